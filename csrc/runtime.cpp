#include "runtime.h"

#include <algorithm>

#include "cpu.h"

namespace kvern {

Runtime::Runtime(int num_threads, const std::string& path)
    : kernels_(select_path(path)), pool_(num_threads) {}

std::unique_ptr<Weight> Runtime::prepare(const std::vector<RawTensor>& tensors, int64_t cols, WeightForm form) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto w = std::make_unique<Weight>(tensors, cols, form, weight_room_);
    Counter next;
    pool_.run(w->bytes >= 65536, 0, [&](const Worker&) {
        int64_t begin, end;
        while (next.take(w->units, 4, begin, end)) w->pack(tensors, begin, end);
    });
    return w;
}

// Runs serial stages from `i` on, on the calling thread; returns the first stage that is shared.
static size_t run_serial(const Step& step, const std::vector<Stage>& stages, size_t i, const Worker& worker) {
    for (; i < stages.size() && stages[i].is_serial; ++i) {
        stages[i].op->work(step, stages[i].index, {0, stages[i].units, true}, worker);
    }
    return i;
}

void Runtime::serve_stages(const Step& step, const Worker& worker) {
    uint32_t now = current_.value();
    while (now < stages_.size()) {
        const Stage& stage = stages_[now];
        Progress& progress = progress_[now];
        Claim claim{0, 0, true};
        while (stage.is_guided ? progress.shares.take(worker.id, claim.begin, claim.end)
                               : progress.next.take(stage.units, stage.least, claim.begin, claim.end)) {
            stage.op->work(step, stage.index, claim, worker);
            claim.is_first = false;
            const int64_t mine = claim.end - claim.begin;
            if (progress.done.fetch_add(mine) + mine == stage.units) {
                // The last unit is done: here, so what is not worth sharing goes on here.
                current_.set(static_cast<uint32_t>(run_serial(step, stages_, now + 1, worker)));
            }
        }
        current_.wait_past(now, pool_.spins());
        now = current_.value();
    }
}

int64_t Runtime::execute(Step& step, const std::vector<Op*>& ops) {
    step.kernels = kernels_;
    step.shared = &shared_;
    step.threads = num_threads();
    if (step.tokens == 0) return 0;
    stages_.clear();
    size_t scratch = 0;
    for (Op* op : ops) {
        op->plan(step, stages_);
        scratch = std::max(scratch, op->scratch_bytes(step));
    }
    while (progress_.size() < stages_.size()) progress_.emplace_back();
    bool is_shared = false;
    for (size_t i = 0; i < stages_.size(); ++i) {
        if (stages_[i].is_guided && !stages_[i].is_serial) {
            progress_[i].shares.reset(stages_[i].units, stages_[i].least, num_threads());
        } else {
            progress_[i].next.reset();
        }
        progress_[i].done.store(0, std::memory_order_relaxed);
        is_shared = is_shared || !stages_[i].is_serial;
    }
    current_.set(0);
    if (!is_shared) {
        pool_.run(false, scratch, [&](const Worker& worker) { run_serial(step, stages_, 0, worker); });
    } else {
        // Before the region opens nobody else looks at the stages.
        if (stages_.front().is_serial) {
            pool_.run(false, scratch, [&](const Worker& worker) {
                current_.set(static_cast<uint32_t>(run_serial(step, stages_, 0, worker)));
            });
        }
        pool_.run(true, scratch, [&](const Worker& worker) { serve_stages(step, worker); });
    }
    int64_t pairs = 0;
    for (const Op* op : ops) {
        if (op->kind != OpKind::ATTEND) continue;
        const auto* attend = static_cast<const AttendOp*>(op);
        if (attend->failed()) return -1;
        pairs += attend->pairs();
    }
    return pairs;
}

int64_t Runtime::run(std::unique_ptr<Op> op, int64_t tokens, const int32_t* token_ids, const StepBatch* batch) {
    std::lock_guard<std::mutex> hold(mutex_);
    Step step;
    step.tokens = tokens;
    step.token_ids = token_ids;
    if (batch) step.batches.push_back(*batch);
    const int64_t result = execute(step, {op.get()});
    if (recording_) record(std::move(op), tokens, token_ids, batch);
    return result;
}

int Runtime::find_batch(Op& op, const StepBatch& batch) const {
    for (size_t g = 0; g < recording_->batches.size(); ++g) {
        const StepBatch& known = recording_->batches[g];
        const bool same = op.kind == OpKind::ROTARY   ? batch.positions == known.positions
                          : op.kind == OpKind::APPEND ? batch.slots == known.slots
                          : op.kind == OpKind::CALL   ? batch.positions == known.positions
                          : op.kind == OpKind::STATE  ? batch.cu_seqlens == known.cu_seqlens &&
                                                            batch.block_tables == known.block_tables
                                                      : batch.cu_seqlens == known.cu_seqlens &&
                                                            batch.seq_lens == known.seq_lens &&
                                                            batch.block_tables == known.block_tables;
        if (same) return static_cast<int>(g);
    }
    return -1;
}

void Runtime::record(std::unique_ptr<Op> op, int64_t tokens, const int32_t* token_ids, const StepBatch* batch) {
    Recording& r = *recording_;
    bool fits = true;
    if (op->kind == OpKind::NORM) {
        auto& norm = static_cast<NormOp&>(*op);
        fits = tokens % r.tokens == 0;
        norm.per_token = fits ? tokens / r.tokens : 1;
    } else {
        fits = tokens == r.tokens;
    }
    if (op->kind == OpKind::EMBED) fits = fits && token_ids == r.token_ids;
    if (fits && batch) {
        const int group = find_batch(*op, *batch);
        fits = group >= 0;
        if (op->kind == OpKind::ROTARY) static_cast<RotaryOp&>(*op).group = group;
        if (op->kind == OpKind::APPEND) static_cast<AppendOp&>(*op).group = group;
        if (op->kind == OpKind::ATTEND) static_cast<AttendOp&>(*op).group = group;
        if (int* index = op->batch_index()) *index = group;
    }
    r.is_repeatable = r.is_repeatable && fits;
    r.ops.push_back(std::move(op));
}

void Runtime::start_recording(int64_t tokens, const int32_t* token_ids, std::vector<StepBatch> batches) {
    std::lock_guard<std::mutex> hold(mutex_);
    recording_ = std::make_unique<Recording>();
    recording_->tokens = tokens;
    recording_->token_ids = token_ids;
    recording_->batches = std::move(batches);
}

std::unique_ptr<Program> Runtime::finish_recording(int64_t max_tokens) {
    std::lock_guard<std::mutex> hold(mutex_);
    std::unique_ptr<Recording> r = std::move(recording_);
    // A single row does not show how far apart the rows of a view lie.
    if (!r || !r->is_repeatable || r->ops.empty() || r->tokens < 2) return nullptr;
    return std::make_unique<Program>(std::move(r->ops), max_tokens, static_cast<int>(r->batches.size()));
}

int64_t Runtime::run(const Program& program, int64_t tokens, const int32_t* token_ids,
                     std::vector<StepBatch> batches) {
    std::lock_guard<std::mutex> hold(mutex_);
    Step step;
    step.tokens = tokens;
    step.token_ids = token_ids;
    step.batches = std::move(batches);
    std::vector<Op*> ops;
    for (const auto& op : program.ops()) ops.push_back(op.get());
    return execute(step, ops);
}

}  // namespace kvern
