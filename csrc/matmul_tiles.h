// Quantised products of many tokens on tile registers: 16 tokens x 16 weight rows x one block of 32
// features at a time. The sums are exact and the float steps those of quant_tile, so the numbers are too.
#pragma once

namespace KVERN_PATH {

constexpr int kTileTokens = 16;

// Tiles 0 to 3 hold the sums of four blocks in turn (of Q6_K, whose scales change every 16 features, of two
// blocks' halves), 4 and 5 activations, 6 and 7 codes.
template <ElementType T>
static inline TileConfig quant_tiles() {
    constexpr int kFeatures = Codes<T>::is_six ? kBlock / 2 : kBlock;
    TileConfig config;
    for (int c = 0; c < 4; ++c) config.set(c, kTileTokens, 64);
    for (int a = 4; a < 6; ++a) config.set(a, kTileTokens, kFeatures);
    for (int b = 6; b < 8; ++b) config.set(b, kFeatures / 4, 64);
    return config;
}

template <ElementType T, int C>
static inline void tile_product(const int8_t* x, int64_t cols, const uint8_t* codes) {
    constexpr int A = 4 + C % 2, W = 6 + C % 2;
    tile_load<A>(x, cols);
    tile_load<W>(codes, 64);
    tile_zero<C>();
    if constexpr (Codes<T>::is_signed) {
        tile_dot_ss<C, A, W>();
    } else {
        tile_dot_su<C, A, W>();
    }
}

struct BlockDots {
    alignas(64) int32_t low[kTileTokens * kGroupRows], high[kTileTokens * kGroupRows];  // high of Q6_K alone
};

// A product takes its time: it is begun some blocks before its sums are stored, and those before they are read.
template <ElementType T>
static inline void begin_block(int64_t turn, const int8_t* x, int64_t cols, const uint8_t* codes) {
    if constexpr (Codes<T>::is_six) {
        const int8_t* second = x + kBlock / 2;
        const uint8_t* second_codes = codes + kPlainBytes / 2;
        if (turn % 2) {
            tile_product<T, 2>(x, cols, codes);
            tile_product<T, 3>(second, cols, second_codes);
        } else {
            tile_product<T, 0>(x, cols, codes);
            tile_product<T, 1>(second, cols, second_codes);
        }
    } else {
        switch (turn % 4) {
            case 0: return tile_product<T, 0>(x, cols, codes);
            case 1: return tile_product<T, 1>(x, cols, codes);
            case 2: return tile_product<T, 2>(x, cols, codes);
            default: return tile_product<T, 3>(x, cols, codes);
        }
    }
}
template <ElementType T>
static inline void store_block(int64_t turn, BlockDots& dots) {
    if constexpr (Codes<T>::is_six) {
        if (turn % 2) {
            tile_store<2>(dots.low, 64);
            tile_store<3>(dots.high, 64);
        } else {
            tile_store<0>(dots.low, 64);
            tile_store<1>(dots.high, 64);
        }
    } else {
        switch (turn % 4) {
            case 0: return tile_store<0>(dots.low, 64);
            case 1: return tile_store<1>(dots.low, 64);
            case 2: return tile_store<2>(dots.low, 64);
            default: return tile_store<3>(dots.low, 64);
        }
    }
}

// What is known of some blocks of 16 tokens, token beside token.
constexpr int kMetaBlocks = 32;
struct TokenMeta {
    float scale[kMetaBlocks][kTileTokens], scaled_sum[kMetaBlocks][kTileTokens];
    int32_t zero[kMetaBlocks][kTileTokens], low_zero[kMetaBlocks][kTileTokens];  // zero point times sums
};

template <ElementType T>
static inline void gather_meta(const BlockMeta* meta, int64_t blocks, int count, TokenMeta& to) {
    static_assert(sizeof(BlockMeta) == 16, "four words, as they are gathered");
    constexpr int kShift = Codes<T>::is_signed || Codes<T>::zero_shift < 0 ? 0 : Codes<T>::zero_shift;
    const int stride = static_cast<int>(4 * blocks);
    alignas(64) static constexpr int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const I at = i_mul(i_set1(stride), _mm512_load_si512(kLanes));
    auto words = [&](int b, int word) { return _mm512_i32gather_epi32(at, reinterpret_cast<const int32_t*>(meta + b) + word, 4); };
    for (int b = 0; b < count; ++b) {
        f_store(to.scale[b], f_bits(words(b, 0)));
        if constexpr (Codes<T>::has_offset) f_store(to.scaled_sum[b], f_bits(words(b, 1)));
        if constexpr (kShift > 0) {
            I sum = words(b, 2);
            if constexpr (Codes<T>::is_six) {
                const I low = words(b, 3);
                sum = i_sub(sum, low);
                _mm512_storeu_si512(to.low_zero[b], i_shl<kShift>(low));
            }
            _mm512_storeu_si512(to.zero[b], i_shl<kShift>(sum));
        }
    }
}

// Adds one block's products to acc [16 tokens][16 rows]; b counts from the first block that `meta` holds.
template <ElementType T>
static inline void add_block(const BlockDots& d, const uint8_t* chunk, int64_t block, const TokenMeta& meta, int b,
                             F (&acc)[kTileTokens][1]) {
    if constexpr (Codes<T>::is_six) {
        const int8_t* sc = reinterpret_cast<const int8_t*>(chunk + 32 + block % 8 * 32);
        const I first = i_from_f(f_load_i8(sc)), second = i_from_f(f_load_i8(sc + 16));
        const F scale = f_load_f16(chunk);
#pragma GCC unroll 16
        for (int i = 0; i < kTileTokens; ++i) {
            const I low = i_sub(_mm512_load_si512(d.low + 16 * i), i_set1(meta.low_zero[b][i]));
            const I high = i_sub(_mm512_load_si512(d.high + 16 * i), i_set1(meta.zero[b][i]));
            const I joined = i_add(i_mul(low, first), i_mul(high, second));
            acc[i][0] = f_fma(f_from_i(joined), f_mul(scale, f_set1(meta.scale[b][i])), acc[i][0]);
        }
        return;
    }
    F scale, offset;
    load_scales<T>(chunk, block, scale, offset);
#pragma GCC unroll 16
    for (int i = 0; i < kTileTokens; ++i) {
        I dot = _mm512_load_si512(d.low + 16 * i);
        if constexpr (!Codes<T>::is_signed && Codes<T>::zero_shift >= 0) dot = i_sub(dot, i_set1(meta.zero[b][i]));
        acc[i][0] = f_fma(f_from_i(dot), f_mul(scale, f_set1(meta.scale[b][i])), acc[i][0]);
        if constexpr (Codes<T>::has_offset) acc[i][0] = f_fma(offset, f_set1(meta.scaled_sum[b][i]), acc[i][0]);
    }
}

struct TileSums {
    alignas(64) float at[kTileTokens][kGroupRows];
};

// Blocks [begin, begin + count) of one group against 16 tokens, whose activations of block 0 begin at x.
// `codes` holds block 0's codes, a byte each; int8 codes are read as they lie in the group.
template <ElementType T>
static void add_blocks(const uint8_t* group, const uint8_t* codes, const int8_t* x, int64_t cols, int64_t begin,
                       int count, const TokenMeta& meta, TileSums& sums) {
    constexpr int kBegun = Codes<T>::is_six ? 1 : 2;  // blocks between a product's beginning and its store
    constexpr int kAhead = 1;                          // and between that and its use
    auto begin_at = [&](int64_t b) {
        const uint8_t* at = Codes<T>::is_signed ? group + kvern::codes_at(Codes<T>::layout, b) : codes + b * kPlainBytes;
        begin_block<T>(b, x + b * kBlock, cols, at);
    };
    BlockDots dots[2];
    F acc[kTileTokens][1];
#pragma GCC unroll 16
    for (int i = 0; i < kTileTokens; ++i) acc[i][0] = f_load(sums.at[i]);
    for (int b = -kAhead - kBegun; b < count; ++b) {
        if (b + kAhead + kBegun < count) begin_at(begin + b + kAhead + kBegun);
        if (b + kAhead >= 0 && b + kAhead < count) store_block<T>(begin + b + kAhead, dots[(b + kAhead) % 2]);
        if (b < 0) continue;
        add_block<T>(dots[b % 2], group + kvern::scales_at(Codes<T>::layout, begin + b), begin + b, meta, b, acc);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTileTokens; ++i) f_store(sums.at[i], acc[i][0]);
}

// `num` groups from g on against tokens t to t + 15.
template <ElementType T>
static void quant_tokens_16(const QuantJob& job, int64_t g, int num, int64_t t) {
    const int64_t cols = job.x.cols, blocks = cols / kBlock;
    for (int k = 0; k < kTileTokens; ++k) {  // results go to as many far lines: ask for them now
        for (int i = 0; i < num; ++i) __builtin_prefetch(job.out.to + (t + k) * job.out.stride + (g + i) * kGroupRows, 1);
    }
    TileSums sums[kvern::kMostPlainGroups];
    std::memset(sums, 0, static_cast<size_t>(num) * sizeof(TileSums));
    TokenMeta meta;
    for (int64_t begin = 0; begin < blocks; begin += kMetaBlocks) {
        const int count = blocks - begin < kMetaBlocks ? static_cast<int>(blocks - begin) : kMetaBlocks;
        gather_meta<T>(job.x.meta + t * blocks + begin, blocks, count, meta);
        for (int i = 0; i < num; ++i) {
            add_blocks<T>(job.groups + (g + i) * job.group_bytes, job.scratch + i * cols * kGroupRows,
                          job.x.q + t * cols, cols, begin, count, meta, sums[i]);
        }
    }
    for (int i = 0; i < num; ++i) {
        const int64_t row = (g + i) * kGroupRows;
        for (int k = 0; k < kTileTokens; ++k) {
            store_outputs(f_load(sums[i].at[k]), job.out, (t + k) * job.out.stride + row, job.num_rows - row);
        }
    }
}

// Whole sixteens of tokens for every group; returns the first token that is left.
template <ElementType T>
static int64_t quant_tiles_of(const QuantJob& job) {
    const int64_t whole = job.num_tokens / kTileTokens * kTileTokens;
    if (whole == 0 || !job.scratch) return 0;
    const TileConfig config = quant_tiles<T>();
    const TileScope scope(config);
    const int64_t at_once = kvern::plain_groups(job.x.cols);
    for (int64_t g = 0; g < job.num_groups; g += at_once) {
        const int num = static_cast<int>(job.num_groups - g < at_once ? job.num_groups - g : at_once);
        for (int i = 0; !Codes<T>::is_signed && i < num; ++i) {
            unpack_group<T>(job, g + i, job.scratch + i * job.x.cols * kGroupRows);
        }
        for (int64_t t = 0; t < whole; t += kTileTokens) quant_tokens_16<T>(job, g, num, t);
    }
    return whole;
}

}  // namespace KVERN_PATH
