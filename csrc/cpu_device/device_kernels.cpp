#include "cpu_device/device_kernels.h"

#include <exception>
#include <thread>
#include <vector>

#include "adamw/replay_adamw.h"
#include "adamw/tile_journal.h"
#include "common/half.h"

namespace zenflow {

DeviceKernels device_kernels(DataType dtype, InstructionSet instruction_set) {
    return ZENFLOW_FUNCTION_FOR(instruction_set, select_device_kernels)(dtype);
}

namespace {

InstructionSet instruction_set() {
    static const InstructionSet best = best_instruction_set();
    return best;
}

DeviceKernels kernels(uint32_t dtype) { return device_kernels(static_cast<DataType>(dtype), instruction_set()); }

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

template <typename T>
void scatter_columns(const zenflow_columns& columns) {
    T* matrix = static_cast<T*>(columns.matrix);
    const T* selected = static_cast<const T*>(columns.selected);
    for (int64_t row = 0; row < columns.rows; ++row, matrix += columns.width, selected += columns.n_selected) {
        for (int64_t i = 0; i < columns.n_selected; ++i)
            matrix[columns.indices == nullptr ? i : columns.indices[i]] = selected[i];
    }
}

}  // namespace
}  // namespace zenflow

void zenflow_route(const void* gradient, int64_t rows, int64_t columns, float* squared_norms, void* slot, uint32_t dtype,
                   int64_t n_threads) {
    const auto route = zenflow::kernels(dtype).route;
    zenflow::divide(rows, n_threads, [=](zenflow::Rows part) { route(gradient, part, columns, squared_norms, slot); });
}

void zenflow_provisional_update(const zenflow_provisional_update_args* args, int64_t n_threads) {
    const auto update = zenflow::kernels(args->dtype).provisional_update;
    zenflow::divide(args->rows, n_threads, [=](zenflow::Rows rows) { update(*args, rows); });
}

void zenflow_adamw(float* master, float* exp_avg, float* exp_avg_sq, const void* gradient, void* weights, int64_t n,
                   const zenflow::Hyperparameters* hyperparameters, int64_t count, float factor, uint32_t dtype,
                   int64_t n_threads) {
    using namespace zenflow;
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
}

void zenflow_scatter_columns(const zenflow_columns* columns, int64_t n, uint32_t dtype) {
    const bool wide = static_cast<zenflow::DataType>(dtype) == zenflow::DataType::kFloat32;
    const auto scatter = wide ? zenflow::scatter_columns<uint32_t> : zenflow::scatter_columns<uint16_t>;
    for (int64_t i = 0; i < n; ++i) scatter(columns[i]);
}
