// Python bindings. Shapes are checked here; a wrong one raises ValueError with the numbers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <sstream>

#include "cpu.h"
#include "runtime.h"

namespace nb = nanobind;
using namespace kvern;

namespace {

template <class T>
using Array = nb::ndarray<T, nb::device::cpu>;
using Floats = Array<const float>;
using FloatsOut = Array<float>;
using Ints = Array<const int32_t>;
using Longs = Array<const int64_t>;
using RawBytes = Array<const uint8_t>;

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw nb::value_error(text.str().c_str());
}

// The last `tail` axes are contiguous, and so are the outer ones unless `free_first`.
template <class A>
void require(const A& a, const char* name, size_t ndim, bool free_first = false) {
    if (a.ndim() != ndim) fail(name, " has ", a.ndim(), " dimensions, expected ", ndim);
    int64_t stride = 1;
    for (size_t i = ndim; i-- > 0;) {
        const bool is_free = free_first && i == 0;
        if (!is_free && a.shape(i) > 1 && a.stride(i) != stride) {
            fail(name, " must be C-contiguous", free_first ? " beyond its first axis" : "");
        }
        stride *= static_cast<int64_t>(a.shape(i));
    }
}

template <class A>
void require_size(const A& a, const char* name, size_t axis, int64_t expected) {
    if (static_cast<int64_t>(a.shape(axis)) != expected) {
        fail(name, " has ", a.shape(axis), " entries in dimension ", axis, ", expected ", expected);
    }
}

using RawTuple = std::tuple<int, int64_t, RawBytes>;  // element type, rows, bytes

std::unique_ptr<Weight> prepare(Runtime& rt, const std::vector<RawTuple>& parts, int64_t cols, bool as_float) {
    std::vector<RawTensor> tensors;
    for (const auto& [type_index, rows, data] : parts) {
        const auto type = static_cast<ElementType>(type_index);
        require(data, "data", 1);
        const int64_t row_bytes = raw_row_bytes(type, cols);
        if (row_bytes == 0) fail(cols, " columns are not a whole number of ", type_name(type), " blocks");
        if (static_cast<int64_t>(data.shape(0)) != rows * row_bytes) {
            fail("a ", type_name(type), " tensor of ", rows, " rows and ", cols, " columns takes ",
                 rows * row_bytes, " bytes, got ", data.shape(0));
        }
        tensors.push_back({type, rows, data.data()});
    }
    nb::gil_scoped_release unlocked;
    return rt.prepare(tensors, cols, as_float);
}

void matmul(Runtime& rt, Floats x, const Weight& w, FloatsOut out) {
    require(x, "x", 2);
    require(out, "out", 2);
    require_size(x, "x", 1, w.cols);
    require_size(out, "out", 0, static_cast<int64_t>(x.shape(0)));
    require_size(out, "out", 1, w.rows);
    nb::gil_scoped_release unlocked;
    rt.matmul(w, x.data(), static_cast<int64_t>(x.shape(0)), out.data());
}

void embed(Runtime& rt, const Weight& w, Ints ids, FloatsOut out) {
    require(ids, "token_ids", 1);
    require(out, "out", 2);
    const auto count = static_cast<int64_t>(ids.shape(0));
    require_size(out, "out", 0, count);
    require_size(out, "out", 1, w.cols);
    for (int64_t i = 0; i < count; ++i) {
        if (ids.data()[i] < 0 || ids.data()[i] >= w.rows) {
            fail("token id ", ids.data()[i], " is not in the vocabulary of ", w.rows);
        }
    }
    nb::gil_scoped_release unlocked;
    rt.embed(w, ids.data(), count, out.data());
}

void rms_norm(Runtime& rt, Floats x, Floats weight, float eps, FloatsOut out) {
    require(x, "x", 2);
    require(weight, "weight", 1);
    require(out, "out", 2);
    require_size(weight, "weight", 0, static_cast<int64_t>(x.shape(1)));
    for (size_t i = 0; i < 2; ++i) require_size(out, "out", i, static_cast<int64_t>(x.shape(i)));
    nb::gil_scoped_release unlocked;
    rt.rms_norm(x.data(), weight.data(), eps, static_cast<int64_t>(x.shape(0)),
                static_cast<int64_t>(x.shape(1)), out.data());
}

void rotary(Runtime& rt, FloatsOut x, Ints positions, Floats cos, Floats sin, bool interleaved) {
    require(x, "x", 3, true);
    require(positions, "positions", 1);
    require(cos, "cos", 2);
    require(sin, "sin", 2);
    const auto tokens = static_cast<int64_t>(x.shape(0));
    require_size(positions, "positions", 0, tokens);
    for (size_t i = 0; i < 2; ++i) require_size(sin, "sin", i, static_cast<int64_t>(cos.shape(i)));
    if (2 * cos.shape(1) > x.shape(2)) fail("rotary dim ", 2 * cos.shape(1), " exceeds head dim ", x.shape(2));
    for (int64_t i = 0; i < tokens; ++i) {
        const int32_t p = positions.data()[i];
        if (p < 0 || p >= static_cast<int64_t>(cos.shape(0))) {
            fail("position ", p, " is outside the rotary table of ", cos.shape(0));
        }
    }
    nb::gil_scoped_release unlocked;
    rt.rotary(x.data(), x.stride(0), tokens, static_cast<int>(x.shape(1)), static_cast<int>(x.shape(2)),
              positions.data(), cos.data(), sin.data(), static_cast<int>(cos.shape(1)), interleaved);
}

// (pages, offset, dtype index, num_heads, block_size, dim)
using StreamTuple = std::tuple<Array<uint8_t>, int64_t, int, int, int, int>;

StreamView stream_view(const StreamTuple& t, const char* name) {
    const auto& [pages, offset, type, heads, block_size, dim] = t;
    require(pages, name, 2);
    StreamView s{pages.data(), static_cast<int64_t>(pages.shape(1)), static_cast<int64_t>(pages.shape(0)),
                 offset, static_cast<StreamType>(type), heads, block_size, dim};
    const int64_t width = s.type == StreamType::FP32 ? 4 : 2;
    const int64_t bytes = static_cast<int64_t>(heads) * block_size * dim * width;
    if (heads < 1 || block_size < 1 || dim < 1 || offset < 0 || offset + bytes > s.page_bytes) {
        fail(name, " of ", bytes, " bytes at offset ", offset, " do not fit into pages of ", s.page_bytes);
    }
    return s;
}

void append(Runtime& rt, Floats x, const StreamTuple& stream, Longs slots) {
    const StreamView s = stream_view(stream, "stream");
    require(x, "x", 3, true);
    require(slots, "slot_mapping", 1);
    require_size(x, "x", 1, s.num_heads);
    require_size(x, "x", 2, s.dim);
    const auto tokens = static_cast<int64_t>(x.shape(0));
    require_size(slots, "slot_mapping", 0, tokens);
    for (int64_t i = 0; i < tokens; ++i) {
        const int64_t slot = slots.data()[i];
        if (slot < s.block_size || slot >= s.num_blocks * s.block_size) {
            fail("slot ", slot, " lies outside blocks 1 to ", s.num_blocks - 1);
        }
    }
    nb::gil_scoped_release unlocked;
    rt.append(x.data(), x.stride(0), tokens, s, slots.data());
}

// (scale, window, chunk, num_sink_tokens, softcap); 0 means none
using ParamTuple = std::tuple<float, int64_t, int64_t, int64_t, float>;

int64_t attend(Runtime& rt, Floats q, const StreamTuple& keys, const StreamTuple& values, Ints cu_seqlens,
               Ints seq_lens, Ints tables, const ParamTuple& params, std::optional<Floats> sinks, FloatsOut out) {
    AttendCall c{};
    c.keys = stream_view(keys, "keys");
    c.values = stream_view(values, "values");
    if (c.keys.num_heads != c.values.num_heads || c.keys.block_size != c.values.block_size) {
        fail("keys and values differ in heads or block_size");
    }
    require(q, "q", 3, true);
    require(out, "out", 3, true);
    require(cu_seqlens, "cu_seqlens_q", 1);
    require(seq_lens, "seq_lens", 1);
    require(tables, "block_tables", 2, true);
    const auto tokens = static_cast<int64_t>(q.shape(0));
    c.num_heads = static_cast<int>(q.shape(1));
    c.num_seqs = static_cast<int64_t>(seq_lens.shape(0));
    if (c.num_heads % c.keys.num_heads) fail(c.num_heads, " query heads do not divide into ", c.keys.num_heads);
    require_size(q, "q", 2, c.keys.dim);
    require_size(out, "out", 0, tokens);
    require_size(out, "out", 1, c.num_heads);
    require_size(out, "out", 2, c.values.dim);
    require_size(cu_seqlens, "cu_seqlens_q", 0, c.num_seqs + 1);
    require_size(tables, "block_tables", 0, c.num_seqs);
    for (int64_t s = 0; s < c.num_seqs; ++s) {
        const int64_t rows = cu_seqlens.data()[s + 1] - cu_seqlens.data()[s];
        const int64_t length = seq_lens.data()[s];
        const int64_t room = static_cast<int64_t>(tables.shape(1)) * c.keys.block_size;
        if (rows < 0 || cu_seqlens.data()[s] < 0 || length < rows || length > room) {
            fail("sequence ", s, ": ", rows, " rows, ", length, " keys, room for ", room, " in its block table");
        }
    }
    if (cu_seqlens.data()[0] != 0 || cu_seqlens.data()[c.num_seqs] != tokens) {
        fail("cu_seqlens_q runs from ", cu_seqlens.data()[0], " to ", cu_seqlens.data()[c.num_seqs],
             ", expected 0 to ", tokens);
    }
    auto& p = c.params;
    std::tie(p.scale, p.window, p.chunk, p.num_sinks, p.softcap) = params;
    if (!(p.scale > 0.0f)) fail("scale is ", p.scale, ", expected a positive number");
    if (sinks) {
        require(*sinks, "sink_logits", 1);
        require_size(*sinks, "sink_logits", 0, c.num_heads);
        p.sink_logits = sinks->data();
    }
    c.q = q.data();
    c.q_token_stride = q.stride(0);
    c.cu_seqlens = cu_seqlens.data();
    c.seq_lens = seq_lens.data();
    c.block_tables = tables.data();
    c.table_stride = tables.stride(0);
    c.out = out.data();
    c.out_token_stride = out.stride(0);
    int64_t pairs = 0;
    {
        nb::gil_scoped_release unlocked;
        pairs = rt.attend(c);
    }
    if (pairs < 0) fail("a block table names no valid block (1 to ", c.keys.num_blocks - 1, ") for a visible key");
    return pairs;
}

void gated_activation(Runtime& rt, Floats gate_up, int kind, FloatsOut out) {
    require(gate_up, "gate_up", 2);
    require(out, "out", 2);
    require_size(out, "out", 0, static_cast<int64_t>(gate_up.shape(0)));
    require_size(gate_up, "gate_up", 1, 2 * static_cast<int64_t>(out.shape(1)));
    nb::gil_scoped_release unlocked;
    rt.gated_activation(gate_up.data(), static_cast<Activation>(kind), static_cast<int64_t>(out.shape(0)),
                        static_cast<int64_t>(out.shape(1)), out.data());
}

void add(Runtime& rt, FloatsOut x, Floats y) {
    require(x, "x", 2);
    require(y, "y", 2);
    for (size_t i = 0; i < 2; ++i) require_size(y, "y", i, static_cast<int64_t>(x.shape(i)));
    nb::gil_scoped_release unlocked;
    rt.add(x.data(), y.data(), static_cast<int64_t>(x.shape(0) * x.shape(1)));
}

double time_reads(Runtime& rt, RawBytes data) {
    require(data, "data", 1);
    nb::gil_scoped_release unlocked;
    return rt.time_reads(data.data(), static_cast<int64_t>(data.shape(0)));
}

std::tuple<double, double> time_arithmetic(Runtime& rt, int kind, int64_t rounds) {
    nb::gil_scoped_release unlocked;
    double operations = 0;
    const double seconds = rt.time_arithmetic(static_cast<Arithmetic>(kind), rounds, &operations);
    return {seconds, operations};
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "kvern's CPU kernels; use kvern.kernels.native.NativeBackend";
    m.def("available_paths", &available_paths, "Kernel paths that run on this machine, best first.");
    nb::class_<Weight>(m, "Weight", "A matrix in the kernels' interleaved form.")
        .def_prop_ro("rows", [](const Weight& w) { return w.rows; })
        .def_prop_ro("cols", [](const Weight& w) { return w.cols; })
        .def_prop_ro("nbytes_owned", [](const Weight& w) { return w.bytes; });
    nb::class_<Runtime>(m, "Runtime", "A thread pool and the kernels of one path.")
        .def(nb::init<int, const std::string&>(), nb::arg("num_threads"), nb::arg("path"))
        .def_prop_ro("path", [](const Runtime& r) { return std::string(r.path()); })
        .def_prop_ro("num_threads", &Runtime::num_threads)
        .def("prepare", &prepare)
        .def("matmul", &matmul, nb::arg("x").noconvert(), nb::arg("weight"), nb::arg("out").noconvert())
        .def("embed", &embed, nb::arg("weight"), nb::arg("ids").noconvert(), nb::arg("out").noconvert())
        .def("rms_norm", &rms_norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"),
             nb::arg("out").noconvert())
        .def("rotary", &rotary, nb::arg("x").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("cos").noconvert(), nb::arg("sin").noconvert(), nb::arg("interleaved"))
        .def("append", &append, nb::arg("x").noconvert(), nb::arg("stream"), nb::arg("slots").noconvert())
        .def("attend", &attend, nb::arg("q").noconvert(), nb::arg("keys"), nb::arg("values"),
             nb::arg("cu_seqlens").noconvert(), nb::arg("seq_lens").noconvert(), nb::arg("tables").noconvert(),
             nb::arg("params"), nb::arg("sinks").none(), nb::arg("out").noconvert())
        .def("gated_activation", &gated_activation, nb::arg("gate_up").noconvert(), nb::arg("kind"),
             nb::arg("out").noconvert())
        .def("add", &add, nb::arg("x").noconvert(), nb::arg("y").noconvert())
        .def("time_reads", &time_reads, "Seconds to read the bytes once with all threads.")
        .def("time_arithmetic", &time_arithmetic, "(seconds, operations) of a loop in registers.");
}
