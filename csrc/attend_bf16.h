// bf16 keys, values, queries and probabilities, float32 sums: the bf16 dot product (vdpbf16ps).
//
// A word is a pair of bf16: two neighbouring features of a key, two neighbouring keys of a value.
//
//   keys    [words of key_dim][kTile]                lanes run over keys
//   values  [kTile / 2][value_dim_padded]            lanes run over features
#pragma once

#ifdef __AVX512BF16__
namespace KVERN_PATH {

struct Bf16DotForm {
    static inline F mac(F acc, const uint32_t* vec, uint32_t word) {
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(vec),
                                (__m512bh)_mm512_set1_epi32(static_cast<int>(word)));
    }
    static inline F mac_masked(F acc, const uint32_t* vec, uint32_t word, unsigned bits) {
        const uint32_t keep = (bits & 1 ? 0xffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u);
        const __m512i v = _mm512_and_si512(_mm512_loadu_si512(vec), _mm512_set1_epi32(static_cast<int>(keep)));
        return _mm512_dpbf16_ps(acc, (__m512bh)v, (__m512bh)_mm512_set1_epi32(static_cast<int>(word)));
    }
    static int words_of(int dim) { return (dim + 1) / 2; }
    static int64_t q_bytes(int dim) { return 4 * static_cast<int64_t>(words_of(dim)); }
    static float prepare_q(const float* q, int dim, uint8_t* to) {
        for (int d = 0; d < dim; d += 16) {
            const int lanes = dim - d < 16 ? dim - d : 16;
            const __m256i h = (__m256i)_mm512_cvtneps_pbh(f_load_n(q + d, lanes));
            _mm256_mask_storeu_epi32(to + 2 * d, static_cast<__mmask8>(first_lanes((lanes + 1) / 2)), h);
        }
        return 1.0f;
    }
    static inline __mmask32 first_halves(int n) {
        return n >= 32 ? ~__mmask32{0} : n <= 0 ? 0 : static_cast<__mmask32>((1u << n) - 1u);
    }

    static int64_t key_tile_bytes(int dim) { return kTile * q_bytes(dim); }
    static bool pack_keys(const TileRows& keys, int dim, int, uint8_t* tile, Ahead& ahead) {
        for (int j = 0; j < kTile; j += 16) {
            for (int d = 0; d < dim; d += 32) {
                float* at = reinterpret_cast<float*>(tile) + static_cast<int64_t>(d / 2) * kTile + j;
                F row[16];
                if (dim - d >= 32) {
#pragma GCC unroll 16
                    for (int i = 0; i < 16; ++i) row[i] = _mm512_loadu_ps(keys.row[j + i] + 2 * d);
                    store_transposed(row, 16, 16, at, kTile);
                } else {
                    const __mmask32 mask = first_halves(dim - d);
                    for (int i = 0; i < 16; ++i) {
                        row[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, keys.row[j + i] + 2 * d));
                    }
                    store_transposed(row, 16, words_of(dim - d), at, kTile);
                }
                ahead.step();
            }
        }
        return true;
    }

    template <int R, int NV>
    static inline void score_tile(const uint32_t* q, int steps, const uint32_t* keys, float* scores) {
        F acc[R][NV];
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < NV; ++v) acc[r][v] = f_zero();
        }
        for (int s = 0; s < steps; ++s) {
            const uint32_t* k = keys + static_cast<int64_t>(s) * kTile;
            for (int r = 0; r < R; ++r) {
                const uint32_t word = q[static_cast<int64_t>(r) * steps + s];
                for (int v = 0; v < NV; ++v) acc[r][v] = mac(acc[r][v], k + 16 * v, word);
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < NV; ++v) f_store(scores + r * kTile + 16 * v, acc[r][v]);
        }
    }
    static void score(const TileRows&, const uint8_t* tile, int dim, int num_rows, const uint8_t* q, const uint64_t*,
                      float* scores, Ahead& ahead) {
        const int steps = words_of(dim);
        const uint32_t* keys = reinterpret_cast<const uint32_t*>(tile);
        in_row_tiles(num_rows, [&](auto rows, int i) {
            const uint32_t* qi = reinterpret_cast<const uint32_t*>(q) + static_cast<int64_t>(i) * steps;
            for (int v = 0; v < kTile / 16; v += kScoreVectors) {
                score_tile<rows.value, kScoreVectors>(qi, steps, keys + 16 * v, scores + i * kTile + 16 * v);
            }
            ahead.step();
        });
    }

    // Features of two keys side by side: x0 y0 x1 y1 ..., 32 of them (or 16, when no more are left).
    struct Interleaver {
        __m512i low, high;
        Interleaver() {
            alignas(64) uint16_t order[64];
            for (uint16_t i = 0; i < 64; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
            low = _mm512_load_si512(order);
            high = _mm512_load_si512(order + 32);
        }
        inline void store(__m512i x, __m512i y, uint32_t* to, int left) const {
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, low, y));
            if (left > 16) _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(x, high, y));
        }
    };
    static int64_t tile_bytes(int dim) { return kTile / 2 * 4 * static_cast<int64_t>(padded_to(dim, 16)); }
    static bool pack(const TileRows& values, int dim, int, uint8_t* tile, Ahead& ahead) {
        const Interleaver order;
        const int padded = padded_to(dim, 16);
        uint32_t* words = reinterpret_cast<uint32_t*>(tile);
        for (int j = 0; j < kTile; j += 2, words += padded) {
            const uint8_t *x = values.row[j], *y = values.row[j + 1];
            int d = 0;
            for (; d + 32 <= dim; d += 32) {
                order.store(_mm512_loadu_si512(x + 2 * d), _mm512_loadu_si512(y + 2 * d), words + d, 32);
            }
            if (d < padded) {
                const __mmask32 mask = first_halves(dim - d);
                order.store(_mm512_maskz_loadu_epi16(mask, x + 2 * d), _mm512_maskz_loadu_epi16(mask, y + 2 * d),
                            words + d, padded - d);
            }
            if (j % 4 == 0) ahead.step();
        }
        return true;
    }

    // 2^t for t <= 0 to 2^-17, far below what rounding to bf16 leaves.
    static inline F exp2(F t) {
        t = f_max(f_set1(-160.0f), t);
        const F n = f_round(t);
        const F r = f_sub(t, n);
        F p = f_set1(9.618437357674640e-3f);
        p = f_fma(p, r, f_set1(5.550332471162809e-2f));
        p = f_fma(p, r, f_set1(2.402264791363012e-1f));
        p = f_fma(p, r, f_set1(6.931472028550421e-1f));
        p = f_fma(p, r, f_set1(1.0f));
        return f_scale2(p, n);
    }
    // Rounds to bf16, in place; the sum is that of the rounded ones.
    static float exponentiate(float* s, float c, float m) {
        const F minus = f_set1(-m);
        F p[4];
        for (int v = 0; v < 4; ++v) p[v] = exp2(f_fma(f_load(s + 16 * v), f_set1(c), minus));
        for (int v = 0; v < 4; ++v) {
            const __m256i h = (__m256i)_mm512_cvtneps_pbh(p[v]);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(s) + v, h);
            p[v] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
        }
        return f_sum(f_add(f_add(p[0], p[1]), f_add(p[2], p[3])));
    }

    template <int R, int NV, bool FULL>
    static inline void value_tile(const uint32_t* p, const uint32_t* values, int padded, const float* alpha,
                                  uint64_t mask, float* out) {
        F acc[R][NV];
        for (int r = 0; r < R; ++r) {
            const F a = f_set1(alpha[r]);
            for (int v = 0; v < NV; ++v) {
                acc[r][v] = f_mul(f_load(out + static_cast<int64_t>(r) * padded + 16 * v), a);
            }
        }
        for (int s = 0; s < kTile / 2; ++s) {
            const uint32_t* row = values + static_cast<int64_t>(s) * padded;
            const unsigned bits = FULL ? 3 : static_cast<unsigned>(mask >> (2 * s)) & 3;
            if (!FULL && bits == 0) continue;
            for (int r = 0; r < R; ++r) {
                const uint32_t word = p[r * kTile + s];
                for (int v = 0; v < NV; ++v) {
                    acc[r][v] = FULL || bits == 3 ? mac(acc[r][v], row + 16 * v, word)
                                                  : mac_masked(acc[r][v], row + 16 * v, word, bits);
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < NV; ++v) f_store(out + static_cast<int64_t>(r) * padded + 16 * v, acc[r][v]);
        }
    }
    static void weigh(const TileRows&, const uint8_t* tile, int dim, int num_rows, float* p, const uint64_t* masks,
                      const float* alpha, float* acc, Ahead& ahead) {
        const int padded = padded_to(dim, 16);
        const uint64_t mask = masks[0];
        const uint32_t* values = reinterpret_cast<const uint32_t*>(tile);
        in_row_tiles(num_rows, [&](auto rows, int i) {
            constexpr int R = rows.value;
            const uint32_t* words = reinterpret_cast<const uint32_t*>(p) + i * kTile;
            float* out = acc + static_cast<int64_t>(i) * padded;
            int v = 0;
            for (; v + kScoreVectors <= padded / 16; v += kScoreVectors) {
                const uint32_t* at = values + 16 * v;
                if (mask == ~0ull) {
                    value_tile<R, kScoreVectors, true>(words, at, padded, alpha + i, mask, out + 16 * v);
                } else {
                    value_tile<R, kScoreVectors, false>(words, at, padded, alpha + i, mask, out + 16 * v);
                }
            }
            for (; v < padded / 16; ++v) {
                value_tile<R, 1, false>(words, values + 16 * v, padded, alpha + i, mask, out + 16 * v);
            }
            ahead.step();
        });
    }
    static void settle(int, int, float*) {}
};

}  // namespace KVERN_PATH
#endif
