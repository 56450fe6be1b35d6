// Sixteen-lane vectors for AVX2 with FMA and F16C: two 8-lane registers each.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace KVERN_PATH {

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct B { __m256i a, b; };
using Mask = uint16_t;

constexpr bool kUnpacksFirst = true;  // unpacking costs as much as some of the product: once for many tokens
constexpr int kPrefetchAhead = 2048;  // bytes of a lone token's stream of weights
constexpr int kQuantRowTile = 6;
constexpr int kQuantGroupTile = 1;
constexpr int kFloatRowTile = 3;
constexpr int kFloatGroupTile = 2;
constexpr int kScoreRows = 3;
constexpr int kScoreVectors = 2;
constexpr int kPairVectors = 1;  // of values by several rows, as pairs of int16: registers for all sums

static inline F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F f_set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void f_store(float* p, F v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
static inline Mask first_lanes(int n) { return static_cast<Mask>((1u << n) - 1u); }
static inline F f_load_n(const float* p, int n) {
    alignas(64) float t[16] = {};
    std::memcpy(t, p, static_cast<size_t>(n) * 4);
    return f_load(t);
}
static inline void f_store_n(float* p, F v, int n) {
    alignas(64) float t[16];
    f_store(t, v);
    std::memcpy(p, t, static_cast<size_t>(n) * 4);
}
static inline F f_add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F f_sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F f_mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F f_div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F f_fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline F f_max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F f_min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline F f_abs(F x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
static inline __m256 lane_mask(uint32_t bits) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i all = _mm256_set1_epi32(static_cast<int>(bits & 0xffu));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, bit), bit));
}
static inline F f_select(Mask m, F yes, F no) {
    return {_mm256_blendv_ps(no.a, yes.a, lane_mask(m)),
            _mm256_blendv_ps(no.b, yes.b, lane_mask(static_cast<uint32_t>(m) >> 8))};
}
static inline float fma_scalar(float a, float b, float c) {
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}

static inline float f_sum(F v) {
    const __m256 h = _mm256_add_ps(v.a, v.b);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
static inline float f_hmax(F v) {
    const __m256 h = _mm256_max_ps(v.a, v.b);
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}

static inline F f_load_f16(const void* p) {
    const __m128i* h = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
static inline F f_load_bf16(const void* p) {
    const __m128i* h = static_cast<const __m128i*>(p);
    const __m256i a = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(h)), 16);
    const __m256i b = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(h + 1)), 16);
    return {_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)};
}
static inline void store_f16(void* p, F v) {
    __m128i* h = static_cast<__m128i*>(p);
    _mm_storeu_si128(h, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128(h + 1, _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline __m256i bf16_words(__m256 a) {
    const __m256i u = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i n = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    const __m256 v = _mm256_blendv_ps(_mm256_castsi256_ps(r), _mm256_castsi256_ps(n), nan);
    return _mm256_srli_epi32(_mm256_castps_si256(v), 16);
}
static inline void store_bf16(void* p, F v) {
    const __m256i packed = _mm256_packus_epi32(bf16_words(v.a), bf16_words(v.b));
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline F f_load_i8(const int8_t* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(h)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(h, 8)))};
}
static inline F f_load_u8(const uint8_t* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(h)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(h, 8)))};
}

static inline F f_round(F v) {
    return {_mm256_round_ps(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline __m256 scale2_half(__m256 p, __m256 n) {
    // Two steps, so that 2^n itself need not be a normal float.
    const __m256i e = _mm256_cvtps_epi32(n);
    const __m256i e1 = _mm256_srai_epi32(e, 1);
    const __m256i e2 = _mm256_sub_epi32(e, e1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256 s1 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e1, bias), 23));
    const __m256 s2 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e2, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(p, s1), s2);
}
static inline F f_scale2(F p, F n) { return {scale2_half(p.a, n.a), scale2_half(p.b, n.b)}; }
static inline F f_bits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

static inline void transpose8(__m256 (&r)[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        for (int h = 0; h < 2; ++h) {
            b[4 * i + 2 * h] = _mm256_shuffle_ps(a[4 * i + h], a[4 * i + 2 + h], 0x44);
            b[4 * i + 2 * h + 1] = _mm256_shuffle_ps(a[4 * i + h], a[4 * i + 2 + h], 0xee);
        }
    }
    for (int c = 0; c < 4; ++c) {
        r[c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
        r[4 + c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
    }
}

// to[d * stride + n] = rows[n][d] for n < num_rows, d < num_lanes.
static inline void store_transposed(const F (&rows)[16], int num_rows, int num_lanes, float* to,
                                    int64_t stride) {
    for (int half = 0; half < 2 && 8 * half < num_rows; ++half) {
        const int count = num_rows - 8 * half < 8 ? num_rows - 8 * half : 8;
        for (int part = 0; part < 2; ++part) {
            __m256 r[8];
            for (int n = 0; n < 8; ++n) r[n] = part ? rows[8 * half + n].b : rows[8 * half + n].a;
            transpose8(r);
            for (int d = 0; d < 8 && 8 * part + d < num_lanes; ++d) {
                float* at = to + (8 * part + d) * stride + 8 * half;
                if (count == 8) {
                    _mm256_storeu_ps(at, r[d]);
                } else {
                    alignas(32) float t[8];
                    _mm256_store_ps(t, r[d]);
                    std::memcpy(at, t, static_cast<size_t>(count) * 4);
                }
            }
        }
    }
}

static inline I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline I i_set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline I i_add(I x, I y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
static inline I i_sub(I x, I y) {
    return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
static inline I i_mul(I x, I y) {
    return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
}
template <int N>
static inline I i_shl(I x) {
    return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
static inline F f_from_i(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline I i_from_f(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline int32_t i_sum(I x) {
    alignas(32) int32_t t[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(t), _mm256_add_epi32(x.a, x.b));
    int32_t s = 0;
    for (int i = 0; i < 8; ++i) s += t[i];
    return s;
}
static inline void store_i8(int8_t* p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

static inline B b_load(const uint8_t* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
static inline void b_store(uint8_t* p, B x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
}
static inline B b_low(B x) {
    const __m256i m = _mm256_set1_epi8(0x0f);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
static inline B b_high(B x) {
    const __m256i m = _mm256_set1_epi8(0x0f);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m),
            _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
static inline __m256i spread_bits(uint32_t bits, uint8_t value) {
    const __m256i src = _mm256_set1_epi32(static_cast<int>(bits));
    const __m256i pick = _mm256_setr_epi64x(0x0000000000000000, 0x0101010101010101,
                                            0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
    const __m256i on = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(src, pick), bit), bit);
    return _mm256_and_si256(on, _mm256_set1_epi8(static_cast<char>(value)));
}
static inline B b_or_masked(B x, const uint8_t* mask64, uint8_t value) {
    uint32_t m[2];
    std::memcpy(m, mask64, 8);
    return {_mm256_or_si256(x.a, spread_bits(m[0], value)),
            _mm256_or_si256(x.b, spread_bits(m[1], value))};
}
template <int FIELD>
static inline __m256i pair_half(__m256i a) {
    const __m256i s = FIELD < 2 ? _mm256_slli_epi16(a, FIELD < 2 ? 4 - 2 * FIELD : 0)
                                : _mm256_srli_epi16(a, FIELD < 2 ? 0 : 2 * FIELD - 4);
    return _mm256_and_si256(s, _mm256_set1_epi8(0x30));
}
template <int FIELD>
static inline B b_pair(B x) {
    return {pair_half<FIELD>(x.a), pair_half<FIELD>(x.b)};
}
static inline B b_or(B x, B y) {
    return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}

// Weights up to 127: two products fit into int16 (2 * 127 * 128 < 32768).
static inline I dot_unsigned(I acc, B w, const int8_t* x4) {
    int32_t x;
    std::memcpy(&x, x4, 4);
    const __m256i v = _mm256_set1_epi32(x);
    const __m256i one = _mm256_set1_epi16(1);
    acc.a = _mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(w.a, v), one));
    acc.b = _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, v), one));
    return acc;
}
// Sums of products that stay in int16 for as long as the codes' range allows: one widening for many quads.
constexpr bool kHasShortSums = true;
struct S { __m256i a, b; };
static inline S s_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline S s_dot(S sum, B w, const int8_t* x4) {
    int32_t x;
    std::memcpy(&x, x4, 4);
    const __m256i v = _mm256_set1_epi32(x);
    sum.a = _mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, v));
    sum.b = _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, v));
    // Else gcc makes all products of a block before it adds the first, and runs out of registers.
    __asm__("" : "+x"(sum.a), "+x"(sum.b));
    return sum;
}
static inline I i_add_short(I acc, S sum) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(sum.a, one)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(sum.b, one))};
}
constexpr bool kSignedNeedsBias = false;
static inline B b_signed(B w) { return w; }
// |w| times x with w's sign: |w| <= 128 and |x| <= 127, so two products fit into int16.
static inline __m256i signed_half(__m256i acc, __m256i w, __m256i v) {
    const __m256i p = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1)));
}
static inline I dot_signed(I acc, B w, const int8_t* x4) {
    int32_t x;
    std::memcpy(&x, x4, 4);
    const __m256i v = _mm256_set1_epi32(x);
    return {signed_half(acc.a, w.a, v), signed_half(acc.b, w.b, v)};
}

// bf16 is widened fastest as the even elements of 16 and the odd ones; "lanes" is that order.
static inline F f_load_bf16_lanes(const void* p) {
    const __m256i h = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    const __m256i odd = _mm256_and_si256(h, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(h, 16)), _mm256_castsi256_ps(odd)};
}
static inline __m256 four_apart(__m256 x) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
}
static inline F f_to_bf16_lanes(F x) {
    return {four_apart(_mm256_shuffle_ps(x.a, x.b, 0x88)), four_apart(_mm256_shuffle_ps(x.a, x.b, 0xdd))};
}
static inline F f_from_bf16_lanes(F x) {
    const __m256 low = _mm256_unpacklo_ps(x.a, x.b);
    const __m256 high = _mm256_unpackhi_ps(x.a, x.b);
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}

// Dot products with the features in the lanes: kDotLanes partial sums of one query and key each.
using D = __m256;
constexpr int kDotLanes = 8;
static inline D d_zero() { return _mm256_setzero_ps(); }
static inline D d_set1(float x) { return _mm256_set1_ps(x); }
static inline D d_mul(D x, D y) { return _mm256_mul_ps(x, y); }
// Written out: left to gcc 12, a tile's sums wander between registers and the stack.
static inline D d_mac(D acc, D x, D y) {
    asm("vfmadd231ps %[y], %[x], %[acc]" : [acc] "+x"(acc) : [x] "x"(x), [y] "x"(y));
    return acc;
}
static inline D d_load(const float* p) { return _mm256_loadu_ps(p); }
static inline void d_store(float* p, D x) { _mm256_storeu_ps(p, x); }
static inline D d_load_fp32(const uint8_t* p, int step) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p) + 8 * step);
}
static inline D d_load_fp16(const uint8_t* p, int step) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + step));
}
static inline D d_load_bf16_lanes(const uint8_t* p, int step) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + step / 2);
    const __m256i odd = _mm256_and_si256(h, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    return _mm256_castsi256_ps(step % 2 ? odd : _mm256_slli_epi32(h, 16));
}
// Blends, where they do, since shuffles are what this path has the fewest units for.
static inline void d_sums4(D a, D b, D c, D d, float* to) {
    const __m256 ab = _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
    const __m256 cd = _mm256_add_ps(_mm256_blend_ps(c, d, 0xcc), _mm256_shuffle_ps(c, d, 0x4e));
    const __m256 s = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

// The same on int16, exact: kWordLanes features at once.
using W = __m256i;
using J = __m256i;
constexpr int kWordLanes = 16;
static inline J j_zero() { return _mm256_setzero_si256(); }
static inline W w_load(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline W w_load_i8(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline J j_mac(J acc, W x, W y) {
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(x, y));
    asm("" : "+x"(acc));  // or gcc 12 gathers the products first and has no registers left for the sums
    return acc;
}
template <int PICK>
static inline J two_of_each(J x, J y) {
    return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(x), _mm256_castsi256_ps(y), PICK));
}
static inline void j_sums4(J a, J b, J c, J d, float* to) {
    const __m256i ab = _mm256_add_epi32(_mm256_blend_epi32(a, b, 0xcc), two_of_each<0x4e>(a, b));
    const __m256i cd = _mm256_add_epi32(_mm256_blend_epi32(c, d, 0xcc), two_of_each<0x4e>(c, d));
    const __m256i s = _mm256_add_epi32(two_of_each<0x88>(ab, cd), two_of_each<0xdd>(ab, cd));
    const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    _mm_storeu_ps(to, _mm_cvtepi32_ps(sum));
}
// 16 features of two keys side by side, as int16: widened from memory, since across registers that takes twice as
// long. `a` holds features 0 to 3 and 8 to 11; unpair brings sums back to their order.
static inline I pair_up(const int8_t* x, const int8_t* y) {
    const W a = w_load_i8(x), b = w_load_i8(y);
    return {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
}
static inline I unpair(I x) {
    return {_mm256_permute2x128_si256(x.a, x.b, 0x20), _mm256_permute2x128_si256(x.a, x.b, 0x31)};
}
static inline I load_pairs(const uint32_t* p) {
    const __m256i* at = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
// The first and the second bf16 of 16 words.
static inline F f_even_bf16(I x) { return f_bits(i_shl<16>(x)); }
static inline F f_odd_bf16(I x) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return f_bits({_mm256_and_si256(x.a, high), _mm256_and_si256(x.b, high)});
}
static inline void store_pairs(uint32_t* p, I x) {
    __m256i* at = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(at, x.a);
    _mm256_storeu_si256(at + 1, x.b);
}
// acc[f] += words' low half * the first key's feature f + their high half * the second's.
static inline I i_mac_pairs(I acc, I pairs, I words) { return {j_mac(acc.a, pairs.a, words.a), j_mac(acc.b, pairs.b, words.b)}; }
static inline void store_i16(int16_t* p, I x) {  // saturating
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8));
}

}  // namespace KVERN_PATH
