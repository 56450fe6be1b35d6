// Sixteen-lane vectors for AVX-512 with VNNI and BF16. Every operation rounds as written: no
// contraction is left to the compiler, so tilings of one recipe give equal bits.
#pragma once
#define KVERN_QUADS 1  // attend_int8_quads.h
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace KVERN_PATH {

using F = __m512;   // 16 floats
using I = __m512i;  // 16 int32
using B = __m512i;  // 64 bytes: 4 consecutive k of 16 rows
using Mask = __mmask16;

constexpr bool kUnpacksFirst = false;
constexpr int kPrefetchAhead = 8192;  // bytes of a lone token's stream of weights
constexpr int kQuantRowTile = 6;    // tokens per register tile of the int8 product
constexpr int kQuantGroupTile = 2;  // 16-row groups per register tile
constexpr int kFloatRowTile = 6;
constexpr int kFloatGroupTile = 4;
constexpr int kScoreRows = 6;       // query rows per register tile of attention
constexpr int kScoreVectors = 4;    // key (or value-dim) vectors per register tile
constexpr int kPairVectors = 4;

static inline F f_zero() { return _mm512_setzero_ps(); }
static inline F f_set1(float x) { return _mm512_set1_ps(x); }
static inline F f_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void f_store(float* p, F a) { _mm512_storeu_ps(p, a); }
static inline Mask first_lanes(int n) { return static_cast<Mask>((1u << n) - 1u); }
static inline F f_load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
static inline void f_store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
static inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F f_div(F a, F b) { return _mm512_div_ps(a, b); }
static inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
static inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F f_min(F a, F b) { return _mm512_min_ps(a, b); }
static inline F f_abs(F a) { return _mm512_abs_ps(a); }
static inline F f_select(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
static inline float fma_scalar(float a, float b, float c) {
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}

static inline float f_sum(F a) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}

static inline float f_hmax(F a) {
    const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}

static inline F f_load_f16(const void* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
static inline F f_load_bf16(const void* p) {
    const __m256i h = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
static inline void store_f16(void* p, F a) {
    _mm256_storeu_si256(static_cast<__m256i*>(p),
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Not vcvtneps2bf16: that flushes subnormals.
static inline void store_bf16(void* p, F a) {
    const __m512i u = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i v = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)));
}
static inline F f_load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
static inline F f_load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

static inline F f_round(F a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// p * 2^n for whole n; results past the float range saturate to infinity, tiny ones to zero.
static inline F f_scale2(F p, F n) { return _mm512_scalef_ps(p, n); }

// to[d * stride + n] = rows[n][d] for n < num_rows, d < num_lanes; moves bits, calculates nothing.
static inline void store_transposed(const F (&rows)[16], int num_rows, int num_lanes, float* to,
                                    int64_t stride) {
    __m512 a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        for (int h = 0; h < 2; ++h) {
            const __m512d x = _mm512_castps_pd(a[4 * i + h]);
            const __m512d y = _mm512_castps_pd(a[4 * i + 2 + h]);
            b[4 * i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            b[4 * i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    }
    const Mask mask = first_lanes(num_rows);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {  // column c of every 4x4 part
        const __m512 low01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
        const __m512 low23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
        const __m512 high01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
        const __m512 high23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
        const __m512 out[4] = {
            _mm512_shuffle_f32x4(low01, low23, 0x88), _mm512_shuffle_f32x4(high01, high23, 0x88),
            _mm512_shuffle_f32x4(low01, low23, 0xdd), _mm512_shuffle_f32x4(high01, high23, 0xdd)};
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q) {
            const int d = 4 * q + c;
            if (d < num_lanes) _mm512_mask_storeu_ps(to + d * stride, mask, out[q]);
        }
    }
}

static inline I i_zero() { return _mm512_setzero_si512(); }
static inline I i_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
static inline I i_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
static inline I i_mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
template <int N>
static inline I i_shl(I a) {
    return _mm512_slli_epi32(a, N);
}
static inline F f_from_i(I a) { return _mm512_cvtepi32_ps(a); }
static inline I i_from_f(F a) { return _mm512_cvtps_epi32(a); }  // nearest even
static inline int32_t i_sum(I a) { return _mm512_reduce_add_epi32(a); }
static inline void store_i8(int8_t* p, I a) {  // saturating
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a));
}

static inline B b_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline void b_store(uint8_t* p, B x) { _mm512_storeu_si512(p, x); }
static inline B b_low(B a) { return _mm512_and_si512(a, _mm512_set1_epi8(0x0f)); }
static inline B b_high(B a) {
    return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(0x0f));
}
// Adds `bit` to the bytes whose mask bit is set.
static inline B b_or_masked(B a, const uint8_t* mask64, uint8_t bit) {
    uint64_t m;
    std::memcpy(&m, mask64, 8);
    return _mm512_mask_add_epi8(a, static_cast<__mmask64>(m), a,
                                _mm512_set1_epi8(static_cast<char>(bit)));
}
template <int FIELD>  // two-bit field of every byte, moved to bits 4 and 5
static inline B b_pair(B a) {
    const __m512i s = FIELD < 2 ? _mm512_slli_epi16(a, 4 - 2 * FIELD)
                                : _mm512_srli_epi16(a, 2 * FIELD - 4);
    return _mm512_and_si512(s, _mm512_set1_epi8(0x30));
}
static inline B b_or(B a, B b) { return _mm512_or_si512(a, b); }

// Exact: acc[row] += sum of 4 products of unsigned weights (at most 127) and int8 activations.
static inline I dot_unsigned(I acc, B w, const int8_t* x4) {
    int32_t x;
    std::memcpy(&x, x4, 4);
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x));
}
// For int8 weights: they are taken as w + 128, the caller starts from -128 * sum(x).
// Sums in int16 would gain nothing here: int32 stands for them.
constexpr bool kHasShortSums = false;
using S = I;
static inline S s_zero() { return i_zero(); }
static inline S s_dot(S sum, B w, const int8_t* x4) { return dot_unsigned(sum, w, x4); }
static inline I i_add_short(I acc, S sum) { return i_add(acc, sum); }
constexpr bool kSignedNeedsBias = true;
static inline B b_signed(B w) { return _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(0x80))); }
static inline I dot_signed(I acc, B w, const int8_t* x4) { return dot_unsigned(acc, w, x4); }

static inline F f_bits(I x) { return _mm512_castsi512_ps(x); }
// The order of lanes that bf16 is widened to most cheaply: here as it lies.
static inline F f_load_bf16_lanes(const void* p) { return f_load_bf16(p); }
static inline F f_to_bf16_lanes(F x) { return x; }
static inline F f_from_bf16_lanes(F x) { return x; }

// Dot products with the features in the lanes: kDotLanes partial sums of one query and key each.
using D = __m512;
constexpr int kDotLanes = 16;
static inline D d_zero() { return _mm512_setzero_ps(); }
static inline D d_mac(D acc, D x, D y) { return _mm512_fmadd_ps(x, y, acc); }
static inline D d_set1(float x) { return _mm512_set1_ps(x); }
static inline D d_mul(D x, D y) { return _mm512_mul_ps(x, y); }
static inline D d_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void d_store(float* p, D x) { _mm512_storeu_ps(p, x); }
static inline D d_load_fp32(const uint8_t* p, int step) { return _mm512_loadu_ps(p + 64 * step); }
static inline D d_load_fp16(const uint8_t* p, int step) { return f_load_f16(p + 32 * step); }
static inline D d_load_bf16_lanes(const uint8_t* p, int step) { return f_load_bf16(p + 32 * step); }
static inline void d_sums4(D a, D b, D c, D d, float* to) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}

// The same on int16, exact: kWordLanes features at once.
using W = __m512i;
using J = __m512i;
constexpr int kWordLanes = 32;
static inline J j_zero() { return _mm512_setzero_si512(); }
static inline W w_load(const int16_t* p) { return _mm512_loadu_si512(p); }
static inline W w_load_i8(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline J j_mac(J acc, W x, W y) { return _mm512_dpwssd_epi32(acc, x, y); }
static inline void j_sums4(J a, J b, J c, J d, float* to) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i s = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1));
    const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    _mm_storeu_ps(to, _mm_cvtepi32_ps(sum));
}
// 16 features of two keys side by side, as int16.
static inline I pair_up(const int8_t* x, const int8_t* y) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(y));
    return _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
}
static inline I unpair(I x) { return x; }  // sums of pairs in the order of features
static inline I load_pairs(const uint32_t* p) { return _mm512_loadu_si512(p); }
// The first and the second bf16 of 16 words.
static inline F f_even_bf16(I x) { return f_bits(i_shl<16>(x)); }
static inline F f_odd_bf16(I x) {
    return f_bits(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
static inline void store_pairs(uint32_t* p, I x) { _mm512_storeu_si512(p, x); }
// acc[f] += words' low half * the first key's feature f + their high half * the second's.
static inline I i_mac_pairs(I acc, I pairs, I words) { return _mm512_dpwssd_epi32(acc, pairs, words); }
static inline void store_i16(int16_t* p, I x) {  // saturating
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(x));
}

}  // namespace KVERN_PATH
