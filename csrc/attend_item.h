// Attention of one item: its rows walk the visible tiles of its units. Keys are tiled at borders of kTile
// and grouped into units of kUnit positions, both absolute, so paging, block size, chunking and
// neighbours cannot change a bit of a row. A unit starts from nothing; units merge in position order.
#pragma once

namespace KVERN_PATH {

using kvern::kMaxItemRows;
using kvern::kUnit;

static inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

static size_t attend_scratch_bytes(const AttendShape& s) {
    const size_t rows = kMaxItemRows;
    const size_t key_dim = static_cast<size_t>(s.keys.dim);
    const size_t padded = static_cast<size_t>(s.value_dim_padded);
    return aligned(key_dim * kTile * 4) + aligned(padded * kTile * 4) + aligned(rows * key_dim * 4) +
           kRowBlock * kTile * 4 + 2 * aligned(rows * padded * 4) + 4 * aligned(rows * 4) + aligned(rows * 8);
}

struct ItemBuffers {
    TileBuffers tile;
    RowState rows;
    uint64_t* masks;
};

static ItemBuffers cut_buffers(const AttendShape& s, uint8_t* scratch) {
    const size_t rows = kMaxItemRows;
    const size_t key_dim = static_cast<size_t>(s.keys.dim);
    const size_t padded = static_cast<size_t>(s.value_dim_padded);
    auto take = [&scratch](size_t bytes) {
        uint8_t* p = scratch;
        scratch += aligned(bytes);
        return p;
    };
    ItemBuffers b;
    b.tile.keys = reinterpret_cast<uint32_t*>(take(key_dim * kTile * 4));
    b.tile.values = reinterpret_cast<uint32_t*>(take(padded * kTile * 4));
    b.tile.scores = reinterpret_cast<float*>(take(kRowBlock * kTile * 4));
    b.rows.q = reinterpret_cast<uint32_t*>(take(rows * key_dim * 4));
    b.rows.acc = reinterpret_cast<float*>(take(rows * padded * 4));
    b.rows.run = reinterpret_cast<float*>(take(rows * padded * 4));
    for (float** p : {&b.rows.m, &b.rows.l, &b.rows.run_m, &b.rows.run_l}) {
        *p = reinterpret_cast<float*>(take(rows * 4));
    }
    b.masks = reinterpret_cast<uint64_t*>(take(rows * 8));
    b.rows.masks = b.masks;
    return b;
}

// Rows `begin` and up; the masks are those of every KV head.
static inline RowState rows_from(RowState s, int begin, int steps, int padded) {
    s.q += static_cast<int64_t>(begin) * steps;
    s.acc += static_cast<int64_t>(begin) * padded;
    s.run += static_cast<int64_t>(begin) * padded;
    for (float** p : {&s.m, &s.l, &s.run_m, &s.run_l}) *p += begin;
    return s;
}

// Bits of [lo, hi) that fall into the tile at `base`.
static inline uint64_t span_mask(int64_t lo, int64_t hi, int64_t base) {
    lo = lo > base ? lo - base : 0;
    hi = hi - base < kTile ? hi - base : kTile;
    if (hi <= lo) return 0;
    const uint64_t upto = hi == 64 ? ~0ull : (1ull << hi) - 1;
    return upto & ~((1ull << lo) - 1);
}

static inline int64_t first_visible(const kvern::AttendParams& p, int64_t position) {
    int64_t start = 0;
    if (p.window > 0 && position - p.window + 1 > start) start = position - p.window + 1;
    if (p.chunk > 0 && position / p.chunk * p.chunk > start) start = position / p.chunk * p.chunk;
    return start;
}

// Keys in the tile that some query at positions first..last sees.
static inline uint64_t visible_mask(const kvern::AttendParams& p, int64_t first, int64_t last, int64_t base) {
    uint64_t mask = span_mask(first_visible(p, first), last + 1, base);
    if (p.num_sinks > 0) {
        mask |= span_mask(0, p.num_sinks < last + 1 ? p.num_sinks : last + 1, base);
    }
    return mask;
}

static inline int64_t last_position(const AttendItem& item) {
    return item.sees_all ? item.unit_limit * kUnit - 1 : item.first_position + item.num_tokens - 1;
}

// Keys in the tile at `base` that some token of the item sees.
static inline uint64_t needed_mask(const AttendShape& shape, const AttendItem& item, int64_t base) {
    if (item.sees_all) return ~0ull;
    return visible_mask(shape.params, item.first_position, last_position(item), base);
}

struct RowRange {
    int begin, end;
};

// Sets every row's mask for the tile at `base`; returns the rows that see any of it and adds the
// (row, visible key) pairs.
static RowRange set_masks(const AttendShape& shape, const AttendItem& item, int64_t base, uint64_t* masks,
                          int64_t& pairs) {
    RowRange range{item.num_tokens * item.num_heads, 0};
    for (int i = 0; i < item.num_tokens; ++i) {
        const int64_t p = item.first_position + i;
        const uint64_t mask = item.sees_all ? ~0ull : visible_mask(shape.params, p, p, base);
        for (int g = 0; g < item.num_heads; ++g) masks[i * item.num_heads + g] = mask;
        if (mask == 0) continue;
        pairs += static_cast<int64_t>(__builtin_popcountll(mask)) * item.num_heads * item.num_kv_heads;
        if (i * item.num_heads < range.begin) range.begin = i * item.num_heads;
        range.end = (i + 1) * item.num_heads;
    }
    return range;
}

// One packed tile of one KV head against rows [begin, end) of the item.
template <class S>
static bool attend_tile(const AttendShape& shape, const AttendItem& item, const ItemBuffers& b, int head,
                        int64_t base, uint64_t need, RowRange range, int steps, Ahead& ahead) {
    const int padded = shape.value_dim_padded;
    bool ok = for_each_run(item, shape.keys, head, base, need, [&](const uint8_t* src, int j, int n) {
        S::pack_keys(src, shape.keys.type, shape.keys.dim, j, n, b.tile.keys, ahead);
    });
    ok = ok && for_each_run(item, shape.values, head, base, need, [&](const uint8_t* src, int j, int n) {
        S::pack_values(src, shape.values.type, shape.values.dim, padded, j, n, b.tile.values, ahead);
    });
    if (!ok) return false;
    const int first = (head - item.first_kv_head) * item.num_tokens * item.num_heads;
    const RowState rows = rows_from(b.rows, first, steps, padded);
    for (int r = range.begin; r < range.end; r += kRowBlock) {
        const int end = r + kRowBlock < range.end ? r + kRowBlock : range.end;
        attend_rows<S>(shape, b.tile, rows, steps, r, end, ahead);
    }
    return true;
}

// One unit from scratch: m, l and acc of every row. False when a needed key has no valid block.
template <class S>
static bool attend_unit(const AttendShape& shape, const AttendItem& item, const ItemBuffers& b, int64_t unit,
                        int steps, int64_t& pairs) {
    const int rows = item.num_tokens * item.num_heads * item.num_kv_heads;
    const int64_t last = last_position(item);
    for (int r = 0; r < rows; ++r) {
        b.rows.m[r] = kMinusInf;
        b.rows.l[r] = 0.0f;
    }
    std::memset(b.rows.acc, 0, static_cast<size_t>(rows) * shape.value_dim_padded * 4);
    Ahead ahead;
    for (int64_t base = unit * kUnit; base < (unit + 1) * kUnit && base <= last; base += kTile) {
        const uint64_t need = needed_mask(shape, item, base);
        if (need == 0) continue;
        const RowRange range = set_masks(shape, item, base, b.masks, pairs);
        for (int h = 0; h < item.num_kv_heads; ++h) {
            const bool same_tile = h + 1 < item.num_kv_heads;
            const int64_t next_base = same_tile ? base : base + kTile;
            const int next_head = item.first_kv_head + (same_tile ? h + 1 : 0);
            ahead.clear();
            if (next_base <= last && next_base < item.unit_limit * kUnit) {
                const uint64_t next = needed_mask(shape, item, next_base);
                for (const StreamView* s : {&shape.keys, &shape.values}) {
                    const int64_t row_bytes = s->dim * stream_width(s->type);
                    for_each_run(item, *s, next_head, next_base, next,
                                 [&](const uint8_t* src, int, int n) { ahead.add(src, n * row_bytes); });
                }
                ahead.spread(24 + 2 * (range.end - range.begin));
            }
            if (!attend_tile<S>(shape, item, b, item.first_kv_head + h, base, need, range, steps, ahead)) {
                return false;
            }
        }
    }
    return true;
}

template <class S>
static int64_t attend_item_as(const AttendShape& shape, const AttendItem& item, uint8_t* scratch) {
    const ItemBuffers b = cut_buffers(shape, scratch);
    const int rows_per_head = item.num_tokens * item.num_heads;
    const int rows = rows_per_head * item.num_kv_heads;
    const int padded = shape.value_dim_padded;
    const int steps = (shape.keys.dim + S::kPer - 1) / S::kPer;
    auto head_of = [&](int r) {
        return static_cast<int64_t>(item.first_head + r / rows_per_head * item.num_heads + r % item.num_heads);
    };
    auto place_of = [&](int r) { return r % rows_per_head / item.num_heads; };
    auto token_of = [&](int r) {
        return item.places ? item.places[place_of(r)].token : item.first_token + place_of(r);
    };
    for (int r = 0; r < rows; ++r) {
        const float* q = item.q + token_of(r) * item.q_token_stride + head_of(r) * shape.keys.dim;
        S::pack_q(q, shape.keys.dim, b.rows.q + static_cast<int64_t>(r) * steps);
        b.rows.run_m[r] = kMinusInf;
        b.rows.run_l[r] = 0.0f;
    }
    int64_t pairs = 0;
    for (int64_t unit = item.unit_begin; unit < item.unit_end; ++unit) {
        if (!attend_unit<S>(shape, item, b, unit, steps, pairs)) return -1;
        for (int r = 0; r < rows; ++r) {
            const float* acc = b.rows.acc + static_cast<int64_t>(r) * padded;
            if (item.places) {
                const kvern::AttendPlace& at = item.places[place_of(r)];
                float* to = item.partials + at.partial +
                            (head_of(r) * at.units + unit - at.first_unit) * (padded + 2);
                std::memcpy(to, acc, static_cast<size_t>(padded) * 4);
                to[padded] = b.rows.m[r];
                to[padded + 1] = b.rows.l[r];
            } else {
                merge_unit(acc, b.rows.m[r], b.rows.l[r], padded, b.rows.run + static_cast<int64_t>(r) * padded,
                           b.rows.run_m[r], b.rows.run_l[r]);
            }
        }
    }
    if (item.places) return pairs;
    for (int r = 0; r < rows; ++r) {
        float* out = item.out + token_of(r) * item.out_token_stride + head_of(r) * shape.values.dim;
        finish_row(shape, b.rows.run + static_cast<int64_t>(r) * padded, b.rows.run_m[r], b.rows.run_l[r],
                   static_cast<int>(head_of(r)), out);
    }
    return pairs;
}

static int64_t attend_item(const AttendShape& shape, const AttendItem& item, uint8_t* scratch) {
#ifdef __AVX512BF16__
    if (shape.keys.type == StreamType::BF16 && shape.values.type == StreamType::BF16) {
        return attend_item_as<Bf16Steps>(shape, item, scratch);
    }
#endif
    return attend_item_as<FloatSteps>(shape, item, scratch);
}

// The running sum lives in the first unit's place.
static void attend_merge(const AttendShape& shape, const float* partial, int64_t num_units, int head,
                         float* out) {
    const int padded = shape.value_dim_padded;
    float* run = const_cast<float*>(partial);
    float m = kMinusInf, l = 0.0f;
    for (int64_t u = 0; u < num_units; ++u) {
        const float* unit = partial + u * (padded + 2);
        merge_unit(unit, unit[padded], unit[padded + 1], padded, run, m, l);
    }
    finish_row(shape, run, m, l, head, out);
}

}  // namespace KVERN_PATH
