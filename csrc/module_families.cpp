// Bindings of the operations that only some families need.
#include <cmath>

#include "bind.h"
#include "ops_families.h"

namespace kvern {

namespace {

using IntsOut = Array<int32_t>;
using MaybeFloats = std::optional<Floats>;

template <class A, class B>
void require_same(const A& a, const char* name, const B& like, size_t ndim) {
    for (size_t i = 0; i < ndim; ++i) require_size(a, name, i, static_cast<int64_t>(like.shape(i)));
}

const float* optional_vector(Handle& h, const MaybeFloats& v, const char* name, int64_t size) {
    if (!v) return nullptr;
    require(*v, name, 1);
    require_size(*v, name, 0, size);
    h.keep(*v);
    return v->data();
}

const float* vector_of(Handle& h, const Floats& v, const char* name, int64_t size) {
    return optional_vector(h, MaybeFloats(v), name, size);
}

void gate(Handle& h, Floats a, int kind, MaybeFloats b, FloatsOut out, float alpha, float limit) {
    require_rows(a, "a", 2);
    require_rows(out, "out", 2);
    require_size(a, "a", 0, static_cast<int64_t>(out.shape(0)));
    GateRows g{};
    g.kind = static_cast<GateKind>(kind);
    g.is_one = a.shape(1) == 1 && out.shape(1) > 1;
    if (!g.is_one) require_size(a, "a", 1, static_cast<int64_t>(out.shape(1)));
    if (b) {
        require_rows(*b, "b", 2);
        require_same(*b, "b", out, 2);
        g.b = b->data();
        g.b_stride = b->stride(0);
        h.keep(*b);
    } else if (g.is_one || g.kind == GateKind::CLAMPED_SWIGLU) {
        fail("a gate of this kind needs what it gates");
    }
    g.a = a.data();
    g.a_stride = a.stride(0);
    g.alpha = alpha;
    g.limit = limit;
    g.cols = static_cast<int64_t>(out.shape(1));
    g.out = out.data();
    g.out_stride = out.stride(0);
    h.keep(a, out);
    auto rows = [g](const Step& step, size_t, int64_t begin, int64_t end) {
        step.kernels->families->gate_rows(g, begin, end);
    };
    run(h, std::make_unique<CallOp>(g.cols * 8, rows), static_cast<int64_t>(out.shape(0)));
}

void norm(Handle& h, Floats x, Floats weight, MaybeFloats bias, float eps, bool is_centered, FloatsOut out) {
    require_rows(x, "x", 3);
    require_rows(out, "out", 3);
    require_same(out, "out", x, 3);
    require(weight, "weight", 1);
    NormHeads n{};
    n.heads = static_cast<int>(x.shape(1));
    n.cols = static_cast<int64_t>(x.shape(2));
    const auto size = static_cast<int64_t>(weight.shape(0));
    if (size != n.cols && size != n.heads * n.cols) {
        fail("weight has ", size, " entries, expected ", n.cols, " or ", n.heads * n.cols);
    }
    n.weight = vector_of(h, weight, "weight", size);
    n.weight_head = size == n.cols ? 0 : n.cols;
    n.bias = optional_vector(h, bias, "bias", size);
    n.x = x.data();
    n.x_token = x.stride(0);
    n.x_head = x.stride(1);
    n.out = out.data();
    n.out_token = out.stride(0);
    n.out_head = out.stride(1);
    n.eps = eps;
    n.is_centered = is_centered;
    h.keep(x, out);
    auto rows = [n](const Step& step, size_t, int64_t begin, int64_t end) {
        step.kernels->families->norm_heads(n, begin, end);
    };
    run(h, std::make_unique<CallOp>(n.heads * n.cols * 2, rows), static_cast<int64_t>(x.shape(0)));
}

void add_bias(Handle& h, FloatsOut x, Floats bias) {
    require_rows(x, "x", 2);
    const auto cols = static_cast<int64_t>(x.shape(1));
    const float* y = vector_of(h, bias, "bias", cols);
    h.keep(x);
    auto rows = [to = x.data(), stride = x.stride(0), y, cols](const Step& step, size_t, int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) step.kernels->add(to + t * stride, y, 0, cols);
    };
    run(h, std::make_unique<CallOp>(cols, rows), static_cast<int64_t>(x.shape(0)));
}

void scale(Handle& h, FloatsOut x, float factor) {
    require_rows(x, "x", 2);
    h.keep(x);
    const auto cols = static_cast<int64_t>(x.shape(1));
    auto rows = [to = x.data(), stride = x.stride(0), factor, cols](const Step&, size_t, int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            for (int64_t i = 0; i < cols; ++i) to[t * stride + i] *= factor;
        }
    };
    run(h, std::make_unique<CallOp>(cols, rows), static_cast<int64_t>(x.shape(0)));
}

void softcap(Handle& h, FloatsOut x, float cap) {
    require(x, "x", 2);
    h.keep(x);
    const auto cols = static_cast<int64_t>(x.shape(1));
    auto rows = [to = x.data(), cap, cols](const Step& step, size_t, int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) step.kernels->families->softcap(to, cap, t * cols, (t + 1) * cols);
    };
    run(h, std::make_unique<CallOp>(cols * 8, rows), static_cast<int64_t>(x.shape(0)));
}

void copy(Handle& h, Floats x, FloatsOut out) {
    require_rows(x, "x", 3);
    require_rows(out, "out", 3);
    require_same(out, "out", x, 3);
    h.keep(x, out);
    struct View {
        int64_t token, head;
    };
    const View from{x.stride(0), x.stride(1)}, to{out.stride(0), out.stride(1)};
    const auto heads = static_cast<int64_t>(x.shape(1)), cols = static_cast<int64_t>(x.shape(2));
    auto rows = [a = x.data(), b = out.data(), from, to, heads, cols](const Step&, size_t, int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            for (int64_t i = 0; i < heads; ++i) {
                std::memcpy(b + t * to.token + i * to.head, a + t * from.token + i * from.head,
                            static_cast<size_t>(cols) * 4);
            }
        }
    };
    run(h, std::make_unique<CallOp>(heads * cols, rows), static_cast<int64_t>(x.shape(0)));
}

// Factor of a query at position p: 1 + factor * log(1 + floor((p + start) / floor)).
void scale_by_position(Handle& h, FloatsOut x, Ints positions, float floor, float factor, float start) {
    require(x, "x", 3, true);
    require(positions, "positions", 1);
    const auto tokens = static_cast<int64_t>(x.shape(0));
    require_size(positions, "positions", 0, tokens);
    h.keep(x);
    const auto cols = static_cast<int64_t>(x.shape(1) * x.shape(2));
    auto rows = [to = x.data(), stride = x.stride(0), floor, factor, start, cols](const Step& step, size_t group,
                                                                                int64_t begin, int64_t end) {
        const int32_t* at = step.batches[group].positions;
        for (int64_t t = begin; t < end; ++t) {
            const float steps = std::floor((static_cast<float>(at[t]) + start) / floor);
            const float by = std::log1p(steps) * factor + 1.0f;
            for (int64_t i = 0; i < cols; ++i) to[t * stride + i] *= by;
        }
    };
    StepBatch batch{};
    batch.positions = positions.data();
    run(h, std::make_unique<CallOp>(cols, rows), tokens, nullptr, &batch);
}

void embed_positions(Handle& h, nb::object weight, Ints positions, int32_t offset, FloatsOut out) {
    const auto& w = nb::cast<const Weight&>(weight);
    require(out, "out", 2);
    require(positions, "positions", 1);
    const auto tokens = static_cast<int64_t>(positions.shape(0));
    require_size(out, "out", 0, tokens);
    require_size(out, "out", 1, w.cols);
    if (offset < 0) fail("the position offset is ", offset, ", expected 0 or more");
    check_positions(positions.data(), tokens, w.rows - offset);
    h.keep(weight, out);
    auto rows = [&w, to = out.data(), offset](const Step& step, size_t group, int64_t begin, int64_t end) {
        const int32_t* at = step.batches[group].positions;
        for (int64_t t = begin; t < end; ++t) w.decode_row(at[t] + offset, to + t * w.cols);
    };
    auto op = std::make_unique<CallOp>(w.cols * 4, rows);
    op->table_rows = w.rows - offset;
    StepBatch batch{};
    batch.positions = positions.data();
    run(h, std::move(op), tokens, nullptr, &batch);
}

// (pages, offset, bytes, dtype index)
using StateTuple = std::tuple<Array<uint8_t>, int64_t, int64_t, int>;

StatePlace place_of(Handle& h, const StateTuple& t, int64_t elements) {
    const auto& [pages, offset, num_bytes, type] = t;
    require(pages, "pages", 2);
    const StatePlace place{pages.data(), static_cast<int64_t>(pages.shape(1)), static_cast<int64_t>(pages.shape(0)),
                           offset, num_bytes, static_cast<StreamType>(type)};
    const int64_t expected = elements * (place.type == StreamType::FP32 ? 4 : 2);
    if (num_bytes != expected || offset < 0) {
        fail("a state of ", num_bytes, " bytes at ", offset, ", expected ", expected, " bytes");
    }
    h.keep(pages);
    return place;
}

void run_state(Handle& h, std::unique_ptr<StateOp> op, const BatchTuple& batch, int64_t tokens) {
    const StepBatch step = step_batch(batch, tokens, 0);
    check_entries(batch, op->place);
    run(h, std::move(op), tokens, nullptr, &step);
}

void convolve(Handle& h, Floats x, Floats weight, MaybeFloats bias, bool is_silu, const StateTuple& tail,
              const BatchTuple& batch, FloatsOut out) {
    require_rows(x, "x", 2);
    require_rows(out, "out", 2);
    require_same(out, "out", x, 2);
    require(weight, "weight", 2);
    ConvolveShape s{};
    s.channels = static_cast<int64_t>(x.shape(1));
    s.taps = static_cast<int>(weight.shape(0));
    require_size(weight, "weight", 1, s.channels);
    if (s.taps < 2 || s.taps > kMaxTaps) fail("a convolution over ", s.taps, " tokens, possible are 2 to ", kMaxTaps);
    s.x = x.data();
    s.x_stride = x.stride(0);
    s.weight = weight.data();
    s.bias = optional_vector(h, bias, "bias", s.channels);
    s.is_silu = is_silu;
    s.out = out.data();
    s.out_stride = out.stride(0);
    s.tail = place_of(h, tail, s.channels * (s.taps - 1));
    h.keep(x, weight, out);
    auto part = [s](const FamilyKernels& k, const StateRows& rows, int64_t i, uint8_t*) {
        k.convolve(s, rows, i * kConvLanes);
    };
    const int64_t parts = (s.channels + kConvLanes - 1) / kConvLanes;
    run_state(h, std::make_unique<StateOp>(s.tail, parts, s.channels * 8, 0, part), batch,
              static_cast<int64_t>(x.shape(0)));
}

// heads and dims: (key heads, value heads, key dim, value dim)
void gated_delta_rule(Handle& h, Floats qkv, Floats gates, Floats decay, Floats step_bias,
                      std::tuple<int, int, int, int> dims, const StateTuple& state, const BatchTuple& batch,
                      FloatsOut out) {
    DeltaShape s{};
    std::tie(s.key_heads, s.heads, s.key_dim, s.value_dim) = dims;
    if (s.key_heads < 1 || s.heads % s.key_heads) fail(s.heads, " value heads do not divide into ", s.key_heads, " key heads");
    require_rows(qkv, "qkv", 2);
    require_rows(gates, "gates", 2);
    require_rows(out, "out", 2);
    require_size(qkv, "qkv", 1, 2 * s.key_heads * s.key_dim + s.heads * s.value_dim);
    require_size(gates, "gates", 1, 2 * s.heads);
    require_size(out, "out", 1, s.heads * s.value_dim);
    const auto tokens = static_cast<int64_t>(qkv.shape(0));
    require_size(gates, "gates", 0, tokens);
    require_size(out, "out", 0, tokens);
    s.qkv = qkv.data();
    s.qkv_stride = qkv.stride(0);
    s.gates = gates.data();
    s.gates_stride = gates.stride(0);
    s.decay = vector_of(h, decay, "decay", s.heads);
    s.step_bias = vector_of(h, step_bias, "step_bias", s.heads);
    s.out = out.data();
    s.out_stride = out.stride(0);
    const int64_t per_head = static_cast<int64_t>(s.key_dim) * s.value_dim;
    s.state = place_of(h, state, s.heads * per_head);
    h.keep(qkv, gates, out);
    const int64_t tiles = (s.value_dim + kStateLanes - 1) / kStateLanes;
    auto part = [s, tiles](const FamilyKernels& k, const StateRows& rows, int64_t i, uint8_t* scratch) {
        k.delta(s, rows, static_cast<int>(i / tiles), i % tiles * kStateLanes, scratch);
    };
    const size_t scratch = static_cast<size_t>(s.key_dim) * kStateLanes * 4;
    run_state(h, std::make_unique<StateOp>(s.state, s.heads * tiles, s.heads * per_head * 4, scratch, part), batch,
              tokens);
}

// dims: (heads, groups, head dim, state dim)
void selective_scan(Handle& h, Floats xbc, Floats steps, std::tuple<Floats, Floats, Floats> vectors,
                    std::tuple<float, float> limits, std::tuple<int, int, int, int> dims, const StateTuple& state,
                    const BatchTuple& batch, FloatsOut out) {
    ScanShape s{};
    std::tie(s.heads, s.groups, s.head_dim, s.state_dim) = dims;
    std::tie(s.low, s.high) = limits;
    if (s.groups < 1 || s.heads % s.groups) fail(s.heads, " heads do not divide into ", s.groups, " groups");
    require_rows(xbc, "xbc", 2);
    require_rows(steps, "steps", 2);
    require_rows(out, "out", 2);
    require_size(xbc, "xbc", 1, s.heads * s.head_dim + 2 * s.groups * s.state_dim);
    require_size(steps, "steps", 1, s.heads);
    require_size(out, "out", 1, s.heads * s.head_dim);
    const auto tokens = static_cast<int64_t>(xbc.shape(0));
    require_size(steps, "steps", 0, tokens);
    require_size(out, "out", 0, tokens);
    s.xbc = xbc.data();
    s.xbc_stride = xbc.stride(0);
    s.steps = steps.data();
    s.steps_stride = steps.stride(0);
    s.decay = vector_of(h, std::get<0>(vectors), "decay", s.heads);
    s.step_bias = vector_of(h, std::get<1>(vectors), "step_bias", s.heads);
    s.skip = vector_of(h, std::get<2>(vectors), "skip", s.heads);
    s.out = out.data();
    s.out_stride = out.stride(0);
    const int64_t per_head = static_cast<int64_t>(s.head_dim) * s.state_dim;
    s.state = place_of(h, state, s.heads * per_head);
    h.keep(xbc, steps, out);
    const int64_t tiles = (s.head_dim + kStateLanes - 1) / kStateLanes;
    auto part = [s, tiles](const FamilyKernels& k, const StateRows& rows, int64_t i, uint8_t* scratch) {
        k.scan(s, rows, static_cast<int>(i / tiles), i % tiles * kStateLanes, scratch);
    };
    const size_t scratch = static_cast<size_t>(s.state_dim + 15) / 16 * 16 * kStateLanes * 4;
    run_state(h, std::make_unique<StateOp>(s.state, s.heads * tiles, s.heads * per_head * 3, scratch, part), batch,
              tokens);
}

std::vector<const Weight*> weights_of(const std::vector<nb::object>& objects, const char* name) {
    std::vector<const Weight*> weights;
    for (const nb::object& object : objects) {
        const auto* w = nb::cast<const Weight*>(object);
        if (!weights.empty() && (w->rows != weights[0]->rows || w->cols != weights[0]->cols)) {
            fail(name, " differ: ", w->rows, " x ", w->cols, " and ", weights[0]->rows, " x ", weights[0]->cols);
        }
        weights.push_back(w);
    }
    if (weights.empty()) fail("no ", name, " are given");
    return weights;
}

// A set of weights and what keeps them alive.
struct WeightGroup {
    std::vector<nb::object> kept;
    std::vector<const Weight*> weights;
};

struct ExpertGroup {
    std::vector<nb::object> kept;
    std::vector<Floats> biases;
    ExpertSet set;
};

void matmul_heads(Handle& h, Floats x, nb::object group, FloatsOut out) {
    const auto& weights = nb::cast<const WeightGroup&>(group).weights;
    require_rows(x, "x", 3);
    require_rows(out, "out", 3);
    const auto heads = static_cast<int64_t>(weights.size());
    require_size(x, "x", 1, heads);
    require_size(x, "x", 2, weights[0]->cols);
    require_size(out, "out", 0, static_cast<int64_t>(x.shape(0)));
    require_size(out, "out", 1, heads);
    require_size(out, "out", 2, weights[0]->rows);
    auto op = std::make_unique<HeadsOp>();
    op->weights = weights;
    op->x = x.data();
    op->x_token = x.stride(0);
    op->x_head = x.stride(1);
    op->out = out.data();
    op->out_token = out.stride(0);
    op->out_head = out.stride(1);
    h.keep(x, group, out);
    run(h, std::move(op), static_cast<int64_t>(x.shape(0)));
}

std::unique_ptr<WeightGroup> group_heads(const std::vector<nb::object>& weights) {
    auto group = std::make_unique<WeightGroup>();
    group->weights = weights_of(weights, "weights per head");
    group->kept = weights;
    return group;
}

std::unique_ptr<ExpertGroup> group_experts(const std::vector<nb::object>& gate_up, const std::vector<nb::object>& down,
                                           const std::vector<MaybeFloats>& gate_up_bias,
                                           const std::vector<MaybeFloats>& down_bias, int kind, bool is_gated,
                                           bool scales_input, float alpha, float limit) {
    auto group = std::make_unique<ExpertGroup>();
    ExpertSet& set = group->set;
    set.gate_up = weights_of(gate_up, "experts' gates");
    set.down = weights_of(down, "experts' outputs");
    const size_t count = set.down.size();
    if (set.gate_up.size() != count || gate_up_bias.size() != count || down_bias.size() != count || count > kMaxExperts) {
        fail(set.gate_up.size(), " gates, ", count, " outputs, ", gate_up_bias.size(), " and ", down_bias.size(),
             " biases of experts: expected equal numbers up to ", kMaxExperts);
    }
    if (set.gate_up[0]->rows != (is_gated ? 2 : 1) * set.down[0]->cols || set.gate_up[0]->cols != set.down[0]->rows) {
        fail("experts' gates are ", set.gate_up[0]->rows, " x ", set.gate_up[0]->cols, ", their outputs ",
             set.down[0]->rows, " x ", set.down[0]->cols);
    }
    const auto take = [&](const std::vector<MaybeFloats>& from, int64_t size, std::vector<const float*>& to) {
        for (const MaybeFloats& bias : from) {
            if (bias) {
                require(*bias, "bias", 1);
                require_size(*bias, "bias", 0, size);
                group->biases.push_back(*bias);
            }
            to.push_back(bias ? bias->data() : nullptr);
        }
    };
    take(gate_up_bias, set.gate_up[0]->rows, set.gate_up_bias);
    take(down_bias, set.down[0]->rows, set.down_bias);
    set.gate.kind = static_cast<GateKind>(kind);
    set.gate.alpha = alpha;
    set.gate.limit = limit;
    set.is_gated = is_gated;
    set.scales_input = scales_input;
    group->kept = gate_up;
    group->kept.insert(group->kept.end(), down.begin(), down.end());
    return group;
}

// numbers: (scoring, experts, chosen, groups, chosen groups); switches: (best two, normalised)
void route(Handle& h, Floats logits, std::tuple<int, int, int, int, int> numbers, std::tuple<bool, bool> switches,
           float factor, MaybeFloats score_bias, MaybeFloats expert_scale, IntsOut ids, FloatsOut weights) {
    Routing r{};
    int scoring = 0;
    std::tie(scoring, r.num_experts, r.num_chosen, r.num_groups, r.num_chosen_groups) = numbers;
    std::tie(r.is_best_two, r.is_normalized) = switches;
    r.scoring = static_cast<Scoring>(scoring);
    r.scale = factor;
    if (r.num_experts < 1 || r.num_experts > kMaxExperts || r.num_chosen < 1 || r.num_chosen > r.num_experts ||
        r.num_groups < 1 || r.num_experts % r.num_groups || r.num_chosen_groups < 1 || r.num_chosen_groups > r.num_groups ||
        (r.num_groups > 1 && r.is_best_two && r.num_experts / r.num_groups < 2)) {
        fail(r.num_chosen, " of ", r.num_experts, " experts in ", r.num_chosen_groups, " of ", r.num_groups,
             " groups cannot be chosen; experts may be up to ", kMaxExperts);
    }
    require(logits, "logits", 2);
    require(ids, "ids", 2);
    require(weights, "weights", 2);
    const auto tokens = static_cast<int64_t>(logits.shape(0));
    require_size(logits, "logits", 1, r.num_experts);
    require_size(ids, "ids", 0, tokens);
    require_size(ids, "ids", 1, r.num_chosen);
    require_same(weights, "weights", ids, 2);
    r.score_bias = optional_vector(h, score_bias, "score_bias", r.num_experts);
    r.expert_scale = optional_vector(h, expert_scale, "expert_scale", r.num_experts);
    h.keep(logits, ids, weights);
    auto rows = [r, from = logits.data(), to = ids.data(), w = weights.data()](const Step& step, size_t, int64_t begin,
                                                                              int64_t end) {
        step.kernels->families->route(r, from, begin, end, to, w);
    };
    run(h, std::make_unique<CallOp>(r.num_experts * 16, rows), tokens);
}

void experts(Handle& h, Floats x, Ints ids, Floats weights, nb::object group, FloatsOut out) {
    const auto& set = nb::cast<const ExpertGroup&>(group).set;
    require(x, "x", 2);
    require(ids, "ids", 2);
    require(weights, "weights", 2);
    require(out, "out", 2);
    const auto tokens = static_cast<int64_t>(x.shape(0));
    require_size(x, "x", 1, set.gate_up[0]->cols);
    require_same(out, "out", x, 2);
    require_size(ids, "ids", 0, tokens);
    require_same(weights, "weights", ids, 2);
    const auto count = static_cast<int32_t>(set.down.size());
    for (size_t i = 0; i < ids.shape(0) * ids.shape(1); ++i) {
        if (ids.data()[i] < 0 || ids.data()[i] >= count) fail("expert ", ids.data()[i], " is not one of ", count);
    }
    auto op = std::make_unique<ExpertsOp>();
    op->set = &set;
    op->x = x.data();
    op->ids = ids.data();
    op->weights = weights.data();
    op->chosen = static_cast<int64_t>(ids.shape(1));
    op->out = out.data();
    h.keep(x, ids, weights, group, out);
    run(h, std::move(op), tokens);
}

}  // namespace

void bind_families(nb::module_& m, nb::class_<Handle>& runtime) {
    nb::class_<WeightGroup>(m, "WeightGroup", "One weight per head.");
    nb::class_<ExpertGroup>(m, "ExpertGroup", "The weights of a layer's experts.");
    m.def("group_heads", &group_heads);
    m.def("group_experts", &group_experts, nb::arg("gate_up"), nb::arg("down"), nb::arg("gate_up_bias"),
          nb::arg("down_bias"), nb::arg("kind"), nb::arg("is_gated"), nb::arg("scales_input"), nb::arg("alpha"),
          nb::arg("limit"));
    runtime
        .def("gate", &gate, nb::arg("a").noconvert(), nb::arg("kind"), nb::arg("b").noconvert().none(),
             nb::arg("out").noconvert(), nb::arg("alpha"), nb::arg("limit"))
        .def("norm", &norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("bias").noconvert().none(),
             nb::arg("eps"), nb::arg("is_centered"), nb::arg("out").noconvert())
        .def("add_bias", &add_bias, nb::arg("x").noconvert(), nb::arg("bias").noconvert())
        .def("scale", &scale, nb::arg("x").noconvert(), nb::arg("factor"))
        .def("softcap", &softcap, nb::arg("x").noconvert(), nb::arg("cap"))
        .def("copy", &copy, nb::arg("x").noconvert(), nb::arg("out").noconvert())
        .def("scale_by_position", &scale_by_position, nb::arg("x").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("floor"), nb::arg("factor"), nb::arg("start"))
        .def("embed_positions", &embed_positions, nb::arg("weight"), nb::arg("positions").noconvert(),
             nb::arg("offset"), nb::arg("out").noconvert())
        .def("convolve", &convolve, nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
             nb::arg("bias").noconvert().none(), nb::arg("is_silu"), nb::arg("tail").noconvert(),
             nb::arg("batch").noconvert(), nb::arg("out").noconvert())
        .def("gated_delta_rule", &gated_delta_rule, nb::arg("qkv").noconvert(), nb::arg("gates").noconvert(),
             nb::arg("decay").noconvert(), nb::arg("step_bias").noconvert(), nb::arg("dims"),
             nb::arg("state").noconvert(), nb::arg("batch").noconvert(), nb::arg("out").noconvert())
        .def("selective_scan", &selective_scan, nb::arg("xbc").noconvert(), nb::arg("steps").noconvert(),
             nb::arg("vectors").noconvert(), nb::arg("limits"), nb::arg("dims"), nb::arg("state").noconvert(),
             nb::arg("batch").noconvert(), nb::arg("out").noconvert())
        .def("matmul_heads", &matmul_heads, nb::arg("x").noconvert(), nb::arg("group"), nb::arg("out").noconvert())
        .def("route", &route, nb::arg("logits").noconvert(), nb::arg("numbers"), nb::arg("switches"), nb::arg("factor"),
             nb::arg("score_bias").noconvert().none(), nb::arg("expert_scale").noconvert().none(),
             nb::arg("ids").noconvert(), nb::arg("weights").noconvert())
        .def("experts", &experts, nb::arg("x").noconvert(), nb::arg("ids").noconvert(),
             nb::arg("weights").noconvert(), nb::arg("group"), nb::arg("out").noconvert());
}

}  // namespace kvern
