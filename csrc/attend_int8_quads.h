// int8 values for processors with four-byte dot products (vpdpbusd): four neighbouring keys' bytes of a feature
// side by side, weights as two bytes each, so that nothing is widened. The sums are those of attend_int8.h.
//
//   values   [kTile / 4][value_dim_padded] words
//   weights  of a row: kTile high bytes (0 to 127), then kTile low ones
#pragma once

namespace KVERN_PATH {

struct Int8QuadForm {
    static int64_t tile_bytes(int dim) { return kTile * static_cast<int64_t>(padded_to(dim, 16)); }

    // Features d to d + 63 of four keys.
    static inline void store_quads_64(const uint8_t* const* x, int d, uint32_t* to) {
        const __m512i x0 = _mm512_loadu_si512(x[0] + d), x1 = _mm512_loadu_si512(x[1] + d);
        const __m512i x2 = _mm512_loadu_si512(x[2] + d), x3 = _mm512_loadu_si512(x[3] + d);
        const __m512i low01 = _mm512_unpacklo_epi8(x0, x1), high01 = _mm512_unpackhi_epi8(x0, x1);
        const __m512i low23 = _mm512_unpacklo_epi8(x2, x3), high23 = _mm512_unpackhi_epi8(x2, x3);
        // Of every 16 features: the first four, the second four, ...
        const F a = f_bits(_mm512_unpacklo_epi16(low01, low23)), b = f_bits(_mm512_unpackhi_epi16(low01, low23));
        const F c = f_bits(_mm512_unpacklo_epi16(high01, high23)), e = f_bits(_mm512_unpackhi_epi16(high01, high23));
        const F ab = _mm512_shuffle_f32x4(a, b, 0x44), ce = _mm512_shuffle_f32x4(c, e, 0x44);
        const F ab2 = _mm512_shuffle_f32x4(a, b, 0xee), ce2 = _mm512_shuffle_f32x4(c, e, 0xee);
        float* out = reinterpret_cast<float*>(to);
        f_store(out, _mm512_shuffle_f32x4(ab, ce, 0x88));
        f_store(out + 16, _mm512_shuffle_f32x4(ab, ce, 0xdd));
        f_store(out + 32, _mm512_shuffle_f32x4(ab2, ce2, 0x88));
        f_store(out + 48, _mm512_shuffle_f32x4(ab2, ce2, 0xdd));
    }
    static inline void store_quads_16(const uint8_t* const* x, int d, uint32_t* to) {
        __m128i v[4];
        for (int i = 0; i < 4; ++i) v[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x[i] + d));
        const __m128i low01 = _mm_unpacklo_epi8(v[0], v[1]), high01 = _mm_unpackhi_epi8(v[0], v[1]);
        const __m128i low23 = _mm_unpacklo_epi8(v[2], v[3]), high23 = _mm_unpackhi_epi8(v[2], v[3]);
        __m128i* out = reinterpret_cast<__m128i*>(to);
        _mm_storeu_si128(out, _mm_unpacklo_epi16(low01, low23));
        _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(low01, low23));
        _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(high01, high23));
        _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(high01, high23));
    }
    static bool pack(const TileRows& rows, int dim, int, uint8_t* tile, Ahead& ahead) {
        const int padded = padded_to(dim, 16);
        uint32_t* to = reinterpret_cast<uint32_t*>(tile);
        for (int j = 0; j < kTile; j += 4, to += padded) {
            int d = 0;
            for (; d + 64 <= padded; d += 64) store_quads_64(rows.row + j, d, to + d);
            for (; d < padded; d += 16) store_quads_16(rows.row + j, d, to + d);
            ahead.step();
        }
        return true;
    }

    // A row's int16 weights, as Int8Form rounds them, to bytes.
    static inline float round_weights(float* p, const float* scale, uint64_t mask) {
        const float unit = Int8Form::round_weights(p, scale, mask);
        I w[4];
        for (int v = 0; v < 4; ++v) {
            const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + v);
            w[v] = _mm512_cvtepu16_epi32(half);
        }
        int8_t* bytes = reinterpret_cast<int8_t*>(p);
        for (int v = 0; v < 4; ++v) {
            store_low_bytes(bytes + 16 * v, _mm512_srli_epi32(w[v], 8));
            store_low_bytes(bytes + kTile + 16 * v, w[v]);
        }
        return unit;
    }
    static inline void store_low_bytes(int8_t* to, I x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
    }

    template <int R, int NV>
    static inline void value_tile(const uint32_t* words, const uint32_t* quads, int padded, int begin, int end,
                                  const float* alpha, const float* unit, float* out) {
        I high[R][NV], low[R][NV];
        for (int r = 0; r < R; ++r) {
            for (int n = 0; n < NV; ++n) high[r][n] = low[r][n] = i_zero();
        }
        for (int j = begin; j < end; ++j) {
            const uint32_t* at = quads + static_cast<int64_t>(j) * padded;
            for (int n = 0; n < NV; ++n) {
                const I v = _mm512_loadu_si512(at + 16 * n);
                for (int r = 0; r < R; ++r) {
                    const uint32_t* w = words + r * kTile + j;
                    high[r][n] = _mm512_dpbusd_epi32(high[r][n], i_set1(static_cast<int>(w[0])), v);
                    low[r][n] = _mm512_dpbusd_epi32(low[r][n], i_set1(static_cast<int>(w[kTile / 4])), v);
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int n = 0; n < NV; ++n) {
                float* to = out + static_cast<int64_t>(r) * padded + 16 * n;
                add_sum(high[r][n], low[r][n], alpha[r], unit[r], to);
            }
        }
    }
    static inline void add_sum(I high, I low, float alpha, float unit, float* to) {
        const F old = f_mul(f_load(to), f_set1(alpha));
        f_store(to, f_fma(f_from_i(i_add(i_shl<8>(high), low)), f_set1(unit), old));
    }

    static void weigh(const TileRows& values, const uint8_t* tile, int dim, int num_rows, float* p, const uint64_t* masks,
                      const float* alpha, float* acc, Ahead& ahead) {
        const int padded = padded_to(dim, 16);
        const uint64_t mask = masks[0];
        float unit[kRowBlock];
        for (int r = 0; r < num_rows; ++r) unit[r] = round_weights(p + r * kTile, values.scale, mask);
        const int begin = __builtin_ctzll(mask) / 4, end = (kTile + 3 - __builtin_clzll(mask)) / 4;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(p);
        const uint32_t* quads = reinterpret_cast<const uint32_t*>(tile);
        in_row_tiles(num_rows, [&](auto rows, int i) {
            constexpr int R = rows.value;
            constexpr int NV = R > 3 ? 2 : 4;  // two sums each: they stay in registers
            float* out = acc + static_cast<int64_t>(i) * padded;
            in_value_tiles<NV>(padded, [&](auto vectors, int v) {
                value_tile<R, vectors.value>(words + i * kTile, quads + 16 * v, padded, begin, end, alpha + i, unit + i,
                                             out + 16 * v);
            });
            ahead.step();
        });
    }
};

}  // namespace KVERN_PATH
