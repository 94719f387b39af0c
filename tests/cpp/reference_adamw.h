// AdamW written down once more, slow and obvious: one element and one step at a time, on plain numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "protocol.h"

namespace zenflow::test {

struct State {
    std::vector<float> master;
    std::vector<float> exp_avg;
    std::vector<float> exp_avg_sq;
};

// Plausible values, with some zeros and subnormals among them.
State random_state(size_t n, uint32_t seed);
std::vector<float> random_gradient(size_t n, uint32_t seed);

// One step of the arithmetic that replay_adamw.h promises, on elements [begin, end).
void reference_step(State& state, const float* gradient, const Hyperparameters& hyperparameters, int64_t count, float clip,
                    size_t begin, size_t end);

// The bytes of an array of `type`, and back, by the conversions of half.h, which have tests of their own.
std::vector<std::byte> encode(const std::vector<float>& values, DataType type);
std::vector<float> decode(const std::byte* bytes, size_t n, DataType type);

// Throws CheckFailed, naming `what` and the first element whose bits differ. Any two NaN count as the same.
void check_same_bits(const std::string& what, const float* actual, const float* expected, size_t n);
void check_same_bytes(const std::string& what, const std::byte* actual, const std::vector<float>& expected, DataType type);

}  // namespace zenflow::test
