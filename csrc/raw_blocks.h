// The published block formats of GGUF files, read one block of 32 features at a time.
//
// Q4_0  d, 16 bytes: feature j in the low nibble of byte j, j + 16 in the high one; d (q - 8)
// Q4_1  d, m, the same bytes; d q + m          Q5_0, Q5_1  the fifth bit of feature j is bit j of a word
// Q8_0  d, 32 int8; d q
// Q4_K  256 features: d, dmin, 8 pairs of 6-bit (scale, min), nibbles; d sc q - dmin mn. Q5_K: a fifth bit
// Q6_K  256 features: low nibbles, upper bit pairs, 16 int8 scales, d; d sc (q - 32)
#pragma once
#include <cstdint>

#include "types.h"

namespace kvern {

// A block in common terms: codes arranged as in Q4_0, upper bits beside them.
struct BlockCodes {
    uint16_t d, m;         // fp16
    uint8_t scale_code;    // K-quants: the block's scale (Q6_K: int8, first half)
    uint8_t second_code;   // K-quants: the block's min (Q6_K: int8 scale of the second half)
    uint32_t fifth;        // Q5: bit j belongs to feature j
    uint8_t bytes[32];     // 16 bytes of nibbles, or 32 int8 for Q8_0
    uint8_t pairs[8];      // Q6_K: field f of byte 4h + e is the upper pair of feature 4 (4h + f) + e
};

void read_block(ElementType type, const uint8_t* row, int64_t block, BlockCodes& c);
void decode_block(ElementType type, const BlockCodes& c, float* out);
void decode_raw_row(ElementType type, const uint8_t* row, int64_t cols, float* out);

}  // namespace kvern
