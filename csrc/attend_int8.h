// int8 codes with a float32 scale per token and head. Sums are whole numbers and exact, so their order is
// free: few rows and many, any register tile, any path give the same numbers.
//
//   scores   q as int16 with a scale per row; s = float(sum q k) k_scale, times q's scale
//   values   w = p v_scale as int16, relative to the row's largest w of the tile; acc += float(sum w v) unit
#pragma once

namespace KVERN_PATH {

struct Int8Form {
    // |q| up to here: no sum of `dim` products with codes down to -128 passes int32.
    static float largest_q(int dim) {
        const int64_t most = INT32_MAX / (128 * static_cast<int64_t>(dim));
        return static_cast<float>(most < 32767 ? most : 32767);
    }
    static int64_t q_bytes(int dim) { return 2 * static_cast<int64_t>(padded_to(dim, kPackAlign)); }
    static float prepare_q(const float* q, int dim, uint8_t* to) {
        F top = f_zero(), odd = f_zero();
        for (int d = 0; d < dim; d += 16) {
            const F x = f_load_n(q + d, dim - d < 16 ? dim - d : 16);
            top = f_max(top, f_abs(x));
            odd = f_add(odd, f_sub(x, x));  // 0, or NaN for an infinity or a NaN: it stays visible
        }
        const float largest = f_hmax(top), limit = largest_q(dim);
        const bool is_zero = largest < 1e-20f;  // or so little that no score could tell
        const F inv = f_set1(is_zero ? 0.0f : limit / largest);
        std::memset(to, 0, static_cast<size_t>(q_bytes(dim)));
        for (int d = 0; d < dim; d += 16) {
            const F x = f_mul(f_load_n(q + d, dim - d < 16 ? dim - d : 16), inv);
            store_i16(reinterpret_cast<int16_t*>(to) + d, i_from_f(f_min(f_max(x, f_set1(-limit)), f_set1(limit))));
        }
        return (is_zero ? 1.0f : largest / limit) + f_sum(odd);
    }

    static constexpr int kDirectRows = kScoreRows;  // for so few, values are paired up as they are read

    static bool pack_nothing(const TileRows&, int, int, uint8_t*, Ahead&) { return false; }
    static int64_t no_bytes(int) { return 0; }

    template <int R>
    static inline void score_tile(const TileRows& keys, int whole, const int16_t* q, uint64_t seen, float* scores,
                                  Ahead& ahead) {
        for (int j = 0; j < kTile; j += kDotKeys) {
            if (!(seen >> j & 15)) continue;
            const int8_t* key[kDotKeys];
            for (int k = 0; k < kDotKeys; ++k) key[k] = reinterpret_cast<const int8_t*>(keys.row[j + k]);
#ifdef KVERN_WRITTEN_OUT
            if constexpr (R == 3) {
                store_scores(score_words_3_by_4(key, q, 2 * static_cast<int64_t>(whole), whole), scores + j);
                ahead.step();
                continue;
            }
#endif
            J acc[kDotKeys][R];
            for (int k = 0; k < kDotKeys; ++k) {
                for (int r = 0; r < R; ++r) acc[k][r] = j_zero();
            }
            for (int d = 0; d < whole; d += kWordLanes) {
                for (int k = 0; k < kDotKeys; ++k) {
                    const W x = w_load_i8(key[k] + d);
                    for (int r = 0; r < R; ++r) {
                        acc[k][r] = j_mac(acc[k][r], x, w_load(q + static_cast<int64_t>(r) * whole + d));
                    }
                }
            }
            for (int r = 0; r < R; ++r) j_sums4(acc[0][r], acc[1][r], acc[2][r], acc[3][r], scores + r * kTile + j);
            ahead.step();
        }
        for (int r = 0; r < R; ++r) {
            for (int j = 0; j < kTile; j += 16) {
                float* s = scores + r * kTile + j;
                f_store(s, f_mul(f_load(s), f_load(keys.scale + j)));
            }
        }
    }

    static void score(const TileRows& keys, const uint8_t*, int dim, int num_rows, const uint8_t* q,
                      const uint64_t* masks, float* scores, Ahead& ahead) {
        const int whole = padded_to(dim, kPackAlign);
        in_row_tiles(num_rows, [&](auto rows, int i) {
            constexpr int R = rows.value;
            uint64_t seen = 0;
            for (int r = 0; r < R; ++r) seen |= masks[i + r];
            score_tile<R>(keys, whole, reinterpret_cast<const int16_t*>(q) + static_cast<int64_t>(i) * whole, seen,
                          scores + i * kTile, ahead);
        });
    }

    // Values [kTile / 2][padded features] as pairs of neighbouring keys.
    static int64_t tile_bytes(int dim) { return kTile / 2 * 4 * static_cast<int64_t>(padded_to(dim, 16)); }
    static I pair_of(const TileRows& rows, int j, int d) {
        return pair_up(reinterpret_cast<const int8_t*>(rows.row[2 * j]) + d, reinterpret_cast<const int8_t*>(rows.row[2 * j + 1]) + d);
    }
    static bool pack(const TileRows& rows, int dim, int num_rows, uint8_t* tile, Ahead& ahead) {
        if (num_rows <= kDirectRows) return false;
        const int padded = padded_to(dim, 16);
        uint32_t* to = reinterpret_cast<uint32_t*>(tile);
        for (int j = 0; j < kTile / 2; ++j, to += padded) {
            for (int d = 0; d < padded; d += 16) store_pairs(to + d, pair_of(rows, j, d));
            if (j % 2 == 0) ahead.step();
        }
        return true;
    }

    // A row's weights to int16 in place; returns what one of them is worth.
    static inline float round_weights(float* p, const float* scale, uint64_t mask) {
        F w[4];
        for (int v = 0; v < 4; ++v) {
            w[v] = f_mul(f_load(p + 16 * v), f_load(scale + 16 * v));
            if (mask != ~0ull) w[v] = f_select(static_cast<Mask>(mask >> (16 * v)), w[v], f_zero());
        }
        const float top = f_hmax(f_max(f_max(w[0], w[1]), f_max(w[2], w[3])));
        const float sum = f_sum(f_add(f_add(w[0], w[1]), f_add(w[2], w[3])));
        const float inverse = top > 0.0f ? 32767.0f / top : 0.0f;
        const F inv = f_set1(inverse < 3e38f ? inverse : 0.0f);
        for (int v = 0; v < 4; ++v) {
            const F x = f_min(f_max(f_mul(w[v], inv), f_zero()), f_set1(32767.0f));  // drops NaN
            store_i16(reinterpret_cast<int16_t*>(p) + 16 * v, i_from_f(x));
        }
        return top / 32767.0f + (sum - sum);
    }

    // NV vectors of features; pair_at(j, n) is vector n of pair j.
    template <int R, int NV, class Pair>
    static inline void value_tile(Pair&& pair_at, const uint32_t* words, int padded, int begin, int end, const float* alpha,
                                  const float* unit, float* out, Ahead& ahead) {
        I acc[R][NV];
        for (int r = 0; r < R; ++r) {
            for (int n = 0; n < NV; ++n) acc[r][n] = i_zero();
        }
        for (int j = begin; j < end; ++j) {
            I word[R];
            for (int r = 0; r < R; ++r) word[r] = i_set1(static_cast<int>(words[r * kTile + j]));
            for (int n = 0; n < NV; ++n) {
                const I pair = pair_at(j, n);
                for (int r = 0; r < R; ++r) acc[r][n] = i_mac_pairs(acc[r][n], pair, word[r]);
            }
        }
        ahead.step();
        for (int r = 0; r < R; ++r) {
            for (int n = 0; n < NV; ++n) {
                float* to = out + static_cast<int64_t>(r) * padded + 16 * n;
                const F old = f_mul(f_load(to), f_set1(alpha[r]));
                f_store(to, f_fma(f_from_i(unpair(acc[r][n])), f_set1(unit[r]), old));
            }
        }
    }

#ifdef KVERN_WRITTEN_OUT
    // 32 features from `at` on, for three rows.
    static inline void written_out(const TileRows& values, const uint8_t* tile, int padded, int at, int begin, int end,
                                   const uint32_t* words, const float* alpha, const float* unit, float* out, Ahead& ahead) {
        WordSums s{};
        if (tile) {
            for (int j = begin; j < end; ++j) {
                const uint8_t* pairs = tile + 4 * (static_cast<int64_t>(j) * padded + at);
                weigh_words_3_by_2<true>(pairs, pairs, words + j, s);
            }
            ahead.step();
        } else {
            for (int j = begin; j < end; ++j) {
                weigh_words_3_by_2<false>(values.row[2 * j] + at, values.row[2 * j + 1] + at, words + j, s);
                if (j % 4 == 0) ahead.step();
            }
        }
        add_word_sums(s, alpha, unit, out, padded);
    }
    static constexpr int value_vectors(int rows) { return rows == 1 ? kScoreVectors : rows == 3 ? 2 : kPairVectors; }
#else
    static constexpr int value_vectors(int rows) { return rows == 1 ? kScoreVectors : kPairVectors; }
#endif

    static void weigh(const TileRows& values, const uint8_t* tile, int dim, int num_rows, float* p, const uint64_t* masks,
                      const float* alpha, float* acc, Ahead& ahead) {
        const int padded = padded_to(dim, 16);
        const uint64_t mask = masks[0];
        float unit[kRowBlock];
        for (int r = 0; r < num_rows; ++r) unit[r] = round_weights(p + r * kTile, values.scale, mask);
        const int begin = __builtin_ctzll(mask) / 2, end = (kTile + 1 - __builtin_clzll(mask)) / 2;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(p);
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(tile);
        in_row_tiles(num_rows, [&](auto rows, int i) {
            constexpr int R = rows.value;
            constexpr int NV = value_vectors(R);
            float* out = acc + static_cast<int64_t>(i) * padded;
            in_value_tiles<NV>(padded, [&](auto vectors, int v) {
#ifdef KVERN_WRITTEN_OUT
                if constexpr (R == 3 && vectors.value == 2) {
                    return written_out(values, tile, padded, 16 * v, begin, end, words + i * kTile, alpha + i, unit + i, out + 16 * v, ahead);
                }
#endif
                auto tile_of = [&](auto&& pair_at) {
                    value_tile<R, vectors.value>(pair_at, words + i * kTile, padded, begin, end, alpha + i, unit + i,
                                                 out + 16 * v, ahead);
                };
                if (tile) {
                    tile_of([&](int j, int n) { return load_pairs(pairs + static_cast<int64_t>(j) * padded + 16 * (v + n)); });
                } else {
                    tile_of([&](int j, int n) { return pair_of(values, j, 16 * (v + n)); });
                }
            });
        });
    }

    static void settle(int, int, float*) {}
};

}  // namespace KVERN_PATH
