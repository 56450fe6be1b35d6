// Where attention's keys and values come from: page lookup, rows of a tile, what is asked for ahead; and
// the table of stored forms that the kernels of a path fill.
#pragma once
#include <initializer_list>

namespace KVERN_PATH {

using kvern::AttendItem;
using kvern::AttendShape;
using kvern::kTile;

constexpr int kDotKeys = 4;     // keys whose scores are summed up together
#ifdef KVERN_TILES
constexpr int kRowBlock = 48;
#else
constexpr int kRowBlock = 24;   // rows that go through scores, softmax and values together: they stay in L1
#endif
constexpr int kScoreSlack = 16;
constexpr int kPackAlign = 32;  // integer rows are read in whole runs of this many elements

static inline int padded_to(int n, int whole) { return (n + whole - 1) / whole * whole; }

// Bytes of one stored vector, its scale not counted.
static inline int64_t row_bytes_of(StreamType t, int dim) {
    return t == StreamType::INT8 ? dim : t == StreamType::FP32 ? 4 * static_cast<int64_t>(dim) : 2 * static_cast<int64_t>(dim);
}

// Cache lines that will be needed next. Asking for many at once only fills the processor's queue of
// misses and stalls it, so they are pulled a few at a time between pieces of arithmetic: about evenly over
// as many steps as the last tile took, and at its end the few that the ends of runs have left over.
class Ahead {
public:
    void clear() { count_ = next_ = lines_ = 0; }
    void add(const uint8_t* from, int64_t bytes) {
        const int lines = static_cast<int>((bytes + 63) / 64);
        if (count_ > 0 && runs_[count_ - 1].at + 64 * static_cast<int64_t>(runs_[count_ - 1].lines) == from) {
            runs_[count_ - 1].lines += lines;  // values often lie right behind their keys
        } else if (count_ < kMost) {
            runs_[count_++] = {from, lines};
        } else {
            return;
        }
        lines_ += lines;
    }
    // Begins a tile; `steps` is what it may take when it is the first.
    void spread(int steps) {
        if (steps_ > 0) steps = steps_;
        steps_ = 0;
        per_step_ = (lines_ + steps - 1) / steps;
    }
    inline void step() {
        ++steps_;
        if (next_ < count_) pull();
    }
    // Whatever is left.
    void finish() {
        while (next_ < count_) pull();
    }

private:
    // From one run, so that how many are asked for hardly ever changes: the loop's end is predicted.
    void pull() {
        Run& run = runs_[next_];
        const int count = run.lines < per_step_ ? run.lines : per_step_;
        for (int i = 0; i < count; ++i, run.at += 64) __builtin_prefetch(run.at, 0, 2);
        run.lines -= count;
        if (run.lines == 0) ++next_;
    }

    static constexpr int kMost = 4 * kTile;
    struct Run {
        const uint8_t* at;
        int lines;
    };
    Run runs_[kMost];
    int count_ = 0, next_ = 0, lines_ = 0, per_step_ = 1, steps_ = 0;
};

// One head's vectors at a tile's 64 positions. Those that nobody needs point to zeros.
struct TileRows {
    alignas(64) const uint8_t* row[kTile];
    alignas(64) float scale[kTile];  // of forms that have one
    int item_rows;                   // query rows per KV head of the item
};

// How keys of one stored form meet queries. Scores are what the product q.k is times the factor that
// prepare_q returned; rows and keys never mix, so tiling is free.
struct KeyForm {
    int64_t (*q_bytes)(int dim);     // of one prepared query
    int64_t (*tile_bytes)(int dim);  // of a packed tile
    float (*prepare_q)(const float* q, int dim, uint8_t* to);
    // Before a tile's rows: packs it, or returns false.
    bool (*pack)(const TileRows& keys, int dim, int num_rows, uint8_t* tile, Ahead& ahead);
    // scores [rows][kTile] of the keys that the masks name; what lies beside them is undefined. `tile` is
    // null when it was not packed.
    void (*score)(const TileRows& keys, const uint8_t* tile, int dim, int num_rows, const uint8_t* q,
                  const uint64_t* masks, float* scores, Ahead& ahead);
};

// How values of one stored form are summed up.
struct ValueForm {
    int64_t (*tile_bytes)(int dim);
    bool (*pack)(const TileRows& values, int dim, int num_rows, uint8_t* tile, Ahead& ahead);
    // A row's scores to probabilities 2^(s c - m) in place, as they will be used; returns their sum.
    float (*exponentiate)(float* scores, float c, float m);
    // acc = acc alpha + p v over the keys in each row's mask; p [rows][kTile] is spent.
    void (*weigh)(const TileRows& values, const uint8_t* tile, int dim, int num_rows, float* p,
                  const uint64_t* masks, const float* alpha, float* acc, Ahead& ahead);
    // The order of features that weigh keeps, to the order they have: once per unit.
    void (*settle)(int dim, int num_rows, float* acc);
    bool takes_any_masks;  // weigh takes rows with different masks; otherwise all of a call have one
};

// Calls use(src, scales, j, count) for each run of needed positions of one head that lies in one block; false
// when a needed position has no valid block.
template <class Use>
static inline bool for_each_run(const AttendItem& item, const StreamView& stream, int head, int64_t base,
                                uint64_t need, Use&& use) {
    const int64_t row_bytes = row_bytes_of(stream.type, stream.dim);
    const int size = stream.block_size;
    const int32_t* blocks = item.block_table + base / size;
    int slot = static_cast<int>(base % size);  // of position base + j
    int j = 0;
    while (j < kTile && need >> j) {
        const int skip = __builtin_ctzll(need >> j);
        j += skip;
        for (slot += skip; slot >= size; slot -= size) ++blocks;
        const uint64_t rest = ~(need >> j);
        int count = rest ? __builtin_ctzll(rest) : kTile;
        if (count > kTile - j) count = kTile - j;
        if (count > size - slot) count = size - slot;
        const int64_t block = *blocks;
        if (block <= 0 || block >= stream.num_blocks) return false;
        const int64_t at = head * static_cast<int64_t>(size) + slot;
        const uint8_t* page = stream.pages + block * stream.page_bytes;
        use(page + stream.offset + at * row_bytes, page + stream.scale_offset + 4 * at, j, count);
        j += count;
        slot += count;
        if (slot == size) {
            slot = 0;
            ++blocks;
        }
    }
    return true;
}

// Integer rows are read in whole runs, past their end: into the next ones, but not out of the slab.
static inline const uint8_t* readable_row(const StreamView& s, const uint8_t* row, uint8_t*& spare) {
    const int64_t whole = padded_to(s.dim, kPackAlign);
    if (row + whole <= s.pages + s.num_blocks * s.page_bytes) return row;
    uint8_t* copy = spare;
    spare += whole;
    std::memcpy(copy, row, static_cast<size_t>(s.dim));
    std::memset(copy + s.dim, 0, static_cast<size_t>(whole - s.dim));
    return copy;
}

// The rows of stored (wide or sealed) vectors.
static inline bool find_rows(const AttendItem& item, const StreamView& s, int head, int64_t base, uint64_t need,
                             const uint8_t* zeros, uint8_t* spare, TileRows& rows) {
    if (need != ~0ull) {
        for (int j = 0; j < kTile; ++j) {
            rows.row[j] = zeros;
            rows.scale[j] = 0.0f;
        }
    }
    const int64_t row_bytes = row_bytes_of(s.type, s.dim);
    const bool is_whole = s.type != StreamType::INT8 || s.dim % kPackAlign == 0;
    return for_each_run(item, s, head, base, need, [&](const uint8_t* src, const uint8_t* scales, int j, int n) {
        const uint8_t** row = rows.row + j;
        for (int i = 0; i < n; ++i, src += row_bytes) row[i] = src;
        if (s.type != StreamType::INT8) return;
        std::memcpy(rows.scale + j, scales, static_cast<size_t>(n) * 4);
        for (int k = 0; !is_whole && k < n; ++k) row[k] = readable_row(s, row[k], spare);
    });
}

// The bf16 rows of the open block and of this step.
static inline void find_open_rows(const AttendItem& item, const StreamView& s, int head, int64_t base,
                                  uint64_t need, const uint8_t* zeros, TileRows& rows) {
    const int64_t row_bytes = 2 * static_cast<int64_t>(s.dim);
    const uint8_t* page = s.open_pages + item.seat * s.open_page_bytes + s.open_offset;
    for (int j = 0; j < kTile; ++j) {
        rows.row[j] = zeros;
        if (!(need >> j & 1)) continue;
        const int64_t p = base + j;
        rows.row[j] = p < item.chunk_position
                          ? page + (head * static_cast<int64_t>(s.block_size) + p % s.block_size) * row_bytes
                          : s.open_rows + ((item.chunk_row + p - item.chunk_position) * s.num_heads + head) * row_bytes;
    }
}

}  // namespace KVERN_PATH
