// Unbiased rounding of a float to bfloat16: up with the probability that its distance to the lower neighbour has.
//
// The second moment needs it: with beta2 = 0.999 a step changes it by less than half of bfloat16's spacing, so that rounding to
// nearest would leave it where it is. The noise is a function of the element and the step alone: the same for any number of
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

// Uniform in 0 to 65535. `element`: index in the partition, modulo 2^32. Few operations, for vectors of 32-bit integers.
ZENFLOW_INLINE uint32_t noise_of(uint32_t seed, uint32_t element) {
    uint32_t x = (element ^ seed) * 0x9e3779b1u;
    x = (x ^ (x >> 15)) * 0x85ebca77u;
    return x >> 16;
}

// One of the two neighbours of `value`, given uniform noise. Bfloat16's own values stay as they are; a finite value beyond its
// largest number may become infinite.
ZENFLOW_INLINE BFloat16 round_stochastically(float value, uint32_t noise) {
    const uint32_t bits = float_bits(value);
    const uint32_t rounded = (bits + noise) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x0040u;
    return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

}  // namespace zenflow
