// Weights as the kernels read them: the file's own bits, 16 rows interleaved.
//
// Sizes equal the file's, except that K-quants spend 8 instead of 6 bits on a scale (Q4_K +2.8 %,
// Q5_K +2.3 %) and Q6_K aligns its scales (+1 %). Chunks are described in layout.h.
//
//   codes of a block of 32 features (a quad is 4 features x 16 rows = 64 bytes, row-major)
//     Q8_0              8 quads of int8
//     Q4_*              4 x 64 bytes; byte v holds quad v (low nibble) and quad v + 4 (high)
//     Q5_*              the same, then 8 x 64 mask bits: the fifth bit of quad 0..7
//     Q6_K              the same as Q4, then 2 x 64 bytes; two-bit field f of byte h: quad 4h + f
//   scales of a chunk
//     Q4_0 Q5_0 Q8_0    2 blocks: 2 x 16 fp16
//     Q4_1 Q5_1         1 block: 16 fp16, 16 fp16 offsets
//     Q4_K Q5_K         8 blocks: 16 fp16 d, 16 fp16 dmin, 8 x (16 u8 scales, 16 u8 mins)
//     Q6_K              8 blocks: 16 fp16 d, 8 x (2 x 16 int8 scales)
//   BF16_PAIRS          for each two neighbouring features the words of the 16 rows; padded to 32 features
//   F32, F16, BF16      panels of 4 groups (the last may have fewer): for each feature the values of all
//                       the panel's rows
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "types.h"

namespace kvern {

struct FreeBytes {
    void operator()(uint8_t* p) const;
};
using Bytes = std::unique_ptr<uint8_t[], FreeBytes>;

// 64-byte aligned, not initialised; big ones ask for huge pages. Throws std::bad_alloc.
Bytes allocate_bytes(size_t size);

// Hands out memory for weights, 64-byte aligned, from chunks that ask for huge pages: a tensor alone is often smaller
// than one, and looking up small pages can cost half of a memory-bound product's time. A chunk lives as long as
// anything in it.
class WeightRoom {
public:
    std::shared_ptr<uint8_t> take(size_t bytes);  // throws std::bad_alloc

private:
    std::shared_ptr<uint8_t> chunk_;
    size_t used_ = 0, size_ = 0;
};

// What tensors become: their own bits, float32, or (rounded once more where it must be) pairs of bf16.
enum class WeightForm : int { STORED, FLOAT, PAIRS };

struct RawTensor {
    ElementType type;
    int64_t rows;
    const uint8_t* data;
};

// One tensor of a stacked weight.
struct Segment {
    ElementType type;
    int64_t first_row, rows;
    int64_t groups;
    int64_t group_bytes;
    int64_t unit_groups;           // groups that threads share out as one: a panel, or 1
    int64_t first_unit, units;
    std::shared_ptr<uint8_t> data;

    // Groups of the panel that holds group g.
    int64_t panel_width(int64_t g) const {
        const int64_t left = groups - g / kPanelGroups * kPanelGroups;
        return left < kPanelGroups ? left : kPanelGroups;
    }
};

class Weight {
public:
    // Reserves the packed form of tensors stacked by rows; `pack` fills it.
    Weight(const std::vector<RawTensor>& tensors, int64_t cols, WeightForm form, WeightRoom& room);
    Weight(Weight&&) = default;
    Weight(const Weight&) = delete;

    // Packs units [begin, end) of the whole weight; callable from several threads.
    void pack(const std::vector<RawTensor>& tensors, int64_t begin, int64_t end);
    void decode_row(int64_t row, float* out) const;
    const Segment& segment_of_unit(int64_t unit) const;
    // Bytes of one row of activations as the products read it.
    int64_t input_row_bytes() const { return is_paired ? 4 * pair_words(cols) : cols * (has_float ? 4 : 1); }

    int64_t rows = 0, cols = 0, units = 0;
    size_t bytes = 0;
    bool has_quantised = false;  // some segment needs int8 activations
    bool has_float = false;
    bool is_paired = false;      // all of it needs bf16 activations
    std::vector<Segment> segments;
};

bool is_quantised(ElementType type);
// Bytes of one row in the file's form; 0 when cols is not a whole number of blocks.
int64_t raw_row_bytes(ElementType type, int64_t cols);
const char* type_name(ElementType type);

}  // namespace kvern
