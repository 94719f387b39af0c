#include "reference_adamw.h"

#include <cmath>
#include <cstring>
#include <random>

#include "check.h"
#include "common/half.h"

namespace zenflow::test {

State random_state(size_t n, uint32_t seed) {
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

std::vector<float> random_gradient(size_t n, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> gradient;
    for (size_t i = 0; i < n; ++i) gradient.push_back(i % 19 == 7 ? 0.0f : i % 23 == 9 ? 0x1p-24f : 1e-2f * normal(random));
    return gradient;
}

void reference_step(State& state, const float* gradient, const Hyperparameters& hyperparameters, int64_t count, float clip,
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

void round_moments(State& state, int64_t step, size_t begin, size_t end) {
    // splitmix64.
    uint64_t seed = static_cast<uint64_t>(step) * 0x9e3779b97f4a7c15u;
    seed ^= seed >> 30;
    seed *= 0xbf58476d1ce4e5b9u;
    seed ^= seed >> 27;
    seed *= 0x94d049bb133111ebu;
    seed ^= seed >> 31;
    for (size_t i = begin; i < end; ++i) {
        state.exp_avg[i] = to_float(from_float<BFloat16>(state.exp_avg[i]));
        float& v = state.exp_avg_sq[i];
        if (std::isnan(v)) continue;
        auto noise = static_cast<uint32_t>(i) * 0x9e3779b1u + static_cast<uint32_t>(seed);
        noise ^= noise >> 15;
        noise *= 0x85ebca77u;
        // The upper neighbour if the noise and the fraction that is cut off reach the next unit.
        const uint32_t bits = float_bits(v), fraction = bits % 65536;
        v = float_from_bits(bits - fraction + (fraction + noise / 65536 >= 65536 ? 65536 : 0));
    }
}

State with_short_moments(State state) {
    for (float& m : state.exp_avg) m = to_float(from_float<BFloat16>(m));
    for (float& v : state.exp_avg_sq) v = to_float(from_float<BFloat16>(v));
    return state;
}

std::vector<InstructionSet> instruction_sets() {
    std::vector<InstructionSet> result;
    for (const InstructionSet candidate : kInstructionSets) {
        if (available(candidate)) result.push_back(candidate);
    }
    return result;
}

std::vector<std::byte> encode(const std::vector<float>& values, DataType type) {
    return with_type(type, [&values](auto zero) {
        std::vector<std::byte> bytes(values.size() * sizeof(zero));
        for (size_t i = 0; i < values.size(); ++i) {
            const auto number = from_float<decltype(zero)>(values[i]);
            std::memcpy(bytes.data() + i * sizeof(number), &number, sizeof(number));
        }
        return bytes;
    });
}

std::vector<float> decode(const std::byte* bytes, size_t n, DataType type) {
    return with_type(type, [bytes, n](auto number) {
        std::vector<float> values;
        for (size_t i = 0; i < n; ++i) {
            std::memcpy(&number, bytes + i * sizeof(number), sizeof(number));
            values.push_back(to_float(number));
        }
        return values;
    });
}

void check_same_bits(const std::string& what, const float* actual, const float* expected, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        if (std::isnan(actual[i]) && std::isnan(expected[i])) continue;
        if (float_bits(actual[i]) != float_bits(expected[i])) {
            check_failed(__FILE__, __LINE__, what, ": element ", i, " of ", n, " is ", std::hexfloat, actual[i], ", not ",
                         expected[i]);
        }
    }
}

void check_same_state(const std::string& what, const AdamState& actual, const State& expected) {
    const size_t n = expected.master.size();
    check_same_bits(what + " master", actual.master, expected.master.data(), n);
    check_same_bits(what + " exp_avg", actual.exp_avg, expected.exp_avg.data(), n);
    check_same_bits(what + " exp_avg_sq", actual.exp_avg_sq, expected.exp_avg_sq.data(), n);
}

void check_same_bytes(const std::string& what, const std::byte* actual, const std::vector<float>& expected, DataType type) {
    const std::vector<float> rounded = decode(encode(expected, type).data(), expected.size(), type);
    check_same_bits(what, decode(actual, expected.size(), type).data(), rounded.data(), expected.size());
}

}  // namespace zenflow::test
