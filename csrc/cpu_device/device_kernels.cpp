#include "cpu_device/device_kernels.h"

#include <cstring>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "adamw/replay_adamw.h"
#include "adamw/tile_journal.h"

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

// Calls `work` with each part: the last on the caller's thread, and where the system refuses threads, others as well.
template <typename Args, typename Work>
void run_parts(const Args* parts, int64_t n_parts, const Work& work) {
    std::vector<std::thread> threads;
    int64_t part = 0;
    try {
        threads.reserve(static_cast<size_t>(n_parts));
        for (; part + 1 < n_parts; ++part) threads.emplace_back(work, std::cref(parts[part]));
    } catch (const std::exception&) {
    }
    for (; part < n_parts; ++part) work(parts[part]);
    for (std::thread& thread : threads) thread.join();
}

void adamw(const zenflow_adamw_args& args) {
    const auto type = static_cast<DataType>(args.dtype);
    const StepCoefficients coefficients = step_coefficients(*args.hyperparameters, args.count, args.factor);
    const WindowView window{1, &args.gradient, &coefficients, 0.0f};
    JournalEntry journal;
    start_at(journal, 0);
    const auto kernel = replay_kernel(type, DataType::kFloat32, instruction_set());
    kernel({args.master, args.exp_avg, args.exp_avg_sq}, static_cast<size_t>(args.n), window, args.weights, journal);
}

template <typename T>
void scatter_columns(const zenflow_columns& columns) {
    T* matrix = static_cast<T*>(columns.matrix);
    const T* selected = static_cast<const T*>(columns.selected);
    if (columns.n_selected == 0) return;
    if (columns.indices == nullptr) {
        std::memcpy(matrix, selected, static_cast<size_t>(columns.rows * columns.width) * sizeof(T));
        return;
    }
    for (int64_t row = 0; row < columns.rows; ++row, matrix += columns.width, selected += columns.n_selected) {
        for (int64_t i = 0; i < columns.n_selected; ++i) matrix[columns.indices[i]] = selected[i];
    }
}

}  // namespace
}  // namespace zenflow

void zenflow_route(const zenflow_route_part* parts, int64_t n_parts) {
    zenflow::run_parts(parts, n_parts, [](const zenflow_route_part& part) {
        for (int64_t i = 0; i < part.n_runs; ++i) zenflow::kernels(part.runs[i].dtype).route(part.runs[i]);
    });
}

bool zenflow_factored_step(const zenflow_factored_step_args* args) {
    return zenflow::device_kernels(zenflow::DataType::kFloat32, zenflow::instruction_set()).factored_step(*args);
}

void zenflow_provisional_update(const zenflow_provisional_update_args* parts, int64_t n_parts) {
    zenflow::run_parts(parts, n_parts, zenflow::kernels(parts->dtype).provisional_update);
}

void zenflow_adamw(const zenflow_adamw_args* parts, int64_t n_parts) { zenflow::run_parts(parts, n_parts, zenflow::adamw); }

void zenflow_scatter_columns(const zenflow_columns* columns, int64_t n, uint32_t dtype) {
    const bool wide = static_cast<zenflow::DataType>(dtype) == zenflow::DataType::kFloat32;
    const auto scatter = wide ? zenflow::scatter_columns<uint32_t> : zenflow::scatter_columns<uint16_t>;
    for (int64_t i = 0; i < n; ++i) scatter(columns[i]);
}
