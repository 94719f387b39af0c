// AdamW's moments as codes of 8 bits, with two scales for each tile.
//
// The update is m / sqrt(v), so that is what is coded, finely where it is small, and the root of v (q: code of exp_avg, signed;
// c: code of exp_avg_sq):
//
//     sqrt(v) = (c / 255)^2 * sqrt(scale of v)      m = (q / 127)^2 * scale of m * that root, with q's sign
//
// The scales are the tile's largest v, and its largest |m| / sqrt(v), rounded to 16 significant bits so that decoded values have
// the same one.
//
// Both squares are rounded to one of their two neighbours, without bias, by independent noise (stochastic_rounding.h). So a first
// moment that gets no gradient shrinks as beta1 has it, until it is exactly zero, and sqrt(v), on average, as beta2 has it.
// To nearest, beta1 * m would have the code of m from some small code on, and the update of a weight without gradients would grow
// as its second moment shrinks. m keeps its ratio to the *coded* root: rounding of v does not change an update, and no update is
// larger than the largest of its tile.
//
// A second moment has a code of at least 1 unless both moments are zero. An element whose root is smaller than that of code 1 is
// coded with that root, so that it is updated too little, never too much.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adamw/stochastic_rounding.h"
#include "common/cpu_features.h"
#include "common/half.h"
#include "common/protocol.h"

namespace zenflow {

constexpr float kSmallestScale = 0x1p-100f;  // its reciprocal is finite
constexpr float kLargestFloat = 0x1.fffffep127f;
constexpr float kSmallestRatio = 0x1p-40f;  // times the smallest root it is no subnormal number
constexpr float kLargestRatio = 0x1p126f;   // nor is its reciprocal

// (code / n)^2.
template <int n>
ZENFLOW_INLINE float square_of_code(int32_t code) {
    return static_cast<float>(code * code) * (1.0f / (n * n));
}

// One of the two neighbours of a square, given n^2 times it, at most n^2, and uniform noise from 0 to 65535. n^2 has the code n
// even if it is smaller by 2^-24 of it. Branch-free and without undefined conversions, for vectors; NaN becomes some code.
template <int n>
ZENFLOW_INLINE int32_t code_of_square(float square, uint32_t noise) {
    const float position = __builtin_sqrtf(square);
    const auto code = static_cast<int32_t>(position < n - 1.0f ? position : n - 1.0f);
    const auto below = static_cast<float>(code), uniform = static_cast<float>(static_cast<int32_t>(noise)) * 0x1p-16f;
    return code + (square - below * below > uniform * (2.0f * below + 1.0f) ? 1 : 0);
}

// From the bits of a tile's largest second moment. Infinity becomes the largest number, and NaN stays NaN.
ZENFLOW_INLINE float scale_of(uint32_t largest) {
    const float magnitude = float_from_bits(largest == 0x7f800000u ? float_bits(kLargestFloat) : largest);
    return magnitude < kSmallestScale ? kSmallestScale : magnitude;
}

// From the bits of a tile's largest ratio, within the bounds; NaN stays NaN.
ZENFLOW_INLINE float bounded_ratio(uint32_t largest) {
    const float ratio = float_from_bits(largest);
    const float above = ratio < kSmallestRatio ? kSmallestRatio : ratio;
    return above > kLargestRatio ? kLargestRatio : above;
}

// The scale of a tile whose largest ratio this is, within the bounds.
ZENFLOW_INLINE float scale_of_ratio(float ratio) {
    return ratio > 0.0f ? float_from_bits((float_bits(ratio) + 0x80u) & 0xffffff00u) : ratio;
}

// `root_scale`: of the scale of second moments.
ZENFLOW_INLINE float decode_root(uint8_t code, float root_scale) { return square_of_code<255>(code) * root_scale; }

ZENFLOW_INLINE float decode_exp_avg(int8_t code, float scale, float root) {
    const int32_t q = code;
    return static_cast<float>(q * (q < 0 ? -q : q)) * (1.0f / (127.0f * 127.0f)) * scale * root;
}

ZENFLOW_INLINE float decode_exp_avg_sq(uint8_t code, float scale) {
    const float share = square_of_code<255>(code);
    return share * share * scale;
}

// A root's share of the largest one, at least that of code 1, given the inverse of the scale of second moments.
ZENFLOW_INLINE float root_share(float exp_avg_sq, float inverse) {
    constexpr float kLeast = 1.0f / (255.0f * 255.0f);
    const float share = __builtin_sqrtf(exp_avg_sq * inverse);
    const float above = share > kLeast ? share : kLeast;
    return above < 1.0f ? above : 1.0f;
}

// `inverse`: 127^2 over the tile's largest ratio.
ZENFLOW_INLINE int32_t encode_exp_avg(float ratio, float inverse, uint32_t noise) {
    const float magnitude = float_from_bits(float_bits(ratio) & 0x7fffffffu);
    const int32_t code = code_of_square<127>(magnitude * inverse, noise);
    return ratio < 0.0f ? -code : code;
}

ZENFLOW_INLINE int32_t encode_exp_avg_sq(float share, uint32_t noise) {
    return code_of_square<255>(share * (255.0f * 255.0f), noise);
}

}  // namespace zenflow
