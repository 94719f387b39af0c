// The kernel against the scalar reference, bit for bit, on every available instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <list>
#include <string>
#include <vector>

#include "adamw/replay_adamw.h"
#include "adamw/stochastic_rounding.h"
#include "adamw/tile_journal.h"
#include "check.h"
#include "common/half.h"
#include "reference_adamw.h"
#include "worker/arena.h"

namespace zenflow {
namespace {

using test::kDecoupled;
using test::kGradientDecay;
using test::kNoDecay;
using test::State;

constexpr int64_t kStep = 41;  // of the last committed step, for the noise
constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16};
constexpr DataType kMoments[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kInt8};

// A copy of an array that begins `offset` elements after a 64-byte boundary, between guards that must stay unchanged.
class Buffer {
  public:
    template <typename T>
    Buffer(const std::vector<T>& values, size_t offset)
        : storage_((values.size() + offset) * sizeof(T) + 3 * kGuard, kFill), size_(values.size() * sizeof(T)) {
        const size_t misalignment = reinterpret_cast<uintptr_t>(storage_.data()) % kGuard;
        begin_ = storage_.data() + 2 * kGuard - misalignment + offset * sizeof(T);
        if (!values.empty()) std::memcpy(begin_, values.data(), values.size() * sizeof(T));
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::byte* data() { return begin_; }
    float* floats() { return reinterpret_cast<float*>(begin_); }
    void check_guards() const {
        for (const std::byte& byte : storage_) CHECK((&byte >= begin_ && &byte < begin_ + size_) || byte == kFill);
    }

  private:
    static constexpr size_t kGuard = 64;
    static constexpr std::byte kFill{0xa5};
    std::vector<std::byte> storage_;
    size_t size_;
    std::byte* begin_;
};

// Gradients of consecutive steps with their hyperparameters. The first step is the third of a run.
struct Window {
    DataType type;
    std::vector<std::vector<std::byte>> gradients;
    std::vector<Hyperparameters> hyperparameters;

    Window(size_t n, size_t n_steps, const Hyperparameters& h, DataType type) : type(type), hyperparameters(n_steps, h) {
        for (uint32_t s = 0; s < n_steps; ++s) gradients.push_back(test::encode(test::random_gradient(n, s), type));
    }
    static int64_t count(size_t s) { return static_cast<int64_t>(3 + s); }
    static float clip(size_t s) { return s % 2 == 0 ? 1.0f : 0.37f; }

    std::vector<StepCoefficients> coefficients() const {
        std::vector<StepCoefficients> result;
        for (size_t s = 0; s < gradients.size(); ++s) result.push_back(step_coefficients(hyperparameters[s], count(s), clip(s)));
        return result;
    }
    State applied_to(State state) const { return applied_to(std::move(state), gradients.size()); }
    State applied_to(State state, size_t n_steps) const {
        const size_t n = state.master.size();
        for (size_t s = 0; s < n_steps; ++s) {
            const std::vector<float> gradient = test::decode(gradients[s].data(), n, type);
            test::reference_step(state, gradient.data(), hyperparameters[s], count(s), clip(s), 0, n);
        }
        return state;
    }
};

// The weights at a distance of `steps` along the momentum, in the order of operations that replay_adamw.h specifies.
std::vector<float> predicted(const State& state, const std::vector<StepCoefficients>& coefficients, float steps) {
    std::vector<float> result = state.master;
    if (coefficients.empty()) return result;
    const StepCoefficients& c = coefficients.back();
    for (size_t i = 0; i < result.size() && steps != 0.0f; ++i) {
        const float u = state.exp_avg[i] / std::fma(std::sqrt(state.exp_avg_sq[i]), c.inv_sqrt_bias_correction2, c.eps);
        result[i] = std::fma(u, steps * c.step_size, result[i]);
    }
    return result;
}

// Runs the kernel for every instruction set, with and without prediction, on arrays that begin at
// different distances from alignment, and compares all results. The window's last step may be tentative.
void check_window(State before, const Window& window, size_t offset = 0, bool has_tentative = false,
                  DataType moments = DataType::kFloat32) {
    const size_t n = before.master.size();
    const size_t n_steps = window.gradients.size() - (has_tentative ? 1 : 0);
    test::round_moments(before, 1, 0, n, moments);
    State after = window.applied_to(before, n_steps);
    if (n_steps > 0) test::round_moments(after, kStep, 0, n, moments, window.hyperparameters[n_steps - 1].beta1);
    const State shown = window.applied_to(before, window.gradients.size());
    const std::vector<StepCoefficients> coefficients = window.coefficients();
    const size_t gradient_bytes = window.type == DataType::kFloat32 ? 4 : 2;
    std::list<Buffer> gradients;
    std::vector<const void*> pointers;
    for (const auto& bytes : window.gradients) {
        gradients.emplace_back(bytes, (offset * 11 + gradients.size()) % 16 * gradient_bytes);
        pointers.push_back(gradients.back().data());
    }
    for (const InstructionSet instruction_set : test::instruction_sets()) {
        for (const float prediction_steps : {0.0f, 2.5f}) {
            Buffer master(before.master, offset);
            test::StoredMoments stored_moments = test::store_moments(before, 0, n, moments);
            const size_t moment_bytes = element_bytes(moments);
            Buffer exp_avg(stored_moments.exp_avg, offset * 3 % 16 * moment_bytes);
            Buffer exp_avg_sq(stored_moments.exp_avg_sq, offset * 5 % 16 * moment_bytes);
            Buffer scales(stored_moments.scales, offset);
            Buffer published(test::encode(std::vector<float>(n), window.type), offset * 7 % 16 * gradient_bytes);
            const AnyState state{master.floats(), exp_avg.data(), exp_avg_sq.data(),
                                 reinterpret_cast<MomentScales*>(scales.data())};
            const WindowView view{n_steps,          pointers.data(), coefficients.data(),
                                  prediction_steps, has_tentative,   {noise_seed(kStep), 0}};
            const ReplayKernel kernel = replay_kernel(window.type, moments, instruction_set);
            JournalEntry journal;
            start_at(journal, 0);
            kernel(state, n, view, published.data(), journal);
            State stored{{master.floats(), master.floats() + n}, std::vector<float>(n), std::vector<float>(n)};
            test::load_moments(stored, 0, n, exp_avg.data(), exp_avg_sq.data(), state.scales, moments);
            const std::string what = std::string(name(instruction_set)) + " n=" + std::to_string(n) +
                                     " steps=" + std::to_string(n_steps) + (has_tentative ? "+1" : "") +
                                     " moments=" + std::to_string(static_cast<uint32_t>(moments)) +
                                     " offset=" + std::to_string(offset);
            test::check_same_state(what, stored.view(), after);
            test::check_same_bytes(what + " published", published.data(), predicted(shown, coefficients, prediction_steps),
                                   window.type);
            for (const Buffer* buffer : {&master, &exp_avg, &exp_avg_sq, &scales, &published}) buffer->check_guards();
        }
    }
}

void check_all(size_t n, size_t n_steps, const Hyperparameters& hyperparameters, size_t offset = 0) {
    for (const DataType type : kTypes) {
        const Window window(n, n_steps, hyperparameters, type);
        for (const DataType moments : kMoments) {
            check_window(test::random_state(n, 7), window, offset, false, moments);
            if (n_steps > 0) check_window(test::random_state(n, 7), window, offset, true, moments);
        }
    }
}

TEST(replay_adamw, equals_reference_for_all_sizes_steps_and_types) {
    for (const size_t n : {0, 1, 15, 17, 513}) {
        for (const size_t n_steps : {0, 1, 2, 4, 9}) check_all(n, n_steps, kDecoupled);
    }
    check_all(4097, 2, kDecoupled);
}

TEST(replay_adamw, equals_reference_for_each_kind_of_decay) {
    for (const Hyperparameters& hyperparameters : {kNoDecay, kGradientDecay}) check_all(403, 3, hyperparameters);
    for (const double beta1 : {0.99609375, 0.9962}) {
        Hyperparameters slow = kDecoupled;
        slow.beta1 = beta1;
        check_all(403, 2, slow);
    }
    Window mixed(600, 3, kNoDecay, DataType::kFloat32);
    mixed.hyperparameters = {kDecoupled, kNoDecay, kGradientDecay};
    check_window(test::random_state(600, 7), mixed);
    check_window(test::random_state(600, 7), mixed, 0, true);
}

TEST(replay_adamw, equals_reference_at_misaligned_starts) {
    for (const size_t offset : {1, 3, 8, 15}) check_all(267, 2, kDecoupled, offset);
}

TEST(replay_adamw, special_values_equal_the_reference) {
    const float infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> values = {0.0f,   -0.0f,    0x1p-149f, -0x1p-130f,    1e38f,
                                       -1e38f, infinity, -infinity, std::nanf(""), 65504.0f};
    const size_t n = values.size();
    for (const DataType type : kTypes) {
        Window window(n, 1, kDecoupled, type);
        window.gradients[0] = test::encode(values, type);
        for (const float value : values) {
            const State state{std::vector<float>(n, value), std::vector<float>(n, value),
                              std::vector<float>(n, std::fabs(value))};
            for (const DataType moments : kMoments) check_window(state, window, 0, false, moments);
        }
    }
}

}  // namespace
}  // namespace zenflow
