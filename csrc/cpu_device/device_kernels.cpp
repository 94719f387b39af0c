#include "cpu_device/device_kernels.h"

#include <exception>
#include <thread>
#include <vector>

#include "adamw/replay_adamw.h"
#include "adamw/tile_journal.h"
#include "common/half.h"

namespace zenflow {

RouteKernel route_kernel(DataType dtype, InstructionSet instruction_set) {
    return ZENFLOW_FUNCTION_FOR(instruction_set, select_route_kernel)(dtype);
}

namespace {

InstructionSet instruction_set() {
    static const InstructionSet best = best_instruction_set();
    return best;
}

// Calls `work` with each thread's part of `n` rows: the last on the caller's thread, and where the system refuses threads, others
// as well.
template <typename Work>
void divide(int64_t n, int64_t n_threads, const Work& work) {
    const auto run = [=, &work](int64_t i) { work(Rows{n * i / n_threads, n * (i + 1) / n_threads}); };
    std::vector<std::thread> threads;
    int64_t part = 0;
    try {
        threads.reserve(static_cast<size_t>(n_threads));
        for (; part + 1 < n_threads; ++part) threads.emplace_back(run, part);
    } catch (const std::exception&) {
    }
    for (; part < n_threads; ++part) run(part);
    for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace zenflow

void zenflow_route(const void* gradient, int64_t rows, int64_t columns, float* squared_norms, void* slot, uint32_t dtype,
                   int64_t n_threads) {
    const auto route = zenflow::route_kernel(static_cast<zenflow::DataType>(dtype), zenflow::instruction_set());
    zenflow::divide(rows, n_threads, [=](zenflow::Rows part) { route(gradient, part, columns, squared_norms, slot); });
}

void zenflow_adamw(float* master, float* exp_avg, float* exp_avg_sq, const void* gradient, void* weights, int64_t n,
                   const zenflow::Hyperparameters* hyperparameters, int64_t count, float factor, uint32_t dtype,
                   int64_t n_threads, int32_t* done, int32_t step) {
    using namespace zenflow;
    if (*done == step) return;
    const auto type = static_cast<DataType>(dtype);
    const auto kernel = replay_kernel(type, DataType::kFloat32, instruction_set());
    const StepCoefficients coefficients = step_coefficients(*hyperparameters, count, factor);
    const auto bytes = with_type(type, [](auto value) { return int64_t{sizeof(value)}; });
    divide(n, n_threads, [=](Rows elements) {
        const int64_t begin = elements.begin;
        const void* const first = static_cast<const char*>(gradient) + begin * bytes;
        JournalEntry journal;
        start_at(journal, 0);
        kernel({master + begin, exp_avg + begin, exp_avg_sq + begin}, static_cast<size_t>(elements.end - begin),
               {1, &first, &coefficients, 0.0f}, static_cast<char*>(weights) + begin * bytes, journal);
    });
    *done = step;
}
