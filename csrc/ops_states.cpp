#include <algorithm>

#include "ops_families.h"

namespace kvern {

namespace {

constexpr int64_t kSmallWork = 32768;  // element operations that are not worth sharing

}  // namespace

void StateOp::plan(Step& step, std::vector<Stage>& stages) {
    const int64_t units = step.batches[static_cast<size_t>(group)].num_seqs * parts_;
    const bool is_serial = step.threads == 1 || step.tokens * work_ < kSmallWork;
    const int64_t chunk = std::max<int64_t>(1, units / (16 * step.threads));
    stages.push_back({this, 0, units, chunk, false, is_serial});
}

void StateOp::work(const Step& step, int, const Claim& claim, const Worker& worker) {
    const StepBatch& batch = step.batches[static_cast<size_t>(group)];
    for (int64_t unit = claim.begin; unit < claim.end; ++unit) {
        const int64_t seq = unit / parts_;
        const int64_t first = batch.cu_seqlens[seq];
        const StateRows rows{batch.block_tables + seq * batch.table_stride, first, batch.cu_seqlens[seq + 1] - first};
        if (rows.count > 0) part_(*step.kernels->families, rows, unit % parts_, worker.scratch);
    }
}

}  // namespace kvern
