// Look-ahead publishing and the mean-gradient rule of the kernel, against the same on plain numbers.
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "reference_adamw.h"
#include "replay_adamw.h"

namespace zenflow {
namespace {

using test::State;

constexpr Hyperparameters kAdamW{1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 0};
constexpr size_t kSizes[] = {1, 15, 16, 17, 511, 513, 4097};

// What look-ahead adds to a weight, in the order of operations that replay_adamw.h promises.
float moved_on(const State& state, size_t i, const StepCoefficients& c, float look_ahead) {
    const float u = state.exp_avg[i] / std::fma(std::sqrt(state.exp_avg_sq[i]), c.inv_sqrt_bias_correction2, c.eps);
    return std::fma(u, look_ahead * c.step_size, state.master[i]);
}

void run(State& state, const WindowView& window, std::vector<float>& published, InstructionSet instruction_set) {
    replay_kernel(DataType::kFloat32, DataType::kFloat32, instruction_set)(state.master.data(), state.exp_avg.data(),
                                                                           state.exp_avg_sq.data(), window, state.master.size(),
                                                                           published.data(), nullptr);
}

template <typename Body>
void for_each_case(const Body& body) {
    for (const size_t n : kSizes) {
        for (const InstructionSet instruction_set : kInstructionSets) {
            if (available(instruction_set))
                body(n, instruction_set, std::string(name(instruction_set)) + " n=" + std::to_string(n));
        }
    }
}

TEST(window_rules, look_ahead_moves_what_is_published_and_nothing_else) {
    for_each_case([](size_t n, InstructionSet instruction_set, const std::string& what) {
        const std::vector<float> first = test::random_gradient(n, 1), second = test::random_gradient(n, 2);
        const void* const gradients[] = {first.data(), second.data()};
        const StepCoefficients coefficients[] = {step_coefficients(kAdamW, 5, 0.5f), step_coefficients(kAdamW, 6, 1.0f)};
        State expected = test::random_state(n, 3), actual = expected;
        test::reference_step(expected, first.data(), kAdamW, 5, 0.5f, 0, n);
        test::reference_step(expected, second.data(), kAdamW, 6, 1.0f, 0, n);
        std::vector<float> ahead(n), published(n);
        for (size_t i = 0; i < n; ++i) ahead[i] = moved_on(expected, i, coefficients[1], 2.5f);

        run(actual, {Rule::kReplay, 2, gradients, coefficients, 2.5f}, published, instruction_set);
        test::check_same_bits(what + " master", actual.master.data(), expected.master.data(), n);
        test::check_same_bits(what + " exp_avg", actual.exp_avg.data(), expected.exp_avg.data(), n);
        test::check_same_bits(what + " exp_avg_sq", actual.exp_avg_sq.data(), expected.exp_avg_sq.data(), n);
        test::check_same_bits(what + " published", published.data(), ahead.data(), n);
    });
}

TEST(window_rules, without_steps_there_is_nothing_to_extrapolate) {
    for_each_case([](size_t n, InstructionSet instruction_set, const std::string& what) {
        State state = test::random_state(n, 3);
        std::vector<float> published(n);
        run(state, {Rule::kReplay, 0, nullptr, nullptr, 3.0f}, published, instruction_set);
        test::check_same_bits(what + " published", published.data(), state.master.data(), n);
    });
}

TEST(window_rules, accumulate_is_one_step_with_the_mean) {
    for_each_case([](size_t n, InstructionSet instruction_set, const std::string& what) {
        const float scales[] = {0.25f, 0.5f, 1.0f};
        std::vector<std::vector<float>> gradients;
        std::vector<const void*> pointers;
        std::vector<StepCoefficients> coefficients;
        std::vector<float> mean(n, 0.0f);
        for (uint32_t s = 0; s < 3; ++s) {
            gradients.push_back(test::random_gradient(n, s));
            for (size_t i = 0; i < n; ++i) mean[i] = std::fma(gradients[s][i], scales[s], mean[i]);
            coefficients.push_back({});
            coefficients.back().grad_scale = scales[s];
        }
        for (const auto& gradient : gradients) pointers.push_back(gradient.data());
        coefficients.push_back(step_coefficients(kAdamW, 4, 1.0f));
        State expected = test::random_state(n, 3), actual = expected;
        test::reference_step(expected, mean.data(), kAdamW, 4, 1.0f, 0, n);
        std::vector<float> published(n);
        run(actual, {Rule::kAccumulate, 3, pointers.data(), coefficients.data(), 0.0f}, published, instruction_set);
        test::check_same_bits(what + " master", actual.master.data(), expected.master.data(), n);
        test::check_same_bits(what + " exp_avg", actual.exp_avg.data(), expected.exp_avg.data(), n);
        test::check_same_bits(what + " exp_avg_sq", actual.exp_avg_sq.data(), expected.exp_avg_sq.data(), n);
        test::check_same_bits(what + " published", published.data(), expected.master.data(), n);
    });
}

TEST(window_rules, a_window_of_skipped_steps_changes_nothing) {
    for_each_case([](size_t n, InstructionSet instruction_set, const std::string& what) {
        const State before = test::random_state(n, 3);
        State state = before;
        std::vector<float> published(n);
        run(state, {Rule::kAccumulate, 0, nullptr, nullptr, 0.0f}, published, instruction_set);
        test::check_same_bits(what + " master", state.master.data(), before.master.data(), n);
        test::check_same_bits(what + " published", published.data(), before.master.data(), n);
    });
}

}  // namespace
}  // namespace zenflow
