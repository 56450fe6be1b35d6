// Plain data of the operations that only some families need: recurrent states, routing to experts,
// gates and norms on views.
#pragma once
#include <cstddef>
#include <cstdint>

#include "types.h"

namespace kvern {

// CLAMPED_SWIGLU is gpt-oss's: both halves are clamped, (b + 1) * a * sigmoid(alpha * a).
enum class GateKind : int { NONE, SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, CLAMPED_SWIGLU };

// out = act(a) * b, row by row of views whose last axis is contiguous; out may be a or b.
struct GateRows {
    const float* a;
    int64_t a_stride;
    const float* b;  // null for ones
    int64_t b_stride;
    GateKind kind;
    bool is_one;  // a has one column, which gates the whole row
    float alpha, limit;
    int64_t cols;
    float* out;
    int64_t out_stride;
};

// A norm of every head of every token: RMS, or of the deviations from the mean. out may be x.
struct NormHeads {
    const float* x;
    int64_t x_token, x_head;
    int heads;
    int64_t cols;
    const float* weight;
    int64_t weight_head;  // 0: all heads share it
    const float* bias;    // like weight; null for none
    float eps;
    bool is_centered;
    float* out;
    int64_t out_token, out_head;
};

enum class Scoring : int { SOFTMAX, SIGMOID, SOFTMAX_CHOSEN, SIGMOID_CHOSEN };

constexpr int kMaxExperts = 1024;

// How a router's logits become experts and weights; ties go to the lower id.
struct Routing {
    Scoring scoring;
    int num_experts, num_chosen, num_groups, num_chosen_groups;
    bool is_best_two;  // a group's score: its best two together, or its best one
    bool is_normalized;
    float scale;
    const float* score_bias;    // [num_experts] or null
    const float* expert_scale;  // [num_experts] or null
};

constexpr int kStateLanes = 32;  // value columns, or state rows, that are worked on together
constexpr int kConvLanes = 64;
constexpr int kMaxTaps = 16;

// One tensor of every entry of a layer's states: byte b of an entry is byte b % page_bytes of its page
// number b / page_bytes.
struct StatePlace {
    uint8_t* pages;
    int64_t page_bytes;
    int64_t num_blocks;
    int64_t offset;  // of the tensor in an entry
    int64_t num_bytes;
    StreamType type;
};

// One sequence's rows of a step, and the pages of its entry.
struct StateRows {
    const int32_t* pages;
    int64_t first, count;
};

// out = silu?(sum over taps of weight * x + bias), x rounded as the tail is stored.
struct ConvolveShape {
    const float* x;
    int64_t x_stride;
    int64_t channels;
    int taps;
    const float* weight;  // [taps, channels], the oldest first
    const float* bias;    // [channels] or null
    bool is_silu;
    float* out;
    int64_t out_stride;
    StatePlace tail;  // [channels, taps - 1]
};

// The gated delta rule on convolved q, k and v; see kernels_states.h.
struct DeltaShape {
    const float* qkv;  // per token: q and k of the key heads, v of the value heads
    int64_t qkv_stride;
    const float* gates;  // per token: beta, then step, of the value heads
    int64_t gates_stride;
    const float *decay, *step_bias;  // [value heads]
    int key_heads, heads, key_dim, value_dim;
    float* out;  // [tokens, heads, value_dim]
    int64_t out_stride;
    StatePlace state;  // [heads, key_dim, value_dim]
};

struct ScanShape {
    const float* xbc;  // per token: x of the heads, B and C of the groups
    int64_t xbc_stride;
    const float* steps;  // [tokens, heads]
    int64_t steps_stride;
    const float *decay, *step_bias, *skip;  // [heads]
    float low, high;                        // bounds of the step
    int heads, groups, head_dim, state_dim;
    float* out;  // [tokens, heads, head_dim]
    int64_t out_stride;
    StatePlace state;  // [heads, head_dim, state_dim]
};

struct FamilyKernels {
    void (*gate_rows)(const GateRows& g, int64_t begin, int64_t end);
    void (*norm_heads)(const NormHeads& n, int64_t begin, int64_t end);
    void (*softcap)(float* x, float cap, int64_t begin, int64_t end);
    // ids ascending, [tokens, num_chosen] like weights.
    void (*route)(const Routing& r, const float* logits, int64_t begin, int64_t end, int32_t* ids, float* weights);
    void (*convolve)(const ConvolveShape& s, const StateRows& rows, int64_t block);
    void (*delta)(const DeltaShape& s, const StateRows& rows, int head, int64_t column, uint8_t* scratch);
    void (*scan)(const ScanShape& s, const StateRows& rows, int head, int64_t row, uint8_t* scratch);
};

}  // namespace kvern
