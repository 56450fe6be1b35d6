// Python bindings. Shapes are checked here; a wrong one raises ValueError with the numbers.
#include <cstdlib>

#include "bind.h"
#include "cpu.h"

using namespace kvern;

namespace {

struct Recorded {
    std::unique_ptr<Program> program;
    std::vector<std::any> kept;
};

using RawTuple = std::tuple<int, int64_t, RawBytes>;  // element type, rows, bytes

std::unique_ptr<Weight> prepare(Handle& h, const std::vector<RawTuple>& parts, int64_t cols, int form) {
    if (form < 0 || form > static_cast<int>(WeightForm::PAIRS)) fail("weights form ", form, " is not one of 0, 1 and 2");
    std::vector<RawTensor> tensors;
    for (const auto& [type_index, rows, data] : parts) {
        if (type_index < 0 || type_index >= static_cast<int>(ElementType::BF16_PAIRS)) fail("element type ", type_index, " is not a file's");
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
    return h.runtime.prepare(tensors, cols, static_cast<WeightForm>(form));
}

void matmul(Handle& h, Floats x, nb::object weight, FloatsOut out) {
    const auto& w = nb::cast<const Weight&>(weight);
    require(x, "x", 2);
    require(out, "out", 2);
    require_size(x, "x", 1, w.cols);
    require_size(out, "out", 0, static_cast<int64_t>(x.shape(0)));
    require_size(out, "out", 1, w.rows);
    h.keep(x, weight, out);
    run(h, std::make_unique<MatmulOp>(w, x.data(), out.data()), static_cast<int64_t>(x.shape(0)));
}

void embed(Handle& h, nb::object weight, Ints ids, FloatsOut out) {
    const auto& w = nb::cast<const Weight&>(weight);
    check_ids(ids, w.rows);
    require(out, "out", 2);
    const auto count = static_cast<int64_t>(ids.shape(0));
    require_size(out, "out", 0, count);
    require_size(out, "out", 1, w.cols);
    h.keep(weight, out);
    run(h, std::make_unique<EmbedOp>(w, out.data()), count, ids.data());
}

void rms_norm(Handle& h, Floats x, Floats weight, float eps, FloatsOut out) {
    require(x, "x", 2);
    require(weight, "weight", 1);
    require(out, "out", 2);
    require_size(weight, "weight", 0, static_cast<int64_t>(x.shape(1)));
    for (size_t i = 0; i < 2; ++i) require_size(out, "out", i, static_cast<int64_t>(x.shape(i)));
    h.keep(x, weight, out);
    const auto cols = static_cast<int64_t>(x.shape(1));
    run(h, std::make_unique<NormOp>(x.data(), weight.data(), eps, cols, 1, out.data()),
        static_cast<int64_t>(x.shape(0)));
}

void rotary(Handle& h, FloatsOut x, Ints positions, Floats cos, Floats sin, bool interleaved) {
    require_rows(x, "x", 3);
    require(positions, "positions", 1);
    require(cos, "cos", 2);
    require(sin, "sin", 2);
    const auto tokens = static_cast<int64_t>(x.shape(0));
    require_size(positions, "positions", 0, tokens);
    for (size_t i = 0; i < 2; ++i) require_size(sin, "sin", i, static_cast<int64_t>(cos.shape(i)));
    if (2 * cos.shape(1) > x.shape(2)) fail("rotary dim ", 2 * cos.shape(1), " exceeds head dim ", x.shape(2));
    check_positions(positions.data(), tokens, static_cast<int64_t>(cos.shape(0)));
    auto op = std::make_unique<RotaryOp>();
    op->x = x.data();
    op->token_stride = x.stride(0);
    op->heads = static_cast<int>(x.shape(1));
    op->head_stride = static_cast<int>(x.stride(1));
    op->half = static_cast<int>(cos.shape(1));
    op->cos = cos.data();
    op->sin = sin.data();
    op->table_rows = static_cast<int64_t>(cos.shape(0));
    op->interleaved = interleaved;
    h.keep(x, cos, sin);
    StepBatch batch{};
    batch.positions = positions.data();
    run(h, std::move(op), tokens, nullptr, &batch);
}

// (pages, offset, rows) of a narrow stream's open blocks
using OpenTuple = std::tuple<Array<uint8_t>, int64_t, Array<uint8_t>>;
// (pages, offset, dtype index, num_heads, block_size, dim, scale offset, open blocks)
using StreamTuple = std::tuple<Array<uint8_t>, int64_t, int, int, int, int, int64_t, std::optional<OpenTuple>>;

void add_open_form(StreamView& s, const OpenTuple& t, const char* name) {
    const auto& [pages, offset, rows] = t;
    require(pages, "open pages", 2);
    require(rows, "row buffer", 3);
    const int64_t count = static_cast<int64_t>(s.num_heads) * s.block_size;
    s.open_pages = pages.data();
    s.open_page_bytes = static_cast<int64_t>(pages.shape(1));
    s.open_offset = offset;
    s.num_seats = static_cast<int64_t>(pages.shape(0));
    s.open_rows = rows.data();
    s.max_rows = static_cast<int64_t>(rows.shape(0));
    require_size(rows, "row buffer", 1, s.num_heads);
    require_size(rows, "row buffer", 2, 2 * static_cast<int64_t>(s.dim));
    if (offset < 0 || offset + count * s.dim * 2 > s.open_page_bytes) {
        fail("open ", name, " of ", count * s.dim * 2, " bytes at offset ", offset, " do not fit into pages of ",
             s.open_page_bytes);
    }
    if (s.scale_offset < 0 || s.scale_offset + count * 4 > s.page_bytes) {
        fail("scales of ", name, " of ", count * 4, " bytes at offset ", s.scale_offset, " do not fit into pages of ",
             s.page_bytes);
    }
}

StreamView stream_view(const StreamTuple& t, const char* name) {
    const auto& [pages, offset, type, heads, block_size, dim, scale_offset, open] = t;
    require(pages, name, 2);
    StreamView s{};
    s.pages = pages.data();
    s.page_bytes = static_cast<int64_t>(pages.shape(1));
    s.num_blocks = static_cast<int64_t>(pages.shape(0));
    s.offset = offset;
    s.type = static_cast<StreamType>(type);
    s.num_heads = heads;
    s.block_size = block_size;
    s.dim = dim;
    s.scale_offset = scale_offset;
    const int64_t width = s.type == StreamType::FP32 ? 4 : s.type == StreamType::INT8 ? 1 : 2;
    const int64_t bytes = static_cast<int64_t>(heads) * block_size * dim * width;
    if (heads < 1 || block_size < 1 || dim < 1 || offset < 0 || offset + bytes > s.page_bytes) {
        fail(name, " of ", bytes, " bytes at offset ", offset, " do not fit into pages of ", s.page_bytes);
    }
    if ((s.type == StreamType::INT8) != open.has_value()) fail(name, ": int8, and only int8, has open blocks");
    if (open) add_open_form(s, *open, name);
    return s;
}

void check_slots(const int64_t* slots, int64_t tokens, int64_t block_size, int64_t num_blocks) {
    for (int64_t i = 0; i < tokens; ++i) {
        if (slots[i] < block_size || slots[i] >= num_blocks * block_size) {
            fail("slot ", slots[i], " lies outside blocks 1 to ", num_blocks - 1);
        }
    }
}

// A narrow stream's seats and, with `is_append`, the blocks that are sealed.
void check_narrow(const StepBatch& b, int64_t tokens, const Program::Slots& to, bool is_append) {
    if (!b.seats) fail("narrow keys and values need seats");
    if (tokens > to.max_rows) fail(tokens, " tokens, the row buffer holds ", to.max_rows);
    for (int64_t s = 0; s < b.num_seqs; ++s) {
        const int64_t end = b.seq_lens[s], begin = end - (b.cu_seqlens[s + 1] - b.cu_seqlens[s]);
        if (begin == end) continue;
        if (b.seats[s] < 0 || b.seats[s] >= to.num_seats) {
            fail("seat ", b.seats[s], " is not one of ", to.num_seats);
        }
        if (!is_append) continue;
        const int64_t size = to.block_size;
        if (begin % size && end % size && begin / size != end / size) {
            fail("positions ", begin, "..", end - 1, " begin inside a block of ", size,
                 " tokens and end inside a later one: the open block would be overwritten while it is read");
        }
        for (int64_t i = begin / size; i < end / size; ++i) {
            const int32_t block = b.block_tables[s * b.table_stride + i];
            if (block < 1 || block >= to.num_blocks) fail("block ", block, " lies outside blocks 1 to ", to.num_blocks - 1);
        }
    }
}

Program::Slots slots_of(const StreamView& s) { return {0, s.block_size, s.num_blocks, s.num_seats, s.max_rows}; }

void keep_stream(Handle& h, const StreamTuple& t) {
    h.keep(std::get<0>(t));
    if (const auto& open = std::get<7>(t)) h.keep(std::get<0>(*open), std::get<2>(*open));
}

void append(Handle& h, Floats x, const StreamTuple& stream, const BatchTuple& batch) {
    const StreamView s = stream_view(stream, "stream");
    require(x, "x", 3, true);
    require_size(x, "x", 1, s.num_heads);
    require_size(x, "x", 2, s.dim);
    const auto tokens = static_cast<int64_t>(x.shape(0));
    require_size(std::get<4>(batch), "slot_mapping", 0, tokens);
    const StepBatch step = step_batch(batch, tokens, s.is_narrow() ? s.block_size : 0);
    if (s.is_narrow()) {
        check_narrow(step, tokens, slots_of(s), true);
    } else {
        check_slots(step.slots, tokens, s.block_size, s.num_blocks);
    }
    h.keep(x);
    keep_stream(h, stream);
    run(h, std::make_unique<AppendOp>(x.data(), x.stride(0), s, 0), tokens, nullptr, &step);
}

// (scale, window, chunk, num_sink_tokens, softcap); 0 means none
using ParamTuple = std::tuple<float, int64_t, int64_t, int64_t, float>;

int64_t refuse_bad_blocks(int64_t pairs) {
    if (pairs < 0) fail("a block table names no valid block for a visible key");
    return pairs;
}

int64_t attend(Handle& h, Floats q, const StreamTuple& keys, const StreamTuple& values, const BatchTuple& batch,
               const ParamTuple& params, std::optional<Floats> sinks, FloatsOut out) {
    auto op = std::make_unique<AttendOp>();
    AttendShape& shape = op->shape;
    shape.keys = stream_view(keys, "keys");
    shape.values = stream_view(values, "values");
    shape.value_dim_padded = (shape.values.dim + 15) / 16 * 16;
    if (shape.keys.num_heads != shape.values.num_heads || shape.keys.block_size != shape.values.block_size) {
        fail("keys and values differ in heads or block_size");
    }
    require(q, "q", 3, true);
    require(out, "out", 3, true);
    const auto tokens = static_cast<int64_t>(q.shape(0));
    const int num_heads = op->num_heads = static_cast<int>(q.shape(1));
    if (num_heads < 1 || num_heads % shape.keys.num_heads) {
        fail(num_heads, " query heads do not divide into ", shape.keys.num_heads, " KV heads");
    }
    require_size(q, "q", 2, shape.keys.dim);
    require_size(out, "out", 0, tokens);
    require_size(out, "out", 1, num_heads);
    require_size(out, "out", 2, shape.values.dim);
    const StepBatch step = step_batch(batch, tokens, shape.keys.block_size);
    for (const StreamView* s : {&shape.keys, &shape.values}) {
        if (s->is_narrow()) check_narrow(step, tokens, slots_of(*s), false);
    }
    auto& p = shape.params;
    std::tie(p.scale, p.window, p.chunk, p.num_sinks, p.softcap) = params;
    if (!(p.scale > 0.0f)) fail("scale is ", p.scale, ", expected a positive number");
    p.sink_logits = nullptr;
    if (sinks) {
        require(*sinks, "sink_logits", 1);
        require_size(*sinks, "sink_logits", 0, num_heads);
        p.sink_logits = sinks->data();
        h.keep(*sinks);
    }
    op->q = q.data();
    op->q_token_stride = q.stride(0);
    op->out = out.data();
    op->out_token_stride = out.stride(0);
    h.keep(q, out);
    keep_stream(h, keys);
    keep_stream(h, values);
    return refuse_bad_blocks(run(h, std::move(op), tokens, nullptr, &step));
}

void gated_activation(Handle& h, Floats gate_up, int kind, FloatsOut out) {
    require(gate_up, "gate_up", 2);
    require(out, "out", 2);
    require_size(out, "out", 0, static_cast<int64_t>(gate_up.shape(0)));
    require_size(gate_up, "gate_up", 1, 2 * static_cast<int64_t>(out.shape(1)));
    h.keep(gate_up, out);
    run(h, std::make_unique<GateOp>(gate_up.data(), static_cast<Activation>(kind),
                                    static_cast<int64_t>(out.shape(1)), out.data()),
        static_cast<int64_t>(out.shape(0)));
}

void add(Handle& h, FloatsOut x, Floats y) {
    require(x, "x", 2);
    require(y, "y", 2);
    for (size_t i = 0; i < 2; ++i) require_size(y, "y", i, static_cast<int64_t>(x.shape(i)));
    h.keep(x, y);
    run(h, std::make_unique<AddOp>(x.data(), y.data(), static_cast<int64_t>(x.shape(1))),
        static_cast<int64_t>(x.shape(0)));
}

void start_recording(Handle& h, Ints ids, const std::vector<BatchTuple>& batches) {
    require(ids, "token_ids", 1);
    const auto tokens = static_cast<int64_t>(ids.shape(0));
    std::vector<StepBatch> steps;
    for (const BatchTuple& b : batches) steps.push_back(step_batch(b, tokens, 0));
    h.kept.clear();
    h.runtime.start_recording(tokens, ids.data(), std::move(steps));
}

std::unique_ptr<Recorded> finish_recording(Handle& h, int64_t max_tokens) {
    auto recorded = std::make_unique<Recorded>();
    recorded->program = h.runtime.finish_recording(max_tokens);
    recorded->kept = std::move(h.kept);
    h.kept.clear();
    if (!recorded->program) return nullptr;
    return recorded;
}

int64_t run_program(Handle& h, const Recorded& recorded, Ints ids, const std::vector<BatchTuple>& batches) {
    const Program& program = *recorded.program;
    check_ids(ids, program.vocab());
    const auto tokens = static_cast<int64_t>(ids.shape(0));
    if (tokens > program.max_tokens()) fail(tokens, " tokens, the program's buffers hold ", program.max_tokens());
    if (static_cast<int>(batches.size()) != program.num_batches()) {
        fail(batches.size(), " batches, the program reads ", program.num_batches());
    }
    std::vector<StepBatch> steps;
    for (const BatchTuple& b : batches) {
        const int64_t block_size = program.block_size(static_cast<int>(steps.size()));
        require_size(std::get<3>(b), "positions", 0, tokens);
        require_size(std::get<4>(b), "slot_mapping", 0, tokens);
        steps.push_back(step_batch(b, tokens, block_size));
        check_positions(steps.back().positions, tokens, program.max_positions());
    }
    for (const auto& a : program.appended()) {
        const StepBatch& step = steps[static_cast<size_t>(a.group)];
        if (a.num_seats > 0) {
            check_narrow(step, tokens, a, true);
        } else {
            check_slots(step.slots, tokens, a.block_size, a.num_blocks);
        }
    }
    for (const auto& s : program.states()) check_entries(batches[static_cast<size_t>(s.group)], s.place);
    nb::gil_scoped_release unlocked;
    return h.runtime.run(program, tokens, ids.data(), std::move(steps));
}

std::string kernel_path() {
    const char* forced = std::getenv("KVERN_KERNEL_PATH");
    const std::string name = select_path(forced ? forced : "")->name;
    return name == "avx512" ? "avx512+vnni+bf16" : name;
}

double time_reads(Handle& h, RawBytes data) {
    require(data, "data", 1);
    nb::gil_scoped_release unlocked;
    return h.runtime.time_reads(data.data(), static_cast<int64_t>(data.shape(0)));
}

std::tuple<double, double> time_arithmetic(Handle& h, int kind, int64_t rounds) {
    nb::gil_scoped_release unlocked;
    double operations = 0;
    const double seconds = h.runtime.time_arithmetic(static_cast<Arithmetic>(kind), rounds, &operations);
    return {seconds, operations};
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "kvern's CPU kernels; use kvern.kernels.native.NativeBackend";
    m.def("kernel_path", &kernel_path, "The path that a backend uses here, with what it rests on.");
    m.def("available_paths", &available_paths, "Kernel paths that run on this machine, best first.");
    nb::class_<Weight>(m, "Weight", "A matrix in the kernels' interleaved form.")
        .def_prop_ro("rows", [](const Weight& w) { return w.rows; })
        .def_prop_ro("cols", [](const Weight& w) { return w.cols; })
        .def_prop_ro("nbytes_owned", [](const Weight& w) { return w.bytes; });
    nb::class_<Recorded>(m, "Program", "A recorded step.")
        .def_prop_ro("max_positions", [](const Recorded& r) { return r.program->max_positions(); })
        .def_prop_ro("max_tokens", [](const Recorded& r) { return r.program->max_tokens(); })
        .def_prop_ro("num_ops", [](const Recorded& r) { return r.program->ops().size(); });
    nb::class_<Handle> runtime(m, "Runtime", "A thread pool and the kernels of one path.");
    runtime.def(nb::init<int, const std::string&>(), nb::arg("num_threads"), nb::arg("path"))
        .def_prop_ro("path", [](const Handle& h) { return std::string(h.runtime.path()); })
        .def_prop_ro("num_threads", [](const Handle& h) { return h.runtime.num_threads(); })
        .def("prepare", &prepare)
        .def("matmul", &matmul, nb::arg("x").noconvert(), nb::arg("weight"), nb::arg("out").noconvert())
        .def("embed", &embed, nb::arg("weight"), nb::arg("ids").noconvert(), nb::arg("out").noconvert())
        .def("rms_norm", &rms_norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"),
             nb::arg("out").noconvert())
        .def("rotary", &rotary, nb::arg("x").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("cos").noconvert(), nb::arg("sin").noconvert(), nb::arg("interleaved"))
        .def("append", &append, nb::arg("x").noconvert(), nb::arg("stream").noconvert(),
             nb::arg("batch").noconvert())
        .def("attend", &attend, nb::arg("q").noconvert(), nb::arg("keys").noconvert(),
             nb::arg("values").noconvert(), nb::arg("batch").noconvert(), nb::arg("params"),
             nb::arg("sinks").none(), nb::arg("out").noconvert())
        .def("gated_activation", &gated_activation, nb::arg("gate_up").noconvert(), nb::arg("kind"),
             nb::arg("out").noconvert())
        .def("add", &add, nb::arg("x").noconvert(), nb::arg("y").noconvert())
        .def("start_recording", &start_recording, nb::arg("ids").noconvert(), nb::arg("batches").noconvert())
        .def("finish_recording", &finish_recording, nb::arg("max_tokens"))
        .def("run_program", &run_program, nb::arg("program"), nb::arg("ids").noconvert(),
             nb::arg("batches").noconvert(), "Attention's (row, visible key) pairs, or -1 for an invalid block.")
        .def("time_reads", &time_reads, "Seconds to read the bytes once with all threads.")
        .def("time_arithmetic", &time_arithmetic, "(seconds, operations) of a loop in registers.");
    bind_family_rows(runtime);
    bind_states(runtime);
    bind_grouped(m, runtime);
}
