#include "weights.h"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "half.h"
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

bool is_quantised(ElementType type) {
    return type != ElementType::F32 && type != ElementType::F16 && type != ElementType::BF16;
}

const char* type_name(ElementType type) {
    static const char* const names[] = {"F32",  "F16",  "BF16", "Q8_0", "Q4_0", "Q4_1",
                                        "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"};
    return names[static_cast<int>(type)];
}

namespace {

bool is_super(ElementType t) {
    return t == ElementType::Q4_K || t == ElementType::Q5_K || t == ElementType::Q6_K;
}

struct PackedSizes {
    size_t scale_section;
    size_t code_bytes;  // per block of 32
};

PackedSizes packed_sizes(ElementType t, int64_t cols) {
    const size_t blocks = static_cast<size_t>(cols / kBlock);
    size_t scales = 0;
    size_t codes = 256;
    switch (t) {
        case ElementType::Q8_0: scales = blocks * 32, codes = 512; break;
        case ElementType::Q4_0: scales = blocks * 32; break;
        case ElementType::Q4_1: scales = blocks * 64; break;
        case ElementType::Q5_0: scales = blocks * 32, codes = 320; break;
        case ElementType::Q5_1: scales = blocks * 64, codes = 320; break;
        case ElementType::Q4_K: scales = blocks / 8 * 320; break;
        case ElementType::Q5_K: scales = blocks / 8 * 320, codes = 320; break;
        case ElementType::Q6_K: scales = blocks / 8 * 288, codes = 384; break;
        default: break;
    }
    return {(scales + 63) / 64 * 64, codes};
}

int64_t group_bytes_of(ElementType t, int64_t cols) {
    if (t == ElementType::F32) return cols * 64;
    if (!is_quantised(t)) return cols * 32;
    const PackedSizes s = packed_sizes(t, cols);
    return static_cast<int64_t>(s.scale_section + static_cast<size_t>(cols / kBlock) * s.code_bytes);
}

// Writes one block of one row (lane) into its places.
void place_scales(ElementType t, const BlockCodes& c, int64_t b, int lane, uint8_t* scales) {
    auto put16 = [lane](uint8_t* at, uint16_t v) { std::memcpy(at + 2 * lane, &v, 2); };
    if (t == ElementType::Q6_K) {
        uint8_t* super = scales + b / 8 * 288;
        if (b % 8 == 0) put16(super, c.d);
        super[32 + b % 8 * 32 + lane] = c.scale_code;
        super[32 + b % 8 * 32 + 16 + lane] = c.second_code;
    } else if (is_super(t)) {
        uint8_t* super = scales + b / 8 * 320;
        if (b % 8 == 0) {
            put16(super, c.d);
            put16(super + 32, c.m);
        }
        super[64 + b % 8 * 32 + lane] = c.scale_code;
        super[64 + b % 8 * 32 + 16 + lane] = c.second_code;
    } else if (t == ElementType::Q4_1 || t == ElementType::Q5_1) {
        put16(scales + b * 64, c.d);
        put16(scales + b * 64 + 32, c.m);
    } else {
        put16(scales + b * 32, c.d);
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
void fetch_block(ElementType t, const uint8_t* group, size_t scale_section, size_t code_bytes, int64_t b,
                 int lane, BlockCodes& c) {
    auto get16 = [lane](const uint8_t* at) {
        uint16_t v;
        std::memcpy(&v, at + 2 * lane, 2);
        return v;
    };
    const uint8_t* codes = group + scale_section + static_cast<size_t>(b) * code_bytes;
    if (t == ElementType::Q6_K) {
        const uint8_t* super = group + b / 8 * 288;
        c.d = get16(super);
        c.scale_code = super[32 + b % 8 * 32 + lane];
        c.second_code = super[32 + b % 8 * 32 + 16 + lane];
        for (int h = 0; h < 2; ++h) std::memcpy(c.pairs + 4 * h, codes + 256 + 64 * h + 4 * lane, 4);
    } else if (is_super(t)) {
        const uint8_t* super = group + b / 8 * 320;
        c.d = get16(super);
        c.m = get16(super + 32);
        c.scale_code = super[64 + b % 8 * 32 + lane];
        c.second_code = super[64 + b % 8 * 32 + 16 + lane];
    } else if (t == ElementType::Q4_1 || t == ElementType::Q5_1) {
        c.d = get16(group + b * 64);
        c.m = get16(group + b * 64 + 32);
    } else {
        c.d = get16(group + b * 32);
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
    const PackedSizes sizes = packed_sizes(raw.type, cols);
    const int64_t row_bytes = raw_row_bytes(raw.type, cols);
    for (int lane = 0; lane < lanes; ++lane) {
        const uint8_t* row = raw.data + (first_row + lane) * row_bytes;
        uint8_t* codes = group + sizes.scale_section;
        for (int64_t b = 0; b < cols / kBlock; ++b, codes += sizes.code_bytes) {
            BlockCodes c{};
            read_block(raw.type, row, b, c);
            place_scales(raw.type, c, b, lane, group);
            place_codes(raw.type, c, lane, codes);
        }
    }
}

void pack_float(const RawTensor& raw, int64_t cols, int64_t first_row, int lanes, uint8_t* group) {
    const size_t width = raw.type == ElementType::F32 ? 4 : 2;
    for (int lane = 0; lane < lanes; ++lane) {
        const uint8_t* row = raw.data + (first_row + lane) * raw_row_bytes(raw.type, cols);
        uint8_t* to = group + static_cast<size_t>(lane) * width;
        for (int64_t k = 0; k < cols; ++k) std::memcpy(to + static_cast<size_t>(k) * 16 * width, row + static_cast<size_t>(k) * width, width);
    }
}

void decode_into_float(const RawTensor& raw, int64_t cols, int64_t first_row, int lanes, uint8_t* group) {
    std::vector<float> row(static_cast<size_t>(cols));
    for (int lane = 0; lane < lanes; ++lane) {
        decode_raw_row(raw.type, raw.data + (first_row + lane) * raw_row_bytes(raw.type, cols), cols, row.data());
        for (int64_t k = 0; k < cols; ++k) std::memcpy(group + (k * 16 + lane) * 4, &row[static_cast<size_t>(k)], 4);
    }
}

}  // namespace

Weight::Weight(const std::vector<RawTensor>& tensors, int64_t num_cols, bool as_float) : cols(num_cols) {
    for (const RawTensor& raw : tensors) {
        Segment s;
        s.type = as_float ? ElementType::F32 : raw.type;
        s.first_row = rows;
        s.rows = raw.rows;
        s.first_group = groups;
        s.groups = (raw.rows + kGroupRows - 1) / kGroupRows;
        s.group_bytes = group_bytes_of(s.type, cols);
        s.data = allocate_bytes(static_cast<size_t>(s.groups * s.group_bytes));
        rows += s.rows;
        groups += s.groups;
        bytes += static_cast<size_t>(s.groups * s.group_bytes);
        (is_quantised(s.type) ? has_quantised : has_float) = true;
        segments.push_back(std::move(s));
    }
}

const Segment& Weight::segment_of_group(int64_t group) const {
    size_t i = 0;
    while (i + 1 < segments.size() && group >= segments[i].first_group + segments[i].groups) ++i;
    return segments[i];
}

void Weight::pack(const std::vector<RawTensor>& tensors, int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
        const Segment& s = segment_of_group(g);
        const RawTensor& raw = tensors[static_cast<size_t>(&s - segments.data())];
        const int64_t row = (g - s.first_group) * kGroupRows;
        const int lanes = static_cast<int>(s.rows - row < kGroupRows ? s.rows - row : kGroupRows);
        uint8_t* group = s.data.get() + (g - s.first_group) * s.group_bytes;
        std::memset(group, 0, static_cast<size_t>(s.group_bytes));
        if (is_quantised(s.type)) {
            pack_quantised(raw, cols, row, lanes, group);
        } else if (s.type == raw.type) {
            pack_float(raw, cols, row, lanes, group);
        } else {
            decode_into_float(raw, cols, row, lanes, group);
        }
    }
}

void Weight::decode_row(int64_t row, float* out) const {
    size_t i = 0;
    while (i + 1 < segments.size() && row >= segments[i].first_row + segments[i].rows) ++i;
    const Segment& s = segments[i];
    const int64_t local = row - s.first_row;
    const int lane = static_cast<int>(local % kGroupRows);
    const uint8_t* group = s.data.get() + local / kGroupRows * s.group_bytes;
    if (!is_quantised(s.type)) {
        for (int64_t k = 0; k < cols; ++k) {
            const uint8_t* at = group + (k * 16 + lane) * (s.type == ElementType::F32 ? 4 : 2);
            uint16_t h;
            if (s.type == ElementType::F32) {
                std::memcpy(out + k, at, 4);
                continue;
            }
            std::memcpy(&h, at, 2);
            out[k] = s.type == ElementType::F16 ? fp16_to_float(h) : bf16_to_float(h);
        }
        return;
    }
    const PackedSizes sizes = packed_sizes(s.type, cols);
    for (int64_t b = 0; b < cols / kBlock; ++b) {
        BlockCodes c{};
        fetch_block(s.type, group, sizes.scale_section, sizes.code_bytes, b, lane, c);
        decode_block(s.type, c, out + b * kBlock);
    }
}

}  // namespace kvern
