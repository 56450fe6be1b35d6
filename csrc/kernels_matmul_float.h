// Matrix products with float weights, interleaved like quantised ones (kernels_matmul.h). For each feature, in
// order: acc = fma(w, x, acc).
#pragma once

#include "matmul_outputs.h"

namespace KVERN_PATH {

using kvern::ElementType;
using kvern::kPanelGroups;

constexpr int kWidenedRowTile = 6;  // by one group, whose float32 copy is small enough to stay near

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
    uint8_t* scratch;  // for one group as float32, or null
};

template <ElementType T>
static inline const uint8_t* first_vector(const FloatJob& job, int64_t g) {
    const int64_t first = g / kPanelGroups * kPanelGroups;
    return job.panels + first * job.group_bytes + (g - first) * (T == ElementType::F32 ? 64 : 32);
}

// Groups g..g+NG-1, all of one panel that holds `width` groups; `w` is their first feature.
template <ElementType T, int NG, int MT>
static void float_tokens(const FloatJob& job, const uint8_t* w, int64_t g, int64_t width, int64_t& t) {
    constexpr int kVector = T == ElementType::F32 ? 64 : 32;
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

template <ElementType T, int NG, int MT>
static void float_groups(const FloatJob& job, const uint8_t* w, int64_t g, int64_t width) {
    int64_t t = 0;
    float_tokens<T, NG, MT>(job, w, g, width, t);
    if constexpr (MT > 4) float_tokens<T, NG, 4>(job, w, g, width, t);
    if constexpr (MT > 2) float_tokens<T, NG, 2>(job, w, g, width, t);
    float_tokens<T, NG, 1>(job, w, g, width, t);
}

// Many tokens: one group's weights are widened once for all of them.
template <ElementType T>
static void float_group_widened(const FloatJob& job, int64_t g, int64_t width) {
    const uint8_t* w = first_vector<T>(job, g);
    float* wide = reinterpret_cast<float*>(job.scratch);
    for (int64_t k = 0; k < job.cols; ++k) f_store(wide + 16 * k, load_weights<T>(w + k * width * 32));
    float_groups<ElementType::F32, 1, kWidenedRowTile>(job, job.scratch, g, 1);
}

template <ElementType T>
static void float_product(const FloatJob& job) {
    for (int64_t first = 0; first < job.num_groups; first += kPanelGroups) {
        const int64_t left = job.num_groups - first;
        const int64_t width = left < kPanelGroups ? left : kPanelGroups;
        int64_t t = 0, g = first;
        if (width == kPanelGroups && job.num_tokens == 1) {
            float_tokens<T, kPanelGroups, 1>(job, first_vector<T>(job, first), first, width, t);
            continue;
        }
        if constexpr (kUnpacksFirst && T != ElementType::F32) {
            if (job.scratch && job.num_tokens >= 2 * kWidenedRowTile) {
                for (; g < first + width; ++g) float_group_widened<T>(job, g, width);
            }
        }
        for (; g + kFloatGroupTile <= first + width; g += kFloatGroupTile) {
            float_groups<T, kFloatGroupTile, kFloatRowTile>(job, first_vector<T>(job, g), g, width);
        }
        for (; g < first + width; ++g) float_groups<T, 1, kFloatRowTile>(job, first_vector<T>(job, g), g, width);
    }
}

static void matmul_float(ElementType type, const uint8_t* groups, int64_t group_bytes, int64_t num_groups,
                         int64_t num_rows, const float* x, int64_t cols, int64_t num_tokens, MatmulOut out,
                         uint8_t* scratch) {
    const FloatJob job{groups, group_bytes, num_groups, num_rows, x, cols, num_tokens, out, scratch};
    switch (type) {
        case ElementType::F32: return float_product<ElementType::F32>(job);
        case ElementType::F16: return float_product<ElementType::F16>(job);
        case ElementType::BF16: return float_product<ElementType::BF16>(job);
        default: return;
    }
}

}  // namespace KVERN_PATH
