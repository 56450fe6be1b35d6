// Recurrent states, token after token. A sequence's heads, and a head's value columns or state rows, do not
// meet in any sum, so threads share them out as they like; the tokens' order is never shared out. A
// state is rounded as it is stored after every token, so it does not matter where a chunk ends.
//
//   delta rule   r = decay * (S^T k);  S = k (beta * (v - r))^T + decay * S;   out = S^T q
//   Mamba-2      S = (step * x) b^T + decay * S;                               out = S c + skip * x
//   convolution  out = sum over taps, the oldest first, of weight * x
#pragma once

namespace KVERN_PATH {

using kvern::ConvolveShape;
using kvern::DeltaShape;
using kvern::kStateLanes;
using kvern::ScanShape;
using kvern::StatePlace;
using kvern::StateRows;

static inline float sigmoid_scalar(float x) {
    float lanes[16];
    f_store(lanes, f_exp(f_set1(-x)));
    return 1.0f / (1.0f + lanes[0]);
}

static inline float exp_scalar(float x) {
    float lanes[16];
    f_store(lanes, f_exp(f_set1(x)));
    return lanes[0];
}

// log(1 + e^x), and x itself where that is the same number.
static inline float softplus_scalar(float x) { return x > 20.0f ? x : __builtin_log1pf(exp_scalar(x)); }

template <StreamType T>
static inline F rounded(F v) {
    if constexpr (T == StreamType::FP32) {
        return v;
    } else {
        alignas(64) uint16_t stored[16];
        if constexpr (T == StreamType::FP16) {
            store_f16(stored, v);
            return f_load_f16(stored);
        } else {
            store_bf16(stored, v);
            return f_load_bf16(stored);
        }
    }
}

static inline int64_t width_of(StreamType t) { return t == StreamType::FP32 ? 4 : 2; }

// Copies bytes [at, at + count) of an entry, which may lie in several pages.
template <bool IS_WRITE>
static void copy_bytes(const StatePlace& place, const int32_t* pages, int64_t at, int64_t count, uint8_t* data) {
    while (count > 0) {
        const int64_t within = at % place.page_bytes;
        const int64_t left = place.page_bytes - within;
        const int64_t n = count < left ? count : left;
        uint8_t* stored = place.pages + pages[at / place.page_bytes] * place.page_bytes + within;
        if (IS_WRITE) {
            std::memcpy(stored, data, static_cast<size_t>(n));
        } else {
            std::memcpy(data, stored, static_cast<size_t>(n));
        }
        at += n, data += n, count -= n;
    }
}

// Up to `kStateLanes * kMaxTaps` elements from byte `at` of an entry on.
static void read_state(const StatePlace& place, const int32_t* pages, int64_t at, int count, float* to) {
    if (place.type == StreamType::FP32) return copy_bytes<false>(place, pages, at, count * 4, reinterpret_cast<uint8_t*>(to));
    uint16_t stored[kStateLanes * kvern::kMaxTaps];
    copy_bytes<false>(place, pages, at, count * 2, reinterpret_cast<uint8_t*>(stored));
    for (int i = 0; i < count; ++i) {
        to[i] = place.type == StreamType::FP16 ? kvern::fp16_to_float(stored[i]) : kvern::bf16_to_float(stored[i]);
    }
}

static void write_state(const StatePlace& place, const int32_t* pages, int64_t at, int count, const float* from) {
    if (place.type == StreamType::FP32) {
        return copy_bytes<true>(place, pages, at, count * 4, reinterpret_cast<uint8_t*>(const_cast<float*>(from)));
    }
    uint16_t stored[kStateLanes * kvern::kMaxTaps];
    for (int i = 0; i < count; ++i) {
        stored[i] = place.type == StreamType::FP16 ? kvern::float_to_fp16(from[i]) : kvern::float_to_bf16(from[i]);
    }
    copy_bytes<true>(place, pages, at, count * 2, reinterpret_cast<uint8_t*>(stored));
}

// A tile of a state, `rows` runs of `cols` elements that lie `row_elements` apart: in its page where it can
// be worked on there, else a copy whose rows are padded with zeros to whole vectors.
struct Tile {
    float* data;
    int64_t stride;
    bool is_copy;
};

static Tile open_tile(const StatePlace& place, const StateRows& seq, int64_t element, int rows, int cols,
                      int64_t row_elements, bool may_stay, float* scratch) {
    const int64_t width = width_of(place.type);
    const int64_t at = place.offset + element * width;
    const int64_t last = at + ((rows - 1) * row_elements + cols) * width - 1;
    uint8_t* stored = place.pages + seq.pages[at / place.page_bytes] * place.page_bytes + at % place.page_bytes;
    const bool is_whole = at / place.page_bytes == last / place.page_bytes;
    if (may_stay && is_whole && place.type == StreamType::FP32 && cols % 16 == 0 &&
        reinterpret_cast<uintptr_t>(stored) % 4 == 0) {
        return {reinterpret_cast<float*>(stored), row_elements, false};
    }
    const int64_t stride = (cols + 15) / 16 * 16;
    for (int r = 0; r < rows; ++r) {
        float* to = scratch + r * stride;
        for (int c = 0; c < cols; c += kStateLanes) {
            const int n = cols - c < kStateLanes ? cols - c : kStateLanes;
            read_state(place, seq.pages, at + (r * row_elements + c) * width, n, to + c);
        }
        for (int64_t c = cols; c < stride; ++c) to[c] = 0.0f;
    }
    return {scratch, stride, true};
}

static void close_tile(const Tile& tile, const StatePlace& place, const StateRows& seq, int64_t element, int rows,
                       int cols, int64_t row_elements) {
    if (!tile.is_copy) return;
    const int64_t width = width_of(place.type);
    const int64_t at = place.offset + element * width;
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < cols; c += kStateLanes) {
            const int n = cols - c < kStateLanes ? cols - c : kStateLanes;
            write_state(place, seq.pages, at + (r * row_elements + c) * width, n, tile.data + r * tile.stride + c);
        }
    }
}

// 1 / sqrt(sum of x^2 + eps): what makes a vector one of length 1.
static inline float unit_factor(const float* x, int64_t cols) {
    return 1.0f / __builtin_sqrtf(row_sum<true>(x, cols, f_zero()) + 1e-6f);
}

// One token on NV vectors of value columns. Even and odd key dims have sums of their own, so that there are
// enough of them under way at once.
template <StreamType T, int NV>
static inline void delta_token(float* s, int64_t stride, int key_dim, const float* q, const float* k, F decay, F recall,
                               F update, const F (&v)[NV], F (&out)[NV]) {
    F even[NV], odd[NV], u[NV];
    for (int j = 0; j < NV; ++j) even[j] = odd[j] = f_zero();
    int i = 0;
    for (; i + 2 <= key_dim; i += 2) {
        const F k0 = f_set1(k[i]), k1 = f_set1(k[i + 1]);
        for (int j = 0; j < NV; ++j) {
            even[j] = f_fma(f_load(s + i * stride + 16 * j), k0, even[j]);
            odd[j] = f_fma(f_load(s + (i + 1) * stride + 16 * j), k1, odd[j]);
        }
    }
    for (int j = 0; i < key_dim && j < NV; ++j) even[j] = f_fma(f_load(s + i * stride + 16 * j), f_set1(k[i]), even[j]);
    for (int j = 0; j < NV; ++j) {
        u[j] = f_mul(f_sub(v[j], f_mul(f_add(even[j], odd[j]), recall)), update);
        even[j] = odd[j] = f_zero();
    }
    const auto step = [&](int row, F (&sum)[NV]) {
        const F kr = f_set1(k[row]), qr = f_set1(q[row]);
        for (int j = 0; j < NV; ++j) {
            float* at = s + row * stride + 16 * j;
            const F next = rounded<T>(f_fma(kr, u[j], f_mul(f_load(at), decay)));
            f_store(at, next);
            sum[j] = f_fma(next, qr, sum[j]);
        }
    };
    for (i = 0; i + 2 <= key_dim; i += 2) {
        step(i, even);
        step(i + 1, odd);
    }
    if (i < key_dim) step(i, even);
    for (int j = 0; j < NV; ++j) out[j] = f_add(even[j], odd[j]);
}

template <StreamType T, int NV>
static void delta_columns(const DeltaShape& s, const StateRows& seq, int head, int64_t column, int cols, Tile tile) {
    const int key_head = head / (s.heads / s.key_heads);
    const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(s.key_dim));
    for (int64_t t = seq.first; t < seq.first + seq.count; ++t) {
        const float* q = s.qkv + t * s.qkv_stride + static_cast<int64_t>(key_head) * s.key_dim;
        const float* k = q + static_cast<int64_t>(s.key_heads) * s.key_dim;
        const float* v = s.qkv + t * s.qkv_stride + 2LL * s.key_heads * s.key_dim +
                         static_cast<int64_t>(head) * s.value_dim + column;
        const float* gates = s.gates + t * s.gates_stride;
        const float beta = sigmoid_scalar(gates[head]);
        const float decay = exp_scalar(softplus_scalar(gates[s.heads + head] + s.step_bias[head]) * s.decay[head]);
        const float q_factor = unit_factor(q, s.key_dim) * query_scale;
        const float k_factor = unit_factor(k, s.key_dim);
        F values[NV], out[NV];
        for (int j = 0; j < NV; ++j) {
            const int n = cols - 16 * j;
            values[j] = n >= 16 ? f_load(v + 16 * j) : f_load_n(v + 16 * j, n);
        }
        delta_token<T, NV>(tile.data, tile.stride, s.key_dim, q, k, f_set1(decay), f_set1(decay * k_factor),
                           f_set1(beta * k_factor), values, out);
        float* to = s.out + t * s.out_stride + static_cast<int64_t>(head) * s.value_dim + column;
        for (int j = 0; j < NV; ++j) {
            const F y = f_mul(out[j], f_set1(q_factor));
            const int n = cols - 16 * j;
            n >= 16 ? f_store(to + 16 * j, y) : f_store_n(to + 16 * j, y, n);
        }
    }
}

template <int NV>
static void delta_typed(const DeltaShape& s, const StateRows& seq, int head, int64_t column, int cols, Tile tile) {
    switch (s.state.type) {
        case StreamType::FP32: return delta_columns<StreamType::FP32, NV>(s, seq, head, column, cols, tile);
        case StreamType::FP16: return delta_columns<StreamType::FP16, NV>(s, seq, head, column, cols, tile);
        default: return delta_columns<StreamType::BF16, NV>(s, seq, head, column, cols, tile);
    }
}

static void delta(const DeltaShape& s, const StateRows& seq, int head, int64_t column, uint8_t* scratch) {
    const int64_t left = s.value_dim - column;
    const int cols = static_cast<int>(left < kStateLanes ? left : kStateLanes);
    const int64_t element = static_cast<int64_t>(head) * s.key_dim * s.value_dim + column;
    // Rows that lie a power of two apart share few places of the cache: worth a copy for several tokens.
    const Tile tile = open_tile(s.state, seq, element, s.key_dim, cols, s.value_dim, seq.count <= 2,
                                reinterpret_cast<float*>(scratch));
    cols > 16 ? delta_typed<2>(s, seq, head, column, cols, tile) : delta_typed<1>(s, seq, head, column, cols, tile);
    close_tile(tile, s.state, seq, element, s.key_dim, cols, s.value_dim);
}

// One token on R rows of a state, so that b and c are read once for all of them.
template <StreamType T, int R>
static inline void scan_token(float* s, int64_t stride, int state_dim, const float* x, float step, F decay, const float* b,
                              const float* c, float skip, float* out) {
    F input[R], sum[R];
    for (int r = 0; r < R; ++r) {
        input[r] = f_set1(x[r] * step);
        sum[r] = f_zero();
    }
    const auto advance = [&](int n, F bn, F cn) {
        for (int r = 0; r < R; ++r) {
            float* at = s + r * stride + n;
            const F next = rounded<T>(f_fma(input[r], bn, f_mul(f_load(at), decay)));
            f_store(at, next);
            sum[r] = f_fma(next, cn, sum[r]);
        }
    };
    int n = 0;
    for (; n + 16 <= state_dim; n += 16) advance(n, f_load(b + n), f_load(c + n));
    const int rest = state_dim - n;
    if (rest) advance(n, f_load_n(b + n, rest), f_load_n(c + n, rest));  // the tile is a copy, padded with zeros
    for (int r = 0; r < R; ++r) {
        const float skipped = x[r] * skip;
        out[r] = f_sum(sum[r]) + skipped;
    }
}

template <StreamType T>
static void scan_rows(const ScanShape& s, const StateRows& seq, int head, int64_t row, int rows, Tile tile) {
    const int64_t width = static_cast<int64_t>(s.heads) * s.head_dim;
    const int64_t group = head / (s.heads / s.groups);
    for (int64_t t = seq.first; t < seq.first + seq.count; ++t) {
        const float* x = s.xbc + t * s.xbc_stride + static_cast<int64_t>(head) * s.head_dim + row;
        const float* b = s.xbc + t * s.xbc_stride + width + group * s.state_dim;
        const float* c = b + static_cast<int64_t>(s.groups) * s.state_dim;
        float step = softplus_scalar(s.steps[t * s.steps_stride + head] + s.step_bias[head]);
        step = step < s.low ? s.low : step;
        step = step > s.high ? s.high : step;
        const F decay = f_set1(exp_scalar(step * s.decay[head]));
        float* to = s.out + t * s.out_stride + static_cast<int64_t>(head) * s.head_dim + row;
        const auto some = [&](auto run, int d) {
            run(tile.data + d * tile.stride, tile.stride, s.state_dim, x + d, step, decay, b, c, s.skip[head], to + d);
        };
        int d = 0;
        for (; d + 4 <= rows; d += 4) some(scan_token<T, 4>, d);
        for (; d < rows; ++d) some(scan_token<T, 1>, d);
    }
}

static void scan(const ScanShape& s, const StateRows& seq, int head, int64_t row, uint8_t* scratch) {
    const int64_t left = s.head_dim - row;
    const int rows = static_cast<int>(left < kStateLanes ? left : kStateLanes);
    const int64_t element = (static_cast<int64_t>(head) * s.head_dim + row) * s.state_dim;
    const Tile tile = open_tile(s.state, seq, element, rows, s.state_dim, s.state_dim, true,
                                reinterpret_cast<float*>(scratch));
    switch (s.state.type) {
        case StreamType::FP32: scan_rows<StreamType::FP32>(s, seq, head, row, rows, tile); break;
        case StreamType::FP16: scan_rows<StreamType::FP16>(s, seq, head, row, rows, tile); break;
        default: scan_rows<StreamType::BF16>(s, seq, head, row, rows, tile); break;
    }
    close_tile(tile, s.state, seq, element, rows, s.state_dim, s.state_dim);
}

template <StreamType T>
static void convolve_vector(const ConvolveShape& s, const StateRows& seq, int64_t channel, int lanes) {
    const int past = s.taps - 1;
    const int64_t at = s.tail.offset + channel * past * width_of(T);
    float stored[16 * kvern::kMaxTaps] = {};
    F inputs[kvern::kMaxTaps], weights[kvern::kMaxTaps];
    read_state(s.tail, seq.pages, at, lanes * past, stored);
    for (int tap = 0; tap < s.taps; ++tap) {
        float column[16] = {};
        for (int i = 0; i < lanes && tap < past; ++i) column[i] = stored[i * past + tap];
        inputs[tap] = f_load(column);
        weights[tap] = f_load_n(s.weight + tap * s.channels + channel, lanes);
    }
    const F bias = s.bias ? f_load_n(s.bias + channel, lanes) : f_zero();
    for (int64_t t = seq.first; t < seq.first + seq.count; ++t) {
        const float* x = s.x + t * s.x_stride + channel;
        float* out = s.out + t * s.out_stride + channel;
        inputs[past] = rounded<T>(lanes == 16 ? f_load(x) : f_load_n(x, lanes));
        F sum = f_zero();
        for (int tap = 0; tap < s.taps; ++tap) sum = f_fma(inputs[tap], weights[tap], sum);
        if (s.bias) sum = f_add(sum, bias);
        if (s.is_silu) sum = activate(sum, Activation::SILU);
        lanes == 16 ? f_store(out, sum) : f_store_n(out, sum, lanes);
        for (int tap = 0; tap < past; ++tap) inputs[tap] = inputs[tap + 1];
    }
    for (int tap = 0; tap < past; ++tap) {
        float column[16];
        f_store(column, inputs[tap]);
        for (int i = 0; i < lanes; ++i) stored[i * past + tap] = column[i];
    }
    write_state(s.tail, seq.pages, at, lanes * past, stored);
}

static void convolve(const ConvolveShape& s, const StateRows& seq, int64_t block) {
    const int64_t end = block + kvern::kConvLanes < s.channels ? block + kvern::kConvLanes : s.channels;
    for (int64_t channel = block; channel < end; channel += 16) {
        const int lanes = static_cast<int>(end - channel < 16 ? end - channel : 16);
        switch (s.tail.type) {
            case StreamType::FP32: convolve_vector<StreamType::FP32>(s, seq, channel, lanes); break;
            case StreamType::FP16: convolve_vector<StreamType::FP16>(s, seq, channel, lanes); break;
            default: convolve_vector<StreamType::BF16>(s, seq, channel, lanes); break;
        }
    }
}

}  // namespace KVERN_PATH
