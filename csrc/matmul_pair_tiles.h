// Products of bf16 by bf16 on tile registers: 16 weight rows and 32 features of up to 16 tokens at a time. Every
// token's chain of products is its own, so how many rows a tile has changes nothing; nor do they all go alike: whole
// tiles two by two, so that each operand is read for two products, and the rest against up to four groups, so that
// products seldom wait for each other.
#pragma once

namespace KVERN_PATH {

constexpr int kPairTokens = 16;
constexpr int kPairWords = 16;  // that one product takes

// Tiles 0 to 3 hold sums, 4 and up activations and weights.
static inline TileConfig pair_config(int tokens, int first_weights) {
    TileConfig config;
    for (int c = 0; c < 4; ++c) config.set(c, tokens, 64);
    for (int a = 4; a < first_weights; ++a) config.set(a, tokens, 64);
    for (int b = first_weights; b < 8; ++b) config.set(b, kPairWords, 64);
    return config;
}

template <int C>
static inline void store_pair_sums(const PairJob& job, int64_t g, int64_t t, int tokens) {
    alignas(64) float sums[kPairTokens * kGroupRows];
    tile_store<C>(sums, 64);
    const int64_t row = g * kGroupRows;
    for (int i = 0; i < tokens; ++i) {
        store_outputs(f_load(sums + i * kGroupRows), job.out, (t + i) * job.out.stride + row, job.num_rows - row);
    }
}

// 32 tokens against one or two groups.
template <int NG>
static inline void pairs_32(const PairJob& job, int64_t g, int64_t t) {
    const int64_t stride = 4 * job.words;
    const uint8_t *w = job.group(g), *next = job.group(g + NG - 1);
    const uint32_t *x = job.x + t * job.words, *below = x + kPairTokens * job.words;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t k = 0; k < job.words; k += kPairWords, w += 64 * kPairWords, next += 64 * kPairWords) {
        tile_load<4>(x + k, stride);
        tile_load<6>(w, 64);
        tile_dot_bf16<0, 4, 6>();
        tile_load<5>(below + k, stride);
        tile_dot_bf16<1, 5, 6>();
        if constexpr (NG == 2) {
            tile_load<7>(next, 64);
            tile_dot_bf16<2, 4, 7>();
            tile_dot_bf16<3, 5, 7>();
        }
    }
    store_pair_sums<0>(job, g, t, kPairTokens);
    store_pair_sums<1>(job, g, t + kPairTokens, kPairTokens);
    if constexpr (NG == 2) {
        store_pair_sums<2>(job, g + 1, t, kPairTokens);
        store_pair_sums<3>(job, g + 1, t + kPairTokens, kPairTokens);
    }
}

template <int C, int NG>
static inline void weigh_pairs(const uint8_t* w, int64_t group_bytes, bool is_lone) {
    if constexpr (C < NG) {
        constexpr int W = 5 + C % 3;
        const uint8_t* at = w + C * group_bytes;
        tile_load<W>(at, 64);
        if (is_lone) {
            for (int line = 0; line < kPairWords; ++line) __builtin_prefetch(at + kPrefetchAhead / NG + 64 * line);
        }
        tile_dot_bf16<C, 4, W>();
        weigh_pairs<C + 1, NG>(w, group_bytes, is_lone);
    }
}

// Up to 16 tokens, as many as the tiles have rows, against NG groups.
template <int NG>
static inline void pairs_16(const PairJob& job, int64_t g, int64_t t, int tokens) {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    const uint8_t* w = job.group(g);
    for (int64_t k = 0; k < job.words; k += kPairWords, w += 64 * kPairWords) {
        tile_load<4>(job.x + t * job.words + k, 4 * job.words);
        weigh_pairs<0, NG>(w, 64 * job.words, job.num_tokens == 1);
    }
    store_pair_sums<0>(job, g, t, tokens);
    if constexpr (NG > 1) store_pair_sums<1>(job, g + 1, t, tokens);
    if constexpr (NG > 2) store_pair_sums<2>(job, g + 2, t, tokens);
    if constexpr (NG > 3) store_pair_sums<3>(job, g + 3, t, tokens);
}

static void pair_tiles(const PairJob& job) {
    const int64_t whole = job.num_tokens / (2 * kPairTokens) * 2 * kPairTokens;
    if (whole > 0) {
        const TileConfig config = pair_config(kPairTokens, 6);
        const TileScope scope(config);
        int64_t g = 0;
        for (; g + 2 <= job.num_groups; g += 2) {
            for (int64_t t = 0; t < whole; t += 2 * kPairTokens) pairs_32<2>(job, g, t);
        }
        for (int64_t t = 0; g < job.num_groups && t < whole; t += 2 * kPairTokens) pairs_32<1>(job, g, t);
    }
    for (int64_t t = whole; t < job.num_tokens; t += kPairTokens) {
        const int tokens = job.num_tokens - t < kPairTokens ? static_cast<int>(job.num_tokens - t) : kPairTokens;
        const TileConfig config = pair_config(tokens, 5);
        const TileScope scope(config);
        int64_t g = 0;
        for (; g + 4 <= job.num_groups; g += 4) pairs_16<4>(job, g, t, tokens);
        switch (job.num_groups - g) {
            case 3: pairs_16<3>(job, g, t, tokens); break;
            case 2: pairs_16<2>(job, g, t, tokens); break;
            case 1: pairs_16<1>(job, g, t, tokens); break;
            default: break;
        }
    }
}

}  // namespace KVERN_PATH
