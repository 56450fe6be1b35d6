// Matrix products with quantised weights. A weight group is 16 rows interleaved, one per lane, so no sum ever
// crosses lanes and a result's order of operations is the same in every tile shape. For each block of 32
// features, in order:
//
//   dot = exact int32 sum of q_w * q_x (zero point taken off exactly)
//   acc = fma(float(dot), w_scale * x_scale, acc);  with offsets: acc = fma(w_offset, x_scaled_sum, acc)
#pragma once

#include "matmul_outputs.h"

namespace KVERN_PATH {

using kvern::ElementType;
using kvern::QuantRows;

constexpr int kPlainBytes = kGroupRows * kBlock;  // a block's codes, a byte each
constexpr int64_t kPlainTokens = 2 * kQuantRowTile;  // from here on a group's codes are unpacked once for all

// How the codes of one block are laid out; see weights.h for the packed forms.
template <ElementType T>
struct Codes {
    static constexpr bool is_signed = T == ElementType::Q8_0;
    static constexpr bool has_fifth = T == ElementType::Q5_0 || T == ElementType::Q5_1 || T == ElementType::Q5_K;
    static constexpr bool is_six = T == ElementType::Q6_K;
    static constexpr bool has_offset = T == ElementType::Q4_1 || T == ElementType::Q5_1 ||
                                       T == ElementType::Q4_K || T == ElementType::Q5_K;
    static constexpr bool is_super = T == ElementType::Q4_K || T == ElementType::Q5_K;
    static constexpr kvern::PackedLayout layout = kvern::packed_layout(T);
    // log2 of the zero point that is taken off the codes, -1 for none
    static constexpr int zero_shift = T == ElementType::Q4_0                          ? 3
                                      : T == ElementType::Q5_0                        ? 4
                                      : T == ElementType::Q6_K                        ? 5
                                      : (is_signed && kSignedNeedsBias)               ? 7
                                                                                      : -1;
    // Quads whose products with int8 (-128 as well) sum up within int16, 2 products of a quad to a lane:
    // 8 * 2 * 15 * 128, 4 * 2 * 31 * 128 and 2 * 2 * 63 * 128 are below 32768.
    static constexpr int short_quads = is_six ? 2 : has_fifth ? 4 : 8;
};

// The 64 bytes holding features 4i..4i+3 of the 16 rows. PLAIN: a byte a code, quad after quad.
template <ElementType T, bool PLAIN, int QUAD>
static inline B load_quad(const uint8_t* codes) {
    if constexpr (PLAIN) {
        return b_load(codes + 64 * QUAD);
    } else if constexpr (Codes<T>::is_signed) {
        return b_signed(b_load(codes + 64 * QUAD));
    } else {
        const B nibbles = b_load(codes + 64 * (QUAD % 4));
        B w = QUAD < 4 ? b_low(nibbles) : b_high(nibbles);
        if constexpr (Codes<T>::has_fifth) w = b_or_masked(w, codes + 256 + 8 * QUAD, 16);
        if constexpr (Codes<T>::is_six) {
            w = b_or(w, b_pair<QUAD % 4>(b_load(codes + 256 + 64 * (QUAD / 4))));
        }
        return w;
    }
}

// `chunk` is where the scales of block b's chunk begin.
template <ElementType T>
static inline void load_scales(const uint8_t* chunk, int64_t b, F& scale, F& offset) {
    if constexpr (Codes<T>::is_super) {
        const uint8_t* codes = chunk + 64 + b % 8 * 32;
        scale = f_mul(f_load_f16(chunk), f_load_u8(codes));
        offset = f_sub(f_zero(), f_mul(f_load_f16(chunk + 32), f_load_u8(codes + 16)));
    } else if constexpr (Codes<T>::has_offset) {
        scale = f_load_f16(chunk);
        offset = f_load_f16(chunk + 32);
    } else {
        scale = f_load_f16(chunk + b % 2 * 32);
        offset = f_zero();
    }
}

template <ElementType T>
static inline I start_from(int32_t sum) {
    if constexpr (Codes<T>::zero_shift < 0) {
        (void)sum;
        return i_zero();
    } else {
        return i_sub(i_zero(), i_shl<Codes<T>::zero_shift>(i_set1(sum)));
    }
}

// Quads FROM..FROM+COUNT-1 of every group against every token, into int32 sums.
template <ElementType T, bool PLAIN, int NG, int MT, int FROM, int COUNT>
__attribute__((always_inline)) static inline void long_quads(const uint8_t* const (&codes)[NG], const int8_t* x, int64_t cols,
                              I (&dot)[MT][NG]) {
    B w[NG];
    for (int g = 0; g < NG; ++g) w[g] = load_quad<T, PLAIN, FROM>(codes[g]);
    for (int t = 0; t < MT; ++t) {
        for (int g = 0; g < NG; ++g) {
            const int8_t* x4 = x + t * cols + 4 * FROM;
            dot[t][g] = Codes<T>::is_signed ? dot_signed(dot[t][g], w[g], x4)
                                            : dot_unsigned(dot[t][g], w[g], x4);
        }
    }
    if constexpr (COUNT > 1) long_quads<T, PLAIN, NG, MT, FROM + 1, COUNT - 1>(codes, x, cols, dot);
}

// The same into int16 sums, which the caller knows to be wide enough.
template <ElementType T, bool PLAIN, int NG, int MT, int FROM, int COUNT>
__attribute__((always_inline)) static inline void short_quads(const uint8_t* const (&codes)[NG], const int8_t* x, int64_t cols,
                               S (&sum)[MT][NG]) {
    B w[NG];
    for (int g = 0; g < NG; ++g) w[g] = load_quad<T, PLAIN, FROM>(codes[g]);
    for (int t = 0; t < MT; ++t) {
        for (int g = 0; g < NG; ++g) sum[t][g] = s_dot(sum[t][g], w[g], x + t * cols + 4 * FROM);
    }
    if constexpr (COUNT > 1) short_quads<T, PLAIN, NG, MT, FROM + 1, COUNT - 1>(codes, x, cols, sum);
}

// Adds quads FROM..FROM+COUNT-1; exact, whichever way the sums go.
template <ElementType T, bool PLAIN, int NG, int MT, int FROM, int COUNT>
__attribute__((always_inline)) static inline void add_quads(const uint8_t* const (&codes)[NG], const int8_t* x, int64_t cols,
                             I (&dot)[MT][NG]) {
    if constexpr (!kHasShortSums || Codes<T>::is_signed) {
        long_quads<T, PLAIN, NG, MT, FROM, COUNT>(codes, x, cols, dot);
    } else {
        constexpr int kQuads = COUNT < Codes<T>::short_quads ? COUNT : Codes<T>::short_quads;
        S sum[MT][NG];
        for (int t = 0; t < MT; ++t) {
            for (int g = 0; g < NG; ++g) sum[t][g] = s_zero();
        }
        short_quads<T, PLAIN, NG, MT, FROM, kQuads>(codes, x, cols, sum);
        for (int t = 0; t < MT; ++t) {
            for (int g = 0; g < NG; ++g) dot[t][g] = i_add_short(dot[t][g], sum[t][g]);
        }
        if constexpr (COUNT > kQuads) {
            add_quads<T, PLAIN, NG, MT, FROM + kQuads, COUNT - kQuads>(codes, x, cols, dot);
        }
    }
}

// `plain` holds the codes of the one group, a byte each, when PLAIN.
template <ElementType T, bool PLAIN, int NG, int MT>
static void quant_tile(const uint8_t* group, int64_t group_bytes, const uint8_t* plain, const int8_t* x,
                       const BlockMeta* meta, int64_t cols, int64_t blocks, F (&acc)[MT][NG]) {
    static_assert(!PLAIN || NG == 1, "one group is unpacked at a time");
    for (int t = 0; t < MT; ++t) {
        for (int g = 0; g < NG; ++g) acc[t][g] = f_zero();
    }
    for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* codes[NG];
        const uint8_t* chunk[NG];
        for (int g = 0; g < NG; ++g) {
            chunk[g] = group + g * group_bytes + kvern::scales_at(Codes<T>::layout, b);
            codes[g] = PLAIN ? plain + b * kPlainBytes
                             : group + g * group_bytes + kvern::codes_at(Codes<T>::layout, b);
        }
        if constexpr (MT == 1) {  // bound by memory: keep the stream of weights running ahead
            for (int i = 0; i < Codes<T>::layout.code_bytes + 64; i += 64) {
                __builtin_prefetch(codes[0] + kPrefetchAhead + i);
            }
        }
        const int8_t* xb = x + b * kBlock;
        I dot[MT][NG];
        if constexpr (Codes<T>::is_six) {
            // Two halves of 16 with whole-number scales, joined exactly before the float step.
            I high[MT][NG];
            for (int t = 0; t < MT; ++t) {
                const BlockMeta& m = meta[t * blocks + b];
                for (int g = 0; g < NG; ++g) {
                    dot[t][g] = start_from<T>(m.low_sum);
                    high[t][g] = start_from<T>(m.sum - m.low_sum);
                }
            }
            add_quads<T, PLAIN, NG, MT, 0, 4>(codes, xb, cols, dot);
            add_quads<T, PLAIN, NG, MT, 4, 4>(codes, xb, cols, high);
            for (int g = 0; g < NG; ++g) {
                const int8_t* sc = reinterpret_cast<const int8_t*>(chunk[g] + 32 + b % 8 * 32);
                const I first = i_from_f(f_load_i8(sc));
                const I second = i_from_f(f_load_i8(sc + 16));
                const F scale = f_load_f16(chunk[g]);
                for (int t = 0; t < MT; ++t) {
                    const F xs = f_set1(meta[t * blocks + b].scale);
                    const I joined = i_add(i_mul(dot[t][g], first), i_mul(high[t][g], second));
                    acc[t][g] = f_fma(f_from_i(joined), f_mul(scale, xs), acc[t][g]);
                }
            }
        } else {
            for (int t = 0; t < MT; ++t) {
                for (int g = 0; g < NG; ++g) dot[t][g] = start_from<T>(meta[t * blocks + b].sum);
            }
            add_quads<T, PLAIN, NG, MT, 0, 8>(codes, xb, cols, dot);
            for (int g = 0; g < NG; ++g) {
                F scale, offset;
                load_scales<T>(chunk[g], b, scale, offset);
                for (int t = 0; t < MT; ++t) {
                    const BlockMeta& m = meta[t * blocks + b];
                    acc[t][g] = f_fma(f_from_i(dot[t][g]), f_mul(scale, f_set1(m.scale)), acc[t][g]);
                    if constexpr (Codes<T>::has_offset) {
                        acc[t][g] = f_fma(offset, f_set1(m.scaled_sum), acc[t][g]);
                    }
                }
            }
        }
    }
}

struct QuantJob {
    const uint8_t* groups;
    int64_t group_bytes;
    int64_t num_groups, num_rows;
    QuantRows x;
    int64_t num_tokens;
    MatmulOut out;
    uint8_t* scratch;  // for one group's plain codes, or null
};

template <ElementType T, bool PLAIN, int NG, int MT>
static void quant_tokens(const QuantJob& job, int64_t g, int64_t& t) {
    const int64_t blocks = job.x.cols / kBlock;
    for (; t + MT <= job.num_tokens; t += MT) {
        F acc[MT][NG];
        quant_tile<T, PLAIN, NG, MT>(job.groups + g * job.group_bytes, job.group_bytes, job.scratch,
                                     job.x.q + t * job.x.cols, job.x.meta + t * blocks, job.x.cols, blocks, acc);
        store_tile<NG, MT>(acc, job.out, t, g, job.num_rows);
    }
}

template <ElementType T, int NG>
static void quant_groups(const QuantJob& job, int64_t g) {
    int64_t t = 0;
    quant_tokens<T, false, NG, kQuantRowTile>(job, g, t);
    if constexpr (kQuantRowTile > 4) quant_tokens<T, false, NG, 4>(job, g, t);
    if constexpr (kQuantRowTile > 2) quant_tokens<T, false, NG, 2>(job, g, t);
    for (int i = 0; i < NG; ++i) {  // a lone token: one stream of weights, front to back
        int64_t last = t;
        quant_tokens<T, false, 1, 1>(job, g + i, last);
    }
}

template <ElementType T, int QUAD>
static inline void unpack_quads(const uint8_t* codes, uint8_t* to) {
    b_store(to + 64 * QUAD, load_quad<T, false, QUAD>(codes));
    if constexpr (QUAD < 7) unpack_quads<T, QUAD + 1>(codes, to);
}

template <ElementType T>
static inline void unpack_group(const QuantJob& job, int64_t g, uint8_t* to) {
    const uint8_t* group = job.groups + g * job.group_bytes;
    for (int64_t b = 0; b < job.x.cols / kBlock; ++b) {
        unpack_quads<T, 0>(group + kvern::codes_at(Codes<T>::layout, b), to + b * kPlainBytes);
    }
}

// Many tokens: one group's codes are unpacked once, and stay in the first-level cache for all of them.
template <ElementType T>
static void quant_group_plain(const QuantJob& job, int64_t g) {
    unpack_group<T>(job, g, job.scratch);
    int64_t t = 0;
    quant_tokens<T, true, 1, kQuantRowTile>(job, g, t);
    quant_tokens<T, true, 1, 2>(job, g, t);
    quant_tokens<T, true, 1, 1>(job, g, t);
}

#ifdef KVERN_TILES
}  // namespace KVERN_PATH
#include "matmul_tiles.h"
namespace KVERN_PATH {
#endif

template <ElementType T>
static void quant_product(QuantJob job) {
#ifdef KVERN_TILES
    const int64_t done = quant_tiles_of<T>(job);
    job.x.q += done * job.x.cols;
    job.x.meta += done * (job.x.cols / kBlock);
    job.num_tokens -= done;
    job.out = job.out.from_token(done);
    if (job.num_tokens == 0) return;
#endif
    int64_t g = 0;
    if constexpr (kUnpacksFirst && !Codes<T>::is_signed) {
        if (job.scratch && job.num_tokens >= kPlainTokens) {
            for (; g < job.num_groups; ++g) quant_group_plain<T>(job, g);
        }
    }
    for (; g + kQuantGroupTile <= job.num_groups; g += kQuantGroupTile) quant_groups<T, kQuantGroupTile>(job, g);
    for (; g < job.num_groups; ++g) quant_groups<T, 1>(job, g);
}

static void matmul_quant(ElementType type, const uint8_t* groups, int64_t group_bytes, int64_t num_groups,
                         int64_t num_rows, QuantRows x, int64_t num_tokens, MatmulOut out, uint8_t* scratch) {
    const QuantJob job{groups, group_bytes, num_groups, num_rows, x, num_tokens, out, scratch};
    switch (type) {
        case ElementType::Q8_0: return quant_product<ElementType::Q8_0>(job);
        case ElementType::Q4_0: return quant_product<ElementType::Q4_0>(job);
        case ElementType::Q4_1: return quant_product<ElementType::Q4_1>(job);
        case ElementType::Q5_0: return quant_product<ElementType::Q5_0>(job);
        case ElementType::Q5_1: return quant_product<ElementType::Q5_1>(job);
        case ElementType::Q4_K: return quant_product<ElementType::Q4_K>(job);
        case ElementType::Q5_K: return quant_product<ElementType::Q5_K>(job);
        case ElementType::Q6_K: return quant_product<ElementType::Q6_K>(job);
        default: return;
    }
}

}  // namespace KVERN_PATH
