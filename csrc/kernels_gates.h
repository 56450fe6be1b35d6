// Row-wise operations on views: gates of every kind, norms of heads, caps, routing to experts.
#pragma once

namespace KVERN_PATH {

using kvern::GateKind;
using kvern::GateRows;
using kvern::NormHeads;
using kvern::Routing;
using kvern::Scoring;

static inline F sigmoid(F x) { return f_div(f_set1(1.0f), f_add(f_set1(1.0f), f_exp(f_sub(f_zero(), x)))); }

static inline F gate(F a, F b, const GateRows& g) {
    const F zero = f_zero();
    switch (g.kind) {
        case GateKind::NONE: return f_mul(a, b);
        case GateKind::SILU: return f_mul(activate(a, Activation::SILU), b);
        case GateKind::GELU: return f_mul(activate(a, Activation::GELU), b);
        case GateKind::GELU_TANH: return f_mul(activate(a, Activation::GELU_TANH), b);
        case GateKind::RELU: return f_mul(f_max(zero, a), b);  // this order lets NaN through
        case GateKind::RELU2: {
            const F r = f_max(zero, a);
            return f_mul(f_mul(r, r), b);
        }
        case GateKind::SIGMOID: return f_mul(sigmoid(a), b);
        case GateKind::CLAMPED_SWIGLU: {
            const F limit = f_set1(g.limit);
            const F low = f_min(limit, a);
            const F up = f_min(limit, f_max(f_sub(zero, limit), b));
            return f_mul(f_add(up, f_set1(1.0f)), f_mul(low, sigmoid(f_mul(f_set1(g.alpha), low))));
        }
    }
    return a;
}

static void gate_rows(const GateRows& g, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* a = g.a + row * g.a_stride;
        const float* b = g.b ? g.b + row * g.b_stride : nullptr;
        float* out = g.out + row * g.out_stride;
        if (g.is_one) {  // activated once, then a factor
            GateRows own = g;
            const F factor = gate(f_set1(a[0]), f_set1(1.0f), own);
            int64_t i = 0;
            for (; i + 16 <= g.cols; i += 16) f_store(out + i, f_mul(factor, f_load(b + i)));
            const int rest = static_cast<int>(g.cols - i);
            if (rest) f_store_n(out + i, f_mul(factor, f_load_n(b + i, rest)), rest);
            continue;
        }
        int64_t i = 0;
        for (; i + 16 <= g.cols; i += 16) {
            f_store(out + i, gate(f_load(a + i), b ? f_load(b + i) : f_set1(1.0f), g));
        }
        const int rest = static_cast<int>(g.cols - i);
        if (rest) {
            const F v = gate(f_load_n(a + i, rest), b ? f_load_n(b + i, rest) : f_set1(1.0f), g);
            f_store_n(out + i, v, rest);
        }
    }
}

// Sum over a row of (x - shift)^2, or of x alone.
template <bool SQUARED>
static inline float row_sum(const float* x, int64_t cols, F shift) {
    F acc = f_zero();
    int64_t i = 0;
    for (; i + 16 <= cols; i += 16) {
        const F v = f_sub(f_load(x + i), shift);
        acc = SQUARED ? f_fma(v, v, acc) : f_add(acc, v);
    }
    const int rest = static_cast<int>(cols - i);
    if (rest) {
        F v = f_sub(f_load_n(x + i, rest), shift);
        v = f_select(static_cast<Mask>((1u << rest) - 1u), v, f_zero());
        acc = SQUARED ? f_fma(v, v, acc) : f_add(acc, v);
    }
    return f_sum(acc);
}

static void norm_head(const NormHeads& n, const float* x, const float* weight, const float* bias, float* out) {
    const float count = static_cast<float>(n.cols);
    const F shift = n.is_centered ? f_set1(row_sum<false>(x, n.cols, f_zero()) / count) : f_zero();
    const float mean = row_sum<true>(x, n.cols, shift) / count;
    const F inv = f_set1(1.0f / __builtin_sqrtf(mean + n.eps));
    int64_t i = 0;
    for (; i + 16 <= n.cols; i += 16) {
        F v = f_mul(f_mul(f_sub(f_load(x + i), shift), inv), f_load(weight + i));
        if (bias) v = f_add(v, f_load(bias + i));
        f_store(out + i, v);
    }
    const int rest = static_cast<int>(n.cols - i);
    if (rest) {
        F v = f_mul(f_mul(f_sub(f_load_n(x + i, rest), shift), inv), f_load_n(weight + i, rest));
        if (bias) v = f_add(v, f_load_n(bias + i, rest));
        f_store_n(out + i, v, rest);
    }
}

static void norm_heads(const NormHeads& n, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        for (int h = 0; h < n.heads; ++h) {
            norm_head(n, n.x + t * n.x_token + h * n.x_head, n.weight + h * n.weight_head,
                      n.bias ? n.bias + h * n.weight_head : nullptr, n.out + t * n.out_token + h * n.out_head);
        }
    }
}

static void softcap(float* x, float cap, int64_t begin, int64_t end) {
    const F c = f_set1(cap);
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) f_store(x + i, f_mul(c, f_tanh(f_div(f_load(x + i), c))));
    const int rest = static_cast<int>(end - i);
    if (rest) f_store_n(x + i, f_mul(c, f_tanh(f_div(f_load_n(x + i, rest), c))), rest);
}

// e^(x - the largest) of `count` numbers, divided by their sum.
static void softmax_row(const float* x, int count, float* out) {
    float peak = x[0];
    for (int i = 1; i < count; ++i) peak = x[i] > peak ? x[i] : peak;
    float sum = 0.0f;
    for (int i = 0; i < count; i += 16) {
        const int n = count - i < 16 ? count - i : 16;
        f_store_n(out + i, f_exp(f_sub(f_load_n(x + i, n), f_set1(peak))), n);
    }
    for (int i = 0; i < count; ++i) sum += out[i];
    for (int i = 0; i < count; ++i) out[i] /= sum;
}

static void sigmoid_row(const float* x, int count, float* out) {
    for (int i = 0; i < count; i += 16) {
        const int n = count - i < 16 ? count - i : 16;
        f_store_n(out + i, sigmoid(f_load_n(x + i, n)), n);
    }
}

// The largest first; a tie goes to the lower index, NaN comes last.
static void choose_largest(const float* x, int count, int chosen, int32_t* ids) {
    bool taken[kvern::kMaxExperts] = {};
    for (int c = 0; c < chosen; ++c) {
        int best = -1;
        for (int i = 0; i < count; ++i) {
            if (taken[i]) continue;
            if (best < 0 || x[i] > x[best] || (x[best] != x[best] && x[i] == x[i])) best = i;
        }
        taken[best] = true;
        ids[c] = best;
    }
}

// All experts outside the best groups get -infinity.
static void keep_best_groups(const Routing& r, float* ranking) {
    float scores[kvern::kMaxExperts];
    int32_t kept[kvern::kMaxExperts];
    const int size = r.num_experts / r.num_groups;
    for (int g = 0; g < r.num_groups; ++g) {
        int32_t best[2] = {0, 0};
        const float* own = ranking + g * size;
        choose_largest(own, size, r.is_best_two ? 2 : 1, best);
        scores[g] = r.is_best_two ? own[best[0]] + own[best[1]] : own[best[0]];
    }
    choose_largest(scores, r.num_groups, r.num_chosen_groups, kept);
    bool is_kept[kvern::kMaxExperts] = {};
    for (int g = 0; g < r.num_chosen_groups; ++g) is_kept[kept[g]] = true;
    for (int e = 0; e < r.num_experts; ++e) {
        if (!is_kept[e / size]) ranking[e] = -__builtin_inff();
    }
}

static void route_row(const Routing& r, const float* logits, int32_t* ids, float* weights) {
    float scores[kvern::kMaxExperts], ranking[kvern::kMaxExperts], chosen[kvern::kMaxExperts];
    const int count = r.num_experts, k = r.num_chosen;
    if (r.scoring == Scoring::SOFTMAX) {
        softmax_row(logits, count, scores);
    } else if (r.scoring == Scoring::SIGMOID) {
        sigmoid_row(logits, count, scores);
    } else {
        std::memcpy(scores, logits, static_cast<size_t>(count) * 4);
    }
    for (int e = 0; e < count; ++e) ranking[e] = r.score_bias ? scores[e] + r.score_bias[e] : scores[e];
    if (r.num_groups > 1) keep_best_groups(r, ranking);
    choose_largest(ranking, count, k, ids);
    for (int i = 0; i < k; ++i) weights[i] = scores[ids[i]];
    if (r.scoring == Scoring::SOFTMAX_CHOSEN || r.scoring == Scoring::SIGMOID_CHOSEN) {
        std::memcpy(chosen, weights, static_cast<size_t>(k) * 4);
        r.scoring == Scoring::SOFTMAX_CHOSEN ? softmax_row(chosen, k, weights) : sigmoid_row(chosen, k, weights);
    }
    if (r.is_normalized) {
        float sum = 0.0f;
        for (int i = 0; i < k; ++i) sum += weights[i];
        for (int i = 0; i < k; ++i) weights[i] /= sum + 1e-20f;
    }
    for (int i = 0; i < k; ++i) {
        weights[i] *= r.scale;
        if (r.expert_scale) weights[i] *= r.expert_scale[ids[i]];
    }
    for (int i = 1; i < k; ++i) {  // in order of id
        for (int j = i; j > 0 && ids[j] < ids[j - 1]; --j) {
            const int32_t id = ids[j];
            const float weight = weights[j];
            ids[j] = ids[j - 1], weights[j] = weights[j - 1];
            ids[j - 1] = id, weights[j - 1] = weight;
        }
    }
}

static void route(const Routing& r, const float* logits, int64_t begin, int64_t end, int32_t* ids, float* weights) {
    for (int64_t t = begin; t < end; ++t) {
        route_row(r, logits + t * r.num_experts, ids + t * r.num_chosen, weights + t * r.num_chosen);
    }
}

}  // namespace KVERN_PATH
