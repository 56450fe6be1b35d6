#include <algorithm>

#include "attend_plan.h"
#include "ops.h"

namespace kvern {

namespace {

constexpr int64_t kSmallWork = 1 << 17;  // multiply-adds that are not worth sharing
constexpr int64_t kFewPartials = 64;     // unit partials that one thread merges for all

float* partials_of(const Step& step) { return reinterpret_cast<float*>(step.shared->partial.get()); }

AttendItem item_of(const AttendOp& op, const Step& step, const AttendPlan& plan, const AttendPlan::Task& task) {
    const StepBatch& b = step.batches[static_cast<size_t>(op.group)];
    const Piece& p = plan.pieces[task.piece];
    AttendItem item{};
    item.block_table = b.block_tables + p.seq * b.table_stride;
    if (b.seats) item.seat = b.seats[p.seq];
    item.chunk_row = p.sequence_token;
    item.chunk_position = b.seq_lens[p.seq] - (b.cu_seqlens[p.seq + 1] - b.cu_seqlens[p.seq]);
    item.sees_all = p.sees_all;
    item.first_position = p.first_position;
    item.first_token = p.first_token;
    item.num_tokens = p.num_tokens;
    item.first_head = p.first_head;
    item.num_heads = p.num_heads;
    item.first_kv_head = p.first_kv_head;
    item.num_kv_heads = p.num_kv_heads;
    item.unit_begin = task.unit_begin;
    item.unit_end = task.unit_end;
    item.unit_limit = p.unit_end;
    item.q = op.q;
    item.q_token_stride = op.q_token_stride;
    item.out = op.out;
    item.out_token_stride = op.out_token_stride;
    if (p.first_place >= 0) {
        item.partials = partials_of(step);
        item.places = plan.places.data() + p.first_place;
    }
    return item;
}

void merge_row(const AttendOp& op, const Step& step, const AttendPlan& plan, const AttendPlan::Merge& m) {
    const AttendPlace& at = plan.places[m.place];
    const int64_t first = at.partial + m.head * at.units * (op.shape.value_dim_padded + 2);
    float* out = op.out + at.token * op.out_token_stride + static_cast<int64_t>(m.head) * op.shape.values.dim;
    step.kernels->attend_merge(op.shape, partials_of(step) + first, at.units, m.head, out);
}

}  // namespace

void AttendOp::plan(Step& step, std::vector<Stage>& stages) {
    pairs_ = 0;
    failed_ = false;
    const AttendParams& p = shape.params;
    const PlanKey key{group,    num_heads, shape.keys.num_heads, shape.keys.block_size, shape.value_dim_padded,
                      shape.is_narrow(), p.window, p.chunk,   p.num_sinks};
    plan_ = nullptr;
    for (const auto& known : step.attend_plans) {
        if (known->key == key) plan_ = known;
    }
    if (!plan_) {
        plan_ = std::make_shared<AttendPlan>(step.batches[static_cast<size_t>(group)], key, step.threads);
        step.attend_plans.push_back(plan_);
    }
    SharedBuffers::grow(step.shared->partial, step.shared->partial_bytes,
                        static_cast<size_t>(plan_->partial_floats) * 4);
    const bool is_serial = step.threads == 1 || plan_->work * shape.keys.dim < kSmallWork;
    stages.push_back({this, 0, static_cast<int64_t>(plan_->tasks.size()), 1, true, is_serial});
    const auto merges = static_cast<int64_t>(plan_->merges.size());
    if (merges > 0) {
        stages.push_back({this, 1, merges, 1, false, is_serial || plan_->num_partials <= kFewPartials});
    }
}

size_t AttendOp::scratch_bytes(const Step& step) const { return step.kernels->attend_scratch_bytes(shape); }

void AttendOp::work(const Step& step, int stage, const Claim& claim, const Worker& worker) {
    const AttendPlan& plan = *plan_;
    if (stage == 1) {
        for (int64_t i = claim.begin; i < claim.end; ++i) merge_row(*this, step, plan, plan.merges[static_cast<size_t>(i)]);
        return;
    }
    int64_t pairs = 0;
    for (int64_t i = claim.begin; i < claim.end;) {
        AttendPlan::Task task = plan.tasks[static_cast<size_t>(i)];
        // Units of one piece that follow each other go on without a stop.
        for (++i; i < claim.end && task.joins(plan.tasks[static_cast<size_t>(i)]); ++i) {
            task.unit_end = plan.tasks[static_cast<size_t>(i)].unit_end;
        }
        const AttendItem item = item_of(*this, step, plan, task);
        const int64_t n = step.kernels->attend_item(shape, item, worker.scratch);
        if (n < 0) failed_ = true;
        pairs += n;
    }
    pairs_ += pairs;
}

}  // namespace kvern
