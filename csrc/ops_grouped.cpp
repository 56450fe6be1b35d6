// Products of many weights, each with rows of its own: experts and heads. Every row's numbers are those of
// a product of one row, whatever rows are beside it.
#include <algorithm>
#include <cstring>

#include "ops_families.h"

namespace kvern {

namespace {

constexpr int64_t kSmallWork = 32768;       // multiply-adds that are not worth sharing
constexpr int64_t kBufferBytes = 96 << 20;  // experts take as many tokens at once as fit into this

int64_t round_up(int64_t n) { return (n + 63) / 64 * 64; }

}  // namespace

GroupShape::GroupShape(const std::vector<const Weight*>& weights)
    : rows(weights.front()->rows), cols(weights.front()->cols) {
    for (const Weight* w : weights) {
        units = std::max(units, w->units);
        is_quantised = is_quantised || w->has_quantised;
        is_paired = is_paired || w->is_paired;
    }
}

size_t GroupInput::bytes(const GroupShape& s, int64_t rows) {
    int64_t need = round_up(rows * s.cols * 4);
    if (s.is_paired) need += rows * pair_words(s.cols) * 4;
    if (s.is_quantised) {
        need += round_up(rows * s.cols) + round_up(rows * (s.cols / kBlock) * static_cast<int64_t>(sizeof(BlockMeta)));
    }
    return static_cast<size_t>(need);
}

GroupInput GroupInput::at(uint8_t* data, const GroupShape& s, int64_t rows) {
    GroupInput in{reinterpret_cast<float*>(data), nullptr, nullptr, nullptr};
    data += round_up(rows * s.cols * 4);
    if (s.is_paired) {
        in.words = reinterpret_cast<uint32_t*>(data);
        data += rows * pair_words(s.cols) * 4;
    }
    if (!s.is_quantised) return in;
    in.codes = reinterpret_cast<int8_t*>(data);
    in.meta = reinterpret_cast<BlockMeta*>(data + round_up(rows * s.cols));
    return in;
}

void GroupInput::quantise(const Step& step, const GroupShape& s, int64_t begin, int64_t end) const {
    if (s.is_quantised) step.kernels->quantise_rows(x, s.cols, begin, end, codes, meta);
    if (s.is_paired) step.kernels->round_rows(x, s.cols, begin, end, words);
}

void HeadsOp::plan(Step& step, std::vector<Stage>& stages) {
    const GroupShape shape(weights);
    const auto heads = static_cast<int64_t>(weights.size());
    SharedBuffers& shared = *step.shared;
    SharedBuffers::grow(shared.grouped, shared.grouped_bytes, GroupInput::bytes(shape, heads * step.tokens));
    const int64_t inputs = heads * step.tokens;
    const bool is_serial = step.threads == 1 || inputs * shape.rows * shape.cols < kSmallWork;
    const bool is_small = step.threads == 1 || inputs * shape.cols < kSmallWork;
    stages.push_back({this, 0, inputs, std::max<int64_t>(4, inputs / (8 * step.threads)), false, is_small});
    stages.push_back({this, 1, heads * shape.units, 2, true, is_serial});
}

void HeadsOp::work(const Step& step, int stage, const Claim& claim, const Worker& worker) {
    const GroupShape shape(weights);
    const int64_t tokens = step.tokens, cols = shape.cols;
    const auto inputs = static_cast<int64_t>(weights.size()) * tokens;
    const GroupInput in = GroupInput::at(step.shared->grouped.get(), shape, inputs);
    if (stage == 0) {  // row h * tokens + t of the input
        for (int64_t i = claim.begin; i < claim.end; ++i) {
            const float* from = x + i % tokens * x_token + i / tokens * x_head;
            std::memcpy(in.x + i * cols, from, static_cast<size_t>(cols) * 4);
        }
        return in.quantise(step, shape, claim.begin, claim.end);
    }
    for (int64_t u = claim.begin; u < claim.end;) {
        const int64_t head = u / shape.units, first = head * shape.units;
        const int64_t next = std::min(claim.end, first + shape.units);
        const Weight& w = *weights[static_cast<size_t>(head)];
        multiply_units(step, w, in.from_row(head * tokens, cols), tokens, u - first, std::min(next - first, w.units),
                       {out + head * out_head, nullptr, out_token}, worker.scratch);
        u = next;
    }
}

// Pairs are (token, one of its experts); row r of every buffer is the r-th pair in order of expert and token.
struct ExpertsOp::Buffers {
    GroupShape up_shape, down_shape;
    int64_t* starts = nullptr;   // [experts + 1], first row of each expert
    int32_t* active = nullptr;   // experts that have rows; the last entry is how many there are
    int64_t* pair_of = nullptr;  // [rows]
    int64_t* row_of = nullptr;   // [pairs]
    GroupInput up{}, down{};
    float *wide = nullptr, *results = nullptr;
    size_t bytes = 0;
};

static uint8_t* take(uint8_t*& at, int64_t bytes) {
    uint8_t* own = at;
    at += round_up(bytes);
    return own;
}

ExpertsOp::Buffers ExpertsOp::buffers(uint8_t* base) const {
    const auto experts = static_cast<int64_t>(set->down.size());
    const GroupShape up(set->gate_up), down(set->down);
    const int64_t rows = piece_tokens_ * chosen;
    uint8_t* at = base;
    Buffers b{up, down};
    b.starts = reinterpret_cast<int64_t*>(take(at, (experts + 1) * 8));
    b.active = reinterpret_cast<int32_t*>(take(at, (experts + 1) * 4));
    b.pair_of = reinterpret_cast<int64_t*>(take(at, rows * 8));
    b.row_of = reinterpret_cast<int64_t*>(take(at, rows * 8));
    b.up = GroupInput::at(take(at, static_cast<int64_t>(GroupInput::bytes(up, rows))), up, rows);
    b.down = GroupInput::at(take(at, static_cast<int64_t>(GroupInput::bytes(down, rows))), down, rows);
    b.wide = reinterpret_cast<float*>(take(at, rows * up.rows * 4));
    b.results = reinterpret_cast<float*>(take(at, rows * down.rows * 4));
    b.bytes = static_cast<size_t>(at - base);
    return b;
}

GroupRows ExpertsOp::tokens_of(const Step& step, int64_t piece) const {
    return {piece * piece_tokens_, std::min(step.tokens, (piece + 1) * piece_tokens_)};
}

size_t ExpertsOp::scratch_bytes(const Step&) const {
    return matmul_scratch_bytes(std::max(set->gate_up.front()->cols, set->down.front()->cols));
}

void ExpertsOp::plan(Step& step, std::vector<Stage>& stages) {
    const auto experts = static_cast<int64_t>(set->down.size());
    const GroupShape up(set->gate_up), down(set->down);
    const int64_t per_row = (up.cols + up.rows + down.cols + down.rows) * 4;
    piece_tokens_ = std::min(step.tokens, std::max<int64_t>(16, kBufferBytes / (per_row * chosen)));
    SharedBuffers& shared = *step.shared;
    SharedBuffers::grow(shared.grouped, shared.grouped_bytes, buffers(reinterpret_cast<uint8_t*>(64)).bytes);
    const bool is_alone = step.threads == 1;
    for (int64_t piece = 0; piece * piece_tokens_ < step.tokens; ++piece) {
        const GroupRows tokens = tokens_of(step, piece);
        const int64_t count = tokens.end - tokens.begin, rows = count * chosen;
        const int64_t slots = std::min(rows, experts);  // as many experts as may have rows
        const int64_t chunk = std::max<int64_t>(1, rows / (8 * step.threads));
        const bool is_small = is_alone || rows * up.rows < kSmallWork;
        const int index = static_cast<int>(piece) * 6;
        const auto some = [&](int64_t units) { return std::max<int64_t>(1, units * slots / (32 * step.threads)); };
        stages.push_back({this, index, 1, 1, false, true});
        stages.push_back({this, index + 1, rows, chunk, false, is_small});
        stages.push_back({this, index + 2, slots * up.units, some(up.units), false, is_alone});
        stages.push_back({this, index + 3, rows, chunk, false, is_small});
        stages.push_back({this, index + 4, slots * down.units, some(down.units), false, is_alone});
        stages.push_back({this, index + 5, count, std::max<int64_t>(1, count / (8 * step.threads)), false, is_small});
    }
}

void ExpertsOp::work(const Step& step, int stage, const Claim& claim, const Worker& worker) {
    const Buffers b = buffers(step.shared->grouped.get());
    const GroupRows tokens = tokens_of(step, stage / 6);
    switch (stage % 6) {
        case 0: return sort(b, tokens);
        case 1: return gather(step, b, tokens, claim.begin, claim.end);
        case 2: return products(step, b, false, claim.begin, claim.end, worker.scratch);
        case 3: return activate(step, b, claim.begin, claim.end);
        case 4: return products(step, b, true, claim.begin, claim.end, worker.scratch);
        default: return sum(step, b, tokens, claim.begin, claim.end);
    }
}

void ExpertsOp::sort(const Buffers& b, GroupRows tokens) const {
    const auto experts = static_cast<int64_t>(set->down.size());
    const int64_t rows = (tokens.end - tokens.begin) * chosen;
    const int32_t* id = ids + tokens.begin * chosen;
    std::fill(b.starts, b.starts + experts + 1, 0);
    for (int64_t p = 0; p < rows; ++p) ++b.starts[id[p] + 1];
    int32_t count = 0;
    for (int64_t e = 0; e < experts; ++e) {
        if (b.starts[e + 1] > 0) b.active[count++] = static_cast<int32_t>(e);
        b.starts[e + 1] += b.starts[e];
    }
    b.active[experts] = count;
    for (int64_t p = 0; p < rows; ++p) {  // starts[e] moves on to the end of e
        const int64_t row = b.starts[id[p]]++;
        b.pair_of[row] = p;
        b.row_of[p] = row;
    }
    for (int64_t e = experts; e > 0; --e) b.starts[e] = b.starts[e - 1];
    b.starts[0] = 0;
}

void ExpertsOp::gather(const Step& step, const Buffers& b, GroupRows tokens, int64_t begin, int64_t end) const {
    const int64_t cols = b.up_shape.cols;
    for (int64_t row = begin; row < end; ++row) {
        const int64_t pair = b.pair_of[row];
        float* to = b.up.x + row * cols;
        std::memcpy(to, x + (tokens.begin + pair / chosen) * cols, static_cast<size_t>(cols) * 4);
        if (set->scales_input) {
            const float factor = weights[tokens.begin * chosen + pair];
            for (int64_t i = 0; i < cols; ++i) to[i] *= factor;
        }
    }
    b.up.quantise(step, b.up_shape, begin, end);
}

void ExpertsOp::products(const Step& step, const Buffers& b, bool is_down, int64_t begin, int64_t end,
                         uint8_t* scratch) const {
    const auto& all = is_down ? set->down : set->gate_up;
    const GroupShape& shape = is_down ? b.down_shape : b.up_shape;
    const int64_t units = shape.units, width = shape.rows;
    const int32_t count = b.active[set->down.size()];
    for (int64_t u = begin; u < end;) {
        const int64_t slot = u / units;
        const int64_t stop = std::min(end, (slot + 1) * units);
        if (slot < count) {
            const int32_t expert = b.active[slot];
            const GroupRows rows{b.starts[expert], b.starts[expert + 1]};
            float* to = (is_down ? b.results : b.wide) + rows.begin * width;
            const Weight& w = *all[static_cast<size_t>(expert)];
            const ProductInput in = (is_down ? b.down : b.up).from_row(rows.begin, w.cols);
            multiply_units(step, w, in, rows.end - rows.begin, u - slot * units, std::min(stop - slot * units, w.units),
                           {to, nullptr, width}, scratch);
        }
        u = stop;
    }
}

void ExpertsOp::activate(const Step& step, const Buffers& b, int64_t begin, int64_t end) const {
    const int64_t wide = b.up_shape.rows, inner = b.down_shape.cols;
    int64_t expert = 0;
    for (int64_t row = begin; row < end; ++row) {
        while (b.starts[expert + 1] <= row) ++expert;
        float* own = b.wide + row * wide;
        const float* bias = set->gate_up_bias[static_cast<size_t>(expert)];
        if (bias) step.kernels->add(own, bias, 0, wide);
        GateRows gate = set->gate;
        gate.a = own;
        gate.b = set->is_gated ? own + inner : nullptr;
        gate.cols = inner;
        gate.out = b.down.x + row * inner;
        step.kernels->families->gate_rows(gate, 0, 1);
    }
    b.down.quantise(step, b.down_shape, begin, end);
}

void ExpertsOp::sum(const Step& step, const Buffers& b, GroupRows tokens, int64_t begin, int64_t end) const {
    const int64_t hidden = b.down_shape.rows;
    for (int64_t t = begin; t < end; ++t) {
        float* to = out + (tokens.begin + t) * hidden;
        std::memset(to, 0, static_cast<size_t>(hidden) * 4);
        for (int64_t c = 0; c < chosen; ++c) {
            const int64_t pair = t * chosen + c;
            float* own = b.results + b.row_of[pair] * hidden;
            const float* bias = set->down_bias[static_cast<size_t>(ids[tokens.begin * chosen + pair])];
            if (bias) step.kernels->add(own, bias, 0, hidden);
            const float factor = set->scales_input ? 1.0f : weights[tokens.begin * chosen + pair];
            for (int64_t i = 0; i < hidden; ++i) {
                const float part = own[i] * factor;
                to[i] += part;
            }
        }
    }
}

}  // namespace kvern
