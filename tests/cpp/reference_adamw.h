// AdamW as a plain loop over elements and steps, and helpers to compare the worker's results with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "adamw/replay_adamw.h"
#include "common/protocol.h"

namespace zenflow::test {

constexpr Hyperparameters kNoDecay{1e-3, 0.9, 0.999, 1e-8, 0.0, 1, 0};
constexpr Hyperparameters kDecoupled{1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 0};
constexpr Hyperparameters kGradientDecay{1e-3, 0.8, 0.95, 1e-6, 0.1, 0, 0};

struct State {
    std::vector<float> master;
    std::vector<float> exp_avg;
    std::vector<float> exp_avg_sq;

    AdamState view() { return {master.data(), exp_avg.data(), exp_avg_sq.data()}; }
};

// Plausible values, with some zeros and subnormals among them.
State random_state(size_t n, uint32_t seed);
std::vector<float> random_gradient(size_t n, uint32_t seed);

// One step of the arithmetic that replay_adamw.h specifies, on elements [begin, end); gradient[0] belongs to element `begin`.
void reference_step(State& state, const float* gradient, const Hyperparameters& hyperparameters, int64_t count, float clip,
                    size_t begin, size_t end);

// Rounds the moments of elements [begin, end), whose first one begins a tile, to values that `type` has, as after a window whose
// last committed step is `step`, with this beta1.
void round_moments(State& state, int64_t step, size_t begin, size_t end, DataType type, double beta1 = 0.9);

// Moments in the memory of an arena, from the first element of a tile on.
struct StoredMoments {
    std::vector<std::byte> exp_avg;
    std::vector<std::byte> exp_avg_sq;
    std::vector<MomentScales> scales;  // of int8
};

// Of elements [begin, end), which have values of `type`, and back.
StoredMoments store_moments(const State& state, size_t begin, size_t end, DataType type);
void load_moments(State& state, size_t begin, size_t end, const std::byte* exp_avg, const std::byte* exp_avg_sq,
                  const MomentScales* scales, DataType type);

// The available instruction sets.
std::vector<InstructionSet> instruction_sets();

// Conversions between floats and the bytes of an array of `type`, by half.h, which has tests of its own.
std::vector<std::byte> encode(const std::vector<float>& values, DataType type);
std::vector<float> decode(const std::byte* bytes, size_t n, DataType type);

// Throw CheckFailed, naming `what` and the first element whose bits differ. Any two NaN are equal.
void check_same_bits(const std::string& what, const float* actual, const float* expected, size_t n);
void check_same_state(const std::string& what, const AdamState& actual, const State& expected);
void check_same_bytes(const std::string& what, const std::byte* actual, const std::vector<float>& expected, DataType type);

}  // namespace zenflow::test
