#include <algorithm>

#include "ops.h"

namespace kvern {

namespace {

constexpr int64_t kSmallWork = 32768;    // multiply-adds that are not worth sharing
constexpr int64_t kAlone = 4;            // up to this many tokens every thread makes its own int8 copy
constexpr int64_t kCacheBytes = 384 << 10;  // activations that stay in the second-level cache

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// What one token set needs: [float copy of made input][int8 codes][block meta].
struct InputBytes {
    size_t floats, codes, meta;
    InputBytes(const Weight& w, int64_t tokens, bool own_floats)
        : floats(own_floats ? static_cast<size_t>(round_up(tokens * w.cols * 4, 64)) : 0),
          codes(w.has_quantised ? static_cast<size_t>(round_up(tokens * w.cols, 64)) : 0),
          meta(w.has_quantised ? static_cast<size_t>(tokens * (w.cols / kBlock)) * sizeof(BlockMeta) : 0) {}
};

}  // namespace

bool MatmulOp::take_input_of(std::unique_ptr<RowOp>& op) {
    if (norm_ || gate_) return false;
    if (op->kind == OpKind::NORM) {
        auto* norm = static_cast<NormOp*>(op.get());
        if (norm->out != x || norm->per_token != 1 || norm->x == norm->out) return false;
        op.release();
        norm_.reset(norm);
        return true;
    }
    if (op->kind == OpKind::GATE) {
        auto* gate = static_cast<GateOp*>(op.get());
        if (gate->out != x) return false;
        op.release();
        gate_.reset(gate);
        return true;
    }
    return false;
}

bool MatmulOp::take_add(const AddOp& add) {
    // A thread may add while another still makes its input: they must not meet in one buffer.
    if (add_to || add.y != out || add.cols != weight->rows || add.x == out || add.x == x || (norm_ && norm_->x == add.x)) return false;
    add_to = add.x;
    return true;
}

bool MatmulOp::is_quantised_alone(const Step& step) const { return step.tokens <= kAlone; }

void MatmulOp::plan(Step& step) {
    next_row_.reset();
    next_unit_.reset();
    if (!is_quantised_alone(step)) {
        const InputBytes need(*weight, step.tokens, false);
        SharedBuffers::grow(step.shared->quant, step.shared->quant_bytes, need.codes + need.meta);
    }
}

size_t MatmulOp::scratch_bytes(const Step& step) const {
    if (!is_quantised_alone(step)) return 0;
    const InputBytes need(*weight, step.tokens, true);
    return need.floats + need.codes + need.meta;
}

bool MatmulOp::is_serial(const Step& step) const {
    return step.threads == 1 || step.tokens * weight->rows * weight->cols < kSmallWork;
}

const float* MatmulOp::make_input(const Step& step, int64_t begin, int64_t end, float* target) const {
    if (norm_) {
        norm_->to(step, begin, end, target);
    } else if (gate_) {
        gate_->to(step, begin, end, target);
    } else {
        return x;
    }
    return target;
}

void MatmulOp::run(const Step& step, const Worker& worker) {
    const bool alone = is_quantised_alone(step);
    const InputBytes size(*weight, step.tokens, alone);
    uint8_t* buffer = alone ? worker.scratch : step.shared->quant.get();
    auto* codes = reinterpret_cast<int8_t*>(buffer + size.floats);
    auto* meta = reinterpret_cast<BlockMeta*>(buffer + size.floats + size.codes);
    float* shared_input = const_cast<float*>(x);
    if (alone) {  // doing it on every thread is cheaper than meeting
        const bool keeps = worker.count == 1 || worker.id == 0;
        const float* input =
            make_input(step, 0, step.tokens, keeps ? shared_input : reinterpret_cast<float*>(buffer));
        if (weight->has_quantised) step.kernels->quantise_rows(input, weight->cols, 0, step.tokens, codes, meta);
        return tiles(step, worker, input, codes, meta);
    }
    if (weight->has_quantised || norm_ || gate_) {
        int64_t begin, end;
        while (next_row_.take(step.tokens, 4, begin, end)) {
            make_input(step, begin, end, shared_input);
            if (weight->has_quantised) step.kernels->quantise_rows(x, weight->cols, begin, end, codes, meta);
        }
        worker.barrier();
    }
    tiles(step, worker, x, codes, meta);
}

void MatmulOp::tiles(const Step& step, const Worker& worker, const float* input, const int8_t* codes,
                     const BlockMeta* meta) {
    const Weight& w = *weight;
    const int64_t blocks = w.cols / kBlock;
    const int64_t least = step.tokens == 1 ? 1 : 2;  // groups go in pairs when tokens share them
    const int64_t row_bytes = w.cols * (w.has_float ? 4 : 1);
    const int64_t tokens_at_once = std::max<int64_t>(48, kCacheBytes / row_bytes / 12 * 12);
    int64_t begin, end;
    while (next_unit_.take_guided(w.units, worker.count, least, begin, end)) {
        for (int64_t u = begin; u < end;) {
            const Segment& s = w.segment_of_unit(u);
            const int64_t first = (u - s.first_unit) * s.unit_groups;
            const int64_t units = std::min(end, s.first_unit + s.units) - u;
            const int64_t count = std::min(units * s.unit_groups, s.groups - first);
            const int64_t row = first * kGroupRows;
            const uint8_t* data = s.data.get() + first * s.group_bytes;
            for (int64_t t = 0; t < step.tokens; t += tokens_at_once) {
                const int64_t n = std::min(tokens_at_once, step.tokens - t);
                const int64_t at = t * w.rows + s.first_row + row;
                const MatmulOut to{out + at, add_to ? add_to + at : nullptr, w.rows};
                if (is_quantised(s.type)) {
                    const QuantRows q{codes + t * w.cols, meta + t * blocks, w.cols};
                    step.kernels->matmul_quant(s.type, data, s.group_bytes, count, s.rows - row, q, n, to);
                } else {
                    step.kernels->matmul_float(s.type, data, s.group_bytes, count, s.rows - row,
                                               input + t * w.cols, w.cols, n, to);
                }
            }
            u += units;
        }
    }
}

}  // namespace kvern
