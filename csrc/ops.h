// The operations as objects: each knows its buffers and weights; what changes from step to step comes
// with the `Step`. A single call makes one and runs it; a program keeps hundreds and runs them all in one
// region of the thread pool.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "pool.h"
#include "types.h"
#include "weights.h"

namespace kvern {

// One KV group's rows and tables of a step.
struct StepBatch {
    const int32_t* cu_seqlens;
    const int32_t* seq_lens;
    int64_t num_seqs;
    const int32_t* block_tables;
    int64_t table_stride;
    const int32_t* positions;
    const int64_t* slots;
    const int32_t* seats;  // null: no narrow streams
};

struct AttendPlan;

// Buffers that operations use one after the other.
struct SharedBuffers {
    Bytes quant, partial, grouped;
    size_t quant_bytes = 0, partial_bytes = 0, grouped_bytes = 0;

    static void grow(Bytes& buffer, size_t& have, size_t need);
};

struct Step {
    int64_t tokens = 0;
    const int32_t* token_ids = nullptr;
    std::vector<StepBatch> batches;
    const KernelTable* kernels = nullptr;
    SharedBuffers* shared = nullptr;
    int threads = 1;
    std::vector<std::shared_ptr<AttendPlan>> attend_plans;  // layers of one geometry share a plan
};

enum class OpKind { EMBED, NORM, ROTARY, APPEND, GATE, ADD, CALL, ROWS, MATMUL, ATTEND, STATE, GROUPED };

class Op;

// A stretch of work whose units may be done in any order by any thread; the next stage begins when all
// units are done. Threads claim runs of units.
struct Stage {
    Op* op;
    int index;      // of the operation's stages
    int64_t units;
    int64_t least;  // units claimed at once; of a guided stage what claims are multiples of
    bool is_guided;  // threads have shares of it
    bool is_serial;  // not worth sharing: whoever finishes the stage before does it at once
};

// What a thread has claimed.
struct Claim {
    int64_t begin, end;
    bool is_first;  // this thread's first of the stage
};

class Op {
public:
    explicit Op(OpKind kind) : kind(kind) {}
    virtual ~Op() = default;
    // Before the region, on the calling thread: sizes shared buffers, adds the stages.
    virtual void plan(Step& step, std::vector<Stage>& stages) = 0;
    virtual size_t scratch_bytes(const Step&) const { return 0; }
    virtual void work(const Step& step, int stage, const Claim& claim, const Worker& worker) = 0;
    // Where an operation keeps the index of the batch that it reads, if it reads one.
    virtual int* batch_index() { return nullptr; }

    const OpKind kind;
};

// An operation whose row r reads and writes rows r only: such operations run one after the other on a
// few rows without meeting.
class RowOp : public Op {
public:
    using Op::Op;
    void plan(Step& step, std::vector<Stage>& stages) override;
    void work(const Step& step, int stage, const Claim& claim, const Worker& worker) override;

    virtual void rows(const Step& step, int64_t begin, int64_t end) const = 0;  // tokens
    virtual int64_t work_per_row() const = 0;                                   // element operations
};

class EmbedOp final : public RowOp {
public:
    EmbedOp(const Weight& w, float* out) : RowOp(OpKind::EMBED), weight(&w), out(out) {}
    void rows(const Step& step, int64_t begin, int64_t end) const override;
    int64_t work_per_row() const override { return weight->cols * 4; }

    const Weight* weight;
    float* out;
};

class NormOp final : public RowOp {
public:
    NormOp(const float* x, const float* weight, float eps, int64_t cols, int64_t per_token, float* out)
        : RowOp(OpKind::NORM), x(x), weight(weight), eps(eps), cols(cols), per_token(per_token), out(out) {}
    void rows(const Step& step, int64_t begin, int64_t end) const override { to(step, begin, end, out); }
    int64_t work_per_row() const override { return cols * per_token; }
    void to(const Step& step, int64_t begin, int64_t end, float* target) const;

    const float *x, *weight;
    float eps;
    int64_t cols, per_token;  // rows of the norm per token
    float* out;
};

class RotaryOp final : public RowOp {
public:
    RotaryOp() : RowOp(OpKind::ROTARY) {}
    void rows(const Step& step, int64_t begin, int64_t end) const override;
    int64_t work_per_row() const override { return static_cast<int64_t>(heads) * half * 4; }

    float* x = nullptr;
    int64_t token_stride = 0;
    int heads = 0, head_stride = 0, half = 0, group = 0;
    const float *cos = nullptr, *sin = nullptr;
    int64_t table_rows = 0;
    bool interleaved = false;
};

class AppendOp final : public RowOp {
public:
    AppendOp(const float* x, int64_t token_stride, const StreamView& stream, int group)
        : RowOp(OpKind::APPEND), x(x), token_stride(token_stride), stream(stream), group(group) {}
    void rows(const Step& step, int64_t begin, int64_t end) const override;
    int64_t work_per_row() const override { return static_cast<int64_t>(stream.num_heads) * stream.dim; }

    const float* x;
    int64_t token_stride;
    StreamView stream;
    int group;
};

class GateOp final : public RowOp {
public:
    GateOp(const float* gate_up, Activation act, int64_t cols, float* out)
        : RowOp(OpKind::GATE), gate_up(gate_up), act(act), cols(cols), out(out) {}
    void rows(const Step& step, int64_t begin, int64_t end) const override { to(step, begin, end, out); }
    int64_t work_per_row() const override { return cols * 8; }
    void to(const Step& step, int64_t begin, int64_t end, float* target) const;

    const float* gate_up;
    Activation act;
    int64_t cols;
    float* out;
};

class AddOp final : public RowOp {
public:
    AddOp(float* x, const float* y, int64_t cols) : RowOp(OpKind::ADD), x(x), y(y), cols(cols) {}
    void rows(const Step& step, int64_t begin, int64_t end) const override;
    int64_t work_per_row() const override { return cols; }

    float* x;
    const float* y;
    int64_t cols;
};

// Several row operations in order.
class RowsOp final : public RowOp {
public:
    RowsOp() : RowOp(OpKind::ROWS) {}
    void rows(const Step& step, int64_t begin, int64_t end) const override;
    int64_t work_per_row() const override;

    std::vector<std::unique_ptr<RowOp>> parts;
};

// Activations in the forms that products read; null where the weight needs none.
struct ProductInput {
    const float* x;
    const int8_t* codes;
    const BlockMeta* meta;
    const uint32_t* words;

    ProductInput from_row(int64_t r, int64_t cols) const;
};

// Units [begin, end) of the weight's product with the input's first `rows` rows; `scratch` is null or holds
// matmul_scratch_bytes(cols).
void multiply_units(const Step& step, const Weight& w, const ProductInput& in, int64_t rows, int64_t begin, int64_t end,
                    MatmulOut out, uint8_t* scratch);

class MatmulOp final : public Op {
public:
    MatmulOp(const Weight& w, const float* x, float* out) : Op(OpKind::MATMUL), weight(&w), x(x), out(out) {}
    void plan(Step& step, std::vector<Stage>& stages) override;
    size_t scratch_bytes(const Step& step) const override;
    void work(const Step& step, int stage, const Claim& claim, const Worker& worker) override;

    // Makes x first; its result still lands in x, for others to read.
    bool take_input_of(std::unique_ptr<RowOp>& op);
    // Adds the product to the residual stream too.
    bool take_add(const AddOp& add);

    const Weight* weight;
    const float* x;
    float* out;
    float* add_to = nullptr;

private:
    struct Input;
    Input input_of(const Step& step, const Worker& worker) const;
    void make_rows(const Step& step, int64_t begin, int64_t end, float* target, const Input& in) const;

    std::unique_ptr<NormOp> norm_;
    std::unique_ptr<GateOp> gate_;
};

class AttendOp final : public Op {
public:
    AttendOp() : Op(OpKind::ATTEND) {}
    void plan(Step& step, std::vector<Stage>& stages) override;
    size_t scratch_bytes(const Step& step) const override;
    void work(const Step& step, int stage, const Claim& claim, const Worker& worker) override;

    const float* q = nullptr;
    int64_t q_token_stride = 0;
    int num_heads = 0;
    AttendShape shape{};
    int group = 0;
    float* out = nullptr;
    int64_t out_token_stride = 0;

    int64_t pairs() const { return pairs_.load() / num_heads; }  // (row, visible key), per head
    bool failed() const { return failed_.load(); }               // a needed key had no valid block

private:
    std::shared_ptr<AttendPlan> plan_;
    std::atomic<int64_t> pairs_{0};
    std::atomic<bool> failed_{false};
};

}  // namespace kvern
