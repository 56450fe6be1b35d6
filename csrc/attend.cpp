// Splits one attention call into items. How it is split never changes a result: an item that stores
// unit partials and one that merges them itself do the same arithmetic in the same order.
#include <algorithm>
#include <atomic>
#include <vector>

#include "runtime.h"

namespace kvern {

namespace {

constexpr int kPreferredRows = 96;             // query rows that share a packed tile
constexpr size_t kPartialLimit = size_t{8} << 20;  // bytes of unit partials one call may hold

// Rows of one sequence that an item covers, before splitting over units.
struct Piece {
    int64_t seq;
    int64_t first_row;  // of the batch
    int64_t first_position;
    int num_positions;
    int first_head, num_heads;
    int first_kv_head, num_kv_heads;
    int64_t unit_begin, unit_end;
    int64_t partial_offset;  // in floats; -1 when not split
};

int64_t first_unit(const AttendParams& p, int64_t position) {
    if (p.num_sinks > 0) return 0;
    int64_t start = 0;
    if (p.window > 0) start = std::max(start, position - p.window + 1);
    if (p.chunk > 0) start = std::max(start, position / p.chunk * p.chunk);
    return start / kUnit;
}

// With `heads_together` the KV heads of a few query rows go as one piece: their keys lie side by side in
// a page, so memory is read in longer runs.
std::vector<Piece> make_pieces(const AttendCall& c, bool heads_together) {
    std::vector<Piece> pieces;
    const int group = c.num_heads / c.keys.num_heads;
    const int heads_at_once = std::min(group, kMaxItemRows);
    const int positions_at_once = std::max(1, kPreferredRows / heads_at_once);
    for (int64_t s = 0; s < c.num_seqs; ++s) {
        const int64_t rows = c.cu_seqlens[s + 1] - c.cu_seqlens[s];
        const int kv_at_once = heads_together && rows * c.num_heads <= kMaxItemRows ? c.keys.num_heads : 1;
        for (int64_t i = 0; i < rows; i += positions_at_once) {
            const int n = static_cast<int>(std::min<int64_t>(positions_at_once, rows - i));
            const int64_t position = c.seq_lens[s] - rows + i;
            for (int h = 0; h < c.keys.num_heads; h += kv_at_once) {
                for (int g = 0; g < group; g += heads_at_once) {
                    pieces.push_back({s, c.cu_seqlens[s] + i, position, n, h * group + g,
                                      std::min(heads_at_once, group - g), h, kv_at_once,
                                      first_unit(c.params, position), (position + n - 1) / kUnit + 1, -1});
                }
            }
        }
    }
    return pieces;
}

// Enough units in all that KV heads need not be told apart to keep the threads busy.
bool many_units(const AttendCall& c, int threads) {
    int64_t units = 0;
    for (int64_t s = 0; s < c.num_seqs; ++s) units += c.seq_lens[s] / kUnit + 1 - first_unit(c.params, c.seq_lens[s] - 1);
    return units >= 3 * threads;
}

// Marks pieces to be split over units when there are too few of them to keep all threads busy.
size_t plan_splits(std::vector<Piece>& pieces, int threads, int padded) {
    size_t floats = 0;
    if (threads == 1 || static_cast<int64_t>(pieces.size()) >= 8 * threads) return 0;
    for (Piece& p : pieces) {
        const int64_t units = p.unit_end - p.unit_begin;
        const size_t need = static_cast<size_t>(units * p.num_positions * p.num_heads * p.num_kv_heads * (padded + 2));
        if (units < 2 || (floats + need) * 4 > kPartialLimit) continue;
        p.partial_offset = static_cast<int64_t>(floats);
        floats += need;
    }
    return floats;
}

AttendItem item_of(const AttendCall& c, const Piece& p, float* partials, int64_t unit_begin, int64_t unit_end) {
    AttendItem item{};
    item.block_table = c.block_tables + p.seq * c.table_stride;
    item.seq_len = c.seq_lens[p.seq];
    item.first_position = p.first_position;
    item.num_positions = p.num_positions;
    item.first_head = p.first_head;
    item.num_heads = p.num_heads;
    item.first_kv_head = p.first_kv_head;
    item.num_kv_heads = p.num_kv_heads;
    item.unit_begin = unit_begin;
    item.unit_end = unit_end;
    item.q = c.q + p.first_row * c.q_token_stride + static_cast<int64_t>(p.first_head) * c.keys.dim;
    item.q_token_stride = c.q_token_stride;
    item.out = c.out + p.first_row * c.out_token_stride + static_cast<int64_t>(p.first_head) * c.values.dim;
    item.out_token_stride = c.out_token_stride;
    if (p.partial_offset >= 0) {
        item.partial = partials + p.partial_offset;
        item.partial_units = p.unit_end - p.unit_begin;
        item.partial_first_unit = p.unit_begin;
    }
    return item;
}

}  // namespace

int64_t Runtime::attend(const AttendCall& c) {
    std::lock_guard<std::mutex> hold(mutex_);
    AttendShape shape{c.keys, c.values, c.params, (c.values.dim + 15) / 16 * 16};
    std::vector<Piece> pieces = make_pieces(c, many_units(c, num_threads()));
    const size_t floats = plan_splits(pieces, num_threads(), shape.value_dim_padded);
    grow(partial_, partial_bytes_, floats * 4);
    float* partials = reinterpret_cast<float*>(partial_.get());

    struct Task {
        size_t piece;
        int64_t unit_begin, unit_end;
    };
    std::vector<Task> tasks;
    std::vector<size_t> split;
    int64_t keys = 0;
    for (size_t i = pieces.size(); i-- > 0;) {  // long prompts' last pieces, the costliest, go first
        const Piece& p = pieces[i];
        keys += (p.unit_end - p.unit_begin) * kUnit * p.num_heads * p.num_kv_heads * p.num_positions;
        if (p.partial_offset < 0) {
            tasks.push_back({i, p.unit_begin, p.unit_end});
            continue;
        }
        split.push_back(i);
        for (int64_t u = p.unit_begin; u < p.unit_end; ++u) tasks.push_back({i, u, u + 1});
    }

    Counter next_task, next_merge;
    std::atomic<int64_t> pairs{0};
    std::atomic<bool> failed{false};
    const bool small = keys * c.keys.dim < (1 << 17);
    pool_.run(small ? 1 : num_threads(), kernels_->attend_scratch_bytes(shape), [&](const Worker& worker) {
        int64_t begin, end, mine = 0;
        while (next_task.take_guided(static_cast<int64_t>(tasks.size()), worker.count, 1, begin, end)) {
            for (int64_t i = begin; i < end; ++i) {
                const Task& task = tasks[static_cast<size_t>(i)];
                const AttendItem item = item_of(c, pieces[task.piece], partials, task.unit_begin, task.unit_end);
                const int64_t n = kernels_->attend_item(shape, item, worker.scratch);
                if (n < 0) failed = true;
                mine += n;
            }
        }
        pairs += mine;
        if (split.empty()) return;
        worker.barrier();
        while (next_merge.take(static_cast<int64_t>(split.size()), 1, begin, end)) {
            const Piece& p = pieces[split[static_cast<size_t>(begin)]];
            const AttendItem item = item_of(c, p, partials, p.unit_begin, p.unit_end);
            const int per_head = p.num_positions * p.num_heads;
            for (int r = 0; r < per_head * p.num_kv_heads; ++r) {
                const float* unit = item.partial + r * item.partial_units * (shape.value_dim_padded + 2);
                const int head = r / per_head * p.num_heads + r % p.num_heads;
                const int position = r % per_head / p.num_heads;
                kernels_->attend_merge(shape, unit, item.partial_units, p.first_head + head,
                                       item.out + position * item.out_token_stride +
                                           static_cast<int64_t>(head) * c.values.dim);
            }
        }
    });
    return failed ? -1 : pairs / c.num_heads;
}

}  // namespace kvern
