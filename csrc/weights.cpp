#include "weights.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "half.h"
#include "layout.h"
#include "raw_blocks.h"

namespace kvern {

void FreeBytes::operator()(uint8_t* p) const { std::free(p); }

Bytes allocate_bytes(size_t size) {
    constexpr size_t kHuge = size_t{2} << 20;
    const size_t alignment = size >= 2 * kHuge ? kHuge : 64;
    const size_t whole = (size + 63) / 64 * 64;
    void* p = nullptr;
    if (posix_memalign(&p, alignment, whole ? whole : 64) != 0) throw std::bad_alloc();
#if defined(__linux__)
    if (alignment == kHuge) madvise(p, whole / kHuge * kHuge, MADV_HUGEPAGE);
#endif
    return Bytes(static_cast<uint8_t*>(p));
}

std::shared_ptr<uint8_t> WeightRoom::take(size_t bytes) {
    constexpr size_t kChunk = size_t{16} << 20;
    const size_t whole = (bytes + 63) / 64 * 64;
    if (used_ + whole > size_) {
        size_ = whole > kChunk ? whole : kChunk;
        used_ = 0;
        chunk_ = std::shared_ptr<uint8_t>(allocate_bytes(size_).release(), FreeBytes());
    }
    const std::shared_ptr<uint8_t> piece(chunk_, chunk_.get() + used_);  // keeps the chunk
    used_ += whole;
    return piece;
}

bool is_quantised(ElementType type) {
    return type != ElementType::F32 && type != ElementType::F16 && type != ElementType::BF16 && type != ElementType::BF16_PAIRS;
}

const char* type_name(ElementType type) {
    static const char* const names[] = {"F32",  "F16",  "BF16", "Q8_0", "Q4_0", "Q4_1",
                                        "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "BF16 pairs"};
    return names[static_cast<int>(type)];
}

namespace {

bool is_super(ElementType t) {
    return t == ElementType::Q4_K || t == ElementType::Q5_K || t == ElementType::Q6_K;
}

int64_t group_bytes_of(ElementType t, int64_t cols) {
    if (t == ElementType::F32) return cols * 64;
    if (t == ElementType::BF16_PAIRS) return pair_words(cols) * 64;
    if (!is_quantised(t)) return cols * 32;
    return group_bytes(packed_layout(t), cols / kBlock);
}

// Writes one block of one row (lane) into its places; `chunk` is where its chunk begins.
void place_scales(ElementType t, const BlockCodes& c, int64_t b, int lane, uint8_t* chunk) {
    auto put16 = [lane](uint8_t* at, uint16_t v) { std::memcpy(at + 2 * lane, &v, 2); };
    if (is_super(t)) {
        uint8_t* codes = chunk + (t == ElementType::Q6_K ? 32 : 64) + b % 8 * 32;
        put16(chunk, c.d);
        if (t != ElementType::Q6_K) put16(chunk + 32, c.m);
        codes[lane] = c.scale_code;
        codes[16 + lane] = c.second_code;
    } else if (t == ElementType::Q4_1 || t == ElementType::Q5_1) {
        put16(chunk, c.d);
        put16(chunk + 32, c.m);
    } else {
        put16(chunk + b % 2 * 32, c.d);
    }
}

void place_codes(ElementType t, const BlockCodes& c, int lane, uint8_t* codes) {
    if (t == ElementType::Q8_0) {
        for (int quad = 0; quad < 8; ++quad) std::memcpy(codes + 64 * quad + 4 * lane, c.bytes + 4 * quad, 4);
        return;
    }
    for (int v = 0; v < 4; ++v) std::memcpy(codes + 64 * v + 4 * lane, c.bytes + 4 * v, 4);
    if (t == ElementType::Q6_K) {
        for (int h = 0; h < 2; ++h) std::memcpy(codes + 256 + 64 * h + 4 * lane, c.pairs + 4 * h, 4);
    } else if (t == ElementType::Q5_0 || t == ElementType::Q5_1 || t == ElementType::Q5_K) {
        for (int quad = 0; quad < 8; ++quad) {
            const uint8_t bits = static_cast<uint8_t>((c.fifth >> (4 * quad) & 15u) << (lane % 2 * 4));
            codes[256 + 8 * quad + lane / 2] |= bits;
        }
    }
}

// The reverse of the two above, for decoding a row.
void fetch_block(ElementType t, const uint8_t* group, int64_t b, int lane, BlockCodes& c) {
    auto get16 = [lane](const uint8_t* at) {
        uint16_t v;
        std::memcpy(&v, at + 2 * lane, 2);
        return v;
    };
    const uint8_t* chunk = group + scales_at(packed_layout(t), b);
    const uint8_t* codes = group + codes_at(packed_layout(t), b);
    if (is_super(t)) {
        const uint8_t* scales = chunk + (t == ElementType::Q6_K ? 32 : 64) + b % 8 * 32;
        c.d = get16(chunk);
        if (t != ElementType::Q6_K) c.m = get16(chunk + 32);
        c.scale_code = scales[lane];
        c.second_code = scales[16 + lane];
        if (t == ElementType::Q6_K) {
            for (int h = 0; h < 2; ++h) std::memcpy(c.pairs + 4 * h, codes + 256 + 64 * h + 4 * lane, 4);
        }
    } else if (t == ElementType::Q4_1 || t == ElementType::Q5_1) {
        c.d = get16(chunk);
        c.m = get16(chunk + 32);
    } else {
        c.d = get16(chunk + b % 2 * 32);
    }
    const int words = t == ElementType::Q8_0 ? 8 : 4;
    for (int v = 0; v < words; ++v) std::memcpy(c.bytes + 4 * v, codes + 64 * v + 4 * lane, 4);
    c.fifth = 0;
    if (t == ElementType::Q5_0 || t == ElementType::Q5_1 || t == ElementType::Q5_K) {
        for (int quad = 0; quad < 8; ++quad) {
            const uint32_t bits = codes[256 + 8 * quad + lane / 2] >> (lane % 2 * 4) & 15u;
            c.fifth |= bits << (4 * quad);
        }
    }
}

void pack_quantised(const RawTensor& raw, int64_t cols, int64_t first_row, int lanes, uint8_t* group) {
    const PackedLayout layout = packed_layout(raw.type);
    const int64_t row_bytes = raw_row_bytes(raw.type, cols);
    for (int lane = 0; lane < lanes; ++lane) {
        const uint8_t* row = raw.data + (first_row + lane) * row_bytes;
        for (int64_t b = 0; b < cols / kBlock; ++b) {
            BlockCodes c{};
            read_block(raw.type, row, b, c);
            place_scales(raw.type, c, b, lane, group + scales_at(layout, b));
            place_codes(raw.type, c, lane, group + codes_at(layout, b));
        }
    }
}

// Both write one group of a panel that is `width` groups wide; `group` is its first vector.
void pack_float(const RawTensor& raw, int64_t cols, int64_t first_row, int lanes, int64_t width, uint8_t* group) {
    const int64_t size = raw.type == ElementType::F32 ? 4 : 2;
    for (int lane = 0; lane < lanes; ++lane) {
        const uint8_t* row = raw.data + (first_row + lane) * raw_row_bytes(raw.type, cols);
        uint8_t* to = group + lane * size;
        for (int64_t k = 0; k < cols; ++k, to += width * kGroupRows * size) {
            std::memcpy(to, row + k * size, static_cast<size_t>(size));
        }
    }
}

void decode_into_float(const RawTensor& raw, int64_t cols, int64_t first_row, int lanes, int64_t width,
                       uint8_t* group) {
    std::vector<float> row(static_cast<size_t>(cols));
    for (int lane = 0; lane < lanes; ++lane) {
        decode_raw_row(raw.type, raw.data + (first_row + lane) * raw_row_bytes(raw.type, cols), cols, row.data());
        float* to = reinterpret_cast<float*>(group) + lane;
        for (int64_t k = 0; k < cols; ++k) to[k * width * kGroupRows] = row[static_cast<size_t>(k)];
    }
}

void decode_into_pairs(const RawTensor& raw, int64_t cols, int64_t first_row, int lanes, uint8_t* group) {
    const auto words = static_cast<size_t>(pair_words(cols));
    std::vector<float> row(2 * words);  // zeros past its end
    for (int lane = 0; lane < lanes; ++lane) {
        decode_raw_row(raw.type, raw.data + (first_row + lane) * raw_row_bytes(raw.type, cols), cols, row.data());
        for (size_t w = 0; w < words; ++w) {
            const uint32_t word = float_to_bf16(row[2 * w]) | static_cast<uint32_t>(float_to_bf16(row[2 * w + 1])) << 16;
            std::memcpy(group + 64 * w + 4 * lane, &word, 4);
        }
    }
}

}  // namespace

Weight::Weight(const std::vector<RawTensor>& tensors, int64_t num_cols, WeightForm form, WeightRoom& room)
    : cols(num_cols), is_paired(form == WeightForm::PAIRS) {
    for (const RawTensor& raw : tensors) {
        Segment s;
        s.type = is_paired ? ElementType::BF16_PAIRS : form == WeightForm::FLOAT ? ElementType::F32 : raw.type;
        s.first_row = rows;
        s.rows = raw.rows;
        s.groups = (raw.rows + kGroupRows - 1) / kGroupRows;
        s.group_bytes = group_bytes_of(s.type, cols);
        s.unit_groups = is_quantised(s.type) || is_paired ? 1 : kPanelGroups;
        s.first_unit = units;
        s.units = (s.groups + s.unit_groups - 1) / s.unit_groups;
        s.data = room.take(static_cast<size_t>(s.groups * s.group_bytes));
        rows += s.rows;
        units += s.units;
        bytes += static_cast<size_t>(s.groups * s.group_bytes);
        has_quantised = has_quantised || is_quantised(s.type);
        has_float = has_float || !(is_quantised(s.type) || is_paired);
        segments.push_back(std::move(s));
    }
}

const Segment& Weight::segment_of_unit(int64_t unit) const {
    size_t i = 0;
    while (i + 1 < segments.size() && unit >= segments[i].first_unit + segments[i].units) ++i;
    return segments[i];
}

void Weight::pack(const std::vector<RawTensor>& tensors, int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
        const Segment& s = segment_of_unit(unit);
        const RawTensor& raw = tensors[static_cast<size_t>(&s - segments.data())];
        const int64_t first = (unit - s.first_unit) * s.unit_groups;
        const int64_t count = std::min(s.unit_groups, s.groups - first);
        uint8_t* at = s.data.get() + first * s.group_bytes;
        std::memset(at, 0, static_cast<size_t>(count * s.group_bytes));
        for (int64_t g = 0; g < count; ++g) {
            const int64_t row = (first + g) * kGroupRows;
            const int lanes = static_cast<int>(std::min<int64_t>(s.rows - row, kGroupRows));
            if (is_quantised(s.type)) {
                pack_quantised(raw, cols, row, lanes, at + g * s.group_bytes);
            } else if (is_paired) {
                decode_into_pairs(raw, cols, row, lanes, at + g * s.group_bytes);
            } else if (s.type == raw.type) {
                pack_float(raw, cols, row, lanes, count, at + g * kGroupRows * (s.type == ElementType::F32 ? 4 : 2));
            } else {
                decode_into_float(raw, cols, row, lanes, count, at + g * kGroupRows * 4);
            }
        }
    }
}

void Weight::decode_row(int64_t row, float* out) const {
    size_t i = 0;
    while (i + 1 < segments.size() && row >= segments[i].first_row + segments[i].rows) ++i;
    const Segment& s = segments[i];
    const int64_t local = row - s.first_row;
    const int lane = static_cast<int>(local % kGroupRows);
    const int64_t g = local / kGroupRows;
    if (is_paired) {
        const uint8_t* at = s.data.get() + g * s.group_bytes + 4 * lane;
        for (int64_t k = 0; k < cols; ++k) {
            uint16_t h;
            std::memcpy(&h, at + k / 2 * 64 + k % 2 * 2, 2);
            out[k] = bf16_to_float(h);
        }
        return;
    }
    if (!is_quantised(s.type)) {
        const int64_t size = s.type == ElementType::F32 ? 4 : 2;
        const int64_t width = s.panel_width(g);
        const uint8_t* at = s.data.get() + g / kPanelGroups * kPanelGroups * s.group_bytes +
                            (g % kPanelGroups * kGroupRows + lane) * size;
        for (int64_t k = 0; k < cols; ++k, at += width * kGroupRows * size) {
            uint16_t h;
            if (size == 4) {
                std::memcpy(out + k, at, 4);
                continue;
            }
            std::memcpy(&h, at, 2);
            out[k] = s.type == ElementType::F16 ? fp16_to_float(h) : bf16_to_float(h);
        }
        return;
    }
    const uint8_t* group = s.data.get() + g * s.group_bytes;
    for (int64_t b = 0; b < cols / kBlock; ++b) {
        BlockCodes c{};
        fetch_block(s.type, group, b, lane, c);
        decode_block(s.type, c, out + b * kBlock);
    }
}

}  // namespace kvern
