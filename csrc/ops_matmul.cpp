#include <algorithm>
#include <cstring>

#include "ops.h"

namespace kvern {

namespace {

constexpr int64_t kSmallWork = 32768;    // multiply-adds that are not worth sharing
constexpr int64_t kAlone = 4;            // up to this many tokens every thread makes its own int8 copy
constexpr int64_t kCacheBytes = 384 << 10;  // activations that stay in the second-level cache

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Activations as int8 codes, or as pairs of bf16.
int64_t bytes_of_codes(const Weight& w, int64_t tokens) {
    if (w.is_paired) return tokens * pair_words(w.cols) * 4;
    return w.has_quantised ? round_up(tokens * w.cols, 64) : 0;
}

int64_t bytes_of_meta(const Weight& w, int64_t tokens) {
    return w.has_quantised ? tokens * (w.cols / kBlock) * static_cast<int64_t>(sizeof(BlockMeta)) : 0;
}

int64_t bytes_of_floats(const Weight& w, int64_t tokens) { return round_up(tokens * w.cols * 4, 64); }

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

// Where the activations lie that the tiles read.
struct MatmulOp::Input {
    float* own;       // this thread's copy of x when every thread makes its own
    const float* x;
    int8_t* codes;
    BlockMeta* meta;

    uint32_t* words() const { return reinterpret_cast<uint32_t*>(codes); }
};

// For a few tokens, making the input on every thread is cheaper than making it once and meeting.
static bool is_made_alone(const Step& step) { return step.tokens <= kAlone; }

void MatmulOp::plan(Step& step, std::vector<Stage>& stages) {
    const bool is_serial = step.threads == 1 || step.tokens * weight->rows * weight->cols < kSmallWork;
    if (!is_made_alone(step)) {
        const int64_t need = bytes_of_codes(*weight, step.tokens) + bytes_of_meta(*weight, step.tokens);
        SharedBuffers::grow(step.shared->quant, step.shared->quant_bytes, static_cast<size_t>(need));
        if (weight->has_quantised || weight->is_paired || norm_ || gate_) stages.push_back({this, 0, step.tokens, 4, false, is_serial});
    }
    const int64_t least = step.tokens == 1 ? 1 : 2;  // groups go in pairs when tokens share them
    stages.push_back({this, 1, weight->units, least, true, is_serial});
}

size_t MatmulOp::scratch_bytes(const Step& step) const {
    if (!is_made_alone(step)) return matmul_scratch_bytes(weight->cols);
    return static_cast<size_t>(bytes_of_floats(*weight, step.tokens) + bytes_of_codes(*weight, step.tokens) +
                               bytes_of_meta(*weight, step.tokens));
}

MatmulOp::Input MatmulOp::input_of(const Step& step, const Worker& worker) const {
    const bool alone = is_made_alone(step);
    uint8_t* at = alone ? worker.scratch : step.shared->quant.get();
    Input in{reinterpret_cast<float*>(at), x, nullptr, nullptr};
    if (alone) at += bytes_of_floats(*weight, step.tokens);
    in.codes = reinterpret_cast<int8_t*>(at);
    in.meta = reinterpret_cast<BlockMeta*>(at + bytes_of_codes(*weight, step.tokens));
    if (alone && (norm_ || gate_)) in.x = in.own;
    return in;
}

void MatmulOp::make_rows(const Step& step, int64_t begin, int64_t end, float* target, const Input& in) const {
    if (norm_) norm_->to(step, begin, end, target);
    if (gate_) gate_->to(step, begin, end, target);
    if (weight->has_quantised) step.kernels->quantise_rows(in.x, weight->cols, begin, end, in.codes, in.meta);
    if (weight->is_paired) step.kernels->round_rows(in.x, weight->cols, begin, end, in.words());
}

void MatmulOp::work(const Step& step, int stage, const Claim& claim, const Worker& worker) {
    const Input in = input_of(step, worker);
    if (stage == 0) return make_rows(step, claim.begin, claim.end, const_cast<float*>(x), in);
    if (claim.is_first && is_made_alone(step)) {
        make_rows(step, 0, step.tokens, in.own, in);
    }
    // Whoever has the first units leaves the made input for others to read.
    if (claim.begin == 0 && in.x == in.own) {
        std::memcpy(const_cast<float*>(x), in.own, static_cast<size_t>(step.tokens * weight->cols) * 4);
    }
    const ProductInput made{in.x, in.codes, in.meta, weight->is_paired ? in.words() : nullptr};
    uint8_t* scratch = is_made_alone(step) ? nullptr : worker.scratch;
    multiply_units(step, *weight, made, step.tokens, claim.begin, claim.end, {out, add_to, weight->rows}, scratch);
}

ProductInput ProductInput::from_row(int64_t r, int64_t cols) const {
    ProductInput in = *this;
    if (in.x) in.x += r * cols;
    if (in.codes) in.codes += r * cols;
    if (in.meta) in.meta += r * (cols / kBlock);
    if (in.words) in.words += r * pair_words(cols);
    return in;
}

void multiply_units(const Step& step, const Weight& w, const ProductInput& in, int64_t rows, int64_t begin, int64_t end,
                    MatmulOut out, uint8_t* scratch) {
    const int64_t whole = w.is_paired ? 32 : 48;  // rows that tiles take together
    const int64_t rows_at_once = std::max<int64_t>(w.is_paired ? 64 : 48, kCacheBytes / w.input_row_bytes() / whole * whole);
    for (int64_t u = begin; u < end;) {
        const Segment& s = w.segment_of_unit(u);
        const int64_t first = (u - s.first_unit) * s.unit_groups;
        const int64_t units = std::min(end, s.first_unit + s.units) - u;
        const int64_t count = std::min(units * s.unit_groups, s.groups - first);
        const int64_t row = first * kGroupRows, left = s.rows - row;
        const uint8_t* data = s.data.get() + first * s.group_bytes;
        const MatmulOut segment{out.to + s.first_row + row, out.add_to ? out.add_to + s.first_row + row : nullptr, out.stride};
        for (int64_t r = 0; r < rows; r += rows_at_once) {
            const int64_t n = std::min(rows_at_once, rows - r);
            const ProductInput x = in.from_row(r, w.cols);
            const MatmulOut to = segment.from_token(r);
            if (w.is_paired) {
                step.kernels->matmul_pairs(data, count, left, x.words, pair_words(w.cols), n, to);
            } else if (is_quantised(s.type)) {
                step.kernels->matmul_quant(s.type, data, s.group_bytes, count, left, {x.codes, x.meta, w.cols}, n, to, scratch);
            } else {
                step.kernels->matmul_float(s.type, data, s.group_bytes, count, left, x.x, w.cols, n, to, scratch);
            }
        }
        u += units;
    }
}

}  // namespace kvern
