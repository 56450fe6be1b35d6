// The AVX-512 intrinsics of this folder as plain loops and AVX2, for tests on processors without AVX-512.
//
// Included before simd_avx512.h in builds with KVERN_EMULATE_AVX512. Results are bit for bit the
// processor's, by Intel's Software Developer's Manual, except which of several NaNs is passed on. An
// intrinsic that is missing here stops the build: the compiler's own needs an option that is not given.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace KVERN_PATH {
// That vectors may alias anything is no part of a template's argument, and not needed here.
#pragma GCC diagnostic ignored "-Wignored-attributes"
#define KVERN_OP __attribute__((always_inline)) static inline

namespace emulated {

// The compiler's vectors: operators work lane by lane.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));

// A vector's lanes as an array, and back.
template <class T, class V>
struct Lanes {
    static constexpr int count = sizeof(V) / sizeof(T);
    T at[count];
    Lanes() = default;
    explicit Lanes(V v) { std::memcpy(at, &v, sizeof v); }
    V vector() const {
        V v;
        std::memcpy(&v, at, sizeof v);
        return v;
    }
};

// One conversion per lane of the target.
template <class To, class ToV, class From, class FromV, class Convert>
KVERN_OP ToV each_lane(FromV from, Convert convert) {
    const Lanes<From, FromV> a(from);
    Lanes<To, ToV> r;
    static_assert(a.count >= r.count, "a lane of the source for each of the target");
    for (int i = 0; i < r.count; ++i) r.at[i] = convert(a.at[i]);
    return r.vector();
}

template <class V>
KVERN_OP V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <int I>
KVERN_OP __m256 half(__m512 v) {
    return load<__m256>(reinterpret_cast<const char*>(&v) + 32 * I);
}
template <int I>
KVERN_OP __m256d half(__m512d v) {
    return load<__m256d>(reinterpret_cast<const char*>(&v) + 32 * I);
}
template <int I>
KVERN_OP __m256i half(__m512i v) {
    return load<__m256i>(reinterpret_cast<const char*>(&v) + 32 * I);
}
template <int I>
KVERN_OP __m128i half(__m256i v) {
    return _mm256_extracti128_si256(v, I);
}
template <int I>
KVERN_OP __m128i half(__m128i v) {
    return _mm_srli_si128(v, 8 * I);
}

// Both halves through AVX2.
template <class R, class Call, class... V>
KVERN_OP R by_halves(Call call, V... v) {
    const auto low = call(half<0>(v)...), high = call(half<1>(v)...);
    static_assert(sizeof(R) == 2 * sizeof low, "two halves");
    R r;
    std::memcpy(&r, &low, sizeof low);
    std::memcpy(reinterpret_cast<char*>(&r) + sizeof low, &high, sizeof low);
    return r;
}

// Immediates that the kernels do not use are not emulated.
KVERN_OP void only(bool emulated) {
    if (!emulated) __builtin_trap();
}

// Lanes that the mask leaves out are not touched in memory.
template <class T, class V, class M>
KVERN_OP V maskz_load(M mask, const void* p) {
    Lanes<T, V> r;
    for (int i = 0; i < r.count; ++i) {
        r.at[i] = 0;
        if (mask >> i & 1) std::memcpy(r.at + i, static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
    }
    return r.vector();
}

template <class T, class V, class M>
KVERN_OP void mask_store(void* p, M mask, V v) {
    const Lanes<T, V> a(v);
    for (int i = 0; i < a.count; ++i) {
        if (mask >> i & 1) std::memcpy(static_cast<char*>(p) + i * sizeof(T), a.at + i, sizeof(T));
    }
}

// a 2^floor(b), rounded once: the product is exact in float64, where the exponent is cut to what decides.
KVERN_OP float scalef(float a, float b) {
    if (std::isnan(a) || std::isnan(b)) return a + b;
    if ((a == 0.0f && b == INFINITY) || (std::isinf(a) && b == -INFINITY)) return NAN;
    const float n = std::floor(b < -300.0f ? -300.0f : b > 300.0f ? 300.0f : b);
    const int64_t power = static_cast<int64_t>(n + 1023.0f) << 52;
    double factor;
    std::memcpy(&factor, &power, sizeof factor);
    return static_cast<float>(static_cast<double>(a) * factor);
}

// All ones in the lanes that a mask names.
KVERN_OP Ints lanes_of(__mmask16 m) {
    const Ints bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    return (bit & m) != 0;
}

template <class T>
KVERN_OP T saturated(int32_t x) {
    constexpr int32_t top = (1 << (8 * sizeof(T) - 1)) - 1;
    return static_cast<T>(x > top ? top : x < -top - 1 ? -top - 1 : x);
}

KVERN_OP __m512 without_subnormals(__m512 a) {
    const Words bits = (Words)a;
    return (__m512)(bits & ((Words)((bits & 0x7f800000u) != 0) | 0x80000000u));
}

// Lane i is lane from(i) of a and b, counted through both.
template <class T, class V, class From>
KVERN_OP V picked(V a, V b, From from) {
    const Lanes<T, V> x(a), y(b);
    Lanes<T, V> r;
    for (int i = 0; i < r.count; ++i) {
        const int at = from(i);
        r.at[i] = at < r.count ? x.at[at] : y.at[at - r.count];
    }
    return r.vector();
}

}  // namespace emulated

using emulated::Bytes;
using emulated::Floats;
using emulated::Ints;
using emulated::Lanes;
using emulated::Shorts;
using emulated::Words;

KVERN_OP __m512 _mm512_loadu_ps(const void* p) { return emulated::load<__m512>(p); }
KVERN_OP __m512i _mm512_loadu_si512(const void* p) { return emulated::load<__m512i>(p); }
KVERN_OP __m512i _mm512_load_si512(const void* p) {
    emulated::only(reinterpret_cast<uintptr_t>(p) % 64 == 0);
    return emulated::load<__m512i>(p);
}
KVERN_OP void _mm512_storeu_ps(void* p, __m512 a) { std::memcpy(p, &a, sizeof a); }
KVERN_OP void _mm512_storeu_si512(void* p, __m512i a) { std::memcpy(p, &a, sizeof a); }

KVERN_OP __m512 _mm512_maskz_loadu_ps(__mmask16 m, const void* p) {
    return emulated::maskz_load<uint32_t, __m512>(m, p);
}
KVERN_OP __m512i _mm512_maskz_loadu_epi16(__mmask32 m, const void* p) {
    return emulated::maskz_load<uint16_t, __m512i>(m, p);
}
KVERN_OP void _mm512_mask_storeu_ps(void* p, __mmask16 m, __m512 a) { emulated::mask_store<uint32_t>(p, m, a); }
KVERN_OP void _mm256_mask_storeu_epi32(void* p, __mmask8 m, __m256i a) {
    emulated::mask_store<uint32_t>(p, m, a);
}

KVERN_OP __m512 _mm512_setzero_ps() { return __m512{}; }
KVERN_OP __m512i _mm512_setzero_si512() { return __m512i{}; }
KVERN_OP __m512 _mm512_set1_ps(float x) { return (__m512)(Floats{} + x); }
KVERN_OP __m512i _mm512_set1_epi32(int x) { return (__m512i)(Ints{} + x); }
KVERN_OP __m512i _mm512_set1_epi8(char x) { return (__m512i)(Bytes{} + static_cast<uint8_t>(x)); }

KVERN_OP __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
KVERN_OP __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
KVERN_OP __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
KVERN_OP __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
KVERN_OP __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return emulated::by_halves<__m512>([](auto... h) { return _mm256_fmadd_ps(h...); }, a, b, c);
}
KVERN_OP __m512 _mm512_max_ps(__m512 a, __m512 b) {
    return emulated::by_halves<__m512>([](auto... h) { return _mm256_max_ps(h...); }, a, b);
}
KVERN_OP __m512 _mm512_min_ps(__m512 a, __m512 b) {
    return emulated::by_halves<__m512>([](auto... h) { return _mm256_min_ps(h...); }, a, b);
}
KVERN_OP __m512 _mm512_abs_ps(__m512 a) { return (__m512)((Words)a & 0x7fffffffu); }
KVERN_OP __m512 _mm512_roundscale_ps(__m512 a, int how) {
    emulated::only(how == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return emulated::by_halves<__m512>(
        [](__m256 h) { return _mm256_round_ps(h, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }, a);
}
KVERN_OP __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
    const Lanes<float, __m512> x(a), y(b);
    Lanes<float, __m512> r;
    for (int i = 0; i < 16; ++i) r.at[i] = emulated::scalef(x.at[i], y.at[i]);
    return r.vector();
}

KVERN_OP __m512 _mm512_mask_blend_ps(__mmask16 m, __m512 a, __m512 b) {
    const Ints chosen = emulated::lanes_of(m);
    return (__m512)(((Ints)b & chosen) | ((Ints)a & ~chosen));
}
KVERN_OP __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    emulated::only(how == _CMP_UNORD_Q);
    const auto unordered = [](__m256 x, __m256 y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_UNORD_Q)); };
    return static_cast<__mmask16>(unordered(emulated::half<0>(a), emulated::half<0>(b)) |
                                  unordered(emulated::half<1>(a), emulated::half<1>(b)) << 8);
}

KVERN_OP __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
KVERN_OP __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
KVERN_OP __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
KVERN_OP __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((Words)a + (Words)b); }
KVERN_OP __m512i _mm512_sub_epi32(__m512i a, __m512i b) { return (__m512i)((Words)a - (Words)b); }
KVERN_OP __m512i _mm512_mullo_epi32(__m512i a, __m512i b) { return (__m512i)((Words)a * (Words)b); }
KVERN_OP __m512i _mm512_slli_epi32(__m512i a, unsigned n) {
    return n > 31 ? __m512i{} : (__m512i)((Words)a << n);
}
KVERN_OP __m512i _mm512_srli_epi32(__m512i a, unsigned n) {
    return n > 31 ? __m512i{} : (__m512i)((Words)a >> n);
}
KVERN_OP __m512i _mm512_slli_epi16(__m512i a, unsigned n) {
    return n > 15 ? __m512i{} : (__m512i)((Shorts)a << n);
}
KVERN_OP __m512i _mm512_srli_epi16(__m512i a, unsigned n) {
    return n > 15 ? __m512i{} : (__m512i)((Shorts)a >> n);
}
KVERN_OP __m512i _mm512_mask_or_epi32(__m512i other, __mmask16 m, __m512i a, __m512i b) {
    const Ints chosen = emulated::lanes_of(m);
    return (__m512i)(((Ints)(a | b) & chosen) | ((Ints)other & ~chosen));
}
KVERN_OP __m512i _mm512_mask_add_epi8(__m512i other, __mmask64 m, __m512i a, __m512i b) {
    const Lanes<uint8_t, __m512i> sum((__m512i)((Bytes)a + (Bytes)b));
    Lanes<uint8_t, __m512i> r(other);
    for (int i = 0; i < 64; ++i) {
        if (m >> i & 1) r.at[i] = sum.at[i];
    }
    return r.vector();
}
KVERN_OP int _mm512_reduce_add_epi32(__m512i a) {
    const Lanes<uint32_t, __m512i> x(a);
    uint32_t sum = 0;
    for (uint32_t lane : x.at) sum += lane;
    return static_cast<int>(sum);
}

// acc + sum of 4 products of unsigned and signed bytes; nothing saturates.
KVERN_OP __m512i _mm512_dpbusd_epi32(__m512i acc, __m512i a, __m512i b) {
    const Lanes<uint8_t, __m512i> x(a);
    const Lanes<int8_t, __m512i> y(b);
    Lanes<uint32_t, __m512i> r(acc);
    for (int i = 0; i < 16; ++i) {
        int sum = 0;
        for (int k = 4 * i; k < 4 * i + 4; ++k) sum += x.at[k] * y.at[k];
        r.at[i] += static_cast<uint32_t>(sum);
    }
    return r.vector();
}
// acc + sum of 2 products of int16, modulo 2^32.
KVERN_OP __m512i _mm512_dpwssd_epi32(__m512i acc, __m512i a, __m512i b) {
    return _mm512_add_epi32(
        acc, emulated::by_halves<__m512i>([](__m256i x, __m256i y) { return _mm256_madd_epi16(x, y); }, a, b));
}

KVERN_OP __m512i _mm512_cvtps_epi32(__m512 a) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_cvtps_epi32(h...); }, a);
}
KVERN_OP __m512 _mm512_cvtepi32_ps(__m512i a) {
    return emulated::by_halves<__m512>([](auto... h) { return _mm256_cvtepi32_ps(h...); }, a);
}
KVERN_OP __m512 _mm512_cvtph_ps(__m256i a) {
    return emulated::by_halves<__m512>([](auto... h) { return _mm256_cvtph_ps(h...); }, a);
}
KVERN_OP __m256i _mm512_cvtps_ph(__m512 a, int how) {
    emulated::only(how == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return emulated::by_halves<__m256i>([](__m256 h) { return _mm256_cvtps_ph(h, _MM_FROUND_TO_NEAREST_INT); }, a);
}
KVERN_OP __m512i _mm512_cvtepu16_epi32(__m256i a) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_cvtepu16_epi32(h...); }, a);
}
KVERN_OP __m512i _mm512_cvtepu8_epi32(__m128i a) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_cvtepu8_epi32(h...); }, a);
}
KVERN_OP __m512i _mm512_cvtepi8_epi32(__m128i a) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_cvtepi8_epi32(h...); }, a);
}
KVERN_OP __m512i _mm512_cvtepi8_epi16(__m256i a) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_cvtepi8_epi16(h...); }, a);
}
KVERN_OP __m256i _mm512_cvtepi32_epi16(__m512i a) {  // the low halves
    return emulated::each_lane<uint16_t, __m256i, uint32_t>(a, [](uint32_t x) { return static_cast<uint16_t>(x); });
}
KVERN_OP __m128i _mm512_cvtepi32_epi8(__m512i a) {  // the low bytes
    return emulated::each_lane<uint8_t, __m128i, uint32_t>(a, [](uint32_t x) { return static_cast<uint8_t>(x); });
}
KVERN_OP __m256i _mm512_cvtsepi32_epi16(__m512i a) {
    return emulated::each_lane<int16_t, __m256i, int32_t>(a, emulated::saturated<int16_t>);
}
KVERN_OP __m128i _mm512_cvtsepi32_epi8(__m512i a) {
    return emulated::each_lane<int8_t, __m128i, int32_t>(a, emulated::saturated<int8_t>);
}

// bf16: nearest even; subnormals become zero, a NaN a quiet one.
KVERN_OP __m256i _mm512_cvtneps_pbh(__m512 a) {
    return emulated::each_lane<uint16_t, __m256i, uint32_t>(a, [](uint32_t x) {
        const uint32_t magnitude = x & 0x7fffffffu;
        if (magnitude < 0x00800000u) return static_cast<uint16_t>(x >> 16 & 0x8000u);
        if (magnitude > 0x7f800000u) return static_cast<uint16_t>(x >> 16 | 0x40u);
        return static_cast<uint16_t>((x + 0x7fffu + (x >> 16 & 1u)) >> 16);
    });
}
namespace emulated {
// One step of the dot product: a fused multiply-add that writes zero for a subnormal result.
KVERN_OP __m512 fma_flushed(__m512 a, __m512 b, __m512 c) {
    const __m512 sum = without_subnormals(_mm512_fmadd_ps(a, b, c));
    const Ints is_smallest = ((Words)sum & 0x7fffffffu) == 0x00800000u;
    const auto any = [](__m256i h) { return !_mm256_testz_si256(h, h); };
    if (!any(half<0>((__m512i)is_smallest)) && !any(half<1>((__m512i)is_smallest))) return sum;
    // The smallest normal number may come from below it: what counts is the value before it was cut to a
    // subnormal's precision.
    const Lanes<float, __m512> x(a), y(b), z(c);
    Lanes<float, __m512> r(sum);
    for (int i = 0; i < 16; ++i) {
        const double exact = static_cast<double>(x.at[i]) * y.at[i] + z.at[i];
        if (std::fabs(exact) < 0x1p-126 - 0x1p-151) r.at[i] = std::copysign(0.0f, r.at[i]);
    }
    return r.vector();
}
}  // namespace emulated
// acc + the product of the upper halves, rounded; then + that of the lower ones, rounded.
KVERN_OP __m512 _mm512_dpbf16_ps(__m512 acc, __m512bh a, __m512bh b) {
    const auto upper = [](__m512bh v) { return emulated::without_subnormals((__m512)((Words)v & 0xffff0000u)); };
    const auto lower = [](__m512bh v) { return emulated::without_subnormals((__m512)((Words)v << 16)); };
    const __m512 sum = emulated::fma_flushed(upper(a), upper(b), emulated::without_subnormals(acc));
    return emulated::fma_flushed(lower(a), lower(b), sum);
}

KVERN_OP __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) {
    return emulated::by_halves<__m512>([](auto... h) { return _mm256_unpacklo_ps(h...); }, a, b);
}
KVERN_OP __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) {
    return emulated::by_halves<__m512>([](auto... h) { return _mm256_unpackhi_ps(h...); }, a, b);
}
KVERN_OP __m512d _mm512_unpacklo_pd(__m512d a, __m512d b) {
    return emulated::by_halves<__m512d>([](auto... h) { return _mm256_unpacklo_pd(h...); }, a, b);
}
KVERN_OP __m512d _mm512_unpackhi_pd(__m512d a, __m512d b) {
    return emulated::by_halves<__m512d>([](auto... h) { return _mm256_unpackhi_pd(h...); }, a, b);
}
KVERN_OP __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_unpacklo_epi32(h...); }, a, b);
}
KVERN_OP __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_unpackhi_epi32(h...); }, a, b);
}
KVERN_OP __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_unpacklo_epi64(h...); }, a, b);
}
KVERN_OP __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_unpackhi_epi64(h...); }, a, b);
}
KVERN_OP __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_unpacklo_epi8(h...); }, a, b);
}
KVERN_OP __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_unpackhi_epi8(h...); }, a, b);
}
KVERN_OP __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_unpacklo_epi16(h...); }, a, b);
}
KVERN_OP __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
    return emulated::by_halves<__m512i>([](auto... h) { return _mm256_unpackhi_epi16(h...); }, a, b);
}
KVERN_OP __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int how) {
    return emulated::picked<uint32_t>(
        a, b, [=](int i) { return i / 4 * 4 + (how >> 2 * (i % 4) & 3) + (i % 4 / 2) * 16; });
}
KVERN_OP __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int how) {
    return emulated::picked<uint32_t>(
        a, b, [=](int i) { return (how >> 2 * (i / 4) & 3) * 4 + i % 4 + (i / 8) * 16; });
}
KVERN_OP __m512i _mm512_permutex2var_epi16(__m512i a, __m512i order, __m512i b) {
    const Lanes<uint16_t, __m512i> from(order);
    return emulated::picked<uint16_t>(a, b, [&](int i) { return from.at[i] & 63; });
}
KVERN_OP __m256 _mm512_extractf32x8_ps(__m512 a, int half) {
    return half ? emulated::half<1>(a) : emulated::half<0>(a);
}
KVERN_OP __m256i _mm512_extracti64x4_epi64(__m512i a, int half) {
    return half ? emulated::half<1>(a) : emulated::half<0>(a);
}
KVERN_OP __m256 _mm512_castps512_ps256(__m512 a) { return emulated::half<0>(a); }
KVERN_OP __m256i _mm512_castsi512_si256(__m512i a) { return emulated::half<0>(a); }
KVERN_OP __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
KVERN_OP __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
KVERN_OP __m512d _mm512_castps_pd(__m512 a) { return (__m512d)a; }
KVERN_OP __m512 _mm512_castpd_ps(__m512d a) { return (__m512)a; }

#undef KVERN_OP

}  // namespace KVERN_PATH
