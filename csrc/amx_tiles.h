// Tile registers: 16 rows of 64 bytes, and their products. C[m][n] += sum over k of A[m][k] B[k][n], with
// B's row holding four int8 (or two bf16) of consecutive k side by side for each n, as a weight group's
// quads and packed keys and values lie.
//
// Integer products are exact. A bf16 product sums in float32, pair by pair along k, each row by itself:
// which other rows are in the tile changes nothing.
#pragma once
#ifndef KVERN_EMULATE_AVX512

namespace KVERN_PATH {

struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};
static_assert(sizeof(TileConfig) == 64, "as the processor reads it");

// Tiles may be used while one of these lives.
class TileScope {
public:
    explicit TileScope(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
    ~TileScope() { asm volatile("tilerelease"); }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
};

template <int T>
static inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
static inline void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
static inline void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
static inline void tile_dot_ss() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>  // A signed, B unsigned
static inline void tile_dot_su() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>  // A unsigned, B signed
static inline void tile_dot_us() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
static inline void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace KVERN_PATH
#endif
