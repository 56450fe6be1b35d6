// Where a packed weight's scales and codes lie. A group of 16 rows is one run of bytes that the kernels
// read front to back: chunks of a few blocks, each chunk's scales before its codes, everything aligned
// to 64 bytes.
#pragma once
#include <cstdint>

#include "types.h"

namespace kvern {

struct PackedLayout {
    int blocks;       // per chunk
    int scale_bytes;  // per chunk
    int code_bytes;   // per block
};

static constexpr PackedLayout packed_layout(ElementType t) {
    switch (t) {
        case ElementType::Q8_0: return {2, 64, 512};
        case ElementType::Q4_0: return {2, 64, 256};
        case ElementType::Q5_0: return {2, 64, 320};
        case ElementType::Q4_1: return {1, 64, 256};
        case ElementType::Q5_1: return {1, 64, 320};
        case ElementType::Q4_K: return {8, 320, 256};
        case ElementType::Q5_K: return {8, 320, 320};
        case ElementType::Q6_K: return {8, 320, 384};
        default: return {1, 0, 0};
    }
}

static constexpr int64_t chunk_bytes(PackedLayout l) {
    return l.scale_bytes + static_cast<int64_t>(l.blocks) * l.code_bytes;
}
static constexpr int64_t group_bytes(PackedLayout l, int64_t blocks) {
    return (blocks + l.blocks - 1) / l.blocks * chunk_bytes(l);
}
static constexpr int64_t scales_at(PackedLayout l, int64_t block) { return block / l.blocks * chunk_bytes(l); }
static constexpr int64_t codes_at(PackedLayout l, int64_t block) {
    return scales_at(l, block) + l.scale_bytes + block % l.blocks * l.code_bytes;
}

}  // namespace kvern
