#include "runtime.h"

#include <algorithm>

#include "cpu.h"

namespace kvern {

Runtime::Runtime(int num_threads, const std::string& path)
    : kernels_(select_path(path)), pool_(num_threads) {}

std::unique_ptr<Weight> Runtime::prepare(const std::vector<RawTensor>& tensors, int64_t cols, bool as_float) {
    auto w = std::make_unique<Weight>(tensors, cols, as_float);
    Counter next;
    std::lock_guard<std::mutex> hold(mutex_);
    pool_.run(w->bytes < 65536 ? 1 : num_threads(), 0, [&](const Worker&) {
        int64_t begin, end;
        while (next.take(w->units, 4, begin, end)) w->pack(tensors, begin, end);
    });
    return w;
}

int64_t Runtime::execute(Step& step, const std::vector<Op*>& ops) {
    step.kernels = kernels_;
    step.shared = &shared_;
    step.threads = num_threads();
    if (step.tokens == 0) return 0;
    size_t scratch = 0;
    bool is_shared = false;
    for (Op* op : ops) {
        op->plan(step);
        scratch = std::max(scratch, op->scratch_bytes(step));
        is_shared = is_shared || !op->is_serial(step);
    }
    pool_.run(is_shared ? step.threads : 1, scratch, [&](const Worker& worker) {
        Worker alone = worker;
        alone.count = 1;
        size_t i = 0;
        // What one thread does for all is done by whoever arrives last, while the others wait anyway.
        auto run_serial = [&](size_t from) {
            for (; from < ops.size() && ops[from]->is_serial(step); ++from) ops[from]->run(step, alone);
        };
        auto skip_serial = [&] {
            while (i < ops.size() && ops[i]->is_serial(step)) ++i;
        };
        if (ops[0]->is_serial(step)) {
            worker.barrier([&] { run_serial(0); });
            skip_serial();
        }
        while (i < ops.size()) {
            ops[i]->run(step, worker);
            ++i;
            if (i == ops.size()) break;  // the region's end is a barrier
            worker.barrier([&] { run_serial(i); });
            skip_serial();
        }
    });
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
    if (!r || !r->is_repeatable || r->ops.empty() || r->tokens < 1) return nullptr;
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
