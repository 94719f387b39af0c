#include "reference_adamw.h"

#include <cmath>
#include <cstring>
#include <random>

#include "check.h"
#include "half.h"

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
        float g = gradient[i] * clip;
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

std::vector<std::byte> encode(const std::vector<float>& values, DataType type) {
    std::vector<std::byte> bytes;
    const auto append = [&bytes](const auto& number) {
        const auto* const begin = reinterpret_cast<const std::byte*>(&number);
        bytes.insert(bytes.end(), begin, begin + sizeof(number));
    };
    for (const float value : values) {
        if (type == DataType::kFloat32) append(value);
        if (type == DataType::kBFloat16) append(from_float<BFloat16>(value));
        if (type == DataType::kFloat16) append(from_float<Float16>(value));
    }
    return bytes;
}

std::vector<float> decode(const std::byte* bytes, size_t n, DataType type) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; ++i) {
        uint16_t bits = 0;
        if (type == DataType::kFloat32) {
            std::memcpy(&values[i], bytes + 4 * i, 4);
        } else {
            std::memcpy(&bits, bytes + 2 * i, 2);
            values[i] = type == DataType::kBFloat16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
        }
    }
    return values;
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

void check_same_bytes(const std::string& what, const std::byte* actual, const std::vector<float>& expected, DataType type) {
    const std::vector<float> rounded = decode(encode(expected, type).data(), expected.size(), type);
    check_same_bits(what, decode(actual, expected.size(), type).data(), rounded.data(), expected.size());
}

}  // namespace zenflow::test
