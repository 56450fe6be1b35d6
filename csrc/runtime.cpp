#include "runtime.h"

#include <algorithm>
#include <atomic>

#include "cpu.h"

namespace kvern {

namespace {

constexpr int64_t kSmallWork = 32768;  // element operations that are not worth waking threads for
constexpr int64_t kShareQuantising = 4;  // up to this many rows every thread quantises for itself

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace

Runtime::Runtime(int num_threads, const std::string& path)
    : kernels_(select_path(path)), pool_(num_threads) {}

template <class Rows>
void Runtime::over_rows(int64_t rows, int64_t work_per_row, Rows&& f) {
    if (rows <= 0) return;
    if (rows == 1 || rows * work_per_row < kSmallWork || num_threads() == 1) {
        f(int64_t{0}, rows);
        return;
    }
    Counter next;
    const int64_t chunk = std::max<int64_t>(1, rows / (4 * num_threads()));
    pool_.run(num_threads(), 0, [&](const Worker&) {
        int64_t begin, end;
        while (next.take(rows, chunk, begin, end)) f(begin, end);
    });
}

void Runtime::grow(Bytes& buffer, size_t& have, size_t need) {
    if (need <= have) return;
    buffer = nullptr;
    have = 0;
    buffer = allocate_bytes(need);
    have = need;
}

std::unique_ptr<Weight> Runtime::prepare(const std::vector<RawTensor>& tensors, int64_t cols, bool as_float) {
    auto w = std::make_unique<Weight>(tensors, cols, as_float);
    over_rows(w->units, cols * kGroupRows, [&](int64_t begin, int64_t end) { w->pack(tensors, begin, end); });
    return w;
}

void Runtime::matmul(const Weight& w, const float* x, int64_t num_tokens, float* out) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (num_tokens == 0) return;
    const int64_t blocks = w.cols / kBlock;
    const size_t code_bytes = w.has_quantised ? static_cast<size_t>(round_up(num_tokens * w.cols, 64)) : 0;
    const size_t meta_bytes = w.has_quantised ? static_cast<size_t>(num_tokens * blocks) * sizeof(BlockMeta) : 0;
    const bool own = num_tokens <= kShareQuantising;  // quantising twice is cheaper than meeting
    if (!own) grow(quant_, quant_bytes_, code_bytes + meta_bytes);

    const int64_t work = num_tokens * w.rows * w.cols;
    const int threads = work < kSmallWork ? 1 : num_threads();
    const int64_t least = num_tokens == 1 ? 1 : 2;  // groups go in pairs when there are tokens to share them
    // Activations of this many tokens stay in the second-level cache while weights pass.
    const int64_t row_bytes = w.cols * (w.has_float ? 4 : 1);
    const int64_t tokens_at_once = std::max<int64_t>(48, (384 << 10) / row_bytes / 12 * 12);
    Counter next_row, next_unit;
    auto job = [&](const Worker& worker) {
        uint8_t* buffer = own ? worker.scratch : quant_.get();
        auto* codes = reinterpret_cast<int8_t*>(buffer);
        auto* meta = reinterpret_cast<BlockMeta*>(buffer + code_bytes);
        int64_t begin, end;
        if (w.has_quantised && own) {
            kernels_->quantise_rows(x, w.cols, 0, num_tokens, codes, meta);
        } else if (w.has_quantised) {
            while (next_row.take(num_tokens, 4, begin, end)) {
                kernels_->quantise_rows(x, w.cols, begin, end, codes, meta);
            }
            worker.barrier();
        }
        while (next_unit.take_guided(w.units, threads, least, begin, end)) {
            for (int64_t u = begin; u < end;) {
                const Segment& s = w.segment_of_unit(u);
                const int64_t first = (u - s.first_unit) * s.unit_groups;
                const int64_t units = std::min(end, s.first_unit + s.units) - u;
                const int64_t count = std::min(units * s.unit_groups, s.groups - first);
                const int64_t row = first * kGroupRows;
                const uint8_t* data = s.data.get() + first * s.group_bytes;
                for (int64_t t = 0; t < num_tokens; t += tokens_at_once) {
                    const int64_t n = std::min(tokens_at_once, num_tokens - t);
                    float* to = out + t * w.rows + s.first_row + row;
                    if (is_quantised(s.type)) {
                        const QuantRows q{codes + t * w.cols, meta + t * blocks, w.cols};
                        kernels_->matmul_quant(s.type, data, s.group_bytes, count, s.rows - row, q, n, to, w.rows);
                    } else {
                        kernels_->matmul_float(s.type, data, s.group_bytes, count, s.rows - row,
                                               x + t * w.cols, w.cols, n, to, w.rows);
                    }
                }
                u += units;
            }
        }
    };
    pool_.run(threads, own ? code_bytes + meta_bytes : 0, job);
}

void Runtime::embed(const Weight& w, const int32_t* ids, int64_t num_tokens, float* out) {
    over_rows(num_tokens, w.cols * 4, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) w.decode_row(ids[t], out + t * w.cols);
    });
}

void Runtime::rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t cols, float* out) {
    over_rows(rows, cols, [&](int64_t begin, int64_t end) {
        kernels_->rms_norm(x, weight, eps, cols, begin, end, out);
    });
}

void Runtime::rotary(float* x, int64_t token_stride, int64_t num_tokens, int heads, int dim,
                     const int32_t* positions, const float* cos, const float* sin, int half,
                     bool interleaved) {
    over_rows(num_tokens, static_cast<int64_t>(heads) * half * 4, [&](int64_t begin, int64_t end) {
        kernels_->rotary(x, token_stride, heads, dim, positions, cos, sin, half, interleaved, begin, end);
    });
}

void Runtime::append(const float* x, int64_t token_stride, int64_t num_tokens, const StreamView& stream,
                     const int64_t* slots) {
    over_rows(num_tokens, static_cast<int64_t>(stream.num_heads) * stream.dim, [&](int64_t begin, int64_t end) {
        kernels_->append(x, token_stride, stream, slots, begin, end);
    });
}

void Runtime::gated_activation(const float* gate_up, Activation kind, int64_t rows, int64_t cols, float* out) {
    over_rows(rows, cols * 8, [&](int64_t begin, int64_t end) {
        kernels_->gated_activation(gate_up, kind, cols, begin, end, out);
    });
}

void Runtime::add(float* x, const float* y, int64_t count) {
    constexpr int64_t kPiece = 4096;
    over_rows((count + kPiece - 1) / kPiece, kPiece, [&](int64_t begin, int64_t end) {
        kernels_->add(x, y, begin * kPiece, std::min(end * kPiece, count));
    });
}

}  // namespace kvern
