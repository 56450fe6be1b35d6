// Plain data that the orchestration (ops) and the per-path kernels share.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvern {

enum class ElementType : int { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, BF16_PAIRS };
enum class StreamType : int { FP32, FP16, BF16, INT8 };
enum class Arithmetic : int { INT8, BF16, FP32 };
enum class Activation : int { SILU, GELU, GELU_TANH };

constexpr int kGroupRows = 16;  // weight rows that lie interleaved, one per vector lane
constexpr int kPanelGroups = 4;  // groups of a float weight that lie side by side for each feature
constexpr int kBlock = 32;      // activations share one scale per block of this many features
constexpr int kTile = 64;       // keys per attention tile, in absolute position
constexpr int kUnit = 256;      // keys per split unit, in absolute position; whole tiles
constexpr int kMaxItemRows = 128;  // query rows (positions x heads) that share one packed tile

// What the int8 product needs to know about one block of activations.
struct BlockMeta {
    float scale;       // x is about scale * q
    float scaled_sum;  // scale * (sum of q), for formats with an offset per block
    int32_t sum;       // sum of q
    int32_t low_sum;   // sum of the first 16 q
};

struct QuantRows {
    const int8_t* q;        // [num_rows, cols]
    const BlockMeta* meta;  // [num_rows, cols / kBlock]
    int64_t cols;
};

// Words, of two neighbouring features in bf16 each, that a row of `cols` features takes: padded with zeros to
// as many as one step of a tile register takes.
constexpr int64_t pair_words(int64_t cols) { return (cols + 31) / 32 * 16; }

// Where a product's rows go, and optionally a second place that they are added to (the residual stream).
struct MatmulOut {
    float* to;
    float* add_to;   // null for none
    int64_t stride;  // of both

    MatmulOut from_token(int64_t t) const { return {to + t * stride, add_to ? add_to + t * stride : nullptr, stride}; }
};

// One stream of one layer: page `b` starts at `pages + b * page_bytes + offset` and is
// [num_heads, block_size, dim].
struct StreamView {
    const uint8_t* pages;
    int64_t page_bytes;
    int64_t num_blocks;
    int64_t offset;
    StreamType type;
    int num_heads;
    int block_size;
    int dim;
    // Of narrow streams only: float32 scales [num_heads, block_size] from here on in a page; the open blocks,
    // bf16 [num_heads, block_size, dim] per seat; and the step's rows, bf16 [tokens, num_heads, dim].
    int64_t scale_offset;
    uint8_t* open_pages;
    int64_t open_page_bytes, open_offset, num_seats;
    uint8_t* open_rows;
    int64_t max_rows;

    bool is_narrow() const { return open_pages != nullptr; }
};

// Rows of one sequence that go to a narrow stream: to its row buffer, and sealed into pages or into the
// seat's open page.
struct NarrowRows {
    int64_t row_begin, row_end;
    int64_t position;        // of row_begin
    int64_t chunk_position;  // of the sequence's first row in the step
    int64_t seq_len;
    const int32_t* block_table;
    int64_t seat;
};

struct AttendParams {
    float scale;
    int64_t window;     // 0: none
    int64_t chunk;      // 0: none
    int64_t num_sinks;
    float softcap;      // 0: none
    const float* sink_logits;  // [num_heads] or null
};

// Where a token's unit partials lie: head h, unit u at
// partial + ((h * units) + u - first_unit) * (value_dim_padded + 2), as acc, m, l.
struct AttendPlace {
    int64_t token;
    int64_t partial;  // in floats
    int64_t first_unit, units;
};

// One piece of attention work: some tokens' rows over a run of split units, for one or several KV heads.
// Rows are (KV head, token, head of its group), in this order.
struct AttendItem {
    const int32_t* block_table;
    // Of the sequence, for narrow streams: its seat, and the position and row of its first token in the step.
    int64_t seat, chunk_position, chunk_row;
    bool sees_all;           // the tokens, of several sequences, all see every key of these units
    int64_t first_position;  // of the first token, when not sees_all
    int64_t first_token;     // tokens are consecutive, unless places say which
    int num_tokens;
    int first_head;          // query head of the first row
    int num_heads;           // query heads per token and KV head
    int first_kv_head, num_kv_heads;
    int64_t unit_begin, unit_end;
    int64_t unit_limit;      // units of the same keys go on to here: what may be asked for ahead; of narrow
                             // streams the last is the open block
    const float* q;          // token t, head h: q + t * q_token_stride + h * key_dim
    int64_t q_token_stride;
    float* out;              // token t, head h: out + t * out_token_stride + h * value_dim
    int64_t out_token_stride;
    // When set, every unit's partial result is stored instead of `out`.
    float* partials;
    const AttendPlace* places;  // [num_tokens]
};

struct FamilyKernels;

struct AttendShape {
    StreamView keys, values;
    AttendParams params;
    int value_dim_padded;  // to whole vectors

    bool is_narrow() const { return keys.is_narrow() || values.is_narrow(); }
};

// Groups whose codes, a byte each, are held at once: as many as stay in a second-level cache.
constexpr int64_t kMostPlainGroups = 16;
constexpr int64_t plain_groups(int64_t cols) {
    const int64_t fit = (int64_t{256} << 10) / (cols * kGroupRows);
    return fit < 4 ? 4 : fit > kMostPlainGroups ? kMostPlainGroups : fit;
}
// Those, or one group of 16 rows as float32.
constexpr size_t matmul_scratch_bytes(int64_t cols) { return static_cast<size_t>(cols * kGroupRows * plain_groups(cols)); }

// The operations of one kernel path. All of them work on plain row ranges: threads, tiles and
// buffers are the caller's business and can never change a bit.
struct KernelTable {
    const char* name;
    void (*quantise_rows)(const float* x, int64_t cols, int64_t row_begin, int64_t row_end, int8_t* q,
                          BlockMeta* meta);
    // `scratch` is null or matmul_scratch_bytes(cols) for the products' own use.
    // out[t, 0..16*num_groups) for `num_groups` consecutive groups; rows past num_rows are dropped.
    void (*matmul_quant)(ElementType type, const uint8_t* groups, int64_t group_bytes, int64_t num_groups,
                         int64_t num_rows, QuantRows x, int64_t num_tokens, MatmulOut out, uint8_t* scratch);
    void (*matmul_float)(ElementType type, const uint8_t* groups, int64_t group_bytes, int64_t num_groups,
                         int64_t num_rows, const float* x, int64_t cols, int64_t num_tokens, MatmulOut out,
                         uint8_t* scratch);
    // Rows rounded to bf16: words [rows][pair_words(cols)]. And products of such rows with BF16_PAIRS.
    void (*round_rows)(const float* x, int64_t cols, int64_t row_begin, int64_t row_end, uint32_t* words);
    void (*matmul_pairs)(const uint8_t* groups, int64_t num_groups, int64_t num_rows, const uint32_t* x, int64_t words,
                         int64_t num_tokens, MatmulOut out);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t cols, int64_t row_begin,
                     int64_t row_end, float* out);
    void (*rotary)(float* x, int64_t token_stride, int heads, int head_stride, const int32_t* positions,
                   const float* cos, const float* sin, int half, bool interleaved, int64_t row_begin,
                   int64_t row_end);
    void (*append)(const float* x, int64_t token_stride, StreamView stream, const int64_t* slots,
                   int64_t row_begin, int64_t row_end);
    void (*append_narrow)(const float* x, int64_t token_stride, const StreamView& stream, const NarrowRows& rows);
    void (*gated_activation)(const float* gate_up, Activation kind, int64_t cols, int64_t row_begin,
                             int64_t row_end, float* out);
    void (*add)(float* x, const float* y, int64_t begin, int64_t end);
    size_t (*attend_scratch_bytes)(const AttendShape& shape);
    // Returns the number of (row, visible key) pairs per head of the group that were computed.
    int64_t (*attend_item)(const AttendShape& shape, const AttendItem& item, uint8_t* scratch);
    // Merges a row's unit partials in position order and writes its result.
    void (*attend_merge)(const AttendShape& shape, const float* partial, int64_t num_units, int head,
                         float* out);
    // For benchmarks: operations done, and a sum over data read.
    double (*arithmetic_loop)(Arithmetic kind, int64_t rounds, float* sink);
    float (*read_loop)(const float* data, int64_t count);
    const FamilyKernels* families;  // family_types.h
};

const KernelTable* portable_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512vnni_kernels();
const KernelTable* avx512_kernels();
const KernelTable* amx_kernels();

}  // namespace kvern
