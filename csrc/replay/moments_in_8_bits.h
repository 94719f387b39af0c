// AdamW's moments as codes of 8 bits, with a scale for each tile: its largest magnitude.
//
// The update is m / sqrt(v), so both are coded by their effect on it, finely where they are small (q: code of exp_avg, signed;
// c: code of exp_avg_sq):
//
//     m = (q / 127)^2 * scale, with q's sign      sqrt(v) = (c / 255)^2 * sqrt(scale)
//
// A second moment that is not zero has a code of at least 1. First moments reach zero at about the same distance from the largest
// as second moments reach code 1, so an element that the codes cannot hold beside a large one is updated too little, never too
// much.
//
// exp_avg is rounded to nearest, exp_avg_sq to one of its two neighbours, without bias (stochastic_rounding.h says why). Decoded
// values have the same codes and scales when they are encoded to nearest: the largest magnitude of a tile is exact.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cpu_features.h"
#include "common/half.h"
#include "common/protocol.h"
#include "replay/stochastic_rounding.h"

namespace zenflow {

constexpr float kSmallestScale = 0x1p-100f;  // its reciprocal is finite
constexpr float kLargestFloat = 0x1.fffffep127f;

ZENFLOW_INLINE float decode_exp_avg(int8_t code, float scale) {
    const int32_t q = code;
    return static_cast<float>(q * (q < 0 ? -q : q)) * (1.0f / (127.0f * 127.0f)) * scale;
}

// sqrt(v / scale) of a code from 0 to 255.
ZENFLOW_INLINE float root_of_code(int32_t code) { return static_cast<float>(code * code) * (1.0f / (255.0f * 255.0f)); }

ZENFLOW_INLINE float decode_exp_avg_sq(uint8_t code, float scale) {
    const float root = root_of_code(code);
    return root * root * scale;
}

// From the bits of a tile's largest magnitude. Infinity becomes the largest number, and NaN stays NaN.
ZENFLOW_INLINE float scale_of(uint32_t largest) {
    const float magnitude = float_from_bits(largest == 0x7f800000u ? float_bits(kLargestFloat) : largest);
    return magnitude < kSmallestScale ? kSmallestScale : magnitude;
}

// `inverse`: of the scale. Branch-free and without undefined conversions, for vectors; NaN becomes some code.
ZENFLOW_INLINE int32_t encode_exp_avg(float value, float inverse) {
    const float magnitude = float_from_bits(float_bits(value) & 0x7fffffffu);
    const float position = __builtin_sqrtf(magnitude * inverse) * 127.0f + 0.5f;
    const auto code = static_cast<int32_t>(position < 127.0f ? position : 127.0f);
    return value < 0.0f ? -code : code;
}

// `noise`: uniform, from 0 to 65535.
ZENFLOW_INLINE int32_t encode_exp_avg_sq(float value, float inverse, uint32_t noise) {
    const float share = value * inverse;
    const float position = __builtin_sqrtf(__builtin_sqrtf(share)) * 255.0f;
    const auto below = static_cast<int32_t>(position < 254.0f ? position : 254.0f);
    const float low = root_of_code(below), high = root_of_code(below + 1);
    // In the middle of each 2^-16, so that rounding errors of a decoded value do not count.
    const float uniform = static_cast<float>(static_cast<int32_t>(noise)) * 0x1p-16f + 0x1p-17f;
    const int32_t code = below + (share - low * low > uniform * (high * high - low * low) ? 1 : 0);
    const int32_t least = value > 0.0f ? 1 : 0;
    return code > least ? code : least;
}

}  // namespace zenflow
