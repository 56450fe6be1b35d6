// Bindings of products with one weight per head or expert, and of routing.
#include "bind.h"
#include "ops_families.h"

namespace kvern {

namespace {

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

void bind_grouped(nb::module_& m, nb::class_<Handle>& runtime) {
    nb::class_<WeightGroup>(m, "WeightGroup", "One weight per head.");
    nb::class_<ExpertGroup>(m, "ExpertGroup", "The weights of a layer's experts.");
    m.def("group_heads", &group_heads);
    m.def("group_experts", &group_experts, nb::arg("gate_up"), nb::arg("down"), nb::arg("gate_up_bias"),
          nb::arg("down_bias"), nb::arg("kind"), nb::arg("is_gated"), nb::arg("scales_input"), nb::arg("alpha"),
          nb::arg("limit"));
    runtime
        .def("matmul_heads", &matmul_heads, nb::arg("x").noconvert(), nb::arg("group"), nb::arg("out").noconvert())
        .def("route", &route, nb::arg("logits").noconvert(), nb::arg("numbers"), nb::arg("switches"), nb::arg("factor"),
             nb::arg("score_bias").noconvert().none(), nb::arg("expert_scale").noconvert().none(),
             nb::arg("ids").noconvert(), nb::arg("weights").noconvert())
        .def("experts", &experts, nb::arg("x").noconvert(), nb::arg("ids").noconvert(),
             nb::arg("weights").noconvert(), nb::arg("group"), nb::arg("out").noconvert());
}

}  // namespace kvern
