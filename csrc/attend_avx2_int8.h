// Attention's inner loops over int8 for AVX2, written out as those of attend_avx2.h are: 3 rows by 4 keys, or by two
// vectors of values. The sums are whole numbers, so their order is free.
#pragma once

namespace KVERN_PATH {

// Twelve registers of sums: four triples of rows, or two halves of 16 features for each of three rows, twice.
struct WordSums {
    J a, b, c, d, e, f, g, h, i, j, k, l;
};

// Sums of three rows += the words in ymm15 by the rows' words at q.
#define KVERN_WORDS3(at, x, y, z)                                                                                    \
    "vpmaddwd " #at "(%[q]), %%ymm15, %%ymm12\n\tvpmaddwd " #at "(%[q],%[stride]), %%ymm15, %%ymm13\n\t"               \
    "vpmaddwd " #at "(%[q],%[stride],2), %%ymm15, %%ymm14\n\tvpaddd %%ymm12, %[" #x "], %[" #x "]\n\t"                  \
    "vpaddd %%ymm13, %[" #y "], %[" #y "]\n\tvpaddd %%ymm14, %[" #z "], %[" #z "]\n\t"
#define KVERN_KEY3(key, from, at, x, y, z) "vpmovsxbw " #from "(%[" #key "],%[at]), %%ymm15\n\t" KVERN_WORDS3(at, x, y, z)
#define KVERN_ZERO3(x, y, z)                                                             \
    "vpxor %[" #x "], %[" #x "], %[" #x "]\n\tvpxor %[" #y "], %[" #y "], %[" #y "]\n\t"    \
    "vpxor %[" #z "], %[" #z "], %[" #z "]\n\t"

// Partial sums of a triple of queries by each of four keys, over `whole` features: queries lie as int16, `stride`
// bytes apart.
static inline WordSums score_words_3_by_4(const int8_t* const (&key)[4], const int16_t* q, int64_t stride, int64_t whole) {
    static_assert(kPackAlign % 32 == 0);
    WordSums s;
    int64_t at = 0;
    asm(KVERN_ZERO3(a, b, c) KVERN_ZERO3(d, e, f) KVERN_ZERO3(g, h, i) KVERN_ZERO3(j, k, l)
        ".p2align 4\n1:\n\t"
        KVERN_KEY3(k0, 0, 0, a, b, c) KVERN_KEY3(k1, 0, 0, d, e, f) KVERN_KEY3(k2, 0, 0, g, h, i) KVERN_KEY3(k3, 0, 0, j, k, l)
        KVERN_KEY3(k0, 16, 32, a, b, c) KVERN_KEY3(k1, 16, 32, d, e, f) KVERN_KEY3(k2, 16, 32, g, h, i)
        KVERN_KEY3(k3, 16, 32, j, k, l)
        "add $32, %[at]\n\tadd $64, %[q]\n\tcmp %[end], %[at]\n\tjl 1b"
        : [a] "=&x"(s.a), [b] "=&x"(s.b), [c] "=&x"(s.c), [d] "=&x"(s.d), [e] "=&x"(s.e), [f] "=&x"(s.f),
          [g] "=&x"(s.g), [h] "=&x"(s.h), [i] "=&x"(s.i), [j] "=&x"(s.j), [k] "=&x"(s.k), [l] "=&x"(s.l),
          [q] "+&r"(q), [at] "+&r"(at)
        : [stride] "r"(stride), [k0] "r"(key[0]), [k1] "r"(key[1]), [k2] "r"(key[2]), [k3] "r"(key[3]), [end] "rm"(whole)
        : "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc");
    return s;
}

static inline void store_scores(const WordSums& s, float* to) {
    j_sums4(s.a, s.d, s.g, s.j, to);
    j_sums4(s.b, s.e, s.h, s.k, to + kTile);
    j_sums4(s.c, s.f, s.i, s.l, to + 2 * kTile);
}

// ymm14 and ymm12 = 16 features of two keys side by side, in the order of pair_up: widened from their rows, or as they
// lie in a packed tile.
#define KVERN_PAIRS_OF_ROWS(at)                                                             \
    "vpmovsxbw " #at "(%[x]), %%ymm12\n\tvpmovsxbw " #at "(%[y]), %%ymm13\n\t"                 \
    "vpunpcklwd %%ymm13, %%ymm12, %%ymm14\n\tvpunpckhwd %%ymm13, %%ymm12, %%ymm12\n\t"
#define KVERN_PAIRS_OF_TILE(at) "vmovdqu 4*" #at "(%[x]), %%ymm14\n\tvmovdqu 32+4*" #at "(%[x]), %%ymm12\n\t"
// A row's two sums += the pairs by its word.
#define KVERN_PAIR(word, low, high)                                                                             \
    "vpbroadcastd " #word "(%[p]), %%ymm13\n\tvpmaddwd %%ymm14, %%ymm13, %%ymm15\n\t"                              \
    "vpmaddwd %%ymm12, %%ymm13, %%ymm13\n\tvpaddd %%ymm15, %[" #low "], %[" #low "]\n\t"                           \
    "vpaddd %%ymm13, %[" #high "], %[" #high "]\n\t"
#define KVERN_PAIRS(FROM)                                                                                     \
    asm(FROM(0) KVERN_PAIR(0, a, b) KVERN_PAIR(256, c, d) KVERN_PAIR(512, e, f)                                 \
        FROM(16) KVERN_PAIR(0, g, h) KVERN_PAIR(256, i, j) KVERN_PAIR(512, k, l)                                \
        : [a] "+x"(s.a), [b] "+x"(s.b), [c] "+x"(s.c), [d] "+x"(s.d), [e] "+x"(s.e), [f] "+x"(s.f),           \
          [g] "+x"(s.g), [h] "+x"(s.h), [i] "+x"(s.i), [j] "+x"(s.j), [k] "+x"(s.k), [l] "+x"(s.l)            \
        : [p] "r"(p), [x] "r"(x), [y] "r"(y), "m"(weights), "m"(first), "m"(second)                           \
        : "xmm12", "xmm13", "xmm14", "xmm15")

// Two more keys: 32 features of theirs by the pairs of weights at p, p + kTile and p + 2 kTile. `x` and `y` are the
// keys' rows, or both the place in a packed tile.
template <bool IS_PACKED>
static inline void weigh_words_3_by_2(const uint8_t* x, const uint8_t* y, const uint32_t* p, WordSums& s) {
    static_assert(kTile * sizeof(uint32_t) == 256);
    const auto& weights = *reinterpret_cast<const uint32_t(*)[2 * kTile + 1]>(p);
    const auto& first = *reinterpret_cast<const uint8_t(*)[IS_PACKED ? 128 : 32]>(x);
    const auto& second = *reinterpret_cast<const uint8_t(*)[IS_PACKED ? 128 : 32]>(y);
    if constexpr (IS_PACKED) {
        KVERN_PAIRS(KVERN_PAIRS_OF_TILE);
    } else {
        KVERN_PAIRS(KVERN_PAIRS_OF_ROWS);
    }
}

// acc[r] of 32 features = acc[r] alpha[r] + the sums in units of unit[r]; rows are `stride` floats apart.
static inline void add_word_sums(const WordSums& s, const float* alpha, const float* unit, float* out, int64_t stride) {
    auto add = [&](J low, J high, int r, int n) {
        float* to = out + r * stride + 16 * n;
        f_store(to, f_fma(f_from_i(unpair({low, high})), f_set1(unit[r]), f_mul(f_load(to), f_set1(alpha[r]))));
    };
    add(s.a, s.b, 0, 0);
    add(s.c, s.d, 1, 0);
    add(s.e, s.f, 2, 0);
    add(s.g, s.h, 0, 1);
    add(s.i, s.j, 1, 1);
    add(s.k, s.l, 2, 1);
}

#undef KVERN_WORDS3
#undef KVERN_KEY3
#undef KVERN_ZERO3
#undef KVERN_PAIRS_OF_ROWS
#undef KVERN_PAIRS_OF_TILE
#undef KVERN_PAIR
#undef KVERN_PAIRS

}  // namespace KVERN_PATH
