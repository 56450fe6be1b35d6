// Paged attention. Keys are walked in tiles of kTile positions and units of kUnit positions, both at
// absolute borders. A tile is first packed (page lookup, conversion, transposition), then every query row
// that shares it runs the same arithmetic on it, so paging, block size, chunking and neighbours cannot
// change a bit of a row:
//
//   tile:  s = q.k in feature order; m' = max(m, max s); p = 2^(s c - m'); l, acc rescaled, then
//          acc += p v in key order over the row's visible keys only
//   unit:  starts from nothing; units merge in position order
//
// "Step" below is one 4-byte word of a packed operand: a float, or a pair of bf16 for the bf16 dot
// product (two neighbouring features of a key, or two neighbouring keys of a value).
#pragma once

namespace KVERN_PATH {

using kvern::AttendItem;
using kvern::AttendShape;
using kvern::kMaxItemRows;
using kvern::kTile;
using kvern::kUnit;

constexpr float kLog2e = 1.44269502162933349609375f;
constexpr float kMinusInf = -__builtin_inff();

static inline int64_t stream_width(StreamType t) { return t == StreamType::FP32 ? 4 : 2; }

static inline float element_float(const uint8_t* p, StreamType t, int i) {
    if (t == StreamType::FP32) {
        float x;
        std::memcpy(&x, p + 4 * i, 4);
        return x;
    }
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    return t == StreamType::FP16 ? kvern::fp16_to_float(h) : kvern::bf16_to_float(h);
}

static inline F vector_float(const uint8_t* p, StreamType t, int i) {
    if (t == StreamType::FP32) return f_load(reinterpret_cast<const float*>(p) + i);
    return t == StreamType::FP16 ? f_load_f16(p + 2 * i) : f_load_bf16(p + 2 * i);
}

static inline F vector_float_n(const uint8_t* p, StreamType t, int i, int lanes) {
    if (lanes == 16) return vector_float(p, t, i);
    alignas(64) float x[16] = {};
    for (int n = 0; n < lanes; ++n) x[n] = element_float(p, t, i + n);
    return f_load(x);
}

// float32 arithmetic, for every stream type.
struct FloatSteps {
    static constexpr int kPer = 1;
    static inline F mac(F acc, const uint32_t* vec, uint32_t word) {
        return f_fma(f_load(reinterpret_cast<const float*>(vec)), f_set1(kvern::bits_float(word)), acc);
    }
    static inline F mac_masked(F acc, const uint32_t* vec, uint32_t word, unsigned) {
        return mac(acc, vec, word);
    }
    static void pack_q(const float* q, int dim, uint32_t* to) { std::memcpy(to, q, static_cast<size_t>(dim) * 4); }
    // Keys j..j+count-1 of a tile from consecutive rows at src.
    static void pack_keys(const uint8_t* src, StreamType type, int dim, int j, int count, uint32_t* to) {
        const int64_t row_bytes = dim * stream_width(type);
        for (int n = 0; n < count; n += 16) {
            const int rows = count - n < 16 ? count - n : 16;
            for (int d = 0; d < dim; d += 16) {
                const int lanes = dim - d < 16 ? dim - d : 16;
                F row[16];
                for (int i = 0; i < 16; ++i) {
                    row[i] = i < rows ? vector_float_n(src + (n + i) * row_bytes, type, d, lanes) : f_zero();
                }
                float* at = reinterpret_cast<float*>(to) + static_cast<int64_t>(d) * kTile + j + n;
                store_transposed(row, rows, lanes, at, kTile);
            }
        }
    }
    static void pack_values(const uint8_t* src, StreamType type, int dim, int padded, int j, int count,
                            uint32_t* to) {
        const int64_t row_bytes = dim * stream_width(type);
        for (int n = 0; n < count; ++n, src += row_bytes) {
            float* row = reinterpret_cast<float*>(to) + static_cast<int64_t>(j + n) * padded;
            int d = 0;
            for (; d + 16 <= dim; d += 16) f_store(row + d, vector_float(src, type, d));
            for (; d < dim; ++d) row[d] = element_float(src, type, d);
            for (; d < padded; ++d) row[d] = 0.0f;
        }
    }
    // Turns 16 probabilities into words; returns them as they will be used.
    static inline F store_p(uint32_t* to, int lane, F p) {
        f_store(reinterpret_cast<float*>(to) + lane, p);
        return p;
    }
};

#ifdef __AVX512BF16__
// bf16 keys, values, queries and probabilities, float32 sums (vdpbf16ps).
struct Bf16Steps {
    static constexpr int kPer = 2;
    static inline F mac(F acc, const uint32_t* vec, uint32_t word) {
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(vec),
                                (__m512bh)_mm512_set1_epi32(static_cast<int>(word)));
    }
    static inline F mac_masked(F acc, const uint32_t* vec, uint32_t word, unsigned bits) {
        const uint32_t keep = (bits & 1 ? 0xffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u);
        const __m512i v = _mm512_and_si512(_mm512_loadu_si512(vec), _mm512_set1_epi32(static_cast<int>(keep)));
        return _mm512_dpbf16_ps(acc, (__m512bh)v, (__m512bh)_mm512_set1_epi32(static_cast<int>(word)));
    }
    static void pack_q(const float* q, int dim, uint32_t* to) {
        for (int d = 0; d < dim; d += 16) {
            const int lanes = dim - d < 16 ? dim - d : 16;
            const __m256i h = (__m256i)_mm512_cvtneps_pbh(f_load_n(q + d, lanes));
            _mm256_mask_storeu_epi32(to + d / 2, static_cast<__mmask8>(first_lanes((lanes + 1) / 2)), h);
        }
    }
    static inline __mmask32 first_halves(int n) {
        return n >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((1u << n) - 1u);
    }
    static void pack_keys(const uint8_t* src, StreamType, int dim, int j, int count, uint32_t* to) {
        for (int n = 0; n < count; n += 16) {
            const int rows = count - n < 16 ? count - n : 16;
            for (int d = 0; d < dim; d += 32) {
                const __mmask32 mask = first_halves(dim - d);
                const int words = dim - d < 32 ? (dim - d + 1) / 2 : 16;
                F row[16];
#pragma GCC unroll 16
                for (int i = 0; i < 16; ++i) {
                    const uint8_t* at = src + (n + i) * static_cast<int64_t>(2 * dim) + 2 * d;
                    row[i] = f_zero();
                    if (i < rows) row[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, at));
                }
                float* at = reinterpret_cast<float*>(to) + static_cast<int64_t>(d / 2) * kTile + j + n;
                store_transposed(row, rows, words, at, kTile);
            }
        }
    }
    static void pack_values(const uint8_t* src, StreamType, int dim, int padded, int j, int count,
                            uint32_t* to) {
        const int64_t row_bytes = 2 * static_cast<int64_t>(dim);
        for (int n = j; n < j + count;) {
            const uint8_t* row = src + (n - j) * row_bytes;
            uint32_t* words = to + static_cast<int64_t>(n / 2) * padded;
            const bool pair = n % 2 == 0 && n + 1 < j + count;
            for (int d = 0; d < padded; d += 16) {
                const auto mask = static_cast<__mmask16>(first_halves(dim - d < 0 ? 0 : dim - d));
                const __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + 2 * d));
                if (pair) {
                    const __m512i y = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + row_bytes + 2 * d));
                    _mm512_storeu_si512(words + d, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
                } else if (n % 2 == 0) {
                    _mm512_mask_storeu_epi16(words + d, 0x55555555u, x);
                } else {
                    _mm512_mask_storeu_epi16(words + d, 0xaaaaaaaau, _mm512_slli_epi32(x, 16));
                }
            }
            n += pair ? 2 : 1;
        }
    }
    static inline F store_p(uint32_t* to, int lane, F p) {
        const __m256i h = (__m256i)_mm512_cvtneps_pbh(p);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(to) + lane), h);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }
};
#endif

// All buffers of one item, cut from the caller's scratch.
struct ItemBuffers {
    uint32_t *keys, *values, *q;
    float *scores, *acc, *run;
    float *m, *m_new, *l, *alpha, *run_m, *run_l;
    uint64_t* masks;
};

static inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

static size_t attend_scratch_bytes(const AttendShape& s) {
    const size_t rows = kMaxItemRows;
    const size_t key_dim = static_cast<size_t>(s.keys.dim);
    const size_t padded = static_cast<size_t>(s.value_dim_padded);
    return aligned(key_dim * kTile * 4) + aligned(padded * kTile * 4) + aligned(rows * key_dim * 4) +
           rows * kTile * 4 + 2 * aligned(rows * padded * 4) + 6 * aligned(rows * 4) + aligned(rows * 8);
}

static ItemBuffers cut_buffers(const AttendShape& s, uint8_t* scratch) {
    const size_t rows = kMaxItemRows;
    const size_t key_dim = static_cast<size_t>(s.keys.dim);
    const size_t padded = static_cast<size_t>(s.value_dim_padded);
    auto take = [&scratch](size_t bytes) {
        uint8_t* p = scratch;
        scratch += aligned(bytes);
        return p;
    };
    ItemBuffers b;
    b.keys = reinterpret_cast<uint32_t*>(take(key_dim * kTile * 4));
    b.values = reinterpret_cast<uint32_t*>(take(padded * kTile * 4));
    b.q = reinterpret_cast<uint32_t*>(take(rows * key_dim * 4));
    b.scores = reinterpret_cast<float*>(take(rows * kTile * 4));
    b.acc = reinterpret_cast<float*>(take(rows * padded * 4));
    b.run = reinterpret_cast<float*>(take(rows * padded * 4));
    for (float** p : {&b.m, &b.m_new, &b.l, &b.alpha, &b.run_m, &b.run_l}) {
        *p = reinterpret_cast<float*>(take(rows * 4));
    }
    b.masks = reinterpret_cast<uint64_t*>(take(rows * 8));
    return b;
}

// Bits of [lo, hi) that fall into the tile at `base`.
static inline uint64_t span_mask(int64_t lo, int64_t hi, int64_t base) {
    lo = lo > base ? lo - base : 0;
    hi = hi - base < kTile ? hi - base : kTile;
    if (hi <= lo) return 0;
    const uint64_t upto = hi == 64 ? ~0ull : (1ull << hi) - 1;
    return upto & ~((1ull << lo) - 1);
}

static inline int64_t first_visible(const kvern::AttendParams& p, int64_t position) {
    int64_t start = 0;
    if (p.window > 0 && position - p.window + 1 > start) start = position - p.window + 1;
    if (p.chunk > 0 && position / p.chunk * p.chunk > start) start = position / p.chunk * p.chunk;
    return start;
}

// Keys in the tile that some query at positions first..last sees.
static inline uint64_t visible_mask(const kvern::AttendParams& p, int64_t first, int64_t last, int64_t base) {
    uint64_t mask = span_mask(first_visible(p, first), last + 1, base);
    if (p.num_sinks > 0) {
        mask |= span_mask(0, p.num_sinks < last + 1 ? p.num_sinks : last + 1, base);
    }
    return mask;
}

// Calls pack(src, j, count) for each run of needed positions that lies in one block.
template <class Pack>
static bool for_each_run(const AttendItem& item, const StreamView& stream, int64_t base, uint64_t need,
                         Pack&& pack) {
    const int64_t width = stream_width(stream.type);
    int j = 0;
    while (j < kTile) {
        if (!(need >> j & 1)) {
            ++j;
            continue;
        }
        const int64_t position = base + j;
        const int64_t slot = position % stream.block_size;
        int count = 1;
        while (j + count < kTile && slot + count < stream.block_size && (need >> (j + count) & 1)) ++count;
        const int64_t block = item.block_table[position / stream.block_size];
        if (block <= 0 || block >= stream.num_blocks) return false;
        const uint8_t* src = stream.pages + block * stream.page_bytes + stream.offset +
                             (item.kv_head * static_cast<int64_t>(stream.block_size) + slot) * stream.dim * width;
        pack(src, j, count);
        j += count;
    }
    return true;
}

// Asks for the bytes of the tile at `base` ahead of their use.
static inline void prefetch_tile(const AttendItem& item, const StreamView& stream, int64_t base, uint64_t need) {
    for_each_run(item, stream, base, need, [&](const uint8_t* src, int, int count) {
        const int64_t bytes = count * stream.dim * stream_width(stream.type);
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(src + i);
    });
}

template <class S, int R, int NV>
static inline void score_tile(const uint32_t* q, int steps, const uint32_t* keys, float* scores) {
    F acc[R][NV];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < NV; ++v) acc[r][v] = f_zero();
    }
    for (int s = 0; s < steps; ++s) {
        const uint32_t* k = keys + static_cast<int64_t>(s) * kTile;
        for (int r = 0; r < R; ++r) {
            const uint32_t word = q[static_cast<int64_t>(r) * steps + s];
            for (int v = 0; v < NV; ++v) acc[r][v] = S::mac(acc[r][v], k + 16 * v, word);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < NV; ++v) f_store(scores + r * kTile + 16 * v, acc[r][v]);
    }
}

template <class S, int R>
static void score_rows(const uint32_t* q, int steps, const uint32_t* keys, float* scores) {
    for (int v = 0; v < kTile / 16; v += kScoreVectors) {
        score_tile<S, R, kScoreVectors>(q, steps, keys + 16 * v, scores + 16 * v);
    }
}

// acc[row] = acc[row] * alpha + p v, key after key.
template <class S, int R, int NV, bool FULL>
static inline void value_tile(const float* scores, const uint32_t* values, int padded, const float* alpha,
                              uint64_t mask, float* out) {
    F acc[R][NV];
    for (int r = 0; r < R; ++r) {
        const F a = f_set1(alpha[r]);
        for (int v = 0; v < NV; ++v) {
            acc[r][v] = f_mul(f_load(out + static_cast<int64_t>(r) * padded + 16 * v), a);
        }
    }
    const uint32_t* p = reinterpret_cast<const uint32_t*>(scores);
    constexpr unsigned kAll = (1u << S::kPer) - 1;
    for (int s = 0; s < kTile / S::kPer; ++s) {
        const uint32_t* row = values + static_cast<int64_t>(s) * padded;
        const unsigned bits = FULL ? kAll : static_cast<unsigned>(mask >> (s * S::kPer)) & kAll;
        if (!FULL && bits == 0) continue;
        for (int r = 0; r < R; ++r) {
            uint32_t word;
            std::memcpy(&word, p + r * kTile + s, 4);
            for (int v = 0; v < NV; ++v) {
                acc[r][v] = FULL || bits == kAll ? S::mac(acc[r][v], row + 16 * v, word)
                                                 : S::mac_masked(acc[r][v], row + 16 * v, word, bits);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < NV; ++v) f_store(out + static_cast<int64_t>(r) * padded + 16 * v, acc[r][v]);
    }
}

template <class S, int R>
static void value_rows(const float* scores, const uint32_t* values, int padded, const float* alpha,
                       uint64_t mask, float* out) {
    const int vectors = padded / 16;
    int v = 0;
    for (; v + kScoreVectors <= vectors; v += kScoreVectors) {
        if (mask == ~0ull) {
            value_tile<S, R, kScoreVectors, true>(scores, values + 16 * v, padded, alpha, mask, out + 16 * v);
        } else {
            value_tile<S, R, kScoreVectors, false>(scores, values + 16 * v, padded, alpha, mask, out + 16 * v);
        }
    }
    for (; v < vectors; ++v) {
        value_tile<S, R, 1, false>(scores, values + 16 * v, padded, alpha, mask, out + 16 * v);
    }
}

// Splits n rows into register tiles and calls f<R>(first row) for each.
template <class Call>
static inline void in_row_tiles(int n, Call&& call) {
    int r = 0;
    if constexpr (kScoreRows >= 6) {
        for (; n - r >= 6; r += 6) call(std::integral_constant<int, 6>{}, r);
        if (n - r >= 4) call(std::integral_constant<int, 4>{}, r), r += 4;
    }
    if constexpr (kScoreRows >= 3) {
        for (; n - r >= 3; r += 3) call(std::integral_constant<int, 3>{}, r);
    }
    for (; n - r >= 2; r += 2) call(std::integral_constant<int, 2>{}, r);
    if (n - r == 1) call(std::integral_constant<int, 1>{}, r);
}

static inline void cap_scores(float* s, float scale, float cap) {
    for (int v = 0; v < kTile; v += 16) {
        const F t = f_tanh(f_mul(f_load(s + v), f_set1(scale / cap)));
        f_store(s + v, f_mul(t, f_set1(cap)));
    }
}

// Masks the row's scores and returns its new maximum (in units of log2).
static inline float mask_and_max(float* s, uint64_t mask, float c, float m) {
    F top = f_set1(kMinusInf);
    for (int v = 0; v < kTile / 16; ++v) {
        const F x = f_select(static_cast<Mask>(mask >> (16 * v)), f_load(s + 16 * v), f_set1(kMinusInf));
        f_store(s + 16 * v, x);
        top = f_max(top, x);
    }
    const float t = f_hmax(top) * c;
    return t > m ? t : m;
}

template <class S>
static inline float exponentiate(float* s, float c, float m_new) {
    const F minus = f_set1(-m_new);
    F p[4];
    for (int v = 0; v < 4; ++v) p[v] = f_exp2(f_fma(f_load(s + 16 * v), f_set1(c), minus));
    for (int v = 0; v < 4; ++v) p[v] = S::store_p(reinterpret_cast<uint32_t*>(s), 16 * v, p[v]);
    return f_sum(f_add(f_add(p[0], p[1]), f_add(p[2], p[3])));
}

// One packed tile against rows [begin, end) of the item.
template <class S>
static void attend_tile(const AttendShape& shape, ItemBuffers& b, int steps, int begin, int end) {
    const int padded = shape.value_dim_padded;
    const float cap = shape.params.softcap;
    const float c = cap > 0.0f ? kLog2e : shape.params.scale * kLog2e;
    in_row_tiles(end - begin, [&](auto rows, int r) {
        r += begin;
        score_rows<S, rows.value>(b.q + static_cast<int64_t>(r) * steps, steps, b.keys, b.scores + r * kTile);
    });
    for (int r = begin; r < end; ++r) {
        b.m_new[r] = b.m[r];
        if (b.masks[r] == 0) continue;
        float* s = b.scores + r * kTile;
        if (cap > 0.0f) cap_scores(s, shape.params.scale, cap);
        b.m_new[r] = mask_and_max(s, b.masks[r], c, b.m[r]);
    }
    for (int r = begin; r < end; r += 16) {
        const int n = end - r < 16 ? end - r : 16;
        f_store_n(b.alpha + r, f_exp2(f_sub(f_load_n(b.m + r, n), f_load_n(b.m_new + r, n))), n);
    }
    for (int r = begin; r < end; ++r) {
        if (b.masks[r] == 0) continue;
        const float sum = exponentiate<S>(b.scores + r * kTile, c, b.m_new[r]);
        b.l[r] = fma_scalar(b.l[r], b.alpha[r], sum);
        b.m[r] = b.m_new[r];
    }
    for (int r = begin; r < end;) {
        int n = 1;
        while (r + n < end && b.masks[r + n] == b.masks[r]) ++n;
        if (b.masks[r] != 0) {
            in_row_tiles(n, [&](auto rows, int i) {
                i += r;
                value_rows<S, rows.value>(b.scores + i * kTile, b.values, padded, b.alpha + i, b.masks[i],
                                          b.acc + static_cast<int64_t>(i) * padded);
            });
        }
        r += n;
    }
}

// Joins a unit's result into the running one: always the same arithmetic, whoever computed them.
static inline void merge_unit(const float* acc, float m, float l, int padded, float* run, float& run_m,
                              float& run_l) {
    if (l == 0.0f) return;  // the unit held nothing this row sees
    if (run_l == 0.0f) {
        std::memmove(run, acc, static_cast<size_t>(padded) * 4);  // may be the same place
        run_m = m;
        run_l = l;
        return;
    }
    const float top = m > run_m ? m : run_m;
    const float old = exp2_scalar(run_m - top);
    const float fresh = exp2_scalar(m - top);
    run_l = fma_scalar(l, fresh, run_l * old);
    for (int v = 0; v < padded; v += 16) {
        f_store(run + v, f_fma(f_load(acc + v), f_set1(fresh), f_mul(f_load(run + v), f_set1(old))));
    }
    run_m = top;
}

static inline void finish_row(const AttendShape& shape, const float* run, float m, float l, int head,
                              float* out) {
    float keep = 1.0f;
    if (shape.params.sink_logits) {
        const float sink = shape.params.sink_logits[head] * kLog2e;
        const float top = sink > m ? sink : m;
        keep = exp2_scalar(m - top);
        l = fma_scalar(l, keep, exp2_scalar(sink - top));
    }
    const int dim = shape.values.dim;
    for (int v = 0; v < dim; v += 16) {
        const F y = f_div(f_mul(f_load(run + v), f_set1(keep)), f_set1(l));
        if (v + 16 <= dim) {
            f_store(out + v, y);
        } else {
            f_store_n(out + v, y, dim - v);
        }
    }
}

template <class S>
static int64_t attend_item_as(const AttendShape& shape, const AttendItem& item, uint8_t* scratch) {
    ItemBuffers b = cut_buffers(shape, scratch);
    const int rows = item.num_positions * item.num_heads;
    const int padded = shape.value_dim_padded;
    const int steps = (shape.keys.dim + S::kPer - 1) / S::kPer;
    const int64_t last = item.first_position + item.num_positions - 1;
    int64_t pairs = 0;
    for (int r = 0; r < rows; ++r) {
        const float* q = item.q + r / item.num_heads * item.q_token_stride +
                         static_cast<int64_t>(r % item.num_heads) * shape.keys.dim;
        S::pack_q(q, shape.keys.dim, b.q + static_cast<int64_t>(r) * steps);
        b.run_m[r] = kMinusInf;
        b.run_l[r] = 0.0f;
    }
    for (int64_t unit = item.unit_begin; unit < item.unit_end; ++unit) {
        for (int r = 0; r < rows; ++r) {
            b.m[r] = kMinusInf;
            b.l[r] = 0.0f;
        }
        std::memset(b.acc, 0, static_cast<size_t>(rows) * padded * 4);
        for (int64_t base = unit * kUnit; base < (unit + 1) * kUnit && base <= last; base += kTile) {
            const uint64_t need = visible_mask(shape.params, item.first_position, last, base);
            if (need == 0) continue;
            if (base + kTile <= last) {
                const uint64_t next = visible_mask(shape.params, item.first_position, last, base + kTile);
                prefetch_tile(item, shape.keys, base + kTile, next);
                prefetch_tile(item, shape.values, base + kTile, next);
            }
            bool ok = for_each_run(item, shape.keys, base, need, [&](const uint8_t* src, int j, int n) {
                S::pack_keys(src, shape.keys.type, shape.keys.dim, j, n, b.keys);
            });
            ok = ok && for_each_run(item, shape.values, base, need, [&](const uint8_t* src, int j, int n) {
                S::pack_values(src, shape.values.type, shape.values.dim, padded, j, n, b.values);
            });
            if (!ok) return -1;
            int begin = rows, end = 0;
            for (int i = 0; i < item.num_positions; ++i) {
                const int64_t p = item.first_position + i;
                const uint64_t mask = visible_mask(shape.params, p, p, base);
                for (int g = 0; g < item.num_heads; ++g) b.masks[i * item.num_heads + g] = mask;
                if (mask == 0) continue;
                pairs += __builtin_popcountll(mask) * item.num_heads;
                if (i * item.num_heads < begin) begin = i * item.num_heads;
                end = (i + 1) * item.num_heads;
            }
            attend_tile<S>(shape, b, steps, begin, end);
        }
        for (int r = 0; r < rows; ++r) {
            const float* acc = b.acc + static_cast<int64_t>(r) * padded;
            if (item.partial) {
                float* to = item.partial + (r * item.partial_units + unit - item.partial_first_unit) * (padded + 2);
                std::memcpy(to, acc, static_cast<size_t>(padded) * 4);
                to[padded] = b.m[r];
                to[padded + 1] = b.l[r];
            } else {
                merge_unit(acc, b.m[r], b.l[r], padded, b.run + static_cast<int64_t>(r) * padded, b.run_m[r],
                           b.run_l[r]);
            }
        }
    }
    if (item.partial) return pairs;
    for (int r = 0; r < rows; ++r) {
        float* out = item.out + r / item.num_heads * item.out_token_stride +
                     static_cast<int64_t>(r % item.num_heads) * shape.values.dim;
        finish_row(shape, b.run + static_cast<int64_t>(r) * padded, b.run_m[r], b.run_l[r],
                   item.first_head + r % item.num_heads, out);
    }
    return pairs;
}

static int64_t attend_item(const AttendShape& shape, const AttendItem& item, uint8_t* scratch) {
#ifdef __AVX512BF16__
    if (shape.keys.type == StreamType::BF16 && shape.values.type == StreamType::BF16) {
        return attend_item_as<Bf16Steps>(shape, item, scratch);
    }
#endif
    return attend_item_as<FloatSteps>(shape, item, scratch);
}

// The running sum lives in the first unit's place.
static void attend_merge(const AttendShape& shape, const float* partial, int64_t num_units, int head,
                         float* out) {
    const int padded = shape.value_dim_padded;
    float* run = const_cast<float*>(partial);
    float m = kMinusInf, l = 0.0f;
    for (int64_t u = 0; u < num_units; ++u) {
        const float* unit = partial + u * (padded + 2);
        merge_unit(unit, unit[padded], unit[padded + 1], padded, run, m, l);
    }
    finish_row(shape, run, m, l, head, out);
}

}  // namespace KVERN_PATH
