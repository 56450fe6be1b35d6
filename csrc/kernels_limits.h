// Loops that measure what the processor can do, for benchmarks: results mean nothing.
#pragma once

namespace KVERN_PATH {

#ifdef KVERN_TILES
// The same on tiles: four products in turn.
static double tile_loop(bool is_int8, int64_t rounds, float* sink) {
    alignas(64) int32_t sums[256];
    TileConfig config;
    for (int t = 0; t < 8; ++t) config.set(t, 16, 64);
    const TileScope scope(config);
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    tile_zero<4>();
    tile_zero<6>();
    for (int64_t n = 0; n < rounds; ++n) {
        if (is_int8) {
            tile_dot_su<0, 4, 6>();
            tile_dot_su<1, 4, 6>();
            tile_dot_su<2, 4, 6>();
            tile_dot_su<3, 4, 6>();
        } else {
            tile_dot_bf16<0, 4, 6>();
            tile_dot_bf16<1, 4, 6>();
            tile_dot_bf16<2, 4, 6>();
            tile_dot_bf16<3, 4, 6>();
        }
    }
    tile_store<0>(sums, 64);
    *sink = static_cast<float>(sums[0]);
    return static_cast<double>(rounds) * 4 * 16 * 16 * (is_int8 ? 64 : 32) * 2;
}
#endif

// Runs `rounds` of independent multiply-accumulates in registers; returns operations (2 per product).
static double arithmetic_loop(kvern::Arithmetic kind, int64_t rounds, float* sink) {
#ifdef KVERN_TILES
    if (kind != kvern::Arithmetic::FP32) return tile_loop(kind == kvern::Arithmetic::INT8, rounds, sink);
#endif
    constexpr int kChains = 12;
    if (kind == kvern::Arithmetic::INT8) {
        alignas(64) uint8_t bytes[64];
        int8_t x4[4] = {1, 2, 3, 4};
        for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i);
        const B w = b_load(bytes);
        I acc[kChains];
        for (I& a : acc) a = i_zero();
        for (int64_t n = 0; n < rounds; ++n) {
            for (I& a : acc) a = dot_unsigned(a, w, x4);
        }
        I total = i_zero();
        for (const I& a : acc) total = i_add(total, a);
        *sink = static_cast<float>(i_sum(total));
        return static_cast<double>(rounds) * kChains * 64 * 2;
    }
#if defined(__AVX512BF16__) && !defined(KVERN_TILES)
    if (kind == kvern::Arithmetic::BF16) {
        F acc[kChains];
        for (F& a : acc) a = f_zero();
        const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f803f80);
        for (int64_t n = 0; n < rounds; ++n) {
            for (F& a : acc) a = _mm512_dpbf16_ps(a, x, x);
        }
        F total = f_zero();
        for (const F& a : acc) total = f_add(total, a);
        *sink = f_sum(total);
        return static_cast<double>(rounds) * kChains * 32 * 2;
    }
#endif
    F acc[kChains];
    for (F& a : acc) a = f_zero();
    const F x = f_set1(1.0f + *sink);
    for (int64_t n = 0; n < rounds; ++n) {
        for (F& a : acc) a = f_fma(x, x, a);
    }
    F total = f_zero();
    for (const F& a : acc) total = f_add(total, a);
    *sink = f_sum(total);
    return static_cast<double>(rounds) * kChains * 16 * 2;
}

static float read_loop(const float* data, int64_t count) {
    F a = f_zero(), b = f_zero(), c = f_zero(), d = f_zero();
    for (int64_t i = 0; i + 64 <= count; i += 64) {
        for (int line = 0; line < 64; line += 16) __builtin_prefetch(data + i + 2048 + line);
        a = f_add(a, f_load(data + i));
        b = f_add(b, f_load(data + i + 16));
        c = f_add(c, f_load(data + i + 32));
        d = f_add(d, f_load(data + i + 48));
    }
    return f_sum(f_add(f_add(a, b), f_add(c, d)));
}

}  // namespace KVERN_PATH
