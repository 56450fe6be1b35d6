#include "program.h"

#include "ops_families.h"

#include <algorithm>
#include <limits>

namespace kvern {

namespace {

bool is_row_op(const Op& op) { return dynamic_cast<const RowOp*>(&op) != nullptr; }

}  // namespace

std::vector<std::unique_ptr<Op>> fuse(std::vector<std::unique_ptr<Op>> ops) {
    std::vector<std::unique_ptr<Op>> fused;
    std::vector<std::unique_ptr<RowOp>> waiting;  // row operations not placed yet
    auto place_waiting = [&] {
        if (waiting.size() == 1) {
            fused.push_back(std::move(waiting.front()));
        } else if (!waiting.empty()) {
            auto rows = std::make_unique<RowsOp>();
            rows->parts = std::move(waiting);
            fused.push_back(std::move(rows));
        }
        waiting.clear();
    };
    for (auto& op : ops) {
        if (is_row_op(*op)) {
            const bool follows_matmul = waiting.empty() && !fused.empty() && fused.back()->kind == OpKind::MATMUL;
            if (op->kind == OpKind::ADD && follows_matmul &&
                static_cast<MatmulOp&>(*fused.back()).take_add(static_cast<AddOp&>(*op))) {
                continue;
            }
            waiting.emplace_back(static_cast<RowOp*>(op.release()));
            continue;
        }
        if (op->kind == OpKind::MATMUL && !waiting.empty() &&
            static_cast<MatmulOp&>(*op).take_input_of(waiting.back())) {
            waiting.pop_back();
        }
        place_waiting();
        fused.push_back(std::move(op));
    }
    place_waiting();
    return fused;
}

Program::Program(std::vector<std::unique_ptr<Op>> recorded, int64_t max_tokens, int num_batches)
    : max_tokens_(max_tokens),
      num_batches_(num_batches),
      max_positions_(std::numeric_limits<int64_t>::max()),
      vocab_(std::numeric_limits<int64_t>::max()) {
    for (const auto& op : recorded) {
        if (op->kind == OpKind::ROTARY) {
            max_positions_ = std::min(max_positions_, static_cast<const RotaryOp&>(*op).table_rows);
        } else if (op->kind == OpKind::EMBED) {
            vocab_ = std::min(vocab_, static_cast<const EmbedOp&>(*op).weight->rows);
        } else if (op->kind == OpKind::CALL) {
            const auto& call = static_cast<const CallOp&>(*op);
            if (call.table_rows) max_positions_ = std::min(max_positions_, call.table_rows);
        } else if (op->kind == OpKind::STATE) {
            const auto& state = static_cast<const StateOp&>(*op);
            states_.push_back({state.group, state.place});
        } else if (op->kind == OpKind::APPEND) {
            const auto& append = static_cast<const AppendOp&>(*op);
            const StreamView& s = append.stream;
            appended_.push_back({append.group, s.block_size, s.num_blocks, s.num_seats, s.max_rows});
        }
    }
    ops_ = fuse(std::move(recorded));
}

int64_t Program::block_size(int group) const {
    for (const Slots& a : appended_) {
        if (a.group == group && a.num_seats > 0) return a.block_size;
    }
    for (const auto& op : ops_) {
        if (op->kind != OpKind::ATTEND) continue;
        const auto& attend = static_cast<const AttendOp&>(*op);
        if (attend.group == group) return attend.shape.keys.block_size;
    }
    return 0;
}

}  // namespace kvern
