// Bindings of the operations on recurrent states.
#include "bind.h"
#include "ops_families.h"

namespace kvern {

namespace {

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

}  // namespace

void bind_states(nb::class_<Handle>& runtime) {
    runtime
        .def("convolve", &convolve, nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
             nb::arg("bias").noconvert().none(), nb::arg("is_silu"), nb::arg("tail").noconvert(),
             nb::arg("batch").noconvert(), nb::arg("out").noconvert())
        .def("gated_delta_rule", &gated_delta_rule, nb::arg("qkv").noconvert(), nb::arg("gates").noconvert(),
             nb::arg("decay").noconvert(), nb::arg("step_bias").noconvert(), nb::arg("dims"),
             nb::arg("state").noconvert(), nb::arg("batch").noconvert(), nb::arg("out").noconvert())
        .def("selective_scan", &selective_scan, nb::arg("xbc").noconvert(), nb::arg("steps").noconvert(),
             nb::arg("vectors").noconvert(), nb::arg("limits"), nb::arg("dims"), nb::arg("state").noconvert(),
             nb::arg("batch").noconvert(), nb::arg("out").noconvert());
}

}  // namespace kvern
