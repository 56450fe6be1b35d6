// Sixteen-lane vectors in the compilers' own vector extension (gcc, clang): four registers of SSE2, NEON or
// whatever the target has. No fused multiply-add: a * b + c rounds twice here, everywhere. Bytes and words
// that lie in wider lanes are counted from the low end: little-endian targets only.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace KVERN_PATH {

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef int16_t Shorts __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

// Wider vectors than the target's would live in memory: the compiler keeps these in registers.
struct F { Floats a, b, c, d; };
struct I { Ints a, b, c, d; };
struct B { Bytes a, b, c, d; };
using Mask = uint16_t;

constexpr bool kUnpacksFirst = false;
constexpr int kPrefetchAhead = 8192;  // bytes of a lone token's stream of weights
constexpr int kQuantRowTile = 2;
constexpr int kQuantGroupTile = 1;
constexpr int kFloatRowTile = 2;
constexpr int kFloatGroupTile = 1;
constexpr int kScoreRows = 2;
constexpr int kScoreVectors = 1;
constexpr int kPairVectors = 1;

// call(quarter, ...) of each quarter of the arguments.
template <class To, class Call, class... From>
__attribute__((always_inline)) static inline To quarters(Call call, const From&... from) {
    return {call(from.a...), call(from.b...), call(from.c...), call(from.d...)};
}
template <class To>
static inline To load_bytes(const void* p) {
    static_assert(sizeof(To) == 64, "whole vectors");
    const auto* from = static_cast<const uint8_t*>(p);
    To v;
    std::memcpy(&v.a, from, 16);
    std::memcpy(&v.b, from + 16, 16);
    std::memcpy(&v.c, from + 32, 16);
    std::memcpy(&v.d, from + 48, 16);
    return v;
}
template <class From>
static inline void store_bytes(void* p, const From& v) {
    auto* to = static_cast<uint8_t*>(p);
    std::memcpy(to, &v.a, 16);
    std::memcpy(to + 16, &v.b, 16);
    std::memcpy(to + 32, &v.c, 16);
    std::memcpy(to + 48, &v.d, 16);
}

static inline F f_set1(float x) {
    const Floats v = {x, x, x, x};
    return {v, v, v, v};
}
static inline F f_zero() { return f_set1(0.0f); }
static inline F f_load(const float* p) { return load_bytes<F>(p); }
static inline void f_store(float* p, F v) { store_bytes(p, v); }
static inline Mask first_lanes(int n) { return static_cast<Mask>((1u << n) - 1u); }
static inline F f_load_n(const float* p, int n) {
    float t[16] = {};
    std::memcpy(t, p, static_cast<size_t>(n) * 4);
    return f_load(t);
}
static inline void f_store_n(float* p, F v, int n) {
    float t[16];
    f_store(t, v);
    std::memcpy(p, t, static_cast<size_t>(n) * 4);
}
static inline F f_add(F x, F y) {
    return quarters<F>([](Floats p, Floats q) { return p + q; }, x, y);
}
static inline F f_sub(F x, F y) {
    return quarters<F>([](Floats p, Floats q) { return p - q; }, x, y);
}
static inline F f_mul(F x, F y) {
    return quarters<F>([](Floats p, Floats q) { return p * q; }, x, y);
}
static inline F f_div(F x, F y) {
    return quarters<F>([](Floats p, Floats q) { return p / q; }, x, y);
}
static inline F f_fma(F x, F y, F z) {
    return quarters<F>([](Floats p, Floats q, Floats r) { return p * q + r; }, x, y, z);
}
static inline Floats max_of(Floats p, Floats q) { return p > q ? p : q; }
static inline F f_max(F x, F y) { return quarters<F>(max_of, x, y); }
static inline F f_min(F x, F y) {
    return quarters<F>([](Floats p, Floats q) { return p < q ? p : q; }, x, y);
}
static inline F f_abs(F x) {
    return quarters<F>([](Floats p) { return (Floats)((Ints)p & 0x7fffffff); }, x);
}
static inline F f_select(Mask m, F yes, F no) {
    const Ints bits = Ints{} + static_cast<int32_t>(m), first = {1, 2, 4, 8};
    const I on = {(bits & first) != 0, (bits & (first << 4)) != 0, (bits & (first << 8)) != 0,
                  (bits & (first << 12)) != 0};
    return quarters<F>([](Ints o, Floats y, Floats n) { return o ? y : n; }, on, yes, no);
}
static inline float fma_scalar(float a, float b, float c) { return a * b + c; }

static inline float f_sum(F v) {
    const Floats t = (v.a + v.c) + (v.b + v.d);
    return (t[0] + t[2]) + (t[1] + t[3]);
}
static inline float f_hmax(F v) {
    const Floats t = max_of(max_of(v.a, v.c), max_of(v.b, v.d));
    const float even = t[0] > t[2] ? t[0] : t[2], odd = t[1] > t[3] ? t[1] : t[3];
    return even > odd ? even : odd;
}

// Sixteen 16-bit numbers, each in a lane of 32 bits, and back.
struct Wide { Words a, b, c, d; };
static inline Wide load_halves(const void* p) {
    uint16_t h[16];
    uint32_t t[16];
    std::memcpy(h, p, 32);
    for (int i = 0; i < 16; ++i) t[i] = h[i];
    return load_bytes<Wide>(t);
}
static inline void store_halves(void* p, Wide v) {
    uint32_t t[16];
    uint16_t h[16];
    store_bytes(t, v);
    for (int i = 0; i < 16; ++i) h[i] = static_cast<uint16_t>(t[i]);
    std::memcpy(p, h, 32);
}
// kvern::fp16_to_float and its kin (half.h), lane by lane and without branches.
static inline Floats fp16_lanes(Words h) {
    const Words magnitude = h & 0x7fffu, bits = magnitude << 13;
    const Words special = bits | 0x7f800000u | ((Words)(magnitude > 0x7c00u) & 0x400000u);
    const Words small = (Words)(__builtin_convertvector((Ints)magnitude, Floats) * 5.9604644775390625e-08f);
    const Words finite = magnitude < 0x400u ? small : bits + (112u << 23);
    return (Floats)((magnitude >= 0x7c00u ? special : finite) | ((h & 0x8000u) << 16));
}
static inline Words fp16_bits(Floats x) {
    const Words u = (Words)x, magnitude = u & 0x7fffffffu, sign = (u >> 16) & 0x8000u;
    const Words is_small = (Words)(magnitude < 0x38800000u);
    const Floats scaled = (Floats)(magnitude & is_small) * 16777216.0f;
    const Ints whole = __builtin_convertvector(scaled, Ints);
    const Floats rest = scaled - __builtin_convertvector(whole, Floats);
    const Ints up = (rest > 0.5f) | ((rest == 0.5f) & ((whole & 1) != 0));
    const Words normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    const Words finite = (Ints)is_small ? (Words)(whole - up) : normal;
    const Words special = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : Words{} + 0x7c00u;
    return sign | (magnitude >= 0x477ff000u ? special : finite);
}
static inline Words bf16_bits(Floats x) {
    const Words u = (Words)x;
    const Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded;
}
static inline F f_load_f16(const void* p) { return quarters<F>(fp16_lanes, load_halves(p)); }
static inline F f_load_bf16(const void* p) {
    return quarters<F>([](Words h) { return (Floats)(h << 16); }, load_halves(p));
}
static inline void store_f16(void* p, F v) { store_halves(p, quarters<Wide>(fp16_bits, v)); }
static inline void store_bf16(void* p, F v) { store_halves(p, quarters<Wide>(bf16_bits, v)); }
static inline F f_load_i8(const int8_t* p) {
    float t[16];
    for (int i = 0; i < 16; ++i) t[i] = static_cast<float>(p[i]);
    return f_load(t);
}
static inline F f_load_u8(const uint8_t* p) {
    float t[16];
    for (int i = 0; i < 16; ++i) t[i] = static_cast<float>(p[i]);
    return f_load(t);
}

// Nearest even for |a| < 2^22 (all that the kernels round), by adding and taking off 1.5 * 2^23.
static inline Floats round_of(Floats p) { return (p + 12582912.0f) - 12582912.0f; }
static inline F f_round(F x) { return quarters<F>(round_of, x); }
static inline F f_scale2(F x, F n) {
    return quarters<F>(
        [](Floats p, Floats q) {
            const Ints e = __builtin_convertvector(q, Ints);
            const Ints e1 = e >> 1;
            const Words u1 = (Words)e1 + 127u, u2 = (Words)e - (Words)e1 + 127u;
            return p * (Floats)(u1 << 23) * (Floats)(u2 << 23);
        },
        x, n);
}

// to[d * stride + n] = rows[n][d] for n < num_rows, d < num_lanes.
static inline void store_transposed(const F (&rows)[16], int num_rows, int num_lanes, float* to,
                                    int64_t stride) {
    for (int n = 0; n < num_rows; ++n) {
        float t[16];
        f_store(t, rows[n]);
        for (int d = 0; d < num_lanes; ++d) to[d * stride + n] = t[d];
    }
}

// Lanes that are masked away hold anything, so sums and shifts wrap around, as instructions do.
static inline I i_set1(int32_t x) {
    const Ints v = {x, x, x, x};
    return {v, v, v, v};
}
static inline I i_zero() { return i_set1(0); }
static inline I i_add(I x, I y) {
    return quarters<I>([](Ints p, Ints q) { return (Ints)((Words)p + (Words)q); }, x, y);
}
static inline I i_sub(I x, I y) {
    return quarters<I>([](Ints p, Ints q) { return (Ints)((Words)p - (Words)q); }, x, y);
}
static inline I i_mul(I x, I y) {
    return quarters<I>([](Ints p, Ints q) { return (Ints)((Words)p * (Words)q); }, x, y);
}
template <int N>
static inline I i_shl(I x) {
    return quarters<I>([](Ints p) { return (Ints)((Words)p << N); }, x);
}
static inline F f_from_i(I x) {
    return quarters<F>([](Ints p) { return __builtin_convertvector(p, Floats); }, x);
}
static inline I i_from_f(F x) {
    return quarters<I>([](Floats p) { return __builtin_convertvector(round_of(p), Ints); }, x);
}
static inline int32_t i_sum(I x) {
    const Ints t = x.a + x.b + x.c + x.d;
    return t[0] + t[1] + t[2] + t[3];
}
static inline void store_i8(int8_t* p, I x) {
    int32_t t[16];
    store_bytes(t, x);
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(t[i] > 127 ? 127 : t[i] < -128 ? -128 : t[i]);
}

static inline B b_load(const uint8_t* p) { return load_bytes<B>(p); }
static inline B b_low(B x) {
    return quarters<B>([](Bytes p) { return p & 0x0f; }, x);
}
static inline B b_high(B x) {
    return quarters<B>([](Bytes p) { return p >> 4; }, x);
}
static inline Bytes or_masked(Bytes p, const uint8_t* mask16, uint8_t value) {
    typedef uint64_t Longs __attribute__((vector_size(16)));
    const Bytes bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const Bytes all = (Bytes)(Longs{mask16[0] * 0x0101010101010101ull, mask16[1] * 0x0101010101010101ull});
    return p | ((Bytes)((all & bit) != 0) & value);
}
static inline B b_or_masked(B x, const uint8_t* mask64, uint8_t value) {
    return {or_masked(x.a, mask64, value), or_masked(x.b, mask64 + 2, value), or_masked(x.c, mask64 + 4, value),
            or_masked(x.d, mask64 + 6, value)};
}
template <int FIELD>
static inline B b_pair(B x) {
    return quarters<B>([](Bytes p) { return ((p >> (2 * FIELD)) & 3) << 4; }, x);
}
static inline B b_or(B x, B y) {
    return quarters<B>([](Bytes p, Bytes q) { return p | q; }, x, y);
}

// Of a quad, the bytes at even and at odd places, as int16: x4's in every lane, the weights' where they lie.
struct Places { Halves even, odd; };
static inline Places signed_places(Bytes p) {
    return {(Halves)((Shorts)((Halves)p << 8) >> 8), (Halves)((Shorts)p >> 8)};
}
static inline Places unsigned_places(Bytes p) { return {(Halves)p & 0xff, (Halves)p >> 8}; }
static inline Places broadcast_places(const int8_t* x4) {
    int32_t x;
    std::memcpy(&x, x4, 4);
    return signed_places((Bytes)(Ints{x, x, x, x}));
}
static inline Ints low_half(Ints p) { return (Ints)((Words)p << 16) >> 16; }
// acc + the products of two int16 each, every one of which int16 holds.
static inline Ints add_products(Ints acc, Places w, Places x) {
    const Ints even = (Ints)(w.even * x.even), odd = (Ints)(w.odd * x.odd);
    return acc + low_half(even) + (even >> 16) + low_half(odd) + (odd >> 16);
}
static inline I dot_unsigned(I acc, B w, const int8_t* x4) {
    const Places x = broadcast_places(x4);
    return quarters<I>([x](Ints s, Bytes p) { return add_products(s, unsigned_places(p), x); }, acc, w);
}
constexpr bool kHasShortSums = true;
struct S { Halves a, b, c, d; };
static inline S s_zero() { return {Halves{}, Halves{}, Halves{}, Halves{}}; }
static inline S s_dot(S sum, B w, const int8_t* x4) {
    const Places x = broadcast_places(x4);
    return quarters<S>(
        [x](Halves s, Bytes p) {
            const Places q = unsigned_places(p);
            return s + q.even * x.even + q.odd * x.odd;
        },
        sum, w);
}
static inline I i_add_short(I acc, S sum) {
    return quarters<I>([](Ints s, Halves t) { return s + low_half((Ints)t) + ((Ints)t >> 16); }, acc, sum);
}
constexpr bool kSignedNeedsBias = false;
static inline B b_signed(B w) { return w; }
static inline I dot_signed(I acc, B w, const int8_t* x4) {
    const Places x = broadcast_places(x4);
    return quarters<I>([x](Ints s, Bytes p) { return add_products(s, signed_places(p), x); }, acc, w);
}

static inline F f_bits(I x) {
    return quarters<F>([](Ints p) { return (Floats)p; }, x);
}
// The order of lanes that bf16 is widened to most cheaply: here as it lies.
static inline F f_load_bf16_lanes(const void* p) { return f_load_bf16(p); }
static inline F f_to_bf16_lanes(F x) { return x; }
static inline F f_from_bf16_lanes(F x) { return x; }

// Dot products with the features in the lanes: kDotLanes partial sums of one query and key each.
using D = F;
constexpr int kDotLanes = 16;
static inline D d_zero() { return f_zero(); }
static inline D d_mac(D acc, D x, D y) { return f_fma(x, y, acc); }
static inline D d_set1(float x) { return f_set1(x); }
static inline D d_mul(D x, D y) { return f_mul(x, y); }
static inline D d_load(const float* p) { return f_load(p); }
static inline void d_store(float* p, D x) { f_store(p, x); }
static inline D d_load_fp32(const uint8_t* p, int step) { return load_bytes<D>(p + 64 * step); }
static inline D d_load_fp16(const uint8_t* p, int step) { return f_load_f16(p + 32 * step); }
static inline D d_load_bf16_lanes(const uint8_t* p, int step) { return f_load_bf16(p + 32 * step); }
static inline void d_sums4(D a, D b, D c, D d, float* to) {
    to[0] = f_sum(a);
    to[1] = f_sum(b);
    to[2] = f_sum(c);
    to[3] = f_sum(d);
}

// The same on int16, exact: kWordLanes features at once.
struct W { Shorts a, b, c, d; };
using J = I;
constexpr int kWordLanes = 32;
static inline J j_zero() { return i_zero(); }
static inline W w_load(const int16_t* p) { return load_bytes<W>(p); }
static inline W w_load_i8(const int8_t* p) {
    int16_t t[32];
    for (int i = 0; i < 32; ++i) t[i] = p[i];
    return load_bytes<W>(t);
}
static inline J j_mac(J acc, W x, W y) {
    return quarters<J>(
        [](Ints s, Shorts p, Shorts q) {  // pairs: the low half first
            const Ints a = (Ints)p, b = (Ints)q;
            return s + low_half(a) * low_half(b) + (a >> 16) * (b >> 16);
        },
        acc, x, y);
}
static inline void j_sums4(J a, J b, J c, J d, float* to) {
    to[0] = static_cast<float>(i_sum(a));
    to[1] = static_cast<float>(i_sum(b));
    to[2] = static_cast<float>(i_sum(c));
    to[3] = static_cast<float>(i_sum(d));
}
// 16 features of two keys side by side, as int16.
static inline I pair_up(const int8_t* x, const int8_t* y) {
    int16_t t[32];
    for (int i = 0; i < 16; ++i) {
        t[2 * i] = x[i];
        t[2 * i + 1] = y[i];
    }
    return load_bytes<I>(t);
}
static inline I unpair(I x) { return x; }  // sums of pairs in the order of features
static inline I load_pairs(const uint32_t* p) { return load_bytes<I>(p); }
// The first and the second bf16 of 16 words.
static inline F f_even_bf16(I x) {
    return quarters<F>([](Ints p) { return (Floats)(p << 16); }, x);
}
static inline F f_odd_bf16(I x) {
    return quarters<F>([](Ints p) { return (Floats)(p & static_cast<int32_t>(0xffff0000u)); }, x);
}
static inline void store_pairs(uint32_t* p, I x) { store_bytes(p, x); }
// acc[f] += words' low half * the first key's feature f + their high half * the second's.
static inline I i_mac_pairs(I acc, I pairs, I words) {
    return quarters<I>([](Ints s, Ints p, Ints w) { return s + low_half(p) * low_half(w) + (p >> 16) * (w >> 16); }, acc,
                       pairs, words);
}
static inline void store_i16(int16_t* p, I x) {  // saturating
    int32_t t[16];
    store_bytes(t, x);
    for (int i = 0; i < 16; ++i) {
        p[i] = static_cast<int16_t>(t[i] > 32767 ? 32767 : t[i] < -32768 ? -32768 : t[i]);
    }
}

}  // namespace KVERN_PATH
