// Unbiased rounding of a float to bfloat16: up with the probability that its distance to the lower neighbour has.
//
// The second moment needs it: with beta2 = 0.999 a step changes it by less than half of bfloat16's spacing, so that rounding to
// nearest would leave it where it is. So does the first one with beta1 above 1 - 2^-8, which would never end without gradients;
// else the kernel rounds it to nearest. The noise is a function of the element and the step alone: the same for any number of
// threads, after a kill and after a resume.
#pragma once

#include <cstdint>

#include "common/cpu_features.h"
#include "common/half.h"

namespace zenflow {

// Starts the noise of a step: the low half of splitmix64's output for it, so that the noise of successive steps is unrelated.
ZENFLOW_INLINE uint32_t noise_seed(uint64_t step) {
    uint64_t x = step * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return static_cast<uint32_t>(x ^ (x >> 31));
}

// Counts the elements of a step: the next element's counter is larger by kNoiseStride, modulo 2^32. `element`: index in the
// partition, modulo 2^32.
constexpr uint32_t kNoiseStride = 0x9e3779b1u;
ZENFLOW_INLINE uint32_t noise_counter(uint32_t seed, uint32_t element) { return seed + element * kNoiseStride; }

// Uniform in 0 to 65535. Few operations, for vectors of 32-bit integers.
ZENFLOW_INLINE uint32_t noise_of(uint32_t counter) { return ((counter ^ (counter >> 15)) * 0x85ebca77u) >> 16; }

// The same, independent of `noise_of`.
ZENFLOW_INLINE uint32_t other_noise_of(uint32_t counter) { return ((counter ^ (counter >> 15)) * 0x85ebca77u) & 0xffffu; }

// One of the two neighbours of `value`, given uniform noise. `value` is a result of arithmetic and has no sign, as a sum of
// squares; NaN stays NaN. Bfloat16's own values stay as they are; a finite value beyond its largest number may become infinite.
ZENFLOW_INLINE BFloat16 round_stochastically(float value, uint32_t noise) {
    // Keeps a NaN from becoming a number by the addition. Cheaper than a comparison and a selection.
    constexpr uint32_t kLargestNan = 0x7fff0000u;
    const uint32_t bits = float_bits(value);
    return {static_cast<uint16_t>(((bits < kLargestNan ? bits : kLargestNan) + noise) >> 16)};
}

// The same for a value with a sign.
ZENFLOW_INLINE BFloat16 round_signed_stochastically(float value, uint32_t noise) {
    const uint32_t bits = float_bits(value), sign = bits & 0x80000000u;
    const BFloat16 magnitude = round_stochastically(float_from_bits(bits ^ sign), noise);
    return {static_cast<uint16_t>(magnitude.bits | sign >> 16)};
}

}  // namespace zenflow
