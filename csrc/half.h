// Scalar conversions between float32 and the 16-bit floats; the vector paths give the same bits.
#pragma once
#include <cstdint>
#include <cstring>

namespace kvern {

static inline uint32_t float_bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

static inline float bits_float(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

static inline float bf16_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

// Round to nearest even; a NaN stays a (quiet) NaN.
static inline uint16_t float_to_bf16(float x) {
    const uint32_t u = float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float fp16_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 0x1fu;
    const uint32_t mantissa = h & 0x3ffu;
    if (exponent == 0x1f) {
        const uint32_t quiet = mantissa ? 0x400000u : 0u;  // hardware conversion quietens a NaN
        return bits_float(sign | 0x7f800000u | (mantissa << 13) | quiet);
    }
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;  // 2^-24
        return bits_float(float_bits(magnitude) | sign);
    }
    return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// Round to nearest even; too large becomes infinity, a NaN stays a quiet NaN.
static inline uint16_t float_to_fp16(float x) {
    const uint32_t u = float_bits(x);
    const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    }
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {  // subnormal in fp16: multiples of 2^-24
        const float scaled = bits_float(magnitude) * 16777216.0f;
        uint32_t whole = static_cast<uint32_t>(scaled);
        const float rest = scaled - static_cast<float>(whole);
        if (rest > 0.5f || (rest == 0.5f && (whole & 1u))) ++whole;
        return static_cast<uint16_t>(sign | whole);
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace kvern
