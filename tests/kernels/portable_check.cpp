// Runs the portable path on fixed inputs and prints a hash of every result's bytes, one name to a line.
// Builds for different processors must print the same: test_native_arm.py compares them. Where the C library
// computes (the exact GELU asks it for erfc) the line is "near", the name and the numbers themselves.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu.h"
#include "family_types.h"
#include "half.h"
#include "ops_families.h"
#include "runtime.h"

namespace {

using namespace kvern;
using Floats = std::vector<float>;
using Raw = std::vector<uint8_t>;

constexpr int kThreads = 4;
const StreamType kFloatTypes[] = {StreamType::FP32, StreamType::FP16, StreamType::BF16};

void report(const std::string& name, const void* data, size_t bytes) {
    uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
    const auto* p = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * 0x100000001b3ull;
    std::printf("%-36s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}

template <class T>
void report(const std::string& name, const std::vector<T>& v) {
    report(name, v.data(), v.size() * sizeof(T));
}

void report_near(std::string name, const Floats& v) {
    for (char& c : name) c = c == ' ' ? '_' : c;
    std::printf("near %s", name.c_str());
    for (float x : v) std::printf(" %a", static_cast<double>(x));
    std::printf("\n");
}

// The same numbers everywhere, unlike the standard library's distributions.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t bits() {  // splitmix64
        uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    float number(float size) {  // -size..size
        return (static_cast<float>(bits() >> 40) * 0x1p-23f - 1.0f) * size;
    }
    Floats numbers(size_t count, float size) {
        Floats v(count);
        for (float& x : v) x = number(size);
        return v;
    }

private:
    uint64_t state_;
};

void check_conversions() {
    Floats wide;
    std::vector<uint16_t> fp16, bf16;
    for (uint32_t h = 0; h < 65536; ++h) wide.push_back(fp16_to_float(static_cast<uint16_t>(h)));
    for (uint64_t u = 0; u < (1ull << 32); u += 2039) {
        const float x = bits_float(static_cast<uint32_t>(u));
        fp16.push_back(float_to_fp16(x));
        bf16.push_back(float_to_bf16(x));
    }
    report("convert/from fp16", wide);
    report("convert/to fp16", fp16);
    report("convert/to bf16", bf16);
}

void check_rows(const KernelTable& k) {
    Random random(1);
    const int64_t rows = 5, cols = 160;
    const Floats x = random.numbers(rows * 2 * cols, 6.0f), weight = random.numbers(cols, 1.0f);
    std::vector<int8_t> codes(rows * cols);
    std::vector<BlockMeta> meta(rows * cols / kBlock);
    k.quantise_rows(x.data(), cols, 0, rows, codes.data(), meta.data());
    report("rows/quantise codes", codes);
    report("rows/quantise scales", meta);
    for (int64_t n : {cols, cols - 7}) {
        const std::string of = "/" + std::to_string(n);
        Floats out(rows * n);
        k.rms_norm(x.data(), weight.data(), 1e-5f, n, 0, rows, out.data());
        report("rows/rms_norm" + of, out);
        for (int kind = 0; kind < 3; ++kind) {
            k.gated_activation(x.data(), static_cast<Activation>(kind), n, 0, rows, out.data());
            const std::string name = "rows/activation " + std::to_string(kind) + of;
            static_cast<Activation>(kind) == Activation::GELU ? report_near(name, out) : report(name, out);
        }
        k.add(out.data(), x.data(), 3, rows * n);
        report("rows/add" + of, out);
    }
    const int32_t positions[rows] = {0, 3, 1, 7, 4};
    const int half = 20;
    const Floats cos = random.numbers(8 * half, 1.0f), sin = random.numbers(8 * half, 1.0f);
    for (bool interleaved : {false, true}) {
        Floats turned = x;
        k.rotary(turned.data(), 2 * cols, 3, 50, positions, cos.data(), sin.data(), half, interleaved, 0, rows);
        report(interleaved ? "rows/rotary interleaved" : "rows/rotary", turned);
    }
}

// Random codes whose 16-bit scales are sane.
Raw raw_weight(ElementType type, int64_t rows, int64_t cols, Random& random) {
    struct Form {
        int64_t features, bytes;
        std::vector<int> scales;
    };
    static const Form forms[] = {{1, 4, {}},      {1, 2, {}},       {1, 2, {}},       {32, 34, {0}},
                                 {32, 18, {0}},   {32, 20, {0, 2}}, {32, 22, {0}},    {32, 24, {0, 2}},
                                 {256, 144, {0, 2}}, {256, 176, {0, 2}}, {256, 210, {208}}};
    const Form& form = forms[static_cast<int>(type)];
    Raw raw(static_cast<size_t>(rows * raw_row_bytes(type, cols)));
    for (uint8_t& b : raw) b = static_cast<uint8_t>(random.bits());
    for (size_t at = 0; at < raw.size(); at += static_cast<size_t>(form.bytes)) {
        const float x = random.number(1.0f);
        const uint16_t small = float_to_fp16(x * 0.02f), half = float_to_fp16(x), brain = float_to_bf16(x);
        for (int s : form.scales) std::memcpy(&raw[at + static_cast<size_t>(s)], &small, 2);
        if (type == ElementType::F32) std::memcpy(&raw[at], &x, 4);
        if (type == ElementType::F16) std::memcpy(&raw[at], &half, 2);
        if (type == ElementType::BF16) std::memcpy(&raw[at], &brain, 2);
    }
    return raw;
}

void check_products(Runtime& runtime) {
    const int64_t rows = 150, cols = 512;
    for (int t = 0; t <= static_cast<int>(ElementType::Q6_K); ++t) {
        const auto type = static_cast<ElementType>(t);
        Random random(100 + static_cast<uint64_t>(t));
        const Raw raw = raw_weight(type, rows, cols, random);
        for (const auto& [form, label] : {std::pair{WeightForm::STORED, "/"}, std::pair{WeightForm::FLOAT, " as float/"},
                                          std::pair{WeightForm::PAIRS, " in bf16/"}}) {
            const auto weight = runtime.prepare({{type, rows, raw.data()}}, cols, form);
            for (int64_t tokens : {1, 2, 13}) {
                const Floats x = random.numbers(static_cast<size_t>(tokens * cols), 3.0f);
                Floats out(static_cast<size_t>(tokens * rows));
                runtime.run(std::make_unique<MatmulOp>(*weight, x.data(), out.data()), tokens, nullptr, nullptr);
                report("matmul/" + std::string(type_name(type)) + label + std::to_string(tokens), out);
            }
            if (form != WeightForm::STORED) continue;
            const int32_t ids[] = {0, 149, 77};
            Floats out(3 * cols);
            runtime.run(std::make_unique<EmbedOp>(*weight, out.data()), 3, ids, nullptr);
            report("embed/" + std::string(type_name(type)), out);
        }
    }
}

constexpr int kKeyHeads = 2, kPageTokens = 16, kPages = 48, kSeqs = 2, kMaxTokens = 400;

// One stream of one layer and what lies behind it.
struct Stream {
    Raw pages, open, rows;
    StreamView view{};

    Stream(StreamType type, int dim) {
        const int64_t width = type == StreamType::FP32 ? 4 : type == StreamType::INT8 ? 1 : 2;
        const int64_t numbers = static_cast<int64_t>(kKeyHeads) * kPageTokens * dim;
        view.page_bytes = numbers * width + kKeyHeads * kPageTokens * 4;
        pages.assign(static_cast<size_t>(kPages * view.page_bytes), 0xff);  // NaN wherever nothing was appended
        view.pages = pages.data();
        view.num_blocks = kPages;
        view.type = type;
        view.num_heads = kKeyHeads;
        view.block_size = kPageTokens;
        view.dim = dim;
        if (type != StreamType::INT8) return;
        open.assign(static_cast<size_t>(kSeqs * numbers * 2), 0xff);
        rows.assign(static_cast<size_t>(2 * kMaxTokens * kKeyHeads * dim), 0xff);
        view.scale_offset = numbers;
        view.open_pages = open.data();
        view.open_page_bytes = numbers * 2;
        view.num_seats = kSeqs;
        view.open_rows = rows.data();
        view.max_rows = kMaxTokens;
    }
};

// Two sequences, the first `lengths[0]` tokens long and so on, of which the last `fresh` are this step's.
struct Batch {
    std::vector<int32_t> starts{0}, lengths, table, positions, seats{1, 0};
    std::vector<int64_t> slots;
    StepBatch step{};

    Batch(std::vector<int32_t> seq_lens, const std::vector<int32_t>& fresh) : lengths(std::move(seq_lens)) {
        const int stride = (kPages - 1) / kSeqs;
        for (int s = 0; s < kSeqs; ++s) {  // pages 1 and up, those of the sequences in turn, the later the lower
            for (int i = 0; i < stride; ++i) table.push_back(1 + (stride - 1 - i) * kSeqs + s);
            for (int32_t p = lengths[s] - fresh[s]; p < lengths[s]; ++p) {
                positions.push_back(p);
                slots.push_back(static_cast<int64_t>(table[s * stride + p / kPageTokens]) * kPageTokens + p % kPageTokens);
            }
            starts.push_back(static_cast<int32_t>(positions.size()));
        }
        step = {starts.data(), lengths.data(), kSeqs, table.data(), stride, positions.data(), slots.data(), seats.data()};
    }
    int64_t tokens() const { return static_cast<int64_t>(positions.size()); }
};

void attend_step(Runtime& runtime, const std::string& name, Stream& keys, Stream& values, const AttendParams& params,
                 const Batch& batch, Random& random) {
    const int heads = 6, key_dim = keys.view.dim, value_dim = values.view.dim;
    const int64_t tokens = batch.tokens();
    for (Stream* s : {&keys, &values}) {
        const int64_t stride = static_cast<int64_t>(kKeyHeads) * s->view.dim;
        const Floats x = random.numbers(static_cast<size_t>(tokens * stride), 1.5f);
        runtime.run(std::make_unique<AppendOp>(x.data(), stride, s->view, 0), tokens, nullptr, &batch.step);
    }
    const Floats q = random.numbers(static_cast<size_t>(tokens * heads * key_dim), 1.5f);
    Floats out(static_cast<size_t>(tokens * heads * value_dim));
    auto op = std::make_unique<AttendOp>();
    op->shape = {keys.view, values.view, params, (value_dim + 15) / 16 * 16};
    op->num_heads = heads;
    op->q = q.data();
    op->q_token_stride = static_cast<int64_t>(heads) * key_dim;
    op->out = out.data();
    op->out_token_stride = static_cast<int64_t>(heads) * value_dim;
    const int64_t pairs = runtime.run(std::move(op), tokens, nullptr, &batch.step);
    report(name + " pairs", &pairs, sizeof pairs);
    report(name, out);
}

void check_attention(Runtime& runtime) {
    const Floats sinks = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f, -0.25f};
    const AttendParams choices[] = {{0.125f, 0, 0, 0, 0.0f, nullptr}, {0.2f, 70, 0, 4, 20.0f, sinks.data()},
                                    {0.15f, 0, 128, 0, 0.0f, sinks.data()}};
    const Batch prompt({290, 37}, {290, 37}), next({291, 38}, {1, 1});
    for (int type = 0; type <= static_cast<int>(StreamType::INT8); ++type) {
        for (int c = 0; c < 3; ++c) {
            Random random(static_cast<uint64_t>(200 + 10 * type + c));
            const auto stored = static_cast<StreamType>(type);
            Stream keys(stored, c == 1 ? 40 : 64), values(stored, c == 2 ? 24 : 64);
            const std::string name = "attend/" + std::to_string(type) + "/" + std::to_string(c);
            attend_step(runtime, name + " prompt", keys, values, choices[c], prompt, random);
            attend_step(runtime, name + " next", keys, values, choices[c], next, random);
            report(name + " pages", keys.pages);
        }
    }
}

void check_gates(const FamilyKernels& k) {
    Random random(3);
    const int64_t rows = 4, cols = 75;
    const Floats a = random.numbers(rows * cols, 8.0f), b = random.numbers(rows * cols, 3.0f);
    for (int kind = 0; kind <= static_cast<int>(GateKind::CLAMPED_SWIGLU); ++kind) {
        Floats out(rows * cols);
        const GateRows g{a.data(), cols, b.data(), cols, static_cast<GateKind>(kind), false, 1.702f, 7.0f, cols,
                         out.data(), cols};
        k.gate_rows(g, 0, rows);
        const std::string name = "gate/" + std::to_string(kind);
        g.kind == GateKind::GELU ? report_near(name, out) : report(name, out);
    }
    for (bool is_centered : {false, true}) {
        Floats out(rows * cols);
        const NormHeads n{a.data(), cols, 25, 3, 25, b.data(), 25, b.data() + cols, 1e-6f, is_centered, out.data(),
                          cols, 25};
        k.norm_heads(n, 0, rows);
        report(is_centered ? "norm/centred" : "norm/rms", out);
    }
    Floats capped = a;
    k.softcap(capped.data(), 5.0f, 0, rows * cols);
    report("softcap", capped);
    for (int scoring = 0; scoring <= static_cast<int>(Scoring::SIGMOID_CHOSEN); ++scoring) {
        const bool grouped = scoring == static_cast<int>(Scoring::SIGMOID);
        const Routing r{static_cast<Scoring>(scoring), 60, 4, grouped ? 6 : 1, grouped ? 3 : 1, grouped, true, 2.5f,
                        grouped ? b.data() : nullptr, nullptr};
        std::vector<int32_t> ids(rows * 4);
        Floats weights(rows * 4);
        k.route(r, a.data(), 0, rows, ids.data(), weights.data());
        report("route/" + std::to_string(scoring) + " ids", ids);
        report("route/" + std::to_string(scoring) + " weights", weights);
    }
}

constexpr int64_t kStateTokens = 9;
const int32_t kStatePages[] = {5, 2, 7, 1, 3, 6, 4};
constexpr int64_t kStatePageBytes = 2048;

// A state of `numbers` numbers in pages, begun as zeros.
StatePlace place_of(Raw& pages, StreamType type, int64_t numbers) {
    pages.assign(8 * kStatePageBytes, 0);
    return {pages.data(), kStatePageBytes, 8, 64, numbers * (type == StreamType::FP32 ? 4 : 2), type};
}

void check_states(const FamilyKernels& k, StreamType type) {
    Random random(4);
    const std::string of = "/" + std::to_string(static_cast<int>(type));
    const StateRows rows{kStatePages, 0, kStateTokens};
    const Floats x = random.numbers(kStateTokens * 160, 1.0f), small = random.numbers(800, 1.0f);
    const Bytes scratch = allocate_bytes(64 * kStateLanes * 4);
    Floats out(kStateTokens * 160);
    Raw pages;
    const ConvolveShape c{x.data(), 160, 100, 4, small.data(), small.data() + 400, true, out.data(), 160,
                          place_of(pages, type, 100 * 3)};
    for (int64_t block = 0; block < 100; block += kConvLanes) k.convolve(c, rows, block);
    report("convolve" + of, out);
    report("convolve state" + of, pages);
    // One key head and two value heads: 32 features of q and k, 40 columns of v.
    const DeltaShape d{x.data(), 160, small.data(), 4, small.data() + 100, small.data() + 110, 1, 2, 32, 40,
                       out.data(), 80, place_of(pages, type, 2 * 32 * 40)};
    for (int head = 0; head < 2; ++head) {
        for (int64_t column = 0; column < 40; column += kStateLanes) k.delta(d, rows, head, column, scratch.get());
    }
    report("delta" + of, out);
    report("delta state" + of, pages);
    const ScanShape s{x.data(), 160, small.data(), 2, small.data() + 100, small.data() + 110, small.data() + 120,
                      0.0f, 100.0f, 2, 1, 40, 24, out.data(), 80, place_of(pages, type, 2 * 40 * 24)};
    for (int head = 0; head < 2; ++head) {
        for (int64_t row = 0; row < 40; row += kStateLanes) k.scan(s, rows, head, row, scratch.get());
    }
    report("scan" + of, out);
    report("scan state" + of, pages);
}

// The pool alone, over and over: every unit of every region is worked on once and seen afterwards.
void check_pool() {
    ThreadPool pool(kThreads);
    std::vector<int64_t> sums(1000);
    Shares shares;
    for (int64_t turn = 0; turn < 300; ++turn) {
        shares.reset(1000, 8, kThreads);
        pool.run(true, 0, [&](const Worker& worker) {
            int64_t begin, end;
            while (shares.take(worker.id, begin, end)) {
                for (int64_t i = begin; i < end; ++i) sums[static_cast<size_t>(i)] += turn * i;
            }
        });
    }
    report("pool", sums);
}

}  // namespace

int main() {
    Runtime runtime(kThreads, "portable");
    const KernelTable* k = select_path("portable");
    check_conversions();
    check_rows(*k);
    check_products(runtime);
    check_attention(runtime);
    check_gates(*k->families);
    for (StreamType type : kFloatTypes) check_states(*k->families, type);
    check_pool();
    return 0;
}
