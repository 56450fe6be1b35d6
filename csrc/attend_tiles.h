// bf16 keys, values, queries and probabilities on tile registers (tdpbf16ps), float32 sums. Keys and values
// are packed as in attend_bf16.h, so that both are the right-hand side of a product with rows of queries or of
// probabilities.
//
//   scores   each one chain over the features, two at a time, in order
//   values   a tile of kTile keys from nothing, in key order; then acc = acc alpha + that
//
// Keys that a row does not see have probability 0 there, so rows with different masks go together.
//
// For a few rows, packing keys would cost more than the products: keys are then the left-hand side, as they lie in
// their page, and the queries the right-hand one. A product's operands may change sides: the bits are the same.
#pragma once

namespace KVERN_PATH {

struct TileForm {
    static constexpr int kRows = 16;       // of a tile, at most
    static constexpr int kTileWords = 16;  // of a row of a left-hand tile: 32 bf16

    static TileConfig config(int rows) {
        TileConfig c;
        const int most = rows < kRows ? rows : kRows;
        for (int t : {0, 1, 4, 5}) c.set(t, most, 64);
        for (int t : {2, 3}) c.set(t, kTileWords, 4 * columns_of(rows));  // queries of a few rows, and their scores
        for (int t : {6, 7}) c.set(t, kTileWords, 64);
        return c;
    }
    static int columns_of(int rows) { return rows <= 4 ? 4 : kRows; }
    static bool is_few(const TileRows& keys, int dim) {
        return keys.item_rows <= kRows && dim % 32 == 0 && dim <= kMostFewDims;
    }
    static constexpr int kMostFewDims = 576;

    static int words_of(int dim) { return padded_to((dim + 1) / 2, kTileWords); }
    static int64_t q_bytes(int dim) { return 4 * static_cast<int64_t>(words_of(dim)); }
    static float prepare_q(const float* q, int dim, uint8_t* to) {
        std::memset(to, 0, static_cast<size_t>(q_bytes(dim)));
        return Bf16DotForm::prepare_q(q, dim, to);
    }

    static int64_t key_tile_bytes(int dim) { return kTile * q_bytes(dim); }
    static bool pack_keys(const TileRows& keys, int dim, int num_rows, uint8_t* tile, Ahead& ahead) {
        if (is_few(keys, dim)) return gather_keys(keys, 2 * static_cast<int64_t>(dim), tile);
        const int used = Bf16DotForm::words_of(dim), words = words_of(dim);
        Bf16DotForm::pack_keys(keys, dim, num_rows, tile, ahead);
        std::memset(tile + 4 * static_cast<int64_t>(kTile) * used, 0, static_cast<size_t>(4 * kTile * (words - used)));
        return true;
    }

    // The sixteen keys from j on, when they lie one after the other.
    static inline const uint8_t* keys_in_place(const TileRows& keys, int j, int64_t stride) {
        bool same = true;
        for (int i = 1; i < kRows; ++i) same &= keys.row[j + i] == keys.row[j] + i * stride;
        return same ? keys.row[j] : nullptr;
    }
    // Keys of so many bytes that do not, one after the other.
    static bool gather_keys(const TileRows& keys, int64_t bytes, uint8_t* tile) {
        for (int j = 0; j < kTile; j += kRows) {
            if (keys_in_place(keys, j, bytes)) continue;
            for (int i = j; i < j + kRows; ++i) std::memcpy(tile + i * bytes, keys.row[i], static_cast<size_t>(bytes));
        }
        return true;
    }
    // Scores [16 keys][columns] of one sixteen to rows of `scores`.
    static inline void turn_scores(const float* turned, int columns, int num_rows, float* scores) {
        F rows[16];
        if (columns == 4) {
            alignas(64) static constexpr int32_t kFourths[16] = {0, 4, 8, 12, 16, 20, 24, 28};
            const __m512i pick = _mm512_load_si512(kFourths);
            F quarter[4];
            for (int i = 0; i < 4; ++i) quarter[i] = f_load(turned + 16 * i);
            for (int r = 0; r < num_rows; ++r) {
                const __m512i at = _mm512_add_epi32(pick, _mm512_set1_epi32(r));
                const F a = _mm512_permutex2var_ps(quarter[0], at, quarter[1]);
                const F b = _mm512_permutex2var_ps(quarter[2], at, quarter[3]);
                f_store(scores + r * kTile, _mm512_shuffle_f32x4(a, b, 0x44));
            }
            return;
        }
        for (int i = 0; i < 16; ++i) rows[i] = f_load(turned + 16 * i);
        store_transposed(rows, 16, num_rows, scores, kTile);
    }
    static void score_few(const TileRows& keys, const uint8_t* tile, int dim, int num_rows, const uint8_t* q,
                          float* scores, Ahead& ahead) {
        const int columns = columns_of(keys.item_rows), words = dim / 2;
        const int64_t bytes = 2 * static_cast<int64_t>(dim);
        alignas(64) uint32_t queries[kMostFewDims / 2 * kRows];
        alignas(64) float turned[16 * kRows];
        if (num_rows < columns) std::memset(queries, 0, static_cast<size_t>(4 * words * columns));
        for (int r = 0; r < num_rows; ++r) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(q + r * bytes);
            for (int w = 0; w < words; ++w) queries[w * columns + r] = from[w];
        }
        for (int j = 0; j < kTile; j += kRows) {
            const uint8_t* in_place = keys_in_place(keys, j, bytes);
            const uint8_t* at = in_place ? in_place : tile + j * bytes;
            tile_zero<3>();
            for (int w = 0; w < words; w += kTileWords) {
                tile_load<2>(queries + w * columns, 4 * columns);
                tile_load<6>(at + 4 * w, bytes);
                tile_dot_bf16<3, 6, 2>();
            }
            tile_store<3>(turned, 4 * columns);
            turn_scores(turned, columns, num_rows, scores + j);
            ahead.step();
        }
    }

    // 16 rows (as many as the tiles have) against half the keys of the tile.
    static inline void score_tile(const uint8_t* q, int64_t q_bytes, const uint8_t* keys, float* scores) {
        constexpr int64_t kStride = 4 * kTile;
        tile_zero<0>();
        tile_zero<1>();
        for (int64_t at = 0; at < q_bytes; at += 64, keys += kTileWords * kStride) {
            tile_load<4>(q + at, q_bytes);
            tile_load<6>(keys, kStride);
            tile_dot_bf16<0, 4, 6>();
            tile_load<7>(keys + 64, kStride);
            tile_dot_bf16<1, 4, 7>();
        }
        tile_store<0>(scores, kStride);
        tile_store<1>(scores + 16, kStride);
    }
    static void score(const TileRows& keys, const uint8_t* tile, int dim, int num_rows, const uint8_t* q, const uint64_t*,
                      float* scores, Ahead& ahead) {
        if (is_few(keys, dim)) return score_few(keys, tile, dim, num_rows, q, scores, ahead);
        const int64_t bytes = q_bytes(dim);
        for (int i = 0; i < num_rows; i += kRows) {
            score_tile(q + i * bytes, bytes, tile, scores + i * kTile);
            score_tile(q + i * bytes, bytes, tile + 128, scores + i * kTile + 32);
            ahead.step();
        }
    }

    // After the packed tile comes whether a value is infinite or NaN (0 times that would not be 0), and room for
    // a copy without those that a row does not see.
    static int64_t tile_bytes(int dim) { return 2 * Bf16DotForm::tile_bytes(dim) + 64; }
    static bool pack(const TileRows& values, int dim, int num_rows, uint8_t* tile, Ahead& ahead) {
        Bf16DotForm::pack(values, dim, num_rows, tile, ahead);
        const int64_t bytes = Bf16DotForm::tile_bytes(dim);
        const __m512i exponent = _mm512_set1_epi32(0x7f807f80);
        __mmask32 odd = 0;
        for (int64_t i = 0; i < bytes; i += 64) {
            const __m512i x = _mm512_and_si512(_mm512_loadu_si512(tile + i), exponent);
            odd |= _mm512_cmpeq_epi16_mask(x, exponent);
        }
        tile[bytes] = odd != 0;
        return true;
    }

    // Up to 16 rows, all features: acc = acc alpha + p v.
    static inline void value_tile(const uint8_t* p, const uint8_t* values, int padded, int num_rows,
                                  const float* alpha, float* acc) {
        alignas(64) float sums[2][kRows * 16];
        const int64_t stride = 4 * static_cast<int64_t>(padded);
        const uint8_t* second = values + kTileWords * stride;
        tile_load<4>(p, 4 * kTile);
        tile_load<5>(p + 64, 4 * kTile);
        auto add = [&](const float* sum, float* to) {
            for (int r = 0; r < num_rows; ++r, to += padded) {
                f_store(to, f_fma(f_load(to), f_set1(alpha[r]), f_load(sum + 16 * r)));
            }
        };
        for (int v = 0; v < padded; v += 16) {  // the tiles work while the lanes add up
            tile_load<6>(values + 4 * v, stride);
            tile_load<7>(second + 4 * v, stride);
            if (v / 16 % 2 == 0) {
                tile_zero<0>();
                tile_dot_bf16<0, 4, 6>();
                tile_dot_bf16<0, 5, 7>();
                tile_store<0>(sums[0], 64);
                if (v > 0) add(sums[1], acc + v - 16);
            } else {
                tile_zero<1>();
                tile_dot_bf16<1, 4, 6>();
                tile_dot_bf16<1, 5, 7>();
                tile_store<1>(sums[1], 64);
                add(sums[0], acc + v - 16);
            }
        }
        add(sums[(padded / 16 - 1) % 2], acc + padded - 16);
    }

    // The same for one row of a tile with infinities or NaNs, those that it does not see taken out.
    static void value_row_apart(const uint8_t* p, const uint8_t* values, uint8_t* copy, int padded, uint64_t mask,
                                const float* alpha, float* acc) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(values);
        uint32_t* to = reinterpret_cast<uint32_t*>(copy);
        for (int pair = 0; pair < kTile / 2; ++pair) {
            const unsigned bits = static_cast<unsigned>(mask >> (2 * pair)) & 3;
            const uint32_t keep = (bits & 1 ? 0xffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u);
            for (int d = 0; d < padded; ++d) to[pair * padded + d] = from[pair * padded + d] & keep;
        }
        value_tile(p, copy, padded, 1, alpha, acc);
    }

    static void weigh(const TileRows&, const uint8_t* tile, int dim, int num_rows, float* p, const uint64_t* masks,
                      const float* alpha, float* acc, Ahead& ahead) {
        const int padded = padded_to(dim, 16);
        const int64_t bytes = Bf16DotForm::tile_bytes(dim);
        const bool has_odd = tile[bytes] != 0;
        uint8_t* copy = const_cast<uint8_t*>(tile) + bytes + 64;
        const uint8_t* words = reinterpret_cast<const uint8_t*>(p);
        for (int i = 0; i < num_rows; i += has_odd ? 1 : kRows) {
            const uint8_t* row = words + 4 * kTile * static_cast<int64_t>(i);
            float* to = acc + static_cast<int64_t>(i) * padded;
            if (has_odd) {
                value_row_apart(row, tile, copy, padded, masks[i], alpha + i, to);
            } else {
                value_tile(row, tile, padded, num_rows - i < kRows ? num_rows - i : kRows, alpha + i, to);
            }
            ahead.step();
        }
    }
};

}  // namespace KVERN_PATH
