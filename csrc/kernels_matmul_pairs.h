// Matrix products of bf16 by bf16 with float32 sums, 16 weight rows interleaved: a word is two neighbouring
// features of one row. Each output is one chain over the words, in order:
//
//   with bf16 dot products (vdpbf16ps)   acc = acc + w0 x0 + w1 x1, as that instruction rounds
//   on tile registers (tdpbf16ps)        the same for 16 words at a time, as that one rounds
//   elsewhere                            acc = acc + w0 x0, then acc + w1 x1, in float32: fused, but for the portable path
//
// One token goes the same way as many, so its numbers are theirs.
#pragma once

#include "matmul_outputs.h"

namespace KVERN_PATH {

// Whole words of zeros at a row's end stand for features that it does not have.
static void round_rows(const float* x, int64_t cols, int64_t row_begin, int64_t row_end, uint32_t* words) {
    const int64_t stride = kvern::pair_words(cols);
    for (int64_t row = row_begin; row < row_end; ++row) {
        const float* from = x + row * cols;
        uint8_t* to = reinterpret_cast<uint8_t*>(words + row * stride);
        for (int64_t d = 0; d < 2 * stride; d += 16) {
            const int left = d < cols ? static_cast<int>(cols - d) : 0;
            store_bf16(to + 2 * d, left >= 16 ? f_load(from + d) : f_load_n(from + d, left));
        }
    }
}

struct PairJob {
    const uint8_t* groups;  // [num_groups][words][16 rows]
    int64_t num_groups, num_rows;
    const uint32_t* x;  // [num_tokens][words]
    int64_t words, num_tokens;
    MatmulOut out;

    const uint8_t* group(int64_t g) const { return groups + 64 * words * g; }
};

static inline F pair_mac(F acc, I weights, uint32_t word) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(static_cast<int>(word)));
#else
    const F first = f_set1(kvern::bits_float(word << 16)), second = f_set1(kvern::bits_float(word & 0xffff0000u));
    return f_fma(f_odd_bf16(weights), second, f_fma(f_even_bf16(weights), first, acc));
#endif
}

// Groups g to g + NG - 1 against tokens t to t + MT - 1.
template <int NG, int MT>
static inline void pair_tile(const PairJob& job, int64_t g, int64_t t) {
    F acc[MT][NG];
    for (int i = 0; i < MT; ++i) {
        for (int j = 0; j < NG; ++j) acc[i][j] = f_zero();
    }
    const uint32_t* x = job.x + t * job.words;
    const uint8_t* w = job.group(g);
    for (int64_t k = 0; k < job.words; ++k, w += 64) {
        I weights[NG];
        for (int j = 0; j < NG; ++j) {
            const uint8_t* at = w + 64 * job.words * j;
            weights[j] = load_pairs(reinterpret_cast<const uint32_t*>(at));
            if constexpr (MT == 1) __builtin_prefetch(at + kPrefetchAhead / NG);
        }
        for (int i = 0; i < MT; ++i) {
            for (int j = 0; j < NG; ++j) acc[i][j] = pair_mac(acc[i][j], weights[j], x[i * job.words + k]);
        }
    }
    store_tile<NG, MT>(acc, job.out, t, g, job.num_rows);
}

template <int NG>
static void pair_groups(const PairJob& job, int64_t g) {
    int64_t t = 0;
    for (; t + kFloatRowTile <= job.num_tokens; t += kFloatRowTile) pair_tile<NG, kFloatRowTile>(job, g, t);
    for (; t + 2 <= job.num_tokens; t += 2) pair_tile<NG, 2>(job, g, t);
    if (t < job.num_tokens) pair_tile<NG, 1>(job, g, t);
}

}  // namespace KVERN_PATH

#ifdef KVERN_TILES
#include "matmul_pair_tiles.h"
#endif

namespace KVERN_PATH {

static void matmul_pairs(const uint8_t* groups, int64_t num_groups, int64_t num_rows, const uint32_t* x, int64_t words,
                         int64_t num_tokens, MatmulOut out) {
    const PairJob job{groups, num_groups, num_rows, x, words, num_tokens, out};
#ifdef KVERN_TILES
    pair_tiles(job);
#else
    int64_t g = 0;
    for (; g + kFloatGroupTile <= num_groups; g += kFloatGroupTile) pair_groups<kFloatGroupTile>(job, g);
    for (; g < num_groups; ++g) pair_groups<1>(job, g);
#endif
}

}  // namespace KVERN_PATH
