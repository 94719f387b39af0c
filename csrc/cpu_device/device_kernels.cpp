#include "cpu_device/device_kernels.h"

#include <cstring>

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

void zenflow_route(const zenflow_route_args* args) { zenflow::kernels(args->dtype).route(*args); }

bool zenflow_factored_step(const zenflow_factored_step_args* args) {
    return zenflow::device_kernels(zenflow::DataType::kFloat32, zenflow::instruction_set()).factored_step(*args);
}

void zenflow_provisional_update(const zenflow_provisional_update_args* args) {
    zenflow::kernels(args->dtype).provisional_update(*args);
}

void zenflow_adamw(const zenflow_adamw_args* args) {
    const auto type = static_cast<zenflow::DataType>(args->dtype);
    const zenflow::StepCoefficients coefficients = zenflow::step_coefficients(*args->hyperparameters, args->count, args->factor);
    const zenflow::WindowView window{1, &args->gradient, &coefficients, 0.0f};
    zenflow::JournalEntry journal;
    zenflow::start_at(journal, 0);
    const auto kernel = zenflow::replay_kernel(type, zenflow::DataType::kFloat32, zenflow::instruction_set());
    kernel({args->master, args->exp_avg, args->exp_avg_sq}, static_cast<size_t>(args->n), window, args->weights, journal);
}

void zenflow_scatter_columns(const zenflow_columns* columns, int64_t n, uint32_t dtype) {
    const bool wide = static_cast<zenflow::DataType>(dtype) == zenflow::DataType::kFloat32;
    const auto scatter = wide ? zenflow::scatter_columns<uint32_t> : zenflow::scatter_columns<uint16_t>;
    for (int64_t i = 0; i < n; ++i) scatter(columns[i]);
}
