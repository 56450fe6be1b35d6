// Sixteen-lane vectors in the compilers' own vector extension (gcc, clang): SSE2, NEON or whatever the
// target has. No fused multiply-add: a * b + c rounds twice here, everywhere.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace KVERN_PATH {

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint8_t B __attribute__((vector_size(64)));
using Mask = uint16_t;

constexpr bool kHasBf16Dot = false;
constexpr bool kUnpacksFirst = false;
constexpr int kQuantRowTile = 2;
constexpr int kQuantGroupTile = 1;
constexpr int kFloatRowTile = 2;
constexpr int kFloatGroupTile = 1;
constexpr int kScoreRows = 2;
constexpr int kScoreVectors = 1;

static inline F f_zero() { return F{}; }
static inline F f_set1(float x) { return F{} + x; }
static inline F f_load(const float* p) {
    F v;
    std::memcpy(&v, p, 64);
    return v;
}
static inline void f_store(float* p, F v) { std::memcpy(p, &v, 64); }
static inline Mask first_lanes(int n) { return static_cast<Mask>((1u << n) - 1u); }
static inline F f_load_n(const float* p, int n) {
    F v{};
    std::memcpy(&v, p, static_cast<size_t>(n) * 4);
    return v;
}
static inline void f_store_n(float* p, F v, int n) { std::memcpy(p, &v, static_cast<size_t>(n) * 4); }
static inline F f_add(F a, F b) { return a + b; }
static inline F f_sub(F a, F b) { return a - b; }
static inline F f_mul(F a, F b) { return a * b; }
static inline F f_div(F a, F b) { return a / b; }
static inline F f_fma(F a, F b, F c) { return a * b + c; }
static inline F f_max(F a, F b) { return a > b ? a : b; }
static inline F f_min(F a, F b) { return a < b ? a : b; }
static inline F f_abs(F a) { return (F)((I)a & 0x7fffffff); }
static inline F f_select(Mask m, F yes, F no) {
    I on;
    for (int i = 0; i < 16; ++i) on[i] = (m >> i) & 1 ? -1 : 0;
    return on ? yes : no;
}
static inline float fma_scalar(float a, float b, float c) { return a * b + c; }

static inline float f_sum(F v) {
    float t[16];
    f_store(t, v);
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) t[i] = t[i] + t[i + width];
    }
    return t[0];
}
static inline float f_hmax(F v) {
    float t[16];
    f_store(t, v);
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) t[i] = t[i] > t[i + width] ? t[i] : t[i + width];
    }
    return t[0];
}

static inline F f_load_f16(const void* p) {
    uint16_t h[16];
    std::memcpy(h, p, 32);
    F v;
    for (int i = 0; i < 16; ++i) v[i] = kvern::fp16_to_float(h[i]);
    return v;
}
static inline F f_load_bf16(const void* p) {
    uint16_t h[16];
    std::memcpy(h, p, 32);
    F v;
    for (int i = 0; i < 16; ++i) v[i] = kvern::bf16_to_float(h[i]);
    return v;
}
static inline void store_f16(void* p, F v) {
    uint16_t h[16];
    for (int i = 0; i < 16; ++i) h[i] = kvern::float_to_fp16(v[i]);
    std::memcpy(p, h, 32);
}
static inline void store_bf16(void* p, F v) {
    uint16_t h[16];
    for (int i = 0; i < 16; ++i) h[i] = kvern::float_to_bf16(v[i]);
    std::memcpy(p, h, 32);
}
static inline F f_load_i8(const int8_t* p) {
    F v;
    for (int i = 0; i < 16; ++i) v[i] = static_cast<float>(p[i]);
    return v;
}
static inline F f_load_u8(const uint8_t* p) {
    F v;
    for (int i = 0; i < 16; ++i) v[i] = static_cast<float>(p[i]);
    return v;
}

// Nearest even for |a| < 2^22 (all that the kernels round), by adding and taking off 1.5 * 2^23.
static inline F f_round(F a) { return (a + 12582912.0f) - 12582912.0f; }
static inline F f_scale2(F p, F n) {
    const I e = __builtin_convertvector(n, I);
    const I e1 = e >> 1;
    const I e2 = e - e1;
    return p * (F)((e1 + 127) << 23) * (F)((e2 + 127) << 23);
}

// to[d * stride + n] = rows[n][d] for n < num_rows, d < num_lanes.
static inline void store_transposed(const F (&rows)[16], int num_rows, int num_lanes, float* to,
                                    int64_t stride) {
    for (int d = 0; d < num_lanes; ++d) {
        for (int n = 0; n < num_rows; ++n) to[d * stride + n] = rows[n][d];
    }
}

static inline I i_zero() { return I{}; }
static inline I i_set1(int32_t x) { return I{} + x; }
// Lanes that are masked away hold anything, so sums and shifts wrap around, as instructions do.
typedef uint32_t Words __attribute__((vector_size(64)));
static inline I i_add(I a, I b) { return (I)((Words)a + (Words)b); }
static inline I i_sub(I a, I b) { return (I)((Words)a - (Words)b); }
static inline I i_mul(I a, I b) { return (I)((Words)a * (Words)b); }
template <int N>
static inline I i_shl(I a) {
    return (I)((Words)a << N);
}
static inline F f_from_i(I a) { return __builtin_convertvector(a, F); }
static inline I i_from_f(F a) { return __builtin_convertvector(f_round(a), I); }
static inline int32_t i_sum(I a) {
    int32_t s = 0;
    for (int i = 0; i < 16; ++i) s += a[i];
    return s;
}
static inline void store_i8(int8_t* p, I a) {
    for (int i = 0; i < 16; ++i) {
        p[i] = static_cast<int8_t>(a[i] > 127 ? 127 : a[i] < -128 ? -128 : a[i]);
    }
}

static inline B b_load(const uint8_t* p) {
    B v;
    std::memcpy(&v, p, 64);
    return v;
}
static inline B b_low(B a) { return a & 0x0f; }
static inline B b_high(B a) { return a >> 4; }
static inline B b_or_masked(B a, const uint8_t* mask64, uint8_t value) {
    B on;
    for (int i = 0; i < 64; ++i) on[i] = (mask64[i / 8] >> (i % 8)) & 1 ? value : 0;
    return a | on;
}
template <int FIELD>
static inline B b_pair(B a) {
    return ((a >> (2 * FIELD)) & 3) << 4;
}
static inline B b_or(B a, B b) { return a | b; }

static inline I dot_unsigned(I acc, B w, const int8_t* x4) {
    for (int r = 0; r < 16; ++r) {
        int32_t s = 0;
        for (int j = 0; j < 4; ++j) s += static_cast<int32_t>(w[4 * r + j]) * x4[j];
        acc[r] += s;
    }
    return acc;
}
// Sums in int16 would gain nothing here: int32 stands for them.
constexpr bool kHasShortSums = false;
using S = I;
static inline S s_zero() { return i_zero(); }
static inline S s_dot(S sum, B w, const int8_t* x4) { return dot_unsigned(sum, w, x4); }
static inline I i_add_short(I acc, S sum) { return i_add(acc, sum); }
constexpr bool kSignedNeedsBias = false;
static inline B b_signed(B w) { return w; }
static inline I dot_signed(I acc, B w, const int8_t* x4) {
    for (int r = 0; r < 16; ++r) {
        int32_t s = 0;
        for (int j = 0; j < 4; ++j) s += static_cast<int32_t>(static_cast<int8_t>(w[4 * r + j])) * x4[j];
        acc[r] += s;
    }
    return acc;
}

static inline F f_bits(I x) { return (F)x; }
// The order of lanes that bf16 is widened to most cheaply: here as it lies.
static inline F f_load_bf16_lanes(const void* p) { return f_load_bf16(p); }
static inline F f_to_bf16_lanes(F x) { return x; }
static inline F f_from_bf16_lanes(F x) { return x; }

// Dot products with the features in the lanes: kDotLanes partial sums of one query and key each.
using D = F;
constexpr int kDotLanes = 16;
static inline D d_zero() { return D{}; }
static inline D d_mac(D acc, D x, D y) { return f_fma(x, y, acc); }
static inline D d_load(const float* p) { return f_load(p); }
static inline D d_load_fp32(const uint8_t* p, int step) {
    D v;
    std::memcpy(&v, p + 64 * step, 64);
    return v;
}
static inline D d_load_fp16(const uint8_t* p, int step) { return f_load_f16(p + 32 * step); }
static inline D d_load_bf16_lanes(const uint8_t* p, int step) { return f_load_bf16(p + 32 * step); }
static inline void d_sums4(D a, D b, D c, D d, float* to) {
    to[0] = f_sum(a);
    to[1] = f_sum(b);
    to[2] = f_sum(c);
    to[3] = f_sum(d);
}

// The same on int16, exact: kWordLanes features at once.
typedef int16_t W __attribute__((vector_size(64)));
using J = I;
constexpr int kWordLanes = 32;
static inline J j_zero() { return J{}; }
static inline W w_load(const int16_t* p) {
    W v;
    std::memcpy(&v, p, 64);
    return v;
}
static inline W w_load_i8(const int8_t* p) {
    typedef int8_t Bytes __attribute__((vector_size(32)));
    Bytes b;
    std::memcpy(&b, p, 32);
    return __builtin_convertvector(b, W);
}
static inline J j_mac(J acc, W x, W y) {
    const I a = (I)x, b = (I)y;  // pairs: the low half first
    return acc + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
}
static inline void j_sums4(J a, J b, J c, J d, float* to) {
    to[0] = static_cast<float>(i_sum(a));
    to[1] = static_cast<float>(i_sum(b));
    to[2] = static_cast<float>(i_sum(c));
    to[3] = static_cast<float>(i_sum(d));
}
// acc[f] += word's low half * the first key's feature f + its high half * the second's.
static inline I i_mac_pairs(I acc, const uint32_t* pairs, uint32_t word) {
    I p;
    std::memcpy(&p, pairs, 64);
    const int32_t low = static_cast<int16_t>(word & 0xffffu);
    const int32_t high = static_cast<int16_t>(word >> 16);
    return acc + (p << 16 >> 16) * low + (p >> 16) * high;
}
// 16 features of two keys side by side, as int16.
static inline void store_pairs(const int8_t* x, const int8_t* y, uint32_t* to) {
    int16_t t[32];
    for (int i = 0; i < 16; ++i) {
        t[2 * i] = x[i];
        t[2 * i + 1] = y[i];
    }
    std::memcpy(to, t, 64);
}
static inline void store_i16(int16_t* p, I a) {  // saturating
    for (int i = 0; i < 16; ++i) {
        p[i] = static_cast<int16_t>(a[i] > 32767 ? 32767 : a[i] < -32768 ? -32768 : a[i]);
    }
}

}  // namespace KVERN_PATH
