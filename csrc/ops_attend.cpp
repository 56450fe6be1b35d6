// Splits one attention call into items. How it is split never changes a result: an item that stores
// unit partials and one that merges them itself do the same arithmetic in the same order.
#include <algorithm>

#include "ops.h"

namespace kvern {

namespace {

constexpr int kPreferredRows = 96;  // query rows that share a packed tile
constexpr size_t kPartialLimit = size_t{8} << 20;  // bytes of unit partials one call may hold
constexpr int64_t kSmallWork = 1 << 17;            // multiply-adds that are not worth sharing
constexpr int64_t kFewPartials = 64;               // unit partials that one thread merges for all

// Rows of one sequence that an item covers, before splitting over units.
struct Piece {
    int64_t seq;
    int64_t first_row;  // of the batch
    int64_t first_position;
    int num_positions;
    int first_head, num_heads;  // per KV head
    int first_kv_head, num_kv_heads;
    int64_t unit_begin, unit_end;
    int64_t partial_offset;  // in floats; -1 when not split

    int rows() const { return num_positions * num_heads * num_kv_heads; }
};

struct Task {
    size_t piece;
    int64_t unit_begin, unit_end;
};

struct MergeTask {
    size_t piece;
    int row;
};

// What a plan depends on beside the step's batch.
struct PlanKey {
    int group, num_heads, num_kv_heads, padded;
    int64_t window, chunk, num_sinks;

    bool operator==(const PlanKey& o) const {
        return group == o.group && num_heads == o.num_heads && num_kv_heads == o.num_kv_heads &&
               padded == o.padded && window == o.window && chunk == o.chunk && num_sinks == o.num_sinks;
    }
};

int64_t first_unit(const PlanKey& k, int64_t position) {
    if (k.num_sinks > 0) return 0;
    int64_t start = 0;
    if (k.window > 0) start = std::max(start, position - k.window + 1);
    if (k.chunk > 0) start = std::max(start, position / k.chunk * k.chunk);
    return start / kUnit;
}

// With `heads_together` the KV heads of a few query rows go as one piece: their keys lie side by side in
// a page, so memory is read in longer runs.
std::vector<Piece> make_pieces(const StepBatch& b, const PlanKey& k, bool heads_together) {
    std::vector<Piece> pieces;
    const int group = k.num_heads / k.num_kv_heads;
    const int heads_at_once = std::min(group, kMaxItemRows);
    const int positions_at_once = std::max(1, kPreferredRows / heads_at_once);
    for (int64_t s = 0; s < b.num_seqs; ++s) {
        const int64_t rows = b.cu_seqlens[s + 1] - b.cu_seqlens[s];
        const int kv_at_once = heads_together && rows * k.num_heads <= kMaxItemRows ? k.num_kv_heads : 1;
        for (int64_t i = 0; i < rows; i += positions_at_once) {
            const int n = static_cast<int>(std::min<int64_t>(positions_at_once, rows - i));
            const int64_t position = b.seq_lens[s] - rows + i;
            for (int h = 0; h < k.num_kv_heads; h += kv_at_once) {
                for (int g = 0; g < group; g += heads_at_once) {
                    pieces.push_back({s, b.cu_seqlens[s] + i, position, n, h * group + g,
                                      std::min(heads_at_once, group - g), h, kv_at_once,
                                      first_unit(k, position), (position + n - 1) / kUnit + 1, -1});
                }
            }
        }
    }
    return pieces;
}

// Enough units in all that KV heads need not be told apart to keep the threads busy.
bool has_many_units(const StepBatch& b, const PlanKey& k, int threads) {
    int64_t units = 0;
    for (int64_t s = 0; s < b.num_seqs; ++s) {
        units += b.seq_lens[s] / kUnit + 1 - first_unit(k, b.seq_lens[s] - 1);
    }
    return units >= 3 * threads;
}

// Marks pieces to be split over units when there are too few of them to keep all threads busy.
size_t plan_splits(std::vector<Piece>& pieces, int threads, int padded) {
    size_t floats = 0;
    if (threads == 1 || static_cast<int64_t>(pieces.size()) >= 8 * threads) return 0;
    for (Piece& p : pieces) {
        const int64_t units = p.unit_end - p.unit_begin;
        const size_t need = static_cast<size_t>(units * p.rows() * (padded + 2));
        if (units < 2 || (floats + need) * 4 > kPartialLimit) continue;
        p.partial_offset = static_cast<int64_t>(floats);
        floats += need;
    }
    return floats;
}

}  // namespace

struct AttendPlan {
    PlanKey key;
    std::vector<Piece> pieces;
    std::vector<Task> tasks;
    std::vector<MergeTask> merges;  // rows whose units are merged afterwards
    size_t partial_bytes = 0;
    int64_t num_partials = 0;
    int64_t keys = 0;    // (row, key) pairs at most

    AttendPlan(const StepBatch& b, const PlanKey& k, int threads) : key(k) {
        pieces = make_pieces(b, k, has_many_units(b, k, threads));
        partial_bytes = plan_splits(pieces, threads, k.padded) * 4;
        for (size_t i = pieces.size(); i-- > 0;) {  // long prompts' last pieces, the costliest, go first
            const Piece& p = pieces[i];
            const int64_t units = p.unit_end - p.unit_begin;
            keys += units * kUnit * p.rows();
            if (p.partial_offset < 0) {
                tasks.push_back({i, p.unit_begin, p.unit_end});
                continue;
            }
            num_partials += units * p.rows();
            for (int r = 0; r < p.rows(); ++r) merges.push_back({i, r});
            for (int64_t u = p.unit_begin; u < p.unit_end; ++u) tasks.push_back({i, u, u + 1});
        }
    }
};

namespace {

AttendItem item_of(const AttendOp& op, const Step& step, const Piece& p, int64_t unit_begin, int64_t unit_end) {
    const StepBatch& b = step.batches[static_cast<size_t>(op.group)];
    AttendItem item{};
    item.block_table = b.block_tables + p.seq * b.table_stride;
    item.first_position = p.first_position;
    item.num_positions = p.num_positions;
    item.first_head = p.first_head;
    item.num_heads = p.num_heads;
    item.first_kv_head = p.first_kv_head;
    item.num_kv_heads = p.num_kv_heads;
    item.unit_begin = unit_begin;
    item.unit_end = unit_end;
    item.q = op.q + p.first_row * op.q_token_stride + static_cast<int64_t>(p.first_head) * op.shape.keys.dim;
    item.q_token_stride = op.q_token_stride;
    item.out = op.out + p.first_row * op.out_token_stride + static_cast<int64_t>(p.first_head) * op.shape.values.dim;
    item.out_token_stride = op.out_token_stride;
    if (p.partial_offset >= 0) {
        item.partial = reinterpret_cast<float*>(step.shared->partial.get()) + p.partial_offset;
        item.partial_units = p.unit_end - p.unit_begin;
        item.partial_first_unit = p.unit_begin;
    }
    return item;
}

void merge_row(const AttendOp& op, const Step& step, const Piece& p, int r) {
    const AttendItem item = item_of(op, step, p, p.unit_begin, p.unit_end);
    const int per_head = p.num_positions * p.num_heads;
    const float* unit = item.partial + r * item.partial_units * (op.shape.value_dim_padded + 2);
    const int head = r / per_head * p.num_heads + r % p.num_heads;
    const int position = r % per_head / p.num_heads;
    step.kernels->attend_merge(op.shape, unit, item.partial_units, p.first_head + head,
                               item.out + position * item.out_token_stride +
                                   static_cast<int64_t>(head) * op.shape.values.dim);
}

}  // namespace

void AttendOp::plan(Step& step, std::vector<Stage>& stages) {
    pairs_ = 0;
    failed_ = false;
    const AttendParams& p = shape.params;
    const PlanKey key{group, num_heads, shape.keys.num_heads, shape.value_dim_padded, p.window, p.chunk, p.num_sinks};
    plan_ = nullptr;
    for (const auto& known : step.attend_plans) {
        if (known->key == key) plan_ = known;
    }
    if (!plan_) {
        plan_ = std::make_shared<AttendPlan>(step.batches[static_cast<size_t>(group)], key, step.threads);
        step.attend_plans.push_back(plan_);
    }
    SharedBuffers::grow(step.shared->partial, step.shared->partial_bytes, plan_->partial_bytes);
    const bool is_serial = step.threads == 1 || plan_->keys * shape.keys.dim < kSmallWork;
    stages.push_back({this, 0, static_cast<int64_t>(plan_->tasks.size()), 1, true, is_serial});
    const auto merges = static_cast<int64_t>(plan_->merges.size());
    if (merges > 0) {
        stages.push_back({this, 1, merges, 1, false, is_serial || plan_->num_partials <= kFewPartials});
    }
}

size_t AttendOp::scratch_bytes(const Step& step) const { return step.kernels->attend_scratch_bytes(shape); }

void AttendOp::work(const Step& step, int stage, const Claim& claim, const Worker& worker) {
    const AttendPlan& plan = *plan_;
    int64_t pairs = 0;
    for (int64_t i = claim.begin; i < claim.end; ++i) {
        if (stage == 1) {
            const MergeTask& m = plan.merges[static_cast<size_t>(i)];
            merge_row(*this, step, plan.pieces[m.piece], m.row);
            continue;
        }
        const Task& task = plan.tasks[static_cast<size_t>(i)];
        const AttendItem item = item_of(*this, step, plan.pieces[task.piece], task.unit_begin, task.unit_end);
        const int64_t n = step.kernels->attend_item(shape, item, worker.scratch);
        if (n < 0) failed_ = true;
        pairs += n;
    }
    pairs_ += pairs;
}

}  // namespace kvern
