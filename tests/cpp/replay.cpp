// Applies the replay kernel to each case on standard input, on every instruction set that this machine has, and writes what it
// leaves to standard output. test_kernel.py makes the cases. Ends with 1 if the kernel writes beside its arrays.
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <vector>

#include "adamw/replay_adamw.h"
#include "adamw/stochastic_rounding.h"
#include "adamw/tile_journal.h"
#include "worker/arena.h"

namespace zenflow {
namespace {

// Followed by Step[n_gradients], master weights, both moments, scales, and the gradients, each as long as the case says.
struct Case {
    uint32_t model, moments;  // DataType
    uint32_t n, n_gradients, has_tentative;
    uint32_t offset;  // in elements, from alignment
    uint32_t first_element, last_step;
    float prediction_steps;
};

struct Step {
    Hyperparameters hyperparameters;
    int64_t count;
    double clip;
};

// An array between bytes that must stay as they are.
class Buffer {
  public:
    Buffer(size_t size, size_t offset) : storage_(size + offset + 3 * kGuard, kFill), size_(size) {
        const size_t misalignment = reinterpret_cast<uintptr_t>(storage_.data()) % kGuard;
        data_ = storage_.data() + 2 * kGuard - misalignment + offset;
    }
    void read(std::istream& input) { input.read(data_, static_cast<std::streamsize>(size_)); }
    void write(std::ostream& output) const { output.write(data_, static_cast<std::streamsize>(size_)); }
    void* data() { return data_; }
    bool is_intact() const {
        for (const char& byte : storage_) {
            if ((&byte < data_ || &byte >= data_ + size_) && byte != kFill) return false;
        }
        return true;
    }

  private:
    static constexpr size_t kGuard = 64;
    static constexpr char kFill = 0x5a;
    std::vector<char> storage_;
    size_t size_;
    char* data_;
};

bool run(const Case& c, std::istream& input, std::ostream& output) {
    const auto model = static_cast<DataType>(c.model), moments = static_cast<DataType>(c.moments);
    const size_t n_scales = moments == DataType::kInt8 ? (c.n + kTileElements - 1) / kTileElements : 0;
    const size_t sizes[] = {sizeof(float), element_bytes(moments), element_bytes(moments), sizeof(MomentScales)};
    std::vector<Step> steps(c.n_gradients);
    input.read(reinterpret_cast<char*>(steps.data()), static_cast<std::streamsize>(steps.size() * sizeof(Step)));
    std::vector<StepCoefficients> coefficients;
    for (const Step& s : steps) {
        coefficients.push_back(step_coefficients(s.hyperparameters, s.count, static_cast<float>(s.clip)));
    }
    std::vector<std::vector<char>> state;
    for (const size_t& size : sizes) {
        state.emplace_back(size * (&size == sizes + 3 ? n_scales : c.n));
        input.read(state.back().data(), static_cast<std::streamsize>(state.back().size()));
    }
    std::vector<Buffer> gradients;
    std::vector<const void*> pointers;
    for (size_t i = 0; i < c.n_gradients; ++i) {
        gradients.emplace_back(c.n * element_bytes(model), (c.offset * 11 + i) % 16 * element_bytes(model)).read(input);
    }
    for (Buffer& gradient : gradients) pointers.push_back(gradient.data());
    bool is_intact = true;
    for (const InstructionSet instruction_set : kInstructionSets) {
        if (!available(instruction_set)) continue;
        std::vector<Buffer> arrays;
        for (size_t i = 0; i < 4; ++i) {
            arrays.emplace_back(state[i].size(), c.offset * (2 * i + 1) % 16 * sizes[i]);
            std::copy(state[i].begin(), state[i].end(), static_cast<char*>(arrays.back().data()));
        }
        arrays.emplace_back(c.n * element_bytes(model), c.offset * 7 % 16 * element_bytes(model));
        const AnyState any{static_cast<float*>(arrays[0].data()), arrays[1].data(), arrays[2].data(),
                           static_cast<MomentScales*>(arrays[3].data())};
        const WindowView window{c.n_gradients - c.has_tentative,
                                pointers.data(),
                                coefficients.data(),
                                c.prediction_steps,
                                c.has_tentative != 0,
                                {noise_seed(c.last_step), c.first_element}};
        JournalEntry journal;
        start_at(journal, 0);
        replay_kernel(model, moments, instruction_set)(any, c.n, window, arrays[4].data(), journal);
        for (const Buffer& array : arrays) {
            is_intact = is_intact && array.is_intact();
            array.write(output);
        }
    }
    return is_intact;
}

}  // namespace
}  // namespace zenflow

int main() {
    zenflow::Case c;
    while (std::cin.read(reinterpret_cast<char*>(&c), sizeof(c))) {
        if (!zenflow::run(c, std::cin, std::cout)) return 1;
    }
}
