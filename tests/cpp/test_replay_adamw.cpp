// The kernel against the scalar reference, bit for bit, on every instruction set this CPU has.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "half.h"
#include "reference_adamw.h"
#include "replay_adamw.h"

namespace zenflow {
namespace {

using test::State;

constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16};
constexpr Hyperparameters kNoDecay{1e-3, 0.9, 0.999, 1e-8, 0.0, 1, 0};
constexpr Hyperparameters kDecoupled{1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 0};
constexpr Hyperparameters kGradientDecay{1e-3, 0.8, 0.95, 1e-6, 0.1, 0, 0};

size_t bytes_of(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

// An array that begins `offset` elements after an address aligned to 64 bytes, with guards around it that must stay as they are.
class Buffer {
  public:
    Buffer(size_t n, size_t element_bytes, size_t offset) : begin_(kGuard + offset * element_bytes), bytes_(n * element_bytes) {
        storage_.resize(begin_ + bytes_ + 2 * kGuard, kFill);
        void* start = storage_.data();
        size_t space = storage_.size();
        aligned_ = static_cast<std::byte*>(std::align(kGuard, begin_ + bytes_ + kGuard, start, space));
        begin_ += static_cast<size_t>(aligned_ - storage_.data());
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::byte* data() { return storage_.data() + begin_; }
    float* floats() { return reinterpret_cast<float*>(data()); }
    void assign(const void* source) {
        if (bytes_ > 0) std::memcpy(data(), source, bytes_);
    }
    void check_guards() const {
        for (size_t i = 0; i < storage_.size(); ++i) CHECK((i >= begin_ && i < begin_ + bytes_) || storage_[i] == kFill);
    }

  private:
    static constexpr size_t kGuard = 64;
    static constexpr std::byte kFill{0xa5};
    size_t begin_;
    size_t bytes_;
    std::vector<std::byte> storage_;
    std::byte* aligned_ = nullptr;
};

struct Window {
    std::vector<std::vector<float>> gradients;  // as the kernel reads them, that is rounded to the gradient's type
    std::vector<std::vector<std::byte>> bytes;
    std::vector<StepCoefficients> coefficients;
    std::vector<float> clips;
    std::vector<int64_t> counts;
};

// `n_steps` steps, as if the first of them were the third of a run.
Window make_window(size_t n, size_t n_steps, const Hyperparameters& hyperparameters, DataType type) {
    Window window;
    for (size_t s = 0; s < n_steps; ++s) {
        const auto count = static_cast<int64_t>(3 + s);
        const float clip = s % 2 == 0 ? 1.0f : 0.37f;
        window.bytes.push_back(test::encode(test::random_gradient(n, static_cast<uint32_t>(s)), type));
        window.gradients.push_back(test::decode(window.bytes.back().data(), n, type));
        window.coefficients.push_back(step_coefficients(hyperparameters, count, clip));
        window.clips.push_back(clip);
        window.counts.push_back(count);
    }
    return window;
}

State reference(State state, const Window& window, const Hyperparameters& hyperparameters) {
    for (size_t s = 0; s < window.gradients.size(); ++s) {
        test::reference_step(state, window.gradients[s].data(), hyperparameters, window.counts[s], window.clips[s], 0,
                             state.master.size());
    }
    return state;
}

// Runs the kernel once on [0, n) with each array `offset` elements (differently for each) past alignment, and compares all of its
// results.
void check_kernel(const State& before, const State& after, const Window& window, DataType gradient_type, DataType published_type,
                  InstructionSet instruction_set, size_t offset, const std::string& what) {
    const size_t n = before.master.size();
    Buffer master(n, 4, offset), exp_avg(n, 4, offset * 3 % 16), exp_avg_sq(n, 4, offset * 5 % 16);
    Buffer published(n, bytes_of(published_type), offset * 7 % 16);
    master.assign(before.master.data());
    exp_avg.assign(before.exp_avg.data());
    exp_avg_sq.assign(before.exp_avg_sq.data());
    std::vector<std::unique_ptr<Buffer>> gradients;
    std::vector<const void*> pointers;
    for (const auto& bytes : window.bytes) {
        gradients.push_back(std::make_unique<Buffer>(n, bytes_of(gradient_type), (offset * 11 + gradients.size()) % 16));
        gradients.back()->assign(bytes.data());
        pointers.push_back(gradients.back()->data());
    }
    const WindowView view{Rule::kReplay, pointers.size(), pointers.data(), window.coefficients.data(), 0.0f};
    replay_kernel(gradient_type, published_type, instruction_set)(master.floats(), exp_avg.floats(), exp_avg_sq.floats(), view, n,
                                                                  published.data(), nullptr);
    test::check_same_bits(what + " master", master.floats(), after.master.data(), n);
    test::check_same_bits(what + " exp_avg", exp_avg.floats(), after.exp_avg.data(), n);
    test::check_same_bits(what + " exp_avg_sq", exp_avg_sq.floats(), after.exp_avg_sq.data(), n);
    test::check_same_bytes(what + " published", published.data(), after.master, published_type);
    for (const Buffer* buffer : {&master, &exp_avg, &exp_avg_sq, &published}) buffer->check_guards();
}

void check_all(size_t n, size_t n_steps, const Hyperparameters& hyperparameters, DataType gradient_type, size_t offset) {
    const State before = test::random_state(n, 7);
    const Window window = make_window(n, n_steps, hyperparameters, gradient_type);
    const State after = reference(before, window, hyperparameters);
    for (const DataType published_type : kTypes) {
        for (const InstructionSet instruction_set : kInstructionSets) {
            if (!available(instruction_set)) continue;
            const std::string what = std::string(name(instruction_set)) + " n=" + std::to_string(n) +
                                     " steps=" + std::to_string(n_steps) + " offset=" + std::to_string(offset);
            check_kernel(before, after, window, gradient_type, published_type, instruction_set, offset, what);
        }
    }
}

TEST(replay_adamw, equals_reference_for_all_sizes_steps_and_types) {
    for (const size_t n : {0, 1, 15, 16, 17, 255, 513, 4097}) {
        for (const size_t n_steps : {0, 1, 2, 4, 7, 9}) {
            for (const DataType type : kTypes) check_all(n, n_steps, kDecoupled, type, 0);
        }
    }
}

TEST(replay_adamw, equals_reference_for_a_large_size) {
    for (const DataType type : kTypes) check_all(70001, 4, kDecoupled, type, 0);
}

TEST(replay_adamw, equals_reference_for_each_kind_of_decay) {
    for (const Hyperparameters& hyperparameters : {kNoDecay, kDecoupled, kGradientDecay}) {
        for (const DataType type : kTypes) check_all(1003, 4, hyperparameters, type, 0);
    }
}

TEST(replay_adamw, equals_reference_at_misaligned_starts) {
    for (size_t offset = 1; offset < 16; ++offset) {
        for (const DataType type : kTypes) check_all(517, 2, kDecoupled, type, offset);
    }
}

TEST(replay_adamw, each_step_has_its_own_kind_of_decay) {
    const size_t n = 600;
    const State before = test::random_state(n, 7);
    Window window = make_window(n, 3, kNoDecay, DataType::kFloat32);
    State after = before;
    const Hyperparameters each[] = {kDecoupled, kNoDecay, kGradientDecay};
    for (size_t s = 0; s < 3; ++s) {
        window.coefficients[s] = step_coefficients(each[s], window.counts[s], window.clips[s]);
        test::reference_step(after, window.gradients[s].data(), each[s], window.counts[s], window.clips[s], 0, n);
    }
    check_kernel(before, after, window, DataType::kFloat32, DataType::kFloat32, best_instruction_set(), 0, "mixed decay");
}

TEST(replay_adamw, special_values_come_out_as_in_the_reference) {
    const float infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> values = {0.0f,   -0.0f,    0x1p-149f, -0x1p-130f,    1e38f,
                                       -1e38f, infinity, -infinity, std::nanf(""), 65504.0f};
    for (const DataType type : kTypes) {
        for (const float state_value : values) {
            State before{std::vector<float>(values.size(), state_value), std::vector<float>(values.size(), state_value),
                         std::vector<float>(values.size(), std::fabs(state_value))};
            Window window = make_window(values.size(), 1, kDecoupled, type);
            window.bytes[0] = test::encode(values, type);
            window.gradients[0] = test::decode(window.bytes[0].data(), values.size(), type);
            const State after = reference(before, window, kDecoupled);
            for (const InstructionSet instruction_set : kInstructionSets) {
                if (available(instruction_set))
                    check_kernel(before, after, window, type, type, instruction_set, 0, "special values");
            }
        }
    }
}

TEST(replay_adamw, replay_equals_single_steps_and_chunks_equal_the_whole) {
    const size_t n = 5003;
    const size_t n_steps = 7;
    const State before = test::random_state(n, 7);
    const Window window = make_window(n, n_steps, kDecoupled, DataType::kBFloat16);
    const State after = reference(before, window, kDecoupled);
    for (const InstructionSet instruction_set : kInstructionSets) {
        if (!available(instruction_set)) continue;
        const ReplayKernel kernel = replay_kernel(DataType::kBFloat16, DataType::kBFloat16, instruction_set);
        std::vector<BFloat16> published(n);

        State stepwise = before;
        for (size_t s = 0; s < n_steps; ++s) {
            const void* const gradient = window.bytes[s].data();
            const WindowView view{Rule::kReplay, 1, &gradient, &window.coefficients[s], 0.0f};
            kernel(stepwise.master.data(), stepwise.exp_avg.data(), stepwise.exp_avg_sq.data(), view, n, published.data(),
                   nullptr);
        }
        test::check_same_bits("stepwise master", stepwise.master.data(), after.master.data(), n);
        test::check_same_bits("stepwise exp_avg", stepwise.exp_avg.data(), after.exp_avg.data(), n);
        test::check_same_bits("stepwise exp_avg_sq", stepwise.exp_avg_sq.data(), after.exp_avg_sq.data(), n);

        State chunked = before;
        size_t begin = 0;
        for (size_t size = 1; begin < n; begin += size, size = size * 3 + 1) {
            size = std::min(size, n - begin);
            std::vector<const void*> pointers;
            for (const auto& bytes : window.bytes) pointers.push_back(bytes.data() + 2 * begin);
            const WindowView view{Rule::kReplay, n_steps, pointers.data(), window.coefficients.data(), 0.0f};
            kernel(chunked.master.data() + begin, chunked.exp_avg.data() + begin, chunked.exp_avg_sq.data() + begin, view, size,
                   published.data() + begin, nullptr);
        }
        test::check_same_bits("chunked master", chunked.master.data(), after.master.data(), n);
        test::check_same_bytes("chunked published", reinterpret_cast<const std::byte*>(published.data()), after.master,
                               DataType::kBFloat16);
    }
}

// AdamW from its definition, in double precision, from fresh moments.
TEST(replay_adamw, stays_close_to_adamw_in_double_precision) {
    const size_t n = 1000;
    const size_t n_steps = 50;
    for (const Hyperparameters& h : {kNoDecay, kDecoupled, kGradientDecay}) {
        State state = test::random_state(n, 7);
        state.exp_avg.assign(n, 0.0f);
        state.exp_avg_sq.assign(n, 0.0f);
        std::vector<double> w(state.master.begin(), state.master.end()), m(n, 0.0), v(n, 0.0);
        std::vector<float> published(n);
        for (size_t s = 1; s <= n_steps; ++s) {
            const std::vector<float> gradient = test::random_gradient(n, static_cast<uint32_t>(s));
            const StepCoefficients coefficients = step_coefficients(h, static_cast<int64_t>(s), 0.5f);
            const void* const pointer = gradient.data();
            const WindowView view{Rule::kReplay, 1, &pointer, &coefficients, 0.0f};
            replay_kernel(DataType::kFloat32, DataType::kFloat32, best_instruction_set())(
                state.master.data(), state.exp_avg.data(), state.exp_avg_sq.data(), view, n, published.data(), nullptr);
            for (size_t i = 0; i < n; ++i) {
                const double g = 0.5 * gradient[i] + (h.decoupled == 0 ? h.weight_decay * w[i] : 0.0);
                if (h.decoupled != 0) w[i] -= h.lr * h.weight_decay * w[i];
                m[i] = h.beta1 * m[i] + (1 - h.beta1) * g;
                v[i] = h.beta2 * v[i] + (1 - h.beta2) * g * g;
                const double m_hat = m[i] / (1 - std::pow(h.beta1, static_cast<double>(s)));
                const double v_hat = v[i] / (1 - std::pow(h.beta2, static_cast<double>(s)));
                w[i] -= h.lr * m_hat / (std::sqrt(v_hat) + h.eps);
            }
        }
        for (size_t i = 0; i < n; ++i) {
            // 50 updates of about 1e-3, each rounded at the size of the weight (2^-24 of up to 0.1).
            CHECK(std::fabs(state.master[i] - w[i]) < 2e-7);
            CHECK(std::fabs(state.exp_avg[i] - m[i]) < 1e-6 * 1e-2);
            CHECK(std::fabs(state.exp_avg_sq[i] - v[i]) <= 1e-5 * v[i] + 1e-15);
        }
    }
}

TEST(replay_adamw, step_coefficients_have_known_values) {
    const StepCoefficients first = step_coefficients(kDecoupled, 1, 0.25f);
    CHECK_EQ(first.grad_scale, 0.25f);
    CHECK_EQ(first.beta1, 0.9f);
    CHECK_EQ(first.one_minus_beta1, static_cast<float>(1.0 - 0.9));
    CHECK_EQ(first.beta2, 0.999f);
    CHECK_EQ(first.one_minus_beta2, static_cast<float>(1.0 - 0.999));
    CHECK_EQ(first.eps, 1e-8f);
    // After one step both corrections undo the moments' factors: sqrt(1 / 0.001) and 1 / 0.1.
    CHECK(std::fabs(first.inv_sqrt_bias_correction2 - 31.6227766f) < 1e-5f);
    CHECK(std::fabs(first.step_size + 0.01f) < 1e-8f);
    CHECK(first.decay == Decay::kWeight);
    CHECK_EQ(first.decay_factor, -1e-4f);

    const StepCoefficients tenth = step_coefficients(kDecoupled, 10, 1.0f);
    CHECK(std::fabs(tenth.step_size + 1e-3f / 0.6513215599f) < 1e-9f);
    CHECK(std::fabs(tenth.inv_sqrt_bias_correction2 - 10.0225258f) < 1e-5f);

    const StepCoefficients late = step_coefficients(kDecoupled, 10'000'000, 1.0f);
    CHECK_EQ(late.step_size, -1e-3f);
    CHECK_EQ(late.inv_sqrt_bias_correction2, 1.0f);

    CHECK(step_coefficients(kNoDecay, 1, 1.0f).decay == Decay::kNone);
    const StepCoefficients gradient_decay = step_coefficients(kGradientDecay, 1, 1.0f);
    CHECK(gradient_decay.decay == Decay::kGradient);
    CHECK_EQ(gradient_decay.decay_factor, 0.1f);
}

}  // namespace
}  // namespace zenflow
