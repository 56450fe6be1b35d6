// One packed tile of keys against some query rows.
//
//   s = q.k in feature order;  m' = max(m, max s);  p = 2^(s c - m');  l = l 2^(m - m') + sum p
//   acc = acc 2^(m - m'), then acc += p v in key order over the row's visible keys only
//
// Rows never mix, and a row's arithmetic is the same in every register tile.
#pragma once

namespace KVERN_PATH {

constexpr float kLog2e = 1.44269502162933349609375f;
constexpr float kMinusInf = -__builtin_inff();
constexpr int kRowBlock = 24;  // rows that go through scores, softmax and values together: they stay in L1

// What is known about each row of an item, and where its tile operands lie.
struct RowState {
    uint32_t* q;          // [rows][steps]
    float* acc;           // [rows][value_dim_padded], the current unit
    float* run;           // the same, units merged so far
    float *m, *l, *run_m, *run_l;
    const uint64_t* masks;  // visible keys of the tile
};

struct TileBuffers {
    uint32_t *keys, *values;
    float* scores;  // [kRowBlock][kTile]; turned into probabilities in place
};

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

// Masks a row's scores and returns its new maximum, in units of log2.
static inline float mask_and_max(float* s, uint64_t mask, float c, float m) {
    F x[4];
    for (int v = 0; v < 4; ++v) x[v] = f_load(s + 16 * v);
    if (mask != ~0ull) {
        for (int v = 0; v < 4; ++v) {
            x[v] = f_select(static_cast<Mask>(mask >> (16 * v)), x[v], f_set1(kMinusInf));
            f_store(s + 16 * v, x[v]);
        }
    }
    const float t = f_hmax(f_max(f_max(x[0], x[1]), f_max(x[2], x[3]))) * c;
    return t > m ? t : m;
}

// Scores to probabilities in place; returns their sum.
template <class S>
static inline float exponentiate(float* s, float c, float m) {
    const F minus = f_set1(-m);
    F p[4];
    for (int v = 0; v < 4; ++v) p[v] = S::exp2(f_fma(f_load(s + 16 * v), f_set1(c), minus));
    for (int v = 0; v < 4; ++v) p[v] = S::store_p(reinterpret_cast<uint32_t*>(s), 16 * v, p[v]);
    return f_sum(f_add(f_add(p[0], p[1]), f_add(p[2], p[3])));
}

// Rows [begin, end), at most kRowBlock of them.
template <class S>
static void attend_rows(const AttendShape& shape, const TileBuffers& tile, const RowState& row, int steps,
                        int begin, int end, Ahead& ahead) {
    const int padded = shape.value_dim_padded;
    const float cap = shape.params.softcap;
    const float c = cap > 0.0f ? kLog2e : shape.params.scale * kLog2e;
    auto scores_of = [&](int r) { return tile.scores + (r - begin) * kTile; };
    in_row_tiles(end - begin, [&](auto rows, int i) {
        const int r = begin + i;
        score_rows<S, rows.value>(row.q + static_cast<int64_t>(r) * steps, steps, tile.keys, scores_of(r));
        ahead.step();
    });
    alignas(64) float m_new[kRowBlock + 8], alpha[kRowBlock + 8];
    for (int r = begin; r < end; ++r) {
        m_new[r - begin] = row.m[r];
        if (row.masks[r] == 0) continue;
        if (cap > 0.0f) cap_scores(scores_of(r), shape.params.scale, cap);
        m_new[r - begin] = mask_and_max(scores_of(r), row.masks[r], c, row.m[r]);
    }
    ahead.step();
    for (int i = 0; i < end - begin; i += 16) {
        const int n = end - begin - i < 16 ? end - begin - i : 16;
        const F gap = f_sub(f_load_n(row.m + begin + i, n), f_load_n(m_new + i, n));
        f_store_n(alpha + i, f_exp2(gap), n);
    }
    for (int r = begin; r < end; ++r) {
        if (row.masks[r] == 0) continue;
        const float sum = exponentiate<S>(scores_of(r), c, m_new[r - begin]);
        row.l[r] = fma_scalar(row.l[r], alpha[r - begin], sum);
        row.m[r] = m_new[r - begin];
        if (r % 4 == 0) ahead.step();
    }
    for (int r = begin; r < end;) {
        int n = 1;
        while (r + n < end && row.masks[r + n] == row.masks[r]) ++n;
        if (row.masks[r] != 0) {
            in_row_tiles(n, [&](auto rows, int i) {
                i += r;
                value_rows<S, rows.value>(scores_of(i), tile.values, padded, alpha + (i - begin), row.masks[i],
                                          row.acc + static_cast<int64_t>(i) * padded);
                ahead.step();
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

}  // namespace KVERN_PATH
