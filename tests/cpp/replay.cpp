// Applies the replay kernel to each case on standard input, and the CPU device's pass to its first gradient, on every instruction
// set that this machine has, and writes what they leave to standard output. test_kernel.py makes the cases. Ends with 1 if a
// kernel writes beside its arrays.
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <new>
#include <vector>

#include "adamw/replay_adamw.h"
#include "adamw/stochastic_rounding.h"
#include "adamw/tile_journal.h"
#include "cpu_device/device_kernels.h"
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

// An array between bytes that must stay as they are; for a sanitizer, which sees what is read as well, behind it there are none.
class Buffer {
  public:
    Buffer(size_t size, size_t offset) : begin_(kGuard + offset), size_(size), storage_(begin_ + size + kBehind, kFill) {}
    void read(std::istream& input) { input.read(data(), static_cast<std::streamsize>(size_)); }
    void write(std::ostream& output) const { output.write(storage_.data() + begin_, static_cast<std::streamsize>(size_)); }
    char* data() { return storage_.data() + begin_; }
    bool is_intact() const {
        const auto fills = [](char byte) { return byte == kFill; };
        const auto begin = storage_.begin() + static_cast<std::ptrdiff_t>(begin_);
        return std::all_of(storage_.begin(), begin, fills) &&
               std::all_of(begin + static_cast<std::ptrdiff_t>(size_), storage_.end(), fills);
    }

  private:
    static constexpr size_t kGuard = 64;
#ifdef __SANITIZE_ADDRESS__
    static constexpr size_t kBehind = 0;
#else
    static constexpr size_t kBehind = kGuard;
#endif
    static constexpr char kFill = 0x5a;
    // Aligned, so that an offset is one from a cache line.
    template <typename T>
    struct Aligned {
        using value_type = T;
        T* allocate(size_t n) { return static_cast<T*>(::operator new(n, std::align_val_t{kGuard})); }
        void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{kGuard}); }
        bool operator==(const Aligned&) const { return true; }
    };
    size_t begin_, size_;
    std::vector<char, Aligned<char>> storage_;
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
            std::copy(state[i].begin(), state[i].end(), arrays.back().data());
        }
        arrays.emplace_back(c.n * element_bytes(model), c.offset * 7 % 16 * element_bytes(model));
        const AnyState any{reinterpret_cast<float*>(arrays[0].data()), arrays[1].data(), arrays[2].data(),
                           reinterpret_cast<MomentScales*>(arrays[3].data())};
        const WindowView window{c.n_gradients - c.has_tentative,
                                pointers.data(),
                                coefficients.data(),
                                c.prediction_steps,
                                c.has_tentative != 0,
                                {noise_seed(c.last_step), c.first_element}};
        JournalEntry journal;
        start_at(journal, 0);
        replay_kernel(model, moments, instruction_set)(any, c.n, window, arrays[4].data(), journal);
        if (c.n_gradients > 0) {
            const int64_t rows = c.n % 3 == 0 ? 3 : 1;
            arrays.emplace_back(c.n * element_bytes(model), c.offset * 5 % 16 * element_bytes(model));
            arrays.emplace_back(static_cast<size_t>(rows) * sizeof(float), 0);
            route_kernel(model, instruction_set)(pointers[0], {0, rows}, c.n / rows, reinterpret_cast<float*>(arrays[6].data()),
                                                 arrays[5].data());
        }
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
