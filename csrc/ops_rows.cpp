#include "ops.h"

#include <algorithm>

namespace kvern {

namespace {

constexpr int64_t kSmallWork = 32768;  // element operations that are not worth sharing

}  // namespace

void SharedBuffers::grow(Bytes& buffer, size_t& have, size_t need) {
    if (need <= have) return;
    buffer = nullptr;
    have = 0;
    buffer = allocate_bytes(need);
    have = need;
}

void RowOp::plan(Step& step, std::vector<Stage>& stages) {
    const bool is_serial = step.threads == 1 || step.tokens == 1 || step.tokens * work_per_row() < kSmallWork;
    const int64_t chunk = std::max<int64_t>(1, step.tokens / (4 * step.threads));
    stages.push_back({this, 0, step.tokens, chunk, false, is_serial});
}

void RowOp::work(const Step& step, int, const Claim& claim, const Worker&) { rows(step, claim.begin, claim.end); }

void EmbedOp::rows(const Step& step, int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; ++t) weight->decode_row(step.token_ids[t], out + t * weight->cols);
}

void NormOp::to(const Step& step, int64_t begin, int64_t end, float* target) const {
    step.kernels->rms_norm(x, weight, eps, cols, begin * per_token, end * per_token, target);
}

void RotaryOp::rows(const Step& step, int64_t begin, int64_t end) const {
    const int32_t* positions = step.batches[static_cast<size_t>(group)].positions;
    step.kernels->rotary(x, token_stride, heads, head_stride, positions, cos, sin, half, interleaved, begin, end);
}

void AppendOp::rows(const Step& step, int64_t begin, int64_t end) const {
    const StepBatch& b = step.batches[static_cast<size_t>(group)];
    if (!stream.is_narrow()) return step.kernels->append(x, token_stride, stream, b.slots, begin, end);
    const int32_t* const ends = b.cu_seqlens + 1;
    int64_t s = std::upper_bound(ends, ends + b.num_seqs, static_cast<int32_t>(begin)) - ends;
    for (; begin < end; ++s) {
        const int64_t first = b.cu_seqlens[s], last = std::min<int64_t>(ends[s], end);
        if (last <= begin) continue;
        const int64_t chunk = b.seq_lens[s] - (ends[s] - first);
        step.kernels->append_narrow(x, token_stride, stream,
                                    {begin, last, chunk + begin - first, chunk, b.seq_lens[s],
                                     b.block_tables + s * b.table_stride, b.seats[s]});
        begin = last;
    }
}

void GateOp::to(const Step& step, int64_t begin, int64_t end, float* target) const {
    step.kernels->gated_activation(gate_up, act, cols, begin, end, target);
}

void AddOp::rows(const Step& step, int64_t begin, int64_t end) const {
    step.kernels->add(x, y, begin * cols, end * cols);
}

void RowsOp::rows(const Step& step, int64_t begin, int64_t end) const {
    for (const auto& part : parts) part->rows(step, begin, end);
}

int64_t RowsOp::work_per_row() const {
    int64_t work = 0;
    for (const auto& part : parts) work += part->work_per_row();
    return work;
}

}  // namespace kvern
