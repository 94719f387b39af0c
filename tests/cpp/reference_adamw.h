// AdamW as a plain loop over elements and steps, and helpers to compare the worker's results with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "adamw/replay_adamw.h"
#include "check.h"
#include "common/half.h"
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

// Conversions between floats and the bytes of an array of `type`, by half.h, which has tests of its own.
inline std::vector<std::byte> encode(const std::vector<float>& values, DataType type) {
    return with_type(type, [&values](auto zero) {
        std::vector<std::byte> bytes(values.size() * sizeof(zero));
        for (size_t i = 0; i < values.size(); ++i) {
            const auto number = from_float<decltype(zero)>(values[i]);
            std::memcpy(bytes.data() + i * sizeof(number), &number, sizeof(number));
        }
        return bytes;
    });
}

inline std::vector<float> decode(const std::byte* bytes, size_t n, DataType type) {
    return with_type(type, [bytes, n](auto number) {
        std::vector<float> values;
        for (size_t i = 0; i < n; ++i) {
            std::memcpy(&number, bytes + i * sizeof(number), sizeof(number));
            values.push_back(to_float(number));
        }
        return values;
    });
}

// Plausible values, with some zeros and subnormals among them.
inline State random_state(size_t n, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    State state;
    for (size_t i = 0; i < n; ++i) {
        state.master.push_back(0.02f * normal(random));
        state.exp_avg.push_back(i % 11 == 3 ? 0.0f : 1e-3f * normal(random));
        const float root = 1e-3f * normal(random);
        state.exp_avg_sq.push_back(i % 13 == 5 ? 0.0f : i % 17 == 8 ? 0x1p-140f : root * root);
    }
    return state;
}

inline std::vector<float> random_gradient(size_t n, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> gradient;
    for (size_t i = 0; i < n; ++i) gradient.push_back(i % 19 == 7 ? 0.0f : i % 23 == 9 ? 0x1p-24f : 1e-2f * normal(random));
    return gradient;
}

// One step of the arithmetic that replay_adamw.h specifies, on elements [begin, end); gradient[0] belongs to element `begin`.
inline void reference_step(State& state, const float* gradient, const Hyperparameters& hyperparameters, int64_t count, float clip,
                           size_t begin, size_t end) {
    if (std::isnan(clip)) return;
    const double lr = hyperparameters.lr;
    const double decay = hyperparameters.weight_decay;
    const double bias_correction1 = 1.0 - std::pow(hyperparameters.beta1, static_cast<double>(count));
    const double bias_correction2 = 1.0 - std::pow(hyperparameters.beta2, static_cast<double>(count));
    const auto beta1 = static_cast<float>(hyperparameters.beta1);
    const auto beta2 = static_cast<float>(hyperparameters.beta2);
    const auto rest1 = static_cast<float>(1.0 - hyperparameters.beta1);
    const auto rest2 = static_cast<float>(1.0 - hyperparameters.beta2);
    const auto eps = static_cast<float>(hyperparameters.eps);
    const auto inv_root = static_cast<float>(1.0 / std::sqrt(bias_correction2));
    for (size_t i = begin; i < end; ++i) {
        float& w = state.master[i];
        float& m = state.exp_avg[i];
        float& v = state.exp_avg_sq[i];
        float g = gradient[i - begin] * clip;
        if (decay != 0 && hyperparameters.decoupled == 0) g = std::fma(w, static_cast<float>(decay), g);
        m = m * beta1;
        m = std::fma(g, rest1, m);
        v = v * beta2;
        v = std::fma(g * g, rest2, v);
        const float denominator = std::fma(std::sqrt(v), inv_root, eps);
        const float update = m / denominator;
        if (decay != 0 && hyperparameters.decoupled != 0) w = std::fma(w, static_cast<float>(-lr * decay), w);
        w = std::fma(update, static_cast<float>(-lr / bias_correction1), w);
    }
}

inline float value_of_code(int code, int largest_code) {
    return static_cast<float>(code * code) * (1.0f / static_cast<float>(largest_code * largest_code));
}

// Of a tile of second moments.
inline float scale_of_tile(const float* values, size_t n) {
    float largest = 0.0f;
    for (size_t i = 0; i < n; ++i) {
        if (std::isnan(values[i])) return values[i];
        largest = std::max(largest, values[i]);
    }
    return std::min(std::max(largest, 0x1p-100f), std::numeric_limits<float>::max());
}

// Of the largest root, as it is coded; at least that of code 1.
inline float root_share(float v, float scale) { return std::clamp(std::sqrt(v * (1.0f / scale)), value_of_code(1, 255), 1.0f); }

// What a first moment is divided by.
inline float root_of(float v, float scale) { return root_share(v, scale) * std::sqrt(scale); }

inline float largest_ratio(const float* m, const float* v, size_t n, float scale) {
    float largest = 0x1p-40f;
    for (size_t i = 0; i < n; ++i) {
        const float ratio = std::fabs(m[i]) / root_of(v[i], scale);
        if (std::isnan(ratio)) return ratio;
        largest = std::max(largest, ratio);
    }
    return std::min(largest, 0x1p126f);
}

inline float with_16_bits(float ratio) {
    int exponent = 0;
    const float fraction = std::frexp(ratio, &exponent);
    return std::isnan(ratio) ? ratio : std::ldexp(std::floor(fraction * 65536.0f + 0.5f), exponent - 16);
}

// Of n^2 times the square.
inline int code_of_square(float square, int n, uint32_t noise) {
    const float position = std::sqrt(square);
    const int below = position < static_cast<float>(n - 1) ? static_cast<int>(position) : n - 1;
    const float above = square - static_cast<float>(below * below);
    return below + (above > static_cast<float>(noise) / 65536.0f * static_cast<float>(2 * below + 1) ? 1 : 0);
}

// `largest`: ratio of the tile.
inline void round_to_8_bits(float& m, float& v, float largest, float scale, uint32_t noise) {
    const float ratio = m / root_of(v, scale);
    const int q = code_of_square(std::fabs(ratio) * (16129.0f / largest), 127, noise % 65536);
    const int c = v == 0.0f && m == 0.0f ? 0 : code_of_square(root_share(v, scale) * 65025.0f, 255, noise / 65536);
    const float root = value_of_code(c, 255) * std::sqrt(scale);
    m = value_of_code(q, 127) * with_16_bits(largest) * root * (ratio < 0.0f && q > 0 ? -1.0f : 1.0f);
    v = value_of_code(c, 255) * value_of_code(c, 255) * scale;
}

// The upper neighbour if the noise and the fraction that is cut off reach the next unit; of both signs.
inline float round_to_16_bits(float value, uint32_t noise) {
    if (std::isnan(value)) return value;
    const uint32_t bits = float_bits(value), fraction = bits % 65536;
    return float_from_bits(bits - fraction + (fraction + noise >= 65536 ? 65536 : 0));
}

// Rounds the moments of elements [begin, end), whose first one begins a tile, to values that `type` has, as after a window whose
// last committed step is `step`, with this beta1.
inline void round_moments(State& state, int64_t step, size_t begin, size_t end, DataType type, double beta1 = 0.9) {
    if (type == DataType::kFloat32) return;
    // splitmix64.
    uint64_t seed = static_cast<uint64_t>(step) * 0x9e3779b97f4a7c15u;
    seed ^= seed >> 30;
    seed *= 0xbf58476d1ce4e5b9u;
    seed ^= seed >> 27;
    seed *= 0x94d049bb133111ebu;
    seed ^= seed >> 31;
    float largest = 0.0f, scale = 0.0f;
    for (size_t i = begin; i < end; ++i) {
        float &m = state.exp_avg[i], &v = state.exp_avg_sq[i];
        auto noise = static_cast<uint32_t>(i) * 0x9e3779b1u + static_cast<uint32_t>(seed);
        noise ^= noise >> 15;
        noise *= 0x85ebca77u;
        if (type == DataType::kInt8) {
            if ((i - begin) % kTileElements == 0) {
                const size_t n = std::min(kTileElements, end - i);
                scale = scale_of_tile(&v, n), largest = largest_ratio(&m, &v, n, scale);
            }
            round_to_8_bits(m, v, largest, scale, noise);
            continue;
        }
        m = beta1 > 1.0 - 1.0 / 256 ? round_to_16_bits(m, noise % 65536) : to_float(from_float<BFloat16>(m));
        v = round_to_16_bits(v, noise / 65536);
    }
}

// Moments in the memory of an arena, from the first element of a tile on.
struct StoredMoments {
    std::vector<std::byte> exp_avg;
    std::vector<std::byte> exp_avg_sq;
    std::vector<MomentScales> scales;  // of int8
};

// Of elements [begin, end), which have values of `type`, and back.
inline StoredMoments store_moments(const State& state, size_t begin, size_t end, DataType type) {
    const float *const m = state.exp_avg.data(), *const v = state.exp_avg_sq.data();
    if (type != DataType::kInt8) return {encode({m + begin, m + end}, type), encode({v + begin, v + end}, type), {}};
    StoredMoments result;
    for (size_t i = begin; i < end; ++i) {
        if ((i - begin) % kTileElements == 0) {
            const size_t n = std::min(kTileElements, end - i);
            const float scale = scale_of_tile(v + i, n);
            result.scales.push_back({with_16_bits(largest_ratio(m + i, v + i, n, scale)), scale});
        }
        const MomentScales& scales = result.scales.back();
        const double ratio = m[i] / root_of(v[i], scales.exp_avg_sq);
        const int q = static_cast<int>(std::lround(127.0 * std::sqrt(std::fabs(ratio) / scales.exp_avg)));
        const int c = static_cast<int>(std::lround(255.0 * std::pow(v[i] / scales.exp_avg_sq, 0.25)));
        result.exp_avg.push_back(static_cast<std::byte>(m[i] < 0.0f ? -q : q));
        result.exp_avg_sq.push_back(static_cast<std::byte>(c));
    }
    return result;
}

inline void load_moments(State& state, size_t begin, size_t end, const std::byte* exp_avg, const std::byte* exp_avg_sq,
                         const MomentScales* scales, DataType type) {
    if (type != DataType::kInt8) {
        const auto m = decode(exp_avg, end - begin, type), v = decode(exp_avg_sq, end - begin, type);
        std::copy(m.begin(), m.end(), state.exp_avg.begin() + static_cast<ptrdiff_t>(begin));
        std::copy(v.begin(), v.end(), state.exp_avg_sq.begin() + static_cast<ptrdiff_t>(begin));
        return;
    }
    for (size_t i = 0; i < end - begin; ++i) {
        const MomentScales& of_tile = scales[i / kTileElements];
        const int q = static_cast<int8_t>(exp_avg[i]);
        const float share = value_of_code(static_cast<uint8_t>(exp_avg_sq[i]), 255);
        const float root = share * std::sqrt(of_tile.exp_avg_sq);
        state.exp_avg[begin + i] = value_of_code(q, 127) * of_tile.exp_avg * root * (q < 0 ? -1.0f : 1.0f);
        state.exp_avg_sq[begin + i] = share * share * of_tile.exp_avg_sq;
    }
}

// The available instruction sets.
inline std::vector<InstructionSet> instruction_sets() {
    std::vector<InstructionSet> result;
    for (const InstructionSet candidate : kInstructionSets) {
        if (available(candidate)) result.push_back(candidate);
    }
    return result;
}

// Throw CheckFailed, naming `what` and the first element whose bits differ. Any two NaN are equal.
inline void check_same_bits(const std::string& what, const float* actual, const float* expected, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        if (std::isnan(actual[i]) && std::isnan(expected[i])) continue;
        if (float_bits(actual[i]) != float_bits(expected[i])) {
            check_failed(__FILE__, __LINE__, what, ": element ", i, " of ", n, " is ", std::hexfloat, actual[i], ", not ",
                         expected[i]);
        }
    }
}

inline void check_same_state(const std::string& what, const AdamState& actual, const State& expected) {
    const size_t n = expected.master.size();
    check_same_bits(what + " master", actual.master, expected.master.data(), n);
    check_same_bits(what + " exp_avg", actual.exp_avg, expected.exp_avg.data(), n);
    check_same_bits(what + " exp_avg_sq", actual.exp_avg_sq, expected.exp_avg_sq.data(), n);
}

inline void check_same_bytes(const std::string& what, const std::byte* actual, const std::vector<float>& expected,
                             DataType type) {
    const std::vector<float> rounded = decode(encode(expected, type).data(), expected.size(), type);
    check_same_bits(what, decode(actual, expected.size(), type).data(), rounded.data(), expected.size());
}

}  // namespace zenflow::test
