// Matrix products. A weight group is 16 rows interleaved, one per lane, so no sum ever crosses lanes and
// a result's order of operations is the same in every tile shape:
//
//   quantised: for each block of 32 features, in order:
//       dot = exact int32 sum of q_w * q_x (zero point taken off exactly)
//       acc = fma(float(dot), w_scale * x_scale, acc);  with offsets: acc = fma(w_offset, x_scaled_sum, acc)
//   float: for each feature, in order: acc = fma(w, x, acc)
#pragma once

namespace KVERN_PATH {

using kvern::ElementType;
using kvern::kGroupRows;
using kvern::kPanelGroups;
using kvern::MatmulOut;
using kvern::QuantRows;

constexpr int kPrefetchAhead = 8192;

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
};

// The 64 bytes holding features 4i..4i+3 of the 16 rows.
template <ElementType T, int QUAD>
static inline B load_quad(const uint8_t* codes) {
    if constexpr (Codes<T>::is_signed) {
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

// One step of the tile: quad QUAD of every group against every token.
template <ElementType T, int NG, int MT, int QUAD>
static inline void quad_step(const uint8_t* const (&codes)[NG], const int8_t* x, int64_t cols,
                             I (&dot)[MT][NG]) {
    B w[NG];
    for (int g = 0; g < NG; ++g) w[g] = load_quad<T, QUAD>(codes[g]);
    for (int t = 0; t < MT; ++t) {
        for (int g = 0; g < NG; ++g) {
            const int8_t* x4 = x + t * cols + 4 * QUAD;
            dot[t][g] = Codes<T>::is_signed ? dot_signed(dot[t][g], w[g], x4)
                                            : dot_unsigned(dot[t][g], w[g], x4);
        }
    }
}

template <ElementType T, int NG, int MT>
static void quant_tile(const uint8_t* group, int64_t group_bytes, const int8_t* x, const BlockMeta* meta,
                       int64_t cols, int64_t blocks, F (&acc)[MT][NG]) {
    for (int t = 0; t < MT; ++t) {
        for (int g = 0; g < NG; ++g) acc[t][g] = f_zero();
    }
    for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* codes[NG];
        const uint8_t* chunk[NG];
        for (int g = 0; g < NG; ++g) {
            chunk[g] = group + g * group_bytes + kvern::scales_at(Codes<T>::layout, b);
            codes[g] = group + g * group_bytes + kvern::codes_at(Codes<T>::layout, b);
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
            quad_step<T, NG, MT, 0>(codes, xb, cols, dot);
            quad_step<T, NG, MT, 1>(codes, xb, cols, dot);
            quad_step<T, NG, MT, 2>(codes, xb, cols, dot);
            quad_step<T, NG, MT, 3>(codes, xb, cols, dot);
            quad_step<T, NG, MT, 4>(codes, xb, cols, high);
            quad_step<T, NG, MT, 5>(codes, xb, cols, high);
            quad_step<T, NG, MT, 6>(codes, xb, cols, high);
            quad_step<T, NG, MT, 7>(codes, xb, cols, high);
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
            quad_step<T, NG, MT, 0>(codes, xb, cols, dot);
            quad_step<T, NG, MT, 1>(codes, xb, cols, dot);
            quad_step<T, NG, MT, 2>(codes, xb, cols, dot);
            quad_step<T, NG, MT, 3>(codes, xb, cols, dot);
            quad_step<T, NG, MT, 4>(codes, xb, cols, dot);
            quad_step<T, NG, MT, 5>(codes, xb, cols, dot);
            quad_step<T, NG, MT, 6>(codes, xb, cols, dot);
            quad_step<T, NG, MT, 7>(codes, xb, cols, dot);
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

static inline void store_outputs(F acc, const MatmulOut& out, int64_t at, int64_t rows_left) {
    if (rows_left >= kGroupRows) {
        f_store(out.to + at, acc);
        if (out.add_to) f_store(out.add_to + at, f_add(f_load(out.add_to + at), acc));
    } else if (rows_left > 0) {
        const int n = static_cast<int>(rows_left);
        f_store_n(out.to + at, acc, n);
        if (out.add_to) f_store_n(out.add_to + at, f_add(f_load_n(out.add_to + at, n), acc), n);
    }
}

// Token t's outputs of groups g and up.
template <int NG, int MT>
static inline void store_tile(const F (&acc)[MT][NG], const MatmulOut& out, int64_t t, int64_t g, int64_t num_rows) {
    for (int i = 0; i < MT; ++i) {
        for (int j = 0; j < NG; ++j) {
            const int64_t row = (g + j) * kGroupRows;
            store_outputs(acc[i][j], out, (t + i) * out.stride + row, num_rows - row);
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
};

template <ElementType T, int NG, int MT>
static void quant_tokens(const QuantJob& job, int64_t g, int64_t& t) {
    const int64_t blocks = job.x.cols / kBlock;
    for (; t + MT <= job.num_tokens; t += MT) {
        F acc[MT][NG];
        quant_tile<T, NG, MT>(job.groups + g * job.group_bytes, job.group_bytes, job.x.q + t * job.x.cols,
                              job.x.meta + t * blocks, job.x.cols, blocks, acc);
        store_tile<NG, MT>(acc, job.out, t, g, job.num_rows);
    }
}

template <ElementType T, int NG>
static void quant_groups(const QuantJob& job, int64_t g) {
    int64_t t = 0;
    quant_tokens<T, NG, kQuantRowTile>(job, g, t);
    if constexpr (kQuantRowTile > 4) quant_tokens<T, NG, 4>(job, g, t);
    if constexpr (kQuantRowTile > 2) quant_tokens<T, NG, 2>(job, g, t);
    for (int i = 0; i < NG; ++i) {  // a lone token: one stream of weights, front to back
        int64_t last = t;
        quant_tokens<T, 1, 1>(job, g + i, last);
    }
}

template <ElementType T>
static void quant_product(const QuantJob& job) {
    int64_t g = 0;
    for (; g + kQuantGroupTile <= job.num_groups; g += kQuantGroupTile) quant_groups<T, kQuantGroupTile>(job, g);
    for (; g < job.num_groups; ++g) quant_groups<T, 1>(job, g);
}

static void matmul_quant(ElementType type, const uint8_t* groups, int64_t group_bytes, int64_t num_groups,
                         int64_t num_rows, QuantRows x, int64_t num_tokens, MatmulOut out) {
    const QuantJob job{groups, group_bytes, num_groups, num_rows, x, num_tokens, out};
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

template <ElementType T>
static inline F load_weights(const uint8_t* p) {
    if constexpr (T == ElementType::F32) return f_load(reinterpret_cast<const float*>(p));
    if constexpr (T == ElementType::F16) return f_load_f16(p);
    if constexpr (T == ElementType::BF16) return f_load_bf16(p);
}

struct FloatJob {
    const uint8_t* panels;
    int64_t group_bytes;
    int64_t num_groups, num_rows;
    const float* x;
    int64_t cols, num_tokens;
    MatmulOut out;
};

// Groups g..g+NG-1, all of one panel that holds `width` groups.
template <ElementType T, int NG, int MT>
static void float_tokens(const FloatJob& job, int64_t g, int64_t width, int64_t& t) {
    constexpr int kVector = T == ElementType::F32 ? 64 : 32;
    const int64_t first = g / kPanelGroups * kPanelGroups;
    const uint8_t* w = job.panels + first * job.group_bytes + (g - first) * kVector;
    for (; t + MT <= job.num_tokens; t += MT) {
        F acc[MT][NG];
        for (int i = 0; i < MT; ++i) {
            for (int j = 0; j < NG; ++j) acc[i][j] = f_zero();
        }
        const float* x = job.x + t * job.cols;
        const uint8_t* at = w;
        for (int64_t k = 0; k < job.cols; ++k, at += width * kVector) {
            F wk[NG];
            for (int j = 0; j < NG; ++j) wk[j] = load_weights<T>(at + j * kVector);
            if constexpr (MT == 1) {
                for (int j = 0; j < NG * kVector; j += 64) __builtin_prefetch(at + kPrefetchAhead + j);
            }
            for (int i = 0; i < MT; ++i) {
                const F xk = f_set1(x[i * job.cols + k]);
                for (int j = 0; j < NG; ++j) acc[i][j] = f_fma(wk[j], xk, acc[i][j]);
            }
        }
        store_tile<NG, MT>(acc, job.out, t, g, job.num_rows);
    }
}

template <ElementType T, int NG>
static void float_groups(const FloatJob& job, int64_t g, int64_t width, int64_t t) {
    float_tokens<T, NG, kFloatRowTile>(job, g, width, t);
    if constexpr (kFloatRowTile > 4) float_tokens<T, NG, 4>(job, g, width, t);
    if constexpr (kFloatRowTile > 2) float_tokens<T, NG, 2>(job, g, width, t);
    float_tokens<T, NG, 1>(job, g, width, t);
}

template <ElementType T>
static void float_product(const FloatJob& job) {
    for (int64_t first = 0; first < job.num_groups; first += kPanelGroups) {
        const int64_t left = job.num_groups - first;
        const int64_t width = left < kPanelGroups ? left : kPanelGroups;
        int64_t t = 0;
        if (width == kPanelGroups && job.num_tokens == 1) {
            float_tokens<T, kPanelGroups, 1>(job, first, width, t);
            continue;
        }
        int64_t g = 0;
        for (; g + kFloatGroupTile <= width; g += kFloatGroupTile) {
            float_groups<T, kFloatGroupTile>(job, first + g, width, 0);
        }
        for (; g < width; ++g) float_groups<T, 1>(job, first + g, width, 0);
    }
}

static void matmul_float(ElementType type, const uint8_t* groups, int64_t group_bytes, int64_t num_groups,
                         int64_t num_rows, const float* x, int64_t cols, int64_t num_tokens, MatmulOut out) {
    const FloatJob job{groups, group_bytes, num_groups, num_rows, x, cols, num_tokens, out};
    switch (type) {
        case ElementType::F32: return float_product<ElementType::F32>(job);
        case ElementType::F16: return float_product<ElementType::F16>(job);
        case ElementType::BF16: return float_product<ElementType::BF16>(job);
        default: return;
    }
}

}  // namespace KVERN_PATH
