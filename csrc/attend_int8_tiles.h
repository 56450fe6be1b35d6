// int8 keys and values on tile registers. Queries and weights are int16, taken as two bytes: the high one signed,
// the low one unsigned; each sum is exact and so is their joint one, 256 times the high sum plus the low one.
// Heads whose keys are no whole number of 64 features take attend_int8.h's way; the numbers are the same.
//
//   queries  of a row: key_dim high bytes, then key_dim low ones
//   keys     [key_dim / 4][kTile] words, for many rows; for a few as they lie
#pragma once

namespace KVERN_PATH {

struct TileInt8Form {
    static constexpr int kRows = TileForm::kRows;

    static bool is_whole(int dim) { return dim % 64 == 0 && dim <= TileForm::kMostFewDims; }
    static bool is_few(const TileRows& keys) { return keys.item_rows <= kRows; }

    static int64_t q_bytes(int dim) { return Int8Form::q_bytes(dim); }
    static float prepare_q(const float* q, int dim, uint8_t* to) {
        const float unit = Int8Form::prepare_q(q, dim, to);
        if (!is_whole(dim)) return unit;
        uint8_t planes[2 * TileForm::kMostFewDims];
        for (int d = 0; d < dim; ++d) {
            planes[d] = to[2 * d + 1];
            planes[dim + d] = to[2 * d];
        }
        std::memcpy(to, planes, static_cast<size_t>(2 * dim));
        return unit;
    }

    static int64_t key_tile_bytes(int dim) { return is_whole(dim) ? kTile * static_cast<int64_t>(dim) : 0; }
    static bool pack_keys(const TileRows& keys, int dim, int, uint8_t* tile, Ahead& ahead) {
        if (!is_whole(dim)) return false;
        if (is_few(keys)) return TileForm::gather_keys(keys, dim, tile);
        for (int j = 0; j < kTile; j += 16) {
            for (int d = 0; d < dim; d += 64) {
                float* at = reinterpret_cast<float*>(tile) + static_cast<int64_t>(d / 4) * kTile + j;
                F row[16];
#pragma GCC unroll 16
                for (int i = 0; i < 16; ++i) row[i] = f_bits(_mm512_loadu_si512(keys.row[j + i] + d));
                store_transposed(row, 16, 16, at, kTile);
                ahead.step();
            }
        }
        return true;
    }

    // Scores of up to 16 rows with 16 keys: sums [16][16], high and low, of the item's rows.
    static inline void score_tile(const uint8_t* q, int dim, const uint8_t* keys, int32_t* high, int32_t* low) {
        tile_zero<0>();
        tile_zero<1>();
        for (int d = 0; d < dim; d += 64, keys += 16 * 4 * kTile) {
            tile_load<6>(keys, 4 * kTile);
            tile_load<4>(q + d, 2 * dim);
            tile_dot_ss<0, 4, 6>();
            tile_load<5>(q + dim + d, 2 * dim);
            tile_dot_us<1, 5, 6>();
        }
        tile_store<0>(high, 64);
        tile_store<1>(low, 64);
    }
    static inline F joined(const int32_t* high, const int32_t* low) {
        return f_from_i(i_add(i_shl<8>(_mm512_loadu_si512(high)), _mm512_loadu_si512(low)));
    }
    static void score_many(const TileRows& keys, const uint8_t* tile, int dim, int num_rows, const uint8_t* q,
                           float* scores, Ahead& ahead) {
        alignas(64) int32_t high[16 * kRows], low[16 * kRows];
        for (int i = 0; i < num_rows; i += kRows) {
            const int rows = num_rows - i < kRows ? num_rows - i : kRows;
            for (int j = 0; j < kTile; j += 16) {
                score_tile(q + 2 * static_cast<int64_t>(i) * dim, dim, tile + 4 * j, high, low);
                const F scale = f_load(keys.scale + j);
                for (int r = 0; r < rows; ++r) {
                    f_store(scores + (i + r) * kTile + j, f_mul(joined(high + 16 * r, low + 16 * r), scale));
                }
            }
            ahead.step();
        }
    }

    // The sums of sixteen keys, which lie one after the other, with one of the queries' planes [words][columns].
    static inline void few_sums(const uint8_t* keys, int dim, const uint32_t* queries, int columns, bool is_high, int32_t* sums) {
        tile_zero<3>();
        for (int d = 0; d < dim; d += 64) {
            tile_load<2>(queries + d / 4 * columns, 4 * columns);
            tile_load<6>(keys + d, dim);
            if (is_high) {
                tile_dot_ss<3, 6, 2>();
            } else {
                tile_dot_su<3, 6, 2>();
            }
        }
        tile_store<3>(sums, 4 * columns);
    }
    static void score_few(const TileRows& keys, const uint8_t* tile, int dim, int num_rows, const uint8_t* q,
                          float* scores, Ahead& ahead) {
        const int columns = TileForm::columns_of(keys.item_rows), words = dim / 4;
        alignas(64) uint32_t queries[2 * TileForm::kMostFewDims / 4 * kRows];
        alignas(64) int32_t high[16 * kRows], low[16 * kRows];
        alignas(64) float turned[16 * kRows];
        uint32_t* low_queries = queries + words * columns;
        if (num_rows < columns) std::memset(queries, 0, static_cast<size_t>(8 * words * columns));
        for (int r = 0; r < num_rows; ++r) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(q + 2 * static_cast<int64_t>(r) * dim);
            for (int w = 0; w < 2 * words; ++w) queries[w * columns + r] = from[w];
        }
        for (int j = 0; j < kTile; j += kRows) {
            const uint8_t* in_place = TileForm::keys_in_place(keys, j, dim);
            const uint8_t* at = in_place ? in_place : tile + j * static_cast<int64_t>(dim);
            few_sums(at, dim, queries, columns, true, high);
            few_sums(at, dim, low_queries, columns, false, low);
            for (int i = 0; i < columns; ++i) f_store(turned + 16 * i, joined(high + 16 * i, low + 16 * i));
            TileForm::turn_scores(turned, columns, num_rows, scores + j);
            const F scale = f_load(keys.scale + j);
            for (int r = 0; r < num_rows; ++r) {
                float* s = scores + r * kTile + j;
                f_store(s, f_mul(f_load(s), scale));
            }
            ahead.step();
        }
    }
    static void score(const TileRows& keys, const uint8_t* tile, int dim, int num_rows, const uint8_t* q,
                      const uint64_t* masks, float* scores, Ahead& ahead) {
        if (!is_whole(dim)) return Int8Form::score(keys, tile, dim, num_rows, q, masks, scores, ahead);
        if (is_few(keys)) return score_few(keys, tile, dim, num_rows, q, scores, ahead);
        score_many(keys, tile, dim, num_rows, q, scores, ahead);
    }

    static void weigh(const TileRows& values, const uint8_t* tile, int dim, int num_rows, float* p, const uint64_t* masks,
                      const float* alpha, float* acc, Ahead& ahead) {
        const int padded = padded_to(dim, 16);
        alignas(64) int32_t high[16 * kRows], low[16 * kRows];
        float unit[kRowBlock];
        for (int r = 0; r < num_rows; ++r) unit[r] = Int8QuadForm::round_weights(p + r * kTile, values.scale, masks[r]);
        for (int i = 0; i < num_rows; i += kRows) {
            const int rows = num_rows - i < kRows ? num_rows - i : kRows;
            const uint8_t* weights = reinterpret_cast<const uint8_t*>(p + i * kTile);
            tile_load<4>(weights, 4 * kTile);
            tile_load<5>(weights + kTile, 4 * kTile);
            for (int v = 0; v < padded; v += 16) {
                tile_load<6>(tile + 4 * v, 4 * static_cast<int64_t>(padded));
                tile_zero<0>();
                tile_dot_ss<0, 4, 6>();
                tile_zero<1>();
                tile_dot_us<1, 5, 6>();
                tile_store<0>(high, 64);
                tile_store<1>(low, 64);
                for (int r = 0; r < rows; ++r) {
                    float* to = acc + static_cast<int64_t>(i + r) * padded + v;
                    Int8QuadForm::add_sum(_mm512_load_si512(high + 16 * r), _mm512_load_si512(low + 16 * r), alpha[i + r], unit[i + r], to);
                }
            }
            ahead.step();
        }
    }
};

}  // namespace KVERN_PATH
