#include "worker/bench.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <ostream>

#include "adamw/replay_adamw.h"
#include "adamw/tile_journal.h"
#include "common/half.h"
#include "common/parallel.h"
#include "worker/arena.h"
#include "worker/cores.h"

namespace zenflow {
namespace {

constexpr size_t kChunkElements = 16384;

// Calls work(begin, n) for each chunk of n elements that belongs to a thread: consecutive ones, like the shares of BlockReplay.
template <typename Work>
void for_chunks(size_t n, int thread, int n_threads, const Work& work) {
    const size_t n_chunks = (n + kChunkElements - 1) / kChunkElements;
    const auto t = static_cast<size_t>(thread), all = static_cast<size_t>(n_threads);
    for (size_t chunk = n_chunks * t / all; chunk < n_chunks * (t + 1) / all; ++chunk) {
        work(chunk * kChunkElements, std::min(kChunkElements, n - chunk * kChunkElements));
    }
}

// Memory on the NUMA nodes of the threads that will work on it.
template <typename T>
class Array {
  public:
    // Begins with a page, as the arrays of the arena.
    Array(size_t n, T value) : data_(static_cast<T*>(std::aligned_alloc(4096, (n * sizeof(T) / 4096 + 1) * 4096)), std::free) {
        if (data_ == nullptr) throw std::bad_alloc();
        run_in_parallel([&](int thread, int n_threads) {
            for_chunks(n, thread, n_threads, [&](size_t begin, size_t size) { std::fill_n(data_.get() + begin, size, value); });
        });
    }
    T* data() { return data_.get(); }

  private:
    std::unique_ptr<T, void (*)(void*)> data_;
};

template <typename Work>
double seconds_of(const Work& work) {
    const auto begin = std::chrono::steady_clock::now();
    run_in_parallel(work);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void write(std::ostream& output, const char* name, int64_t n_steps, double seconds, size_t n, double bytes_per_element) {
    const double ns = 1e9 * seconds / static_cast<double>(n);
    output << "{\"kernel\": \"" << name << "\", \"steps\": " << n_steps << ", \"ns_per_parameter\": " << ns
           << ", \"bytes_per_parameter\": " << bytes_per_element << ", \"gb_per_s\": " << bytes_per_element / ns << "}\n";
}

}  // namespace

void run_benchmark(const std::vector<int>& cores, const BenchOptions& options, std::ostream& output) {
    pin_threads(cores, true);
    const InstructionSet best = best_instruction_set();
    output << "{\"instruction_set\": \"" << name(best) << "\", \"threads\": " << cores.size()
           << ", \"elements\": " << options.elements << "}\n";
    const auto n = static_cast<size_t>(options.elements);
    Array<float> master(n, 0.5f), exp_avg(n, 1e-3f), exp_avg_sq(n, 1e-6f);
    Array<BFloat16> short_exp_avg(n, from_float<BFloat16>(1e-3f)), short_exp_avg_sq(n, from_float<BFloat16>(1e-6f));
    Array<int8_t> coded_exp_avg(n, 100);
    Array<uint8_t> coded_exp_avg_sq(n, 100);
    Array<MomentScales> scales(n / kTileElements + 1, {2e-3f, 4e-5f});
    Array<BFloat16> published(n, from_float<BFloat16>(0.0f));
    const auto max_steps = static_cast<size_t>(options.max_steps);
    Array<BFloat16> slots(n * (max_steps + 1), from_float<BFloat16>(1e-3f));
    Array<JournalEntry> journal(cores.size(), JournalEntry{});
    const Hyperparameters hyperparameters{1e-4, 0.9, 0.999, 1e-8, 0.01, 1, 0};
    std::vector<StepCoefficients> coefficients;
    for (size_t s = 0; s <= max_steps; ++s)
        coefficients.push_back(step_coefficients(hyperparameters, static_cast<int64_t>(s) + 1000, 1.0f));

    for (int64_t repeat = 0; repeat < options.repeats; ++repeat) {
        const double triad = seconds_of([&](int thread, int n_threads) {
            for_chunks(n, thread, n_threads, [&](size_t begin, size_t size) {
                float* const __restrict a = exp_avg.data() + begin;
                const float* const __restrict b = master.data() + begin;
                for (size_t i = 0; i < size; ++i) a[i] += 1e-9f * b[i];
            });
        });
        write(output, "triad", 0, triad, n, 12.0);
        const auto measure = [&](const char* kernel_name, size_t n_steps, bool has_tentative, auto state, DataType moments) {
            const ReplayKernel kernel = replay_kernel(DataType::kBFloat16, moments, best);
            const size_t n_gradients = n_steps + (has_tentative ? 1 : 0);
            const double seconds = seconds_of([&](int thread, int n_threads) {
                std::vector<const void*> gradients(n_gradients);
                JournalEntry& entry = journal.data()[thread];
                for_chunks(n, thread, n_threads, [&](size_t begin, size_t size) {
                    for (size_t s = 0; s < n_gradients; ++s) gradients[s] = slots.data() + s * n + begin;
                    start_at(entry, begin);
                    const Noise noise{1, static_cast<uint32_t>(begin)};
                    const WindowView window{n_steps, gradients.data(), coefficients.data(), 4.0f, has_tentative, noise};
                    kernel(state + begin, size, window, published.data() + begin, entry);
                });
            });
            const size_t bytes = 2 * sizeof(float) + 4 * element_bytes(moments) + sizeof(BFloat16) * (n_gradients + 1);
            const double of_scales = moments == DataType::kInt8 ? 2.0 * sizeof(MomentScales) / kTileElements : 0.0;
            write(output, kernel_name, static_cast<int64_t>(n_steps), seconds, n, static_cast<double>(bytes) + of_scales);
        };
        const AdamState floats{master.data(), exp_avg.data(), exp_avg_sq.data()};
        const StateOf<BFloat16> shorts{master.data(), short_exp_avg.data(), short_exp_avg_sq.data()};
        const StateOf<int8_t> codes{master.data(), coded_exp_avg.data(), coded_exp_avg_sq.data(), scales.data()};
        measure("one behind", 1, true, floats, DataType::kFloat32);
        for (size_t n_steps = 1; n_steps <= max_steps; n_steps *= 2) {
            measure("replay", n_steps, false, floats, DataType::kFloat32);
        }
        measure("one behind, bfloat16 moments", 1, true, shorts, DataType::kBFloat16);
        measure("replay, bfloat16 moments", 1, false, shorts, DataType::kBFloat16);
        measure("one behind, int8 moments", 1, true, codes, DataType::kInt8);
        measure("replay, int8 moments", 1, false, codes, DataType::kInt8);
    }
}

}  // namespace zenflow
