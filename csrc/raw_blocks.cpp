#include "raw_blocks.h"

#include <cstring>

#include "half.h"
#include "weights.h"

namespace kvern {

namespace {

uint16_t read16(const uint8_t* p) {
    uint16_t v;
    std::memcpy(&v, p, 2);
    return v;
}

uint32_t read32(const uint8_t* p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

struct RawLayout {
    int features, bytes;
};

RawLayout layout_of(ElementType t) {
    switch (t) {
        case ElementType::F32: return {1, 4};
        case ElementType::F16: return {1, 2};
        case ElementType::BF16: return {1, 2};
        case ElementType::Q8_0: return {32, 34};
        case ElementType::Q4_0: return {32, 18};
        case ElementType::Q4_1: return {32, 20};
        case ElementType::Q5_0: return {32, 22};
        case ElementType::Q5_1: return {32, 24};
        case ElementType::Q4_K: return {256, 144};
        case ElementType::Q5_K: return {256, 176};
        case ElementType::Q6_K: return {256, 210};
        case ElementType::BF16_PAIRS: break;  // no file holds it
    }
    return {1, 4};
}

// Six-bit scale and min number j of the 12 packed bytes.
void unpack_six_bits(const uint8_t* s, int j, uint8_t& scale, uint8_t& min) {
    if (j < 4) {
        scale = s[j] & 63;
        min = s[j + 4] & 63;
    } else {
        scale = static_cast<uint8_t>((s[j + 4] & 15) | (s[j - 4] >> 6 << 4));
        min = static_cast<uint8_t>((s[j + 4] >> 4) | (s[j] >> 6 << 4));
    }
}

void read_k_nibbles(const uint8_t* qs, int j, BlockCodes& c) {
    const uint8_t* from = qs + j / 2 * 32;
    for (int i = 0; i < 16; ++i) {
        c.bytes[i] = static_cast<uint8_t>(j % 2 == 0 ? (from[i] & 15) | (from[i + 16] & 15) << 4
                                                     : (from[i] >> 4) | (from[i + 16] & 0xf0));
    }
}

void read_six(const uint8_t* super, int j, BlockCodes& c) {
    const uint8_t* low = super + j / 4 * 64 + j % 2 * 32;
    const uint8_t* high = super + 128 + j / 4 * 32;
    const int quarter = j % 4;
    uint8_t code[32];
    for (int i = 0; i < 32; ++i) {
        const int nibble = quarter < 2 ? low[i] & 15 : low[i] >> 4;
        code[i] = static_cast<uint8_t>(nibble | (high[i] >> (2 * quarter) & 3) << 4);
    }
    for (int i = 0; i < 16; ++i) c.bytes[i] = static_cast<uint8_t>((code[i] & 15) | (code[i + 16] & 15) << 4);
    for (int h = 0; h < 2; ++h) {
        for (int e = 0; e < 4; ++e) {
            int packed = 0;
            for (int f = 0; f < 4; ++f) packed |= (code[16 * h + 4 * f + e] >> 4) << (2 * f);
            c.pairs[4 * h + e] = static_cast<uint8_t>(packed);
        }
    }
    c.scale_code = super[192 + 2 * j];
    c.second_code = super[192 + 2 * j + 1];
    c.d = read16(super + 208);
}

}  // namespace

int64_t raw_row_bytes(ElementType type, int64_t cols) {
    const RawLayout l = layout_of(type);
    return cols % l.features ? 0 : cols / l.features * l.bytes;
}

void read_block(ElementType type, const uint8_t* row, int64_t block, BlockCodes& c) {
    const RawLayout l = layout_of(type);
    const int per = l.features / kBlock;
    const uint8_t* at = row + block / per * l.bytes;
    const int j = static_cast<int>(block % per);
    switch (type) {
        case ElementType::Q8_0:
            c.d = read16(at);
            std::memcpy(c.bytes, at + 2, 32);
            break;
        case ElementType::Q4_0:
            c.d = read16(at);
            std::memcpy(c.bytes, at + 2, 16);
            break;
        case ElementType::Q4_1:
            c.d = read16(at);
            c.m = read16(at + 2);
            std::memcpy(c.bytes, at + 4, 16);
            break;
        case ElementType::Q5_0:
            c.d = read16(at);
            c.fifth = read32(at + 2);
            std::memcpy(c.bytes, at + 6, 16);
            break;
        case ElementType::Q5_1:
            c.d = read16(at);
            c.m = read16(at + 2);
            c.fifth = read32(at + 4);
            std::memcpy(c.bytes, at + 8, 16);
            break;
        case ElementType::Q4_K:
        case ElementType::Q5_K:
            c.d = read16(at);
            c.m = read16(at + 2);
            unpack_six_bits(at + 4, j, c.scale_code, c.second_code);
            if (type == ElementType::Q5_K) {
                c.fifth = 0;
                for (int i = 0; i < 32; ++i) c.fifth |= static_cast<uint32_t>(at[16 + i] >> j & 1) << i;
                read_k_nibbles(at + 48, j, c);
            } else {
                read_k_nibbles(at + 16, j, c);
            }
            break;
        case ElementType::Q6_K: read_six(at, j, c); break;
        default: break;
    }
}

void decode_block(ElementType type, const BlockCodes& c, float* out) {
    const float d = fp16_to_float(c.d);
    const float m = fp16_to_float(c.m);
    if (type == ElementType::Q8_0) {
        for (int i = 0; i < kBlock; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(c.bytes[i]));
        return;
    }
    for (int i = 0; i < kBlock; ++i) {
        const int nibble = i < 16 ? c.bytes[i] & 15 : c.bytes[i - 16] >> 4;
        const int fifth = static_cast<int>(c.fifth >> i & 1u) << 4;
        const float q = static_cast<float>(nibble | fifth);
        switch (type) {
            case ElementType::Q4_0: out[i] = d * (q - 8.0f); break;
            case ElementType::Q5_0: out[i] = d * (q - 16.0f); break;
            case ElementType::Q4_1:
            case ElementType::Q5_1: out[i] = d * q + m; break;
            case ElementType::Q4_K:
            case ElementType::Q5_K:
                out[i] = d * static_cast<float>(c.scale_code) * q - m * static_cast<float>(c.second_code);
                break;
            default: {  // Q6_K
                const int h = i / 16;
                const int upper = c.pairs[4 * h + i % 4] >> (i % 16 / 4 * 2) & 3;
                const auto scale = static_cast<int8_t>(h ? c.second_code : c.scale_code);
                out[i] = d * static_cast<float>(scale) * static_cast<float>((nibble | upper << 4) - 32);
            }
        }
    }
}

void decode_raw_row(ElementType type, const uint8_t* row, int64_t cols, float* out) {
    if (type == ElementType::F32) {
        std::memcpy(out, row, static_cast<size_t>(cols) * 4);
        return;
    }
    if (!is_quantised(type)) {
        for (int64_t k = 0; k < cols; ++k) {
            const uint16_t h = read16(row + 2 * k);
            out[k] = type == ElementType::F16 ? fp16_to_float(h) : bf16_to_float(h);
        }
        return;
    }
    for (int64_t b = 0; b < cols / kBlock; ++b) {
        BlockCodes c{};
        read_block(type, row, b, c);
        decode_block(type, c, out + b * kBlock);
    }
}

}  // namespace kvern
