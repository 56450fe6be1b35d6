// One tile of keys against some query rows.
//
//   s = q.k;  m' = max(m, max s);  p = 2^(s c - m');  l = l 2^(m - m') + sum p
//   acc = acc 2^(m - m') + sum p v, over the row's visible keys only
//
// Rows never mix, and a row's arithmetic is the same in every register tile. How q.k and p v are summed is
// the stored form's business (attend_float.h, attend_bf16.h, attend_int8.h): a path's table names a form
// of the keys and one of the values, and any two go together.
#pragma once

namespace KVERN_PATH {

constexpr float kLog2e = 1.44269502162933349609375f;
constexpr float kMinusInf = -__builtin_inff();

// Splits n rows into register tiles and calls f<R>(first row) for each.
template <class Call>
static inline void in_row_tiles(int n, Call&& call) {
    int r = 0;
    if constexpr (kScoreRows >= 6) {
        for (; n - r >= 6; r += 6) call(std::integral_constant<int, 6>{}, r);
        if (n - r >= 4) call(std::integral_constant<int, 4>{}, r), r += 4;
    }
    if constexpr (kScoreRows >= 3) {
        for (; n - r >= 3 && n - r != 4; r += 3) call(std::integral_constant<int, 3>{}, r);  // 4 go as 2 and 2
    }
    for (; n - r >= 2; r += 2) call(std::integral_constant<int, 2>{}, r);
    if (n - r == 1) call(std::integral_constant<int, 1>{}, r);
}

// Splits a row's features into tiles of NV vectors and calls f<vectors>(first vector) for each.
template <int NV, class Call>
static inline void in_value_tiles(int padded, Call&& call) {
    int v = 0;
    for (; v + NV <= padded / 16; v += NV) call(std::integral_constant<int, NV>{}, v);
    for (; v < padded / 16; ++v) call(std::integral_constant<int, 1>{}, v);
}

}  // namespace KVERN_PATH

#ifdef KVERN_WRITTEN_OUT
#include "attend_avx2.h"
#include "attend_avx2_int8.h"
#endif
#include "attend_bf16.h"
#include "attend_float.h"
#include "attend_int8.h"
#ifdef KVERN_QUADS
#include "attend_int8_quads.h"
#endif
#ifdef KVERN_TILES
#include "attend_tiles.h"
#include "attend_int8_tiles.h"
#endif

namespace KVERN_PATH {

// Indexed by StreamType. A new stored form is one more line in each.
static const KeyForm kKeyForms[] = {
    key_form<FloatForm<StreamType::FP32>>(),
    key_form<FloatForm<StreamType::FP16>>(),
#if defined(KVERN_TILES)
    {TileForm::q_bytes, TileForm::key_tile_bytes, TileForm::prepare_q, TileForm::pack_keys, TileForm::score},
#elif defined(__AVX512BF16__)
    {Bf16DotForm::q_bytes, Bf16DotForm::key_tile_bytes, Bf16DotForm::prepare_q, Bf16DotForm::pack_keys,
     Bf16DotForm::score},
#else
    key_form<FloatForm<StreamType::BF16>>(),
#endif
#if defined(KVERN_TILES)
    {TileInt8Form::q_bytes, TileInt8Form::key_tile_bytes, TileInt8Form::prepare_q, TileInt8Form::pack_keys, TileInt8Form::score},
#else
    {Int8Form::q_bytes, Int8Form::no_bytes, Int8Form::prepare_q, Int8Form::pack_nothing, Int8Form::score},
#endif
};

static const ValueForm kValueForms[] = {
    value_form<FloatForm<StreamType::FP32>>(),
    value_form<FloatForm<StreamType::FP16>>(),
#if defined(KVERN_TILES)
    {TileForm::tile_bytes, TileForm::pack, Bf16DotForm::exponentiate, TileForm::weigh, Bf16DotForm::settle, true},
#elif defined(__AVX512BF16__)
    value_form<Bf16DotForm>(),
#else
    value_form<FloatForm<StreamType::BF16>>(),
#endif
#if defined(KVERN_TILES)
    {Int8QuadForm::tile_bytes, Int8QuadForm::pack, FloatForm<StreamType::FP32>::exponentiate, TileInt8Form::weigh,
     Int8Form::settle, true},
#elif defined(KVERN_QUADS)
    {Int8QuadForm::tile_bytes, Int8QuadForm::pack, FloatForm<StreamType::FP32>::exponentiate, Int8QuadForm::weigh,
     Int8Form::settle, false},
#else
    {Int8Form::tile_bytes, Int8Form::pack, FloatForm<StreamType::FP32>::exponentiate, Int8Form::weigh,
     Int8Form::settle, false},
#endif
};

// What is known about each row of an item, and where its tile operands lie.
struct RowState {
    const uint8_t* q;       // [rows][q_bytes], prepared for the keys' form
    const float* q_unit;    // what a score of the row is to be multiplied by
    float* acc;             // [rows][value_dim_padded], the current unit
    float* run;             // the same, units merged so far
    float *m, *l, *run_m, *run_l;
    const uint64_t* masks;  // visible keys of the tile
};

// Rows [begin, end) of each of some KV heads, at most kRowBlock in all, that meet a tile together: every
// head's scores, then every row's softmax, then every head's values.
struct RowSet {
    int begin, end, heads;
    int per_head;  // rows from one head to the next in RowState

    int count() const { return end - begin; }  // of one head
    // Calls use(place among the scores, place in the state, row whose mask it has).
    template <class Use>
    void each(Use&& use) const {
        for (int h = 0, i = 0; h < heads; ++h) {
            for (int r = begin; r < end; ++r, ++i) use(i, h * per_head + r, r);
        }
    }
};

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

// Scores [rows of the set][kTile] to probabilities in place; moves m and l on and says what that does to acc. All
// heads at once, since each row's is one long chain of steps.
static void soften(const AttendShape& shape, const ValueForm& form, const RowSet& set, const RowState& row, float* scores,
                   float* alpha, Ahead& ahead) {
    const float cap = shape.params.softcap;
    static_assert(kRowBlock % 8 == 0);
    alignas(64) float m_old[kRowBlock + 8] = {}, m_new[kRowBlock + 8] = {}, c[kRowBlock];  // whole vectors are read
    set.each([&](int i, int r, int masked) {
        m_old[i] = m_new[i] = row.m[r];
        c[i] = cap > 0.0f ? kLog2e : shape.params.scale * kLog2e * row.q_unit[r];
        const uint64_t mask = row.masks[masked];
        if (mask == 0) return;
        if (cap > 0.0f) cap_scores(scores + i * kTile, shape.params.scale * row.q_unit[r], cap);
        m_new[i] = mask_and_max(scores + i * kTile, mask, c[i], row.m[r]);
    });
    ahead.step();
    const int rows = set.heads * set.count();
    for (int i = 0; i < rows; i += 16) f_store(alpha + i, f_exp2(f_sub(f_load(m_old + i), f_load(m_new + i))));
    set.each([&](int i, int r, int masked) {
        if (row.masks[masked] == 0) return;
        const float sum = form.exponentiate(scores + i * kTile, c[i], m_new[i]);
        row.l[r] = fma_scalar(row.l[r], alpha[i], sum);
        row.m[r] = m_new[i];
        if (i % 4 == 0) ahead.step();
    });
}

// Adds the values of one head to its rows [begin, end): those with one mask, or that the form takes together, at a time.
static void weigh_head(const AttendShape& shape, const ValueForm& form, const TileRows& values, const uint8_t* tile,
                       const RowSet& set, const uint64_t* masks, float* p, const float* alpha, float* acc, Ahead& ahead) {
    auto go_together = [&](uint64_t a, uint64_t b) { return form.takes_any_masks ? (a != 0) == (b != 0) : a == b; };
    for (int r = 0; r < set.count();) {
        const uint64_t* mask = masks + set.begin + r;
        int n = 1;
        while (r + n < set.count() && go_together(mask[0], mask[n])) ++n;
        if (mask[0] != 0) {
            form.weigh(values, tile, shape.values.dim, n, p + r * kTile, mask, alpha + r,
                       acc + static_cast<int64_t>(set.begin + r) * shape.value_dim_padded, ahead);
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
