// Attention's inner loops for AVX2, written out. 3 rows by 4 keys, or by 4 registers of values, take twelve of the
// sixteen registers for their sums and the rest for operands; of intrinsics, gcc 12 keeps some of the sums on the
// stack, and scores take 1.3 times as long. The arithmetic is that of attend_float.h, in the same order.
#pragma once

namespace KVERN_PATH {

alignas(32) static const uint32_t kHighHalves[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};

// Twelve registers of sums: four triples of rows.
struct Sums {
    D a, b, c, d, e, f, g, h, i, j, k, l;
};

// ymm15 = the first or the second eight of 16 stored features, in the order of lanes that attend_float.h widens to.
#define KVERN_FIRST_FP32(at, from) "vmovups " #at "(" from "), %%ymm15\n\t"
#define KVERN_SECOND_FP32(at, from) "vmovups 32+" #at "(" from "), %%ymm15\n\t"
#define KVERN_FIRST_FP16(at, from) "vcvtph2ps " #at "(" from "), %%ymm15\n\t"
#define KVERN_SECOND_FP16(at, from) "vcvtph2ps 16+" #at "(" from "), %%ymm15\n\t"
#define KVERN_FIRST_BF16(at, from) "vmovdqu " #at "(" from "), %%ymm15\n\tvpslld $16, %%ymm15, %%ymm15\n\t"
#define KVERN_SECOND_BF16(at, from) "vmovdqu " #at "(" from "), %%ymm15\n\tvpand %[high], %%ymm15, %%ymm15\n\t"

#define KVERN_ZERO3(x, y, z)                                                             \
    "vxorps %[" #x "], %[" #x "], %[" #x "]\n\tvxorps %[" #y "], %[" #y "], %[" #y "]\n\t" \
    "vxorps %[" #z "], %[" #z "], %[" #z "]\n\t"
// Three sums += one operand of each row, ymm12 to ymm14, times ymm15.
#define KVERN_MAC3(x, y, z)                                                                        \
    "vfmadd231ps %%ymm15, %%ymm12, %[" #x "]\n\tvfmadd231ps %%ymm15, %%ymm13, %[" #y "]\n\t"          \
    "vfmadd231ps %%ymm15, %%ymm14, %[" #z "]\n\t"
// Eight features of three queries by four keys.
#define KVERN_DOTS(EIGHT, at)                                                            \
    "vmovups " #at "(%[q]), %%ymm12\n\tvmovups " #at "(%[q],%[stride]), %%ymm13\n\t"        \
    "vmovups " #at "(%[q],%[stride],2), %%ymm14\n\t"                                      \
    EIGHT(0, "%[k0],%[at]") KVERN_MAC3(a, b, c) EIGHT(0, "%[k1],%[at]") KVERN_MAC3(d, e, f) \
    EIGHT(0, "%[k2],%[at]") KVERN_MAC3(g, h, i) EIGHT(0, "%[k3],%[at]") KVERN_MAC3(j, k, l)

#define KVERN_SCORE(TYPE, BYTES)                                                                          \
    asm(KVERN_ZERO3(a, b, c) KVERN_ZERO3(d, e, f) KVERN_ZERO3(g, h, i) KVERN_ZERO3(j, k, l)               \
        ".p2align 4\n1:\n\t"                                                                              \
        KVERN_DOTS(KVERN_FIRST_##TYPE, 0) KVERN_DOTS(KVERN_SECOND_##TYPE, 32)                             \
        "add $" #BYTES ", %[at]\n\tadd $64, %[q]\n\tcmp %[end], %[at]\n\tjl 1b"                              \
        : [a] "=&x"(s.a), [b] "=&x"(s.b), [c] "=&x"(s.c), [d] "=&x"(s.d), [e] "=&x"(s.e), [f] "=&x"(s.f), \
          [g] "=&x"(s.g), [h] "=&x"(s.h), [i] "=&x"(s.i), [j] "=&x"(s.j), [k] "=&x"(s.k), [l] "=&x"(s.l), \
          [q] "+&r"(q), [at] "+&r"(at)                                                                    \
        : [stride] "r"(stride), [k0] "r"(key[0]), [k1] "r"(key[1]), [k2] "r"(key[2]), [k3] "r"(key[3]),   \
          [end] "rm"(groups * BYTES), [high] "m"(kHighHalves)                                             \
        : "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc")

// A triple of each key: eight partial sums of each of three queries, `stride` bytes apart, over groups of 16 features.
template <StreamType L>
static inline Sums score_3_by_4(const uint8_t* const (&key)[4], const float* q, int64_t stride, int64_t groups) {
    Sums s;
    int64_t at = 0;
    if constexpr (L == StreamType::FP32) KVERN_SCORE(FP32, 64);
    if constexpr (L == StreamType::FP16) KVERN_SCORE(FP16, 32);
    if constexpr (L == StreamType::BF16) KVERN_SCORE(BF16, 32);
    return s;
}

static inline void store_scores(const Sums& s, float* to) {
    d_sums4(s.a, s.d, s.g, s.j, to);
    d_sums4(s.b, s.e, s.h, s.k, to + kTile);
    d_sums4(s.c, s.f, s.i, s.l, to + 2 * kTile);
}

#define KVERN_WEIGH(TYPE, NEXT)                                                                                     \
    asm("vbroadcastss (%[p]), %%ymm12\n\tvbroadcastss 256(%[p]), %%ymm13\n\tvbroadcastss 512(%[p]), %%ymm14\n\t"       \
        KVERN_FIRST_##TYPE(0, "%[row]") KVERN_MAC3(a, b, c) KVERN_SECOND_##TYPE(0, "%[row]") KVERN_MAC3(d, e, f)       \
        KVERN_FIRST_##TYPE(NEXT, "%[row]") KVERN_MAC3(g, h, i) KVERN_SECOND_##TYPE(NEXT, "%[row]") KVERN_MAC3(j, k, l) \
        : [a] "+x"(s.a), [b] "+x"(s.b), [c] "+x"(s.c), [d] "+x"(s.d), [e] "+x"(s.e), [f] "+x"(s.f),                 \
          [g] "+x"(s.g), [h] "+x"(s.h), [i] "+x"(s.i), [j] "+x"(s.j), [k] "+x"(s.k), [l] "+x"(s.l)                  \
        : [p] "r"(p), [row] "r"(row), [high] "m"(kHighHalves), "m"(weights), "m"(features)                          \
        : "xmm12", "xmm13", "xmm14", "xmm15")

// One more key: the 32 features at `row` by the weights at p, p + kTile and p + 2 kTile. A triple of each eight.
template <StreamType L>
static inline void weigh_3_by_4(const uint8_t* row, const float* p, Sums& s) {
    static_assert(kTile * sizeof(float) == 256);
    // What is read, said one by one: a clobber of all memory would send the sums there.
    const auto& weights = *reinterpret_cast<const float(*)[2 * kTile + 1]>(p);
    const auto& features = *reinterpret_cast<const uint8_t(*)[L == StreamType::FP32 ? 128 : 64]>(row);
    if constexpr (L == StreamType::FP32) KVERN_WEIGH(FP32, 64);
    if constexpr (L == StreamType::FP16) KVERN_WEIGH(FP16, 32);
    if constexpr (L == StreamType::BF16) KVERN_WEIGH(BF16, 32);
}

// out[r stride + 8 n] alpha[r] for the register n of row r.
static inline Sums load_sums(const float* out, int64_t stride, const float* alpha) {
    auto at = [&](int r, int n) { return d_mul(d_load(out + r * stride + 8 * n), d_set1(alpha[r])); };
    return {at(0, 0), at(1, 0), at(2, 0), at(0, 1), at(1, 1), at(2, 1),
            at(0, 2), at(1, 2), at(2, 2), at(0, 3), at(1, 3), at(2, 3)};
}

static inline void store_sums(const Sums& s, float* out, int64_t stride) {
    auto put = [&](int n, D x, D y, D z) {
        d_store(out + 8 * n, x);
        d_store(out + stride + 8 * n, y);
        d_store(out + 2 * stride + 8 * n, z);
    };
    put(0, s.a, s.b, s.c);
    put(1, s.d, s.e, s.f);
    put(2, s.g, s.h, s.i);
    put(3, s.j, s.k, s.l);
}

#undef KVERN_FIRST_FP32
#undef KVERN_SECOND_FP32
#undef KVERN_FIRST_FP16
#undef KVERN_SECOND_FP16
#undef KVERN_FIRST_BF16
#undef KVERN_SECOND_BF16
#undef KVERN_ZERO3
#undef KVERN_MAC3
#undef KVERN_DOTS
#undef KVERN_SCORE
#undef KVERN_WEIGH

}  // namespace KVERN_PATH
