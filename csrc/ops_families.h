// Operations that only some families need: calls on rows, recurrent states, products per expert and head.
#pragma once
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "family_types.h"
#include "ops.h"

namespace kvern {

// A row operation that needs no treatment of its own: `rows(step, index of the batch, begin, end)`.
class CallOp final : public RowOp {
public:
    using Rows = std::function<void(const Step&, size_t, int64_t, int64_t)>;
    CallOp(int64_t work, Rows rows) : RowOp(OpKind::CALL), work_(work), rows_(std::move(rows)) {}
    void rows(const Step& step, int64_t begin, int64_t end) const override {
        rows_(step, static_cast<size_t>(group), begin, end);
    }
    int64_t work_per_row() const override { return work_; }
    int* batch_index() override { return &group; }

    int group = 0;
    int64_t table_rows = 0;  // when positions choose rows of a table: how many it has

private:
    int64_t work_;
    Rows rows_;
};

// An operation on the states of a step's sequences: one unit per sequence and independent part of a state.
class StateOp final : public Op {
public:
    // part(kernels, rows of the sequence, number of the part, scratch)
    using Part = std::function<void(const FamilyKernels&, const StateRows&, int64_t, uint8_t*)>;
    StateOp(const StatePlace& place, int64_t parts, int64_t work_per_token, size_t scratch, Part part)
        : Op(OpKind::STATE), place(place), parts_(parts), work_(work_per_token), scratch_(scratch), part_(std::move(part)) {}
    void plan(Step& step, std::vector<Stage>& stages) override;
    size_t scratch_bytes(const Step&) const override { return scratch_; }
    void work(const Step& step, int stage, const Claim& claim, const Worker& worker) override;
    int* batch_index() override { return &group; }

    int group = 0;
    const StatePlace place;

private:
    int64_t parts_, work_;
    size_t scratch_;
    Part part_;
};

// Rows of several products that lie one after the other, and how many each has.
struct GroupRows {
    int64_t begin, end;
};

// Weights of one shape; their element types may differ.
struct GroupShape {
    explicit GroupShape(const std::vector<const Weight*>& weights);

    int64_t rows, cols;
    int64_t units = 0;         // of the weight that has most
    bool is_quantised = false;  // some need int8 activations
    bool is_paired = false;     // some need bf16 activations
};

// The input of grouped products as the kernels read it: rows of float32, and of int8 with their scales or of bf16.
struct GroupInput {
    float* x;
    int8_t* codes;
    BlockMeta* meta;
    uint32_t* words;

    static size_t bytes(const GroupShape& s, int64_t rows);
    static GroupInput at(uint8_t* data, const GroupShape& s, int64_t rows);
    void quantise(const Step& step, const GroupShape& s, int64_t begin, int64_t end) const;
    ProductInput from_row(int64_t r, int64_t cols) const { return ProductInput{x, codes, meta, words}.from_row(r, cols); }
};

// out[t, h] = weight_h x[t, h]: the products of latent attention that are one per head.
class HeadsOp final : public Op {
public:
    HeadsOp() : Op(OpKind::GROUPED) {}
    size_t scratch_bytes(const Step&) const override { return matmul_scratch_bytes(weights.front()->cols); }
    void plan(Step& step, std::vector<Stage>& stages) override;
    void work(const Step& step, int stage, const Claim& claim, const Worker& worker) override;

    std::vector<const Weight*> weights;  // of one shape
    const float* x = nullptr;
    int64_t x_token = 0, x_head = 0;
    float* out = nullptr;
    int64_t out_token = 0, out_head = 0;
};

// The weights of a layer's experts.
struct ExpertSet {
    std::vector<const Weight*> gate_up, down;
    std::vector<const float*> gate_up_bias, down_bias;  // null pointers for none
    GateRows gate{};                                    // kind, alpha and limit
    bool is_gated = true;
    bool scales_input = false;

};

// out[t] = sum over the token's experts, in the order of `ids`, of weight * expert(x[t]).
class ExpertsOp final : public Op {
public:
    ExpertsOp() : Op(OpKind::GROUPED) {}
    size_t scratch_bytes(const Step&) const override;
    void plan(Step& step, std::vector<Stage>& stages) override;
    void work(const Step& step, int stage, const Claim& claim, const Worker& worker) override;

    const ExpertSet* set = nullptr;
    const float* x = nullptr;
    const int32_t* ids = nullptr;  // [tokens, chosen], ascending
    const float* weights = nullptr;
    int64_t chosen = 0;
    float* out = nullptr;

private:
    struct Buffers;
    Buffers buffers(uint8_t* base) const;
    GroupRows tokens_of(const Step& step, int64_t piece) const;
    void sort(const Buffers& b, GroupRows tokens) const;
    void gather(const Step& step, const Buffers& b, GroupRows tokens, int64_t begin, int64_t end) const;
    void products(const Step& step, const Buffers& b, bool is_down, int64_t begin, int64_t end,
                  uint8_t* scratch) const;
    void activate(const Step& step, const Buffers& b, int64_t begin, int64_t end) const;
    void sum(const Step& step, const Buffers& b, GroupRows tokens, int64_t begin, int64_t end) const;

    int64_t piece_tokens_ = 0;
};

}  // namespace kvern
