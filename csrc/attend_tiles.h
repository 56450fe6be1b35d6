// bf16 keys, values, queries and probabilities on tile registers (tdpbf16ps), float32 sums. Keys and values
// are packed as in attend_bf16.h, so that both are the right-hand side of a product with rows of queries or of
// probabilities.
//
//   scores   each one chain over the features, two at a time, in order
//   values   a tile of kTile keys from nothing, in key order; then acc = acc alpha + that
//
// Keys that a row does not see have probability 0 there, so rows with different masks go together.
#pragma once

namespace KVERN_PATH {

struct TileForm {
    static constexpr int kRows = 16;       // of a tile, at most
    static constexpr int kTileWords = 16;  // of a row of a left-hand tile: 32 bf16

    static TileConfig config(int rows) {
        TileConfig c;
        const int most = rows < kRows ? rows : kRows;
        for (int t = 0; t < 6; ++t) c.set(t, most, 64);
        for (int t = 6; t < 8; ++t) c.set(t, kTileWords, 64);
        return c;
    }

    static int words_of(int dim) { return padded_to((dim + 1) / 2, kTileWords); }
    static int64_t q_bytes(int dim) { return 4 * static_cast<int64_t>(words_of(dim)); }
    static float prepare_q(const float* q, int dim, uint8_t* to) {
        std::memset(to, 0, static_cast<size_t>(q_bytes(dim)));
        return Bf16DotForm::prepare_q(q, dim, to);
    }

    static int64_t key_tile_bytes(int dim) { return kTile * q_bytes(dim); }
    static bool pack_keys(const TileRows& keys, int dim, int num_rows, uint8_t* tile, Ahead& ahead) {
        const int used = Bf16DotForm::words_of(dim), words = words_of(dim);
        Bf16DotForm::pack_keys(keys, dim, num_rows, tile, ahead);
        std::memset(tile + 4 * static_cast<int64_t>(kTile) * used, 0, static_cast<size_t>(4 * kTile * (words - used)));
        return true;
    }

    // 16 rows (as many as the tiles have) against all keys of the tile.
    static inline void score_tile(const uint8_t* q, int64_t q_bytes, const uint8_t* keys, float* scores) {
        constexpr int64_t kStride = 4 * kTile;
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
        for (int64_t at = 0; at < q_bytes; at += 64, keys += kTileWords * kStride) {
            tile_load<4>(q + at, q_bytes);
            tile_load<6>(keys, kStride);
            tile_dot_bf16<0, 4, 6>();
            tile_load<7>(keys + 64, kStride);
            tile_dot_bf16<1, 4, 7>();
            tile_load<6>(keys + 128, kStride);
            tile_dot_bf16<2, 4, 6>();
            tile_load<7>(keys + 192, kStride);
            tile_dot_bf16<3, 4, 7>();
        }
        tile_store<0>(scores, kStride);
        tile_store<1>(scores + 16, kStride);
        tile_store<2>(scores + 32, kStride);
        tile_store<3>(scores + 48, kStride);
    }
    static void score(const TileRows&, const uint8_t* tile, int dim, int num_rows, const uint8_t* q, const uint64_t*,
                      float* scores, Ahead& ahead) {
        const int64_t bytes = q_bytes(dim);
        for (int i = 0; i < num_rows; i += kRows) {
            score_tile(q + i * bytes, bytes, tile, scores + i * kTile);
            ahead.step();
        }
    }

    // After the packed tile comes whether a value is infinite or NaN (0 times that would not be 0), and room for
    // a copy without those that a row does not see.
    static int64_t tile_bytes(int dim) { return 2 * Bf16DotForm::tile_bytes(dim) + 64; }
    static bool pack(const TileRows& values, int dim, int num_rows, uint8_t* tile, Ahead& ahead) {
        Bf16DotForm::pack(values, dim, num_rows, tile, ahead);
        const int64_t bytes = Bf16DotForm::tile_bytes(dim);
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
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
