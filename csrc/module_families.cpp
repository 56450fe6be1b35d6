// Bindings of the row by row operations that only some families need.
#include <cmath>

#include "bind.h"
#include "ops_families.h"

namespace kvern {

namespace {

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

}  // namespace

void bind_family_rows(nb::class_<Handle>& runtime) {
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
             nb::arg("offset"), nb::arg("out").noconvert());
}

}  // namespace kvern
