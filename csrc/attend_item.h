// Attention of one item: its rows walk the visible tiles of its units. Keys are tiled at borders of kTile
// and grouped into units of kUnit positions, both absolute, so paging, chunking and neighbours cannot
// change a bit of a row. A unit starts from nothing; units merge in position order. Of narrow streams a
// query reads the blocks before its own as they are stored, and its own block as it was computed: one more
// unit, merged last.
#pragma once

namespace KVERN_PATH {

using kvern::kMaxItemRows;
using kvern::kUnit;

static inline size_t aligned(int64_t bytes) { return (static_cast<size_t>(bytes) + 63) / 64 * 64; }

// The stored form's kernels of a pass: over sealed (or wide) keys, or over the open block's bf16.
struct Pass {
    StreamType keys, values;

    const KeyForm& key_form() const { return kKeyForms[static_cast<int>(keys)]; }
    const ValueForm& value_form() const { return kValueForms[static_cast<int>(values)]; }
};

static inline Pass stored_pass(const AttendShape& s) { return {s.keys.type, s.values.type}; }
static inline Pass open_pass(const AttendShape& s) {
    return {s.keys.is_narrow() ? StreamType::BF16 : s.keys.type, s.values.is_narrow() ? StreamType::BF16 : s.values.type};
}

struct ItemBuffers {
    uint8_t *keys, *values;        // packed tiles
    uint8_t *q, *open_q;           // queries prepared for either pass
    float *q_unit, *open_q_unit;
    uint8_t *zeros, *spare;        // a row of zeros; rows that end at the slab's, of either stream
    int64_t spare_bytes;           // of one
    TileRows *key_rows, *value_rows;
    float* scores;
    RowState rows;                 // of the pass that is on
    uint64_t* masks;
};

// Cuts the scratch into buffers; without one it only counts.
static size_t cut_buffers(const AttendShape& s, uint8_t* scratch, ItemBuffers& b) {
    const int64_t rows = kMaxItemRows;
    const int64_t padded = s.value_dim_padded;
    size_t used = 0;
    auto take = [&](int64_t bytes) {
        uint8_t* p = scratch ? scratch + used : nullptr;
        used += aligned(bytes);
        return p;
    };
    const Pass stored = stored_pass(s), open = open_pass(s);
    auto larger = [](int64_t x, int64_t y) { return x > y ? x : y; };
    b.keys = take(larger(stored.key_form().tile_bytes(s.keys.dim), open.key_form().tile_bytes(s.keys.dim)));
    b.values = take(larger(stored.value_form().tile_bytes(s.values.dim), open.value_form().tile_bytes(s.values.dim)));
    // A path may read, and make scores of, some rows past an item's own.
    b.q = take((rows + kScoreSlack) * stored.key_form().q_bytes(s.keys.dim));
    b.open_q = take(s.is_narrow() ? (rows + kScoreSlack) * open.key_form().q_bytes(s.keys.dim) : 0);
    const int64_t widest = larger(padded_to(s.keys.dim, kPackAlign), padded_to(s.values.dim, kPackAlign));
    b.zeros = take(4 * widest);
    b.spare = take(2 * kTile * widest);
    b.spare_bytes = kTile * widest;
    b.key_rows = reinterpret_cast<TileRows*>(take(sizeof(TileRows)));
    b.value_rows = reinterpret_cast<TileRows*>(take(sizeof(TileRows)));
    b.scores = reinterpret_cast<float*>(take((kRowBlock + kScoreSlack) * kTile * 4));
    b.rows.acc = reinterpret_cast<float*>(take(rows * padded * 4));
    b.rows.run = reinterpret_cast<float*>(take(rows * padded * 4));
    for (float** p : {&b.rows.m, &b.rows.l, &b.rows.run_m, &b.rows.run_l, &b.q_unit, &b.open_q_unit}) {
        *p = reinterpret_cast<float*>(take(rows * 4));
    }
    b.masks = reinterpret_cast<uint64_t*>(take(rows * 8));
    b.rows.masks = b.masks;
    if (scratch) std::memset(b.zeros, 0, static_cast<size_t>(4 * widest));
    return used;
}

static size_t attend_scratch_bytes(const AttendShape& s) {
    ItemBuffers b;
    return cut_buffers(s, nullptr, b);
}

// Rows `begin` and up; the masks are those of every KV head.
static inline RowState rows_from(RowState s, int begin, int64_t q_bytes, int padded) {
    s.q += begin * q_bytes;
    s.q_unit += begin;
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

static inline int64_t block_begin(const AttendShape& shape, int64_t position) {
    return position / shape.keys.block_size * shape.keys.block_size;
}

// The positions of a pass: all of them, or with narrow streams those before a query's own block (sealed), or
// those of its own block.
enum class Span { ALL, SEALED, OPEN };

// Keys of the pass in the tile at `base` that some query at positions first..last sees.
static inline uint64_t span_visible(const AttendShape& shape, Span span, int64_t first, int64_t last, int64_t base) {
    uint64_t mask = visible_mask(shape.params, first, last, base);
    if (span == Span::SEALED) mask &= span_mask(0, block_begin(shape, last), base);
    if (span == Span::OPEN) mask &= span_mask(block_begin(shape, first), last + 1, base);
    return mask;
}

// One walk of an item over tiles.
struct Walk {
    Span span;
    Pass pass;
    int64_t begin, end;  // positions of the first tile and past the last

    uint64_t needed(const AttendShape& shape, const AttendItem& item, int64_t base) const {
        if (item.sees_all) return ~0ull;
        return span_visible(shape, span, item.first_position, last_position(item), base);
    }
};

struct RowRange {
    int begin, end;
};

// Sets every row's mask for the tile at `base`; returns the rows that see any of it and adds the
// (row, visible key) pairs.
static RowRange set_masks(const AttendShape& shape, const AttendItem& item, Span span, int64_t base,
                          uint64_t* masks, int64_t& pairs) {
    RowRange range{item.num_tokens * item.num_heads, 0};
    for (int i = 0; i < item.num_tokens; ++i) {
        const int64_t p = item.first_position + i;
        const uint64_t mask = item.sees_all ? ~0ull : span_visible(shape, span, p, p, base);
        for (int g = 0; g < item.num_heads; ++g) masks[i * item.num_heads + g] = mask;
        if (mask == 0) continue;
        pairs += static_cast<int64_t>(__builtin_popcountll(mask)) * item.num_heads * item.num_kv_heads;
        if (i * item.num_heads < range.begin) range.begin = i * item.num_heads;
        range.end = (i + 1) * item.num_heads;
    }
    return range;
}

// The tile's rows of one head's keys or values. False when a needed one has no valid block.
static bool find_tile(const AttendShape& shape, const AttendItem& item, const ItemBuffers& b, const Walk& walk,
                      bool of_keys, int head, int64_t base, uint64_t need) {
    const StreamView& stream = of_keys ? shape.keys : shape.values;
    TileRows& rows = of_keys ? *b.key_rows : *b.value_rows;
    rows.item_rows = item.num_tokens * item.num_heads;
    if (walk.span == Span::OPEN && stream.is_narrow()) {
        find_open_rows(item, stream, head, base, need, b.zeros, rows);
        return true;
    }
    return find_rows(item, stream, head, base, need, b.zeros, b.spare + (of_keys ? 0 : b.spare_bytes), rows);
}

// One tile of KV heads [first, first + count) of the item against rows `range` of each. More than one head only
// when all rows go as one block.
static bool attend_heads(const AttendShape& shape, const AttendItem& item, const ItemBuffers& b, const Walk& walk,
                         int first, int count, int64_t base, uint64_t need, RowRange range, Ahead& ahead) {
    const KeyForm& key_form = walk.pass.key_form();
    const ValueForm& value_form = walk.pass.value_form();
    const int per_head = item.num_tokens * item.num_heads, num_rows = range.end - range.begin;
    const int64_t q_bytes = key_form.q_bytes(shape.keys.dim);
    const RowState rows = rows_from(b.rows, first * per_head, q_bytes, shape.value_dim_padded);
    bool has_keys = false, has_values = false;  // packed
    alignas(64) float alpha[kRowBlock + 8];
    for (int r = range.begin; r < range.end; r += kRowBlock) {
        const RowSet set{r, r + kRowBlock < range.end ? r + kRowBlock : range.end, count, per_head};
        for (int h = 0; h < count; ++h) {
            if (r == range.begin) {
                if (!find_tile(shape, item, b, walk, true, item.first_kv_head + first + h, base, need)) return false;
                has_keys = key_form.pack(*b.key_rows, shape.keys.dim, num_rows, b.keys, ahead);
            }
            key_form.score(*b.key_rows, has_keys ? b.keys : nullptr, shape.keys.dim, set.count(),
                           rows.q + (h * per_head + r) * q_bytes, rows.masks + r, b.scores + h * set.count() * kTile, ahead);
        }
        soften(shape, value_form, set, rows, b.scores, alpha, ahead);
        for (int h = 0; h < count; ++h) {
            if (r == range.begin) {
                if (!find_tile(shape, item, b, walk, false, item.first_kv_head + first + h, base, need)) return false;
                has_values = value_form.pack(*b.value_rows, shape.values.dim, num_rows, b.values, ahead);
            }
            weigh_head(shape, value_form, *b.value_rows, has_values ? b.values : nullptr, set, rows.masks,
                       b.scores + h * set.count() * kTile, alpha + h * set.count(),
                       rows.acc + static_cast<int64_t>(h) * per_head * shape.value_dim_padded, ahead);
        }
    }
    return true;
}

// One tile of all the item's KV heads.
static bool attend_tile(const AttendShape& shape, const AttendItem& item, const ItemBuffers& b, const Walk& walk,
                        int64_t base, uint64_t need, RowRange range, Ahead& ahead) {
    const int num_rows = range.end - range.begin;
    const int at_once = num_rows < kRowBlock ? kRowBlock / num_rows : 1;
    for (int h = 0; h < item.num_kv_heads; h += at_once) {
        const int count = item.num_kv_heads - h < at_once ? item.num_kv_heads - h : at_once;
        if (!attend_heads(shape, item, b, walk, h, count, base, need, range, ahead)) return false;
    }
    return true;
}

// Asks for the next tile, all heads of it: in the order in which it lies in memory, since long runs are read
// fastest. Where only a part of it is needed, head by head.
static void look_ahead(const AttendShape& shape, const AttendItem& item, const Walk& walk, int64_t base, Ahead& ahead) {
    ahead.clear();
    const int64_t next = base + kTile;
    if (walk.span == Span::OPEN || next > last_position(item) || next >= item.unit_limit * kUnit) return;
    const uint64_t need = walk.needed(shape, item, next);
    const StreamView* streams[2] = {&shape.keys, &shape.values};
    const int size = shape.keys.block_size;
    if (need == ~0ull && kTile % size == 0) {
        for (int64_t b = next / size; b < (next + kTile) / size; ++b) {
            const int64_t block = item.block_table[b];
            if (block <= 0 || block >= shape.keys.num_blocks) return;  // found out when it is read
            for (const StreamView* s : streams) {
                const uint8_t* page = s->pages + block * s->page_bytes;
                const int64_t first = static_cast<int64_t>(item.first_kv_head) * size, count = static_cast<int64_t>(item.num_kv_heads) * size;
                const int64_t row_bytes = row_bytes_of(s->type, s->dim);
                ahead.add(page + s->offset + first * row_bytes, count * row_bytes);
                if (s->type == StreamType::INT8) ahead.add(page + s->scale_offset + 4 * first, 4 * count);
            }
        }
        return;
    }
    for (int head = item.first_kv_head; head < item.first_kv_head + item.num_kv_heads; ++head) {
        for (const StreamView* s : streams) {
            for_each_run(item, *s, head, next, need, [&](const uint8_t* src, const uint8_t* scales, int, int n) {
                ahead.add(src, n * row_bytes_of(s->type, s->dim));
                if (s->type == StreamType::INT8) ahead.add(scales, n * 4);
            });
        }
    }
}

// One unit from scratch: m, l and acc of every row. False when a needed key has no valid block.
static bool attend_unit(const AttendShape& shape, const AttendItem& item, ItemBuffers& b, const Walk& walk,
                        int64_t& pairs) {
    const int rows = item.num_tokens * item.num_heads * item.num_kv_heads;
    const bool is_open = walk.span == Span::OPEN;
    b.rows.q = is_open ? b.open_q : b.q;
    b.rows.q_unit = is_open ? b.open_q_unit : b.q_unit;
    for (int r = 0; r < rows; ++r) {
        b.rows.m[r] = kMinusInf;
        b.rows.l[r] = 0.0f;
    }
    std::memset(b.rows.acc, 0, static_cast<size_t>(rows) * static_cast<size_t>(shape.value_dim_padded) * 4);
    Ahead ahead;
    for (int64_t base = walk.begin; base < walk.end; base += kTile) {
        const uint64_t need = walk.needed(shape, item, base);
        if (need == 0) continue;
        const RowRange range = set_masks(shape, item, walk.span, base, b.masks, pairs);
        if (range.begin >= range.end) continue;
        const int row_tiles = (range.end - range.begin + kScoreRows - 1) / kScoreRows;
        look_ahead(shape, item, walk, base, ahead);
        ahead.spread(item.num_kv_heads * kTile / 4 * (1 + row_tiles));
        if (!attend_tile(shape, item, b, walk, base, need, range, ahead)) return false;
        ahead.finish();
    }
    walk.pass.value_form().settle(shape.values.dim, rows, b.rows.acc);
    return true;
}

// Unit u of the item; with narrow streams the last one is the open block's.
static bool attend_any_unit(const AttendShape& shape, const AttendItem& item, ItemBuffers& b, int64_t unit,
                            int64_t& pairs) {
    const int64_t last = last_position(item);
    if (shape.is_narrow() && !item.sees_all && unit == item.unit_limit - 1) {
        const int64_t begin = block_begin(shape, item.first_position) / kTile * kTile;
        return attend_unit(shape, item, b, {Span::OPEN, open_pass(shape), begin, last + 1}, pairs);
    }
    const int64_t end = (unit + 1) * kUnit < last + 1 ? (unit + 1) * kUnit : last + 1;
    const Span span = shape.is_narrow() ? Span::SEALED : Span::ALL;
    return attend_unit(shape, item, b, {span, stored_pass(shape), unit * kUnit, end}, pairs);
}

// Which token and query head the item's row r is.
struct RowPlace {
    int64_t token, head;
    int place;
};

static inline RowPlace row_place(const AttendItem& item, int r) {
    const int per_head = item.num_tokens * item.num_heads;
    const int place = r % per_head / item.num_heads;
    return {item.places ? item.places[place].token : item.first_token + place,
            static_cast<int64_t>(item.first_head + r / per_head * item.num_heads + r % item.num_heads), place};
}

static void prepare_rows(const AttendShape& shape, const AttendItem& item, const ItemBuffers& b, int rows) {
    const KeyForm& stored = stored_pass(shape).key_form();
    const KeyForm& open = open_pass(shape).key_form();
    const int dim = shape.keys.dim;
    for (int r = 0; r < rows; ++r) {
        const RowPlace at = row_place(item, r);
        const float* q = item.q + at.token * item.q_token_stride + at.head * dim;
        b.q_unit[r] = stored.prepare_q(q, dim, b.q + r * stored.q_bytes(dim));
        if (shape.is_narrow()) b.open_q_unit[r] = open.prepare_q(q, dim, b.open_q + r * open.q_bytes(dim));
        b.rows.run_m[r] = kMinusInf;
        b.rows.run_l[r] = 0.0f;
    }
}

static int64_t attend_item(const AttendShape& shape, const AttendItem& item, uint8_t* scratch) {
    ItemBuffers b;
    cut_buffers(shape, scratch, b);
    const int rows = item.num_tokens * item.num_heads * item.num_kv_heads;
    const int64_t padded = shape.value_dim_padded;
    prepare_rows(shape, item, b, rows);
#ifdef KVERN_TILES
    const TileConfig tiles = TileForm::config(item.num_tokens * item.num_heads);
    const TileScope scope(tiles);
#endif
    int64_t pairs = 0;
    for (int64_t unit = item.unit_begin; unit < item.unit_end; ++unit) {
        if (!attend_any_unit(shape, item, b, unit, pairs)) return -1;
        for (int r = 0; r < rows; ++r) {
            const float* acc = b.rows.acc + r * padded;
            if (item.places) {
                const RowPlace row = row_place(item, r);
                const kvern::AttendPlace& at = item.places[row.place];
                float* to = item.partials + at.partial + (row.head * at.units + unit - at.first_unit) * (padded + 2);
                std::memcpy(to, acc, static_cast<size_t>(padded) * 4);
                to[padded] = b.rows.m[r];
                to[padded + 1] = b.rows.l[r];
            } else {
                merge_unit(acc, b.rows.m[r], b.rows.l[r], shape.value_dim_padded, b.rows.run + r * padded,
                           b.rows.run_m[r], b.rows.run_l[r]);
            }
        }
    }
    if (item.places) return pairs;
    for (int r = 0; r < rows; ++r) {
        const RowPlace at = row_place(item, r);
        float* out = item.out + at.token * item.out_token_stride + at.head * shape.values.dim;
        finish_row(shape, b.rows.run + r * padded, b.rows.run_m[r], b.rows.run_l[r], static_cast<int>(at.head), out);
    }
    return pairs;
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
