// Row-wise operations: quantising activations, norms, rotary embedding, appending to the cache,
// gated activations.
#pragma once

namespace KVERN_PATH {

using kvern::Activation;
using kvern::BlockMeta;
using kvern::kBlock;
using kvern::StreamType;
using kvern::StreamView;

static void quantise_rows(const float* x, int64_t cols, int64_t row_begin, int64_t row_end, int8_t* q,
                          BlockMeta* meta) {
    const int64_t blocks = cols / kBlock;
    for (int64_t row = row_begin; row < row_end; ++row) {
        const float* xr = x + row * cols;
        int8_t* qr = q + row * cols;
        BlockMeta* mr = meta + row * blocks;
        for (int64_t b = 0; b < blocks; ++b) {
            const F lo = f_load(xr + b * kBlock);
            const F hi = f_load(xr + b * kBlock + 16);
            // x - x is 0, or NaN for an infinity or a NaN: they stay visible in the scale.
            const float poison = f_sum(f_add(f_sub(lo, lo), f_sub(hi, hi)));
            const float largest = f_hmax(f_max(f_abs(lo), f_abs(hi)));
            const float scale = largest / 127.0f + poison;
            const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
            const F inv = f_set1(inverse < 3e38f ? inverse : 0.0f);  // all but zero: below 2^-121
            const F low = f_set1(-127.0f);
            const F high = f_set1(127.0f);
            const I a = i_from_f(f_min(f_max(f_mul(lo, inv), low), high));
            const I c = i_from_f(f_min(f_max(f_mul(hi, inv), low), high));
            store_i8(qr + b * kBlock, a);
            store_i8(qr + b * kBlock + 16, c);
            const int32_t low_sum = i_sum(a);
            const int32_t sum = low_sum + i_sum(c);
            mr[b] = {scale, scale * static_cast<float>(sum), sum, low_sum};
        }
    }
}

static void rms_norm(const float* x, const float* weight, float eps, int64_t cols, int64_t row_begin,
                     int64_t row_end, float* out) {
    const int64_t whole = cols / 16 * 16;
    const int rest = static_cast<int>(cols - whole);
    for (int64_t row = row_begin; row < row_end; ++row) {
        const float* xr = x + row * cols;
        float* yr = out + row * cols;
        F acc = f_zero();
        for (int64_t i = 0; i < whole; i += 16) {
            const F v = f_load(xr + i);
            acc = f_fma(v, v, acc);
        }
        if (rest) {
            const F v = f_load_n(xr + whole, rest);
            acc = f_fma(v, v, acc);
        }
        const float mean = f_sum(acc) / static_cast<float>(cols);
        const F inv = f_set1(1.0f / __builtin_sqrtf(mean + eps));
        for (int64_t i = 0; i < whole; i += 16) {
            f_store(yr + i, f_mul(f_mul(f_load(xr + i), inv), f_load(weight + i)));
        }
        if (rest) {
            const F v = f_mul(f_mul(f_load_n(xr + whole, rest), inv), f_load_n(weight + whole, rest));
            f_store_n(yr + whole, v, rest);
        }
    }
}

static void rotary(float* x, int64_t token_stride, int heads, int head_stride, const int32_t* positions,
                   const float* cos, const float* sin, int half, bool interleaved, int64_t row_begin,
                   int64_t row_end) {
    for (int64_t row = row_begin; row < row_end; ++row) {
        const float* c = cos + static_cast<int64_t>(positions[row]) * half;
        const float* s = sin + static_cast<int64_t>(positions[row]) * half;
        for (int h = 0; h < heads; ++h) {
            float* v = x + row * token_stride + static_cast<int64_t>(h) * head_stride;
            const int step = interleaved ? 2 : 1;
            const int gap = interleaved ? 1 : half;
            for (int i = 0; i < half; ++i) {
                const float a = v[i * step];
                const float b = v[i * step + gap];
                v[i * step] = a * c[i] - b * s[i];
                v[i * step + gap] = b * c[i] + a * s[i];
            }
        }
    }
}

static inline void store_row(const float* x, StreamType type, uint8_t* to, int n) {
    int i = 0;
    if (type == StreamType::FP32) {
        std::memcpy(to, x, static_cast<size_t>(n) * 4);
        return;
    }
    for (; i + 16 <= n; i += 16) {
        if (type == StreamType::FP16) {
            store_f16(to + 2 * i, f_load(x + i));
        } else {
            store_bf16(to + 2 * i, f_load(x + i));
        }
    }
    for (; i < n; ++i) {
        const uint16_t h =
            type == StreamType::FP16 ? kvern::float_to_fp16(x[i]) : kvern::float_to_bf16(x[i]);
        std::memcpy(to + 2 * i, &h, 2);
    }
}

static void append(const float* x, int64_t token_stride, StreamView stream, const int64_t* slots,
                   int64_t row_begin, int64_t row_end) {
    const int64_t width = stream.type == StreamType::FP32 ? 4 : 2;
    for (int64_t row = row_begin; row < row_end; ++row) {
        const int64_t block = slots[row] / stream.block_size;
        const int64_t slot = slots[row] % stream.block_size;
        uint8_t* page = const_cast<uint8_t*>(stream.pages) + block * stream.page_bytes + stream.offset;
        for (int h = 0; h < stream.num_heads; ++h) {
            uint8_t* to = page + (h * static_cast<int64_t>(stream.block_size) + slot) * stream.dim * width;
            store_row(x + row * token_stride + static_cast<int64_t>(h) * stream.dim, stream.type, to,
                      stream.dim);
        }
    }
}

// One bf16 vector to int8 codes; the definition is kvern.store.codecs'.
static float seal_int8(const uint8_t* from, int dim, uint8_t* to) {
    constexpr int kMost = 16;
    uint8_t rest[2 * kMost] = {};
    const int whole = dim / kMost * kMost;
    std::memcpy(rest, from + 2 * whole, static_cast<size_t>(2 * (dim - whole)));
    auto load = [&](int d) { return f_load_bf16(d < whole ? from + 2 * d : rest); };
    F top = f_zero(), odd = f_zero();
    for (int d = 0; d < dim; d += kMost) {
        const F x = load(d);
        top = f_max(top, f_abs(x));
        odd = f_add(odd, f_sub(x, x));
    }
    const float largest = f_hmax(top);
    const bool is_finite = f_sum(odd) == 0.0f;
    if (!is_finite || largest < 7.888609052210118e-31f) {  // 2^-100
        std::memset(to, 0, static_cast<size_t>(dim));
        return is_finite ? 0.0f : __builtin_nanf("");
    }
    const F inverse = f_set1(127.0f / largest);
    for (int d = 0; d < dim; d += kMost) {
        const F x = f_min(f_max(f_round(f_mul(load(d), inverse)), f_set1(-127.0f)), f_set1(127.0f));
        int8_t codes[kMost];
        store_i8(codes, i_from_f(x));
        std::memcpy(to + d, codes, static_cast<size_t>(dim - d < kMost ? dim - d : kMost));
    }
    return largest / 127.0f;
}

// A row's scales and codes depend on that row alone, so whoever has it seals it; the sequence's first row
// seals what the open page holds of its block too. Nothing that is read is written.
static void append_narrow(const float* x, int64_t token_stride, const StreamView& s, const kvern::NarrowRows& rows) {
    const int64_t size = s.block_size, row_bytes = 2 * static_cast<int64_t>(s.dim);
    uint8_t* open = s.open_pages + rows.seat * s.open_page_bytes + s.open_offset;
    auto seal = [&](const uint8_t* from, int head, int64_t position) {
        uint8_t* page = const_cast<uint8_t*>(s.pages) + rows.block_table[position / size] * s.page_bytes;
        const int64_t at = head * size + position % size;
        const float scale = seal_int8(from, s.dim, page + s.offset + at * s.dim);
        std::memcpy(page + s.scale_offset + 4 * at, &scale, 4);
    };
    for (int64_t row = rows.row_begin; row < rows.row_end; ++row) {
        const int64_t position = rows.position + row - rows.row_begin;
        const int64_t block = position / size * size;
        const bool is_sealed = block + size <= rows.seq_len;
        for (int h = 0; h < s.num_heads; ++h) {
            uint8_t* to = s.open_rows + (row * s.num_heads + h) * row_bytes;
            store_row(x + row * token_stride + static_cast<int64_t>(h) * s.dim, StreamType::BF16, to, s.dim);
            if (is_sealed) {
                seal(to, h, position);
            } else {
                std::memcpy(open + (h * size + position % size) * row_bytes, to, static_cast<size_t>(row_bytes));
            }
            if (position != rows.chunk_position || !is_sealed) continue;
            for (int64_t p = block; p < position; ++p) seal(open + (h * size + p % size) * row_bytes, h, p);
        }
    }
}

static inline F activate(F g, Activation kind) {
    if (kind == Activation::SILU) {
        return f_div(g, f_add(f_set1(1.0f), f_exp(f_sub(f_zero(), g))));
    }
    if (kind == Activation::GELU_TANH) {
        // x (1 + tanh(u)) / 2 = x / (1 + e^(-2u)): nothing cancels
        const F cubic = f_fma(f_mul(f_mul(g, g), g), f_set1(0.044715f), g);
        const F u2 = f_mul(cubic, f_set1(-2.0f * 0.7978845608028654f));
        return f_div(g, f_add(f_set1(1.0f), f_exp(u2)));
    }
    float t[16];
    f_store(t, g);
    for (float& v : t) v = 0.5f * v * __builtin_erfcf(-v * 0.7071067811865476f);
    return f_load(t);
}

static void gated_activation(const float* gate_up, Activation kind, int64_t cols, int64_t row_begin,
                             int64_t row_end, float* out) {
    const int64_t whole = cols / 16 * 16;
    const int rest = static_cast<int>(cols - whole);
    for (int64_t row = row_begin; row < row_end; ++row) {
        const float* g = gate_up + row * 2 * cols;
        const float* u = g + cols;
        float* y = out + row * cols;
        for (int64_t i = 0; i < whole; i += 16) {
            f_store(y + i, f_mul(activate(f_load(g + i), kind), f_load(u + i)));
        }
        if (rest) {
            const F v = f_mul(activate(f_load_n(g + whole, rest), kind), f_load_n(u + whole, rest));
            f_store_n(y + whole, v, rest);
        }
    }
}

static void add(float* x, const float* y, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) f_store(x + i, f_add(f_load(x + i), f_load(y + i)));
    for (; i < end; ++i) x[i] += y[i];
}

}  // namespace KVERN_PATH
