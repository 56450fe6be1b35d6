// Reading keys and values for attention: page lookup, conversion, and packing into tiles.
//
// A packed tile holds kTile keys. "Step" is one 4-byte word of a packed operand: a float, or a pair of
// bf16 for the bf16 dot product (two neighbouring features of a key, two neighbouring keys of a value):
//
//   keys    [steps of key_dim][kTile]              lanes run over keys
//   values  [steps of kTile][value_dim_padded]     lanes run over features
#pragma once
#include <initializer_list>

namespace KVERN_PATH {

using kvern::AttendItem;
using kvern::AttendShape;
using kvern::kTile;

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

static inline F vector_float(const uint8_t* p, StreamType t, int i, int lanes) {
    if (lanes == 16) {
        if (t == StreamType::FP32) return f_load(reinterpret_cast<const float*>(p) + i);
        return t == StreamType::FP16 ? f_load_f16(p + 2 * i) : f_load_bf16(p + 2 * i);
    }
    alignas(64) float x[16] = {};
    for (int n = 0; n < lanes; ++n) x[n] = element_float(p, t, i + n);
    return f_load(x);
}

// Cache lines that will be needed next. Asking for many at once only fills the processor's queue of
// misses and stalls it, so they are pulled a few at a time between pieces of arithmetic.
class Ahead {
public:
    void clear() { count_ = next_ = 0; }
    void add(const uint8_t* from, int64_t bytes) {
        if (count_ < kMost) runs_[count_++] = {from, from + bytes};
    }
    // Spreads what is there over about this many steps.
    void spread(int steps) {
        int64_t lines = 0;
        for (int i = 0; i < count_; ++i) lines += (runs_[i].end - runs_[i].at + 63) / 64;
        per_step_ = static_cast<int>(lines / steps) + 1;
    }
    inline void step() {
        int lines = per_step_;
        while (lines > 0 && next_ < count_) {
            const uint8_t* at = runs_[next_].at;
            const int left = static_cast<int>((runs_[next_].end - at + 63) / 64);
            const int count = left < lines ? left : lines;
            for (int i = 0; i < count; ++i) __builtin_prefetch(at + 64 * i);
            runs_[next_].at = at + 64 * static_cast<int64_t>(count);
            lines -= count;
            if (count == left) ++next_;
        }
    }

private:
    static constexpr int kMost = 2 * kTile;
    struct Run {
        const uint8_t *at, *end;
    };
    Run runs_[kMost];
    int count_ = 0, next_ = 0, per_step_ = 0;
};

// float32 arithmetic, for every stream type.
struct FloatSteps {
    static constexpr int kPer = 1;
    static inline F mac(F acc, const uint32_t* vec, uint32_t word) {
        return f_fma(f_load(reinterpret_cast<const float*>(vec)), f_set1(kvern::bits_float(word)), acc);
    }
    static inline F mac_masked(F acc, const uint32_t* vec, uint32_t word, unsigned) {
        return mac(acc, vec, word);
    }
    static void pack_q(const float* q, int dim, uint32_t* to) {
        std::memcpy(to, q, static_cast<size_t>(dim) * 4);
    }
    // Keys j..j+count-1 of a tile from consecutive rows at src.
    static void pack_keys(const uint8_t* src, StreamType type, int dim, int j, int count, uint32_t* to,
                          Ahead& ahead) {
        const int64_t row_bytes = dim * stream_width(type);
        for (int n = 0; n < count; n += 16) {
            const int rows = count - n < 16 ? count - n : 16;
            for (int d = 0; d < dim; d += 16) {
                const int lanes = dim - d < 16 ? dim - d : 16;
                F row[16];
                for (int i = 0; i < 16; ++i) {
                    row[i] = i < rows ? vector_float(src + (n + i) * row_bytes, type, d, lanes) : f_zero();
                }
                float* at = reinterpret_cast<float*>(to) + static_cast<int64_t>(d) * kTile + j + n;
                store_transposed(row, rows, lanes, at, kTile);
                ahead.step();
            }
        }
    }
    static void pack_values(const uint8_t* src, StreamType type, int dim, int padded, int j, int count,
                            uint32_t* to, Ahead& ahead) {
        const int64_t row_bytes = dim * stream_width(type);
        for (int n = 0; n < count; ++n, src += row_bytes) {
            float* row = reinterpret_cast<float*>(to) + static_cast<int64_t>(j + n) * padded;
            for (int d = 0; d < padded; d += 16) {
                f_store(row + d, vector_float(src, type, d, dim - d < 16 ? dim - d : 16));
            }
            if (n % 4 == 0) ahead.step();
        }
    }
    static inline F exp2(F t) { return f_exp2(t); }
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
        return n >= 32 ? ~__mmask32{0} : n <= 0 ? 0 : static_cast<__mmask32>((1u << n) - 1u);
    }
    static void pack_keys(const uint8_t* src, StreamType, int dim, int j, int count, uint32_t* to,
                          Ahead& ahead) {
        const int64_t row_bytes = 2 * static_cast<int64_t>(dim);
        for (int n = 0; n < count; n += 16) {
            const int rows = count - n < 16 ? count - n : 16;
            for (int d = 0; d < dim; d += 32) {
                const uint8_t* from = src + n * row_bytes + 2 * d;
                float* at = reinterpret_cast<float*>(to) + static_cast<int64_t>(d / 2) * kTile + j + n;
                F row[16];
                if (rows == 16 && dim - d >= 32) {
#pragma GCC unroll 16
                    for (int i = 0; i < 16; ++i) row[i] = _mm512_loadu_ps(from + i * row_bytes);
                    store_transposed(row, 16, 16, at, kTile);
                } else {
                    const __mmask32 mask = first_halves(dim - d);
                    for (int i = 0; i < 16; ++i) {
                        row[i] = f_zero();
                        if (i < rows) {
                            row[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, from + i * row_bytes));
                        }
                    }
                    store_transposed(row, rows, dim - d < 32 ? (dim - d + 1) / 2 : 16, at, kTile);
                }
                ahead.step();
            }
        }
    }
    // Features of two keys side by side: x0 y0 x1 y1 ..., 32 of them (or 16, when no more are left).
    struct Interleaver {
        __m512i low, high;
        Interleaver() {
            alignas(64) uint16_t order[64];
            for (uint16_t i = 0; i < 64; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
            low = _mm512_load_si512(order);
            high = _mm512_load_si512(order + 32);
        }
        inline void store(__m512i x, __m512i y, uint32_t* to, int left) const {
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, low, y));
            if (left > 16) _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(x, high, y));
        }
    };
    static inline void pack_pair(const uint8_t* row, int64_t row_bytes, int dim, int padded, uint32_t* words,
                                 const Interleaver& order) {
        int d = 0;
        for (; d + 32 <= dim; d += 32) {
            order.store(_mm512_loadu_si512(row + 2 * d), _mm512_loadu_si512(row + row_bytes + 2 * d), words + d, 32);
        }
        if (d == padded) return;
        const __mmask32 mask = first_halves(dim - d);
        order.store(_mm512_maskz_loadu_epi16(mask, row + 2 * d),
                    _mm512_maskz_loadu_epi16(mask, row + row_bytes + 2 * d), words + d, padded - d);
    }
    // One key of a pair; the other half stays what it is and is masked when used.
    static inline void pack_lone(const uint8_t* row, bool is_even, int dim, int padded, uint32_t* words) {
        for (int d = 0; d < padded; d += 16) {
            const auto mask = static_cast<__mmask16>(first_halves(dim - d));
            const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + 2 * d));
            _mm512_mask_storeu_epi16(words + d, is_even ? 0x55555555u : 0xaaaaaaaau,
                                     is_even ? wide : _mm512_slli_epi32(wide, 16));
        }
    }
    static void pack_values(const uint8_t* src, StreamType, int dim, int padded, int j, int count,
                            uint32_t* to, Ahead& ahead) {
        const int64_t row_bytes = 2 * static_cast<int64_t>(dim);
        const Interleaver order;
        for (int n = j; n < j + count;) {
            const uint8_t* row = src + (n - j) * row_bytes;
            uint32_t* words = to + static_cast<int64_t>(n / 2) * padded;
            if (n % 2 == 0 && n + 1 < j + count) {
                pack_pair(row, row_bytes, dim, padded, words, order);
                n += 2;
            } else {
                pack_lone(row, n % 2 == 0, dim, padded, words);
                n += 1;
            }
            if (n % 4 == 0) ahead.step();
        }
    }
    // 2^t for t <= 0 to 2^-17, far below what rounding to bf16 leaves.
    static inline F exp2(F t) {
        t = f_max(f_set1(-160.0f), t);
        const F n = f_round(t);
        const F r = f_sub(t, n);
        F p = f_set1(9.618437357674640e-3f);
        p = f_fma(p, r, f_set1(5.550332471162809e-2f));
        p = f_fma(p, r, f_set1(2.402264791363012e-1f));
        p = f_fma(p, r, f_set1(6.931472028550421e-1f));
        p = f_fma(p, r, f_set1(1.0f));
        return f_scale2(p, n);
    }
    static inline F store_p(uint32_t* to, int lane, F p) {
        const __m256i h = (__m256i)_mm512_cvtneps_pbh(p);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(to) + lane), h);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }
};
#endif

// Calls use(src, j, count) for each run of needed positions of one head that lies in one block; false
// when a needed position has no valid block.
template <class Use>
static inline bool for_each_run(const AttendItem& item, const StreamView& stream, int head, int64_t base,
                                uint64_t need, Use&& use) {
    const int64_t row_bytes = stream.dim * stream_width(stream.type);
    int j = 0;
    while (need >> j) {
        j += __builtin_ctzll(need >> j);
        const int64_t slot = (base + j) % stream.block_size;
        const uint64_t rest = ~(need >> j);
        int count = rest ? __builtin_ctzll(rest) : kTile;
        if (count > stream.block_size - slot) count = static_cast<int>(stream.block_size - slot);
        const int64_t block = item.block_table[(base + j) / stream.block_size];
        if (block <= 0 || block >= stream.num_blocks) return false;
        use(stream.pages + block * stream.page_bytes + stream.offset +
                (head * static_cast<int64_t>(stream.block_size) + slot) * row_bytes,
            j, count);
        j += count;
        if (j >= kTile) break;
    }
    return true;
}

}  // namespace KVERN_PATH
