// Stored floats (fp32, fp16, bf16) with float32 arithmetic.
//
//   scores   features run over the lanes: each lane one chain over the feature blocks, then a fixed tree
//   values   each feature one chain over the keys, in key order
//
// Few rows read the stored vectors as they lie; for many the tile is widened to float32 first. The numbers
// are the same, lane by lane, so nothing tells the two apart.
#pragma once

namespace KVERN_PATH {

template <StreamType T>
static inline D dot_load(const uint8_t* row, int step) {
    if constexpr (T == StreamType::FP32) return d_load_fp32(row, step);
    if constexpr (T == StreamType::FP16) return d_load_fp16(row, step);
    return d_load_bf16_lanes(row, step);
}

// Features 16 i and up of a stored vector, in the order of lanes that this type is widened to.
template <StreamType T>
static inline F lanes_load(const uint8_t* row, int i) {
    if constexpr (T == StreamType::FP32) return f_load(reinterpret_cast<const float*>(row) + 16 * i);
    if constexpr (T == StreamType::FP16) return f_load_f16(row + 32 * i);
    return f_load_bf16_lanes(row + 32 * i);
}

template <StreamType T>
static inline F to_lanes(F x) {
    return T == StreamType::BF16 ? f_to_bf16_lanes(x) : x;
}

template <StreamType T>
struct FloatForm {
    static constexpr int kDirectRows = T == StreamType::FP32 ? 1 << 20 : 2 * kScoreRows;
    static constexpr int64_t kWidth = T == StreamType::FP32 ? 4 : 2;
    static constexpr int kSteps = 16 / kDotLanes;  // of a dot product, per 16 features

    static int64_t q_bytes(int dim) { return padded_bytes(dim); }
    static int64_t padded_bytes(int dim) { return 4 * static_cast<int64_t>(padded_to(dim, 16)); }
    static int64_t tile_bytes(int dim) { return kTile * padded_bytes(dim); }

    static float prepare_q(const float* q, int dim, uint8_t* to) {
        for (int d = 0; d < dim; d += 16) {
            const F x = f_load_n(q + d, dim - d < 16 ? dim - d : 16);
            f_store(reinterpret_cast<float*>(to) + d, to_lanes<T>(x));
        }
        return 1.0f;
    }

    // The tile as float32 in the order of lanes, rows padded with zeros.
    static bool pack(const TileRows& rows, int dim, int num_rows, uint8_t* tile, Ahead& ahead) {
        if (dim % 16 == 0 && num_rows <= kDirectRows) return false;
        const int whole = dim / 16;
        for (int j = 0; j < kTile; ++j) {
            float* to = reinterpret_cast<float*>(tile + j * padded_bytes(dim));
            for (int i = 0; i < whole; ++i) f_store(to + 16 * i, lanes_load<T>(rows.row[j], i));
            if (dim % 16) {
                uint8_t rest[64] = {};
                std::memcpy(rest, rows.row[j] + 16 * whole * kWidth, static_cast<size_t>(dim % 16 * kWidth));
                f_store(to + 16 * whole, lanes_load<T>(rest, 0));
            }
            if (j % 4 == 0) ahead.step();
        }
        return true;
    }

    template <StreamType L, int R, class Row>
    static inline void score_tile(Row&& row_of, int padded, const float* q, uint64_t seen, float* scores,
                                  Ahead& ahead) {
        for (int j = 0; j < kTile; j += kDotKeys) {
            if (!(seen >> j & 15)) continue;
            const uint8_t* key[kDotKeys];
            for (int k = 0; k < kDotKeys; ++k) key[k] = row_of(j + k);
#ifdef KVERN_WRITTEN_OUT
            if constexpr (R == 3) {
                store_scores(score_3_by_4<L>(key, q, 4 * static_cast<int64_t>(padded), padded / 16), scores + j);
                ahead.step();
                continue;
            }
#endif
            D acc[kDotKeys][R];
            for (int k = 0; k < kDotKeys; ++k) {
                for (int r = 0; r < R; ++r) acc[k][r] = d_zero();
            }
            for (int i = 0; i < padded / 16; ++i) {
                for (int part = 0; part < kSteps; ++part) {
                    const int step = kSteps * i + part;
                    D x[R];
                    for (int r = 0; r < R; ++r) x[r] = d_load(q + static_cast<int64_t>(r) * padded + step * kDotLanes);
                    for (int k = 0; k < kDotKeys; ++k) {
                        const D y = dot_load<L>(key[k], step);
                        for (int r = 0; r < R; ++r) acc[k][r] = d_mac(acc[k][r], x[r], y);
                    }
                }
            }
            for (int r = 0; r < R; ++r) d_sums4(acc[0][r], acc[1][r], acc[2][r], acc[3][r], scores + r * kTile + j);
            ahead.step();
        }
    }

    static void score(const TileRows& keys, const uint8_t* tile, int dim, int num_rows, const uint8_t* q,
                      const uint64_t* masks, float* scores, Ahead& ahead) {
        const int padded = padded_to(dim, 16);
        in_row_tiles(num_rows, [&](auto rows, int i) {
            constexpr int R = rows.value;
            uint64_t seen = 0;
            for (int r = 0; r < R; ++r) seen |= masks[i + r];
            const float* qi = reinterpret_cast<const float*>(q) + static_cast<int64_t>(i) * padded;
            if (tile) {
                auto row_of = [&](int j) { return tile + j * padded_bytes(dim); };
                score_tile<StreamType::FP32, R>(row_of, padded, qi, seen, scores + i * kTile, ahead);
            } else {
                auto row_of = [&](int j) { return keys.row[j]; };
                score_tile<T, R>(row_of, padded, qi, seen, scores + i * kTile, ahead);
            }
        });
    }

    static float exponentiate(float* s, float c, float m) {
        const F minus = f_set1(-m);
        F p[4];
        for (int v = 0; v < 4; ++v) p[v] = f_exp2_down(f_fma(f_load(s + 16 * v), f_set1(c), minus));
        for (int v = 0; v < 4; ++v) f_store(s + 16 * v, p[v]);
        return f_sum(f_add(f_add(p[0], p[1]), f_add(p[2], p[3])));
    }

    // NV vectors of features from vector v on.
    template <StreamType L, int R, int NV, class Row>
    static inline void value_tile(Row&& row_of, int v, int padded, const float* p, uint64_t mask,
                                  const float* alpha, float* out, Ahead& ahead) {
        constexpr int kParts = NV * kSteps;  // one register each
        const int first = v * kSteps;
        auto place = [&](int r, int n) { return out + static_cast<int64_t>(r) * padded + (first + n) * kDotLanes; };
#ifdef KVERN_WRITTEN_OUT
        if constexpr (R == 3 && kParts == 4) {
            constexpr int64_t kStored = L == StreamType::FP32 ? 4 : 2;
            Sums sums = load_sums(place(0, 0), padded, alpha);
            const int64_t at = first * kDotLanes * kStored;
            if (mask == ~0ull) {
                for (int j = 0; j < kTile; j += 4) {
                    for (int i = j; i < j + 4; ++i) weigh_3_by_4<L>(row_of(i) + at, p + i, sums);
                    ahead.step();
                }
            } else {
                for (uint64_t left = mask; left; left &= left - 1) {
                    const int j = __builtin_ctzll(left);
                    weigh_3_by_4<L>(row_of(j) + at, p + j, sums);
                }
            }
            store_sums(sums, place(0, 0), padded);
            return;
        }
#endif
        D acc[R][kParts];
        for (int r = 0; r < R; ++r) {
            for (int n = 0; n < kParts; ++n) acc[r][n] = d_mul(d_load(place(r, n)), d_set1(alpha[r]));
        }
        auto add_key = [&](int j) {
            const uint8_t* row = row_of(j);
            D weight[R];
            for (int r = 0; r < R; ++r) weight[r] = d_set1(p[r * kTile + j]);
            for (int n = 0; n < kParts; ++n) {
                const D x = dot_load<L>(row, first + n);
                for (int r = 0; r < R; ++r) acc[r][n] = d_mac(acc[r][n], weight[r], x);
            }
        };
        if (mask == ~0ull) {
            for (int j = 0; j < kTile; j += 4) {
                for (int i = 0; i < 4; ++i) add_key(j + i);
                ahead.step();
            }
        } else {
            for (uint64_t left = mask; left; left &= left - 1) add_key(__builtin_ctzll(left));
        }
        for (int r = 0; r < R; ++r) {
            for (int n = 0; n < kParts; ++n) d_store(place(r, n), acc[r][n]);
        }
    }

    template <StreamType L, class Row>
    static inline void weigh_rows(Row&& row_of, int dim, int num_rows, const float* p, uint64_t mask,
                                  const float* alpha, float* acc, Ahead& ahead) {
        const int padded = padded_to(dim, 16);
        in_row_tiles(num_rows, [&](auto rows, int i) {
            constexpr int R = rows.value;
            constexpr int NV = R == 1 && kScoreVectors < 4 ? 2 * kScoreVectors : kScoreVectors;
            const float* pr = p + i * kTile;
            float* out = acc + static_cast<int64_t>(i) * padded;
            in_value_tiles<NV>(padded, [&](auto vectors, int v) {
                value_tile<L, R, vectors.value>(row_of, v, padded, pr, mask, alpha + i, out, ahead);
            });
        });
    }

    static void weigh(const TileRows& values, const uint8_t* tile, int dim, int num_rows, float* p, const uint64_t* masks,
                      const float* alpha, float* acc, Ahead& ahead) {
        if (tile) {
            auto row_of = [&](int j) { return tile + j * padded_bytes(dim); };
            weigh_rows<StreamType::FP32>(row_of, dim, num_rows, p, masks[0], alpha, acc, ahead);
        } else {
            auto row_of = [&](int j) { return values.row[j]; };
            weigh_rows<T>(row_of, dim, num_rows, p, masks[0], alpha, acc, ahead);
        }
    }

    static void settle(int dim, int num_rows, float* acc) {
        if (T != StreamType::BF16) return;
        const int64_t count = static_cast<int64_t>(num_rows) * padded_to(dim, 16);
        for (int64_t i = 0; i < count; i += 16) f_store(acc + i, f_from_bf16_lanes(f_load(acc + i)));
    }
};

template <class Form>
constexpr KeyForm key_form() {
    return {Form::q_bytes, Form::tile_bytes, Form::prepare_q, Form::pack, Form::score};
}

template <class Form>
constexpr ValueForm value_form() {
    return {Form::tile_bytes, Form::pack, Form::exponentiate, Form::weigh, Form::settle, false};
}

}  // namespace KVERN_PATH
