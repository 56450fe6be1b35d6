// The tile registers of amx_tiles.h as plain loops, for tests on processors without: the same shapes, zeros past
// a tile's own rows and bytes as the processor keeps them, exact integer products. A bf16 product sums even and
// odd features apart and then together, as Intel's Software Developer's Manual has it, without flushing
// subnormals.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace KVERN_PATH {

// What the tiles' users need beside emulate_avx512.h.
#define _mm512_i32gather_epi32(at, from, scale) emulated_gather(at, from, scale)
static inline __m512i emulated_gather(__m512i at, const void* from, int scale) {
    const emulated::Lanes<int32_t, __m512i> index(at);
    emulated::Lanes<int32_t, __m512i> r;
    for (int i = 0; i < 16; ++i) std::memcpy(&r.at[i], static_cast<const uint8_t*>(from) + int64_t{index.at[i]} * scale, 4);
    return r.vector();
}
static inline __m512 _mm512_permutex2var_ps(__m512 a, __m512i order, __m512 b) {
    const emulated::Lanes<float, __m512> x(a), y(b);
    const emulated::Lanes<int32_t, __m512i> from(order);
    emulated::Lanes<float, __m512> r;
    for (int i = 0; i < 16; ++i) r.at[i] = (from.at[i] & 16 ? y : x).at[from.at[i] & 15];
    return r.vector();
}
static inline __mmask32 _mm512_cmpeq_epi16_mask(__m512i a, __m512i b) {
    const emulated::Lanes<uint16_t, __m512i> x(a), y(b);
    __mmask32 m = 0;
    for (int i = 0; i < 32; ++i) m |= static_cast<__mmask32>(x.at[i] == y.at[i]) << i;
    return m;
}

struct TileConfig {
    int row_bytes[8] = {}, rows[8] = {};

    void set(int tile, int num_rows, int bytes) {
        if (num_rows < 1 || num_rows > 16 || bytes < 4 || bytes > 64 || bytes % 4) std::abort();  // a fault
        rows[tile] = num_rows;
        row_bytes[tile] = bytes;
    }
};

struct EmulatedTiles {
    TileConfig config;
    uint8_t at[8][16][64];
};
static thread_local EmulatedTiles emulated_tiles;

class TileScope {
public:
    explicit TileScope(const TileConfig& config) {
        emulated_tiles = {};
        emulated_tiles.config = config;
    }
    ~TileScope() { emulated_tiles.config = TileConfig(); }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
};

static inline int tile_rows(int tile) {
    if (emulated_tiles.config.rows[tile] == 0) std::abort();  // not configured: a fault
    return emulated_tiles.config.rows[tile];
}
template <int T>
static inline void tile_zero() {
    (void)tile_rows(T);
    std::memset(emulated_tiles.at[T], 0, sizeof emulated_tiles.at[T]);
}
template <int T>
static inline void tile_load(const void* from, int64_t stride) {
    const int rows = tile_rows(T);
    tile_zero<T>();
    for (int r = 0; r < rows; ++r) {
        std::memcpy(emulated_tiles.at[T][r], static_cast<const uint8_t*>(from) + r * stride,
                    static_cast<size_t>(emulated_tiles.config.row_bytes[T]));
    }
}
template <int T>
static inline void tile_store(void* to, int64_t stride) {
    for (int r = 0; r < tile_rows(T); ++r) {
        std::memcpy(static_cast<uint8_t*>(to) + r * stride, emulated_tiles.at[T][r],
                    static_cast<size_t>(emulated_tiles.config.row_bytes[T]));
    }
}

// Calls add(sum, row word of A, column word of B) for every word of 4 bytes along k, in order.
template <int C, class Sum, class Add>
static inline void tile_product_of(int a, int b, Add add) {
    EmulatedTiles& t = emulated_tiles;
    const int words = t.config.row_bytes[a] / 4, columns = t.config.row_bytes[C] / 4;
    const bool fits = tile_rows(a) == tile_rows(C) && tile_rows(b) == words && t.config.row_bytes[b] == 4 * columns;
    if (!fits) std::abort();  // shapes that do not go together: a fault
    for (int m = 0; m < tile_rows(C); ++m) {
        for (int n = 0; n < columns; ++n) {
            Sum sum;
            std::memcpy(&sum, &t.at[C][m][4 * n], 4);
            sum = add(sum, words, [&](int k) { return &t.at[a][m][4 * k]; }, [&](int k) { return &t.at[b][k][4 * n]; });
            std::memcpy(&t.at[C][m][4 * n], &sum, 4);
        }
    }
}
template <int C, class X, class Y>
static inline void tile_dot_bytes(int a, int b) {
    tile_product_of<C, int32_t>(a, b, [](int32_t sum, int words, auto row, auto column) {
        for (int k = 0; k < words; ++k) {
            for (int i = 0; i < 4; ++i) {
                const int64_t product = static_cast<X>(row(k)[i]) * static_cast<Y>(column(k)[i]);
                sum = static_cast<int32_t>(sum + product);
            }
        }
        return sum;
    });
}
template <int C, int A, int B>
static inline void tile_dot_ss() {
    tile_dot_bytes<C, int8_t, int8_t>(A, B);
}
template <int C, int A, int B>
static inline void tile_dot_su() {
    tile_dot_bytes<C, int8_t, uint8_t>(A, B);
}
template <int C, int A, int B>
static inline void tile_dot_us() {
    tile_dot_bytes<C, uint8_t, int8_t>(A, B);
}
template <int C, int A, int B>
static inline void tile_dot_bf16() {
    auto half = [](const uint8_t* word, int i) {
        const uint32_t bits = static_cast<uint32_t>(word[2 * i] | word[2 * i + 1] << 8) << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    };
    tile_product_of<C, float>(A, B, [&](float sum, int words, auto row, auto column) {
        float even = 0.0f, odd = 0.0f;
        for (int k = 0; k < words; ++k) {
            even = __builtin_fmaf(half(row(k), 0), half(column(k), 0), even);
            odd = __builtin_fmaf(half(row(k), 1), half(column(k), 1), odd);
        }
        return sum + (even + odd);
    });
}

}  // namespace KVERN_PATH
