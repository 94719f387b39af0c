#include "device_kernels.h"

#include <cstring>

#include "device_kernels_isa.h"
#include "replay_adamw.h"

namespace zenflow {

DeviceKernels device_kernels(DataType dtype, InstructionSet instruction_set) {
#ifdef ZENFLOW_X86_KERNELS
    if (instruction_set == InstructionSet::kAvx512) return avx512::select_device_kernels(dtype);
    if (instruction_set == InstructionSet::kAvx2) return avx2::select_device_kernels(dtype);
#endif
    (void)instruction_set;
    return baseline::select_device_kernels(dtype);
}

}  // namespace zenflow

namespace {

using zenflow::DataType;

zenflow::DeviceKernels kernels(uint32_t dtype) {
    static const zenflow::InstructionSet best = zenflow::best_instruction_set();
    return zenflow::device_kernels(static_cast<DataType>(dtype), best);
}

template <typename T>
void gather(const void* matrix, int64_t rows, int64_t width, const int64_t* indices, int64_t n, void* selected) {
    for (int64_t row = 0; row < rows; ++row) {
        const T* const source = static_cast<const T*>(matrix) + row * width;
        T* const target = static_cast<T*>(selected) + row * n;
        for (int64_t i = 0; i < n; ++i) target[i] = source[indices[i]];
    }
}

template <typename T>
void scatter(const zenflow_column_write& write) {
    if (write.indices == nullptr) {
        std::memcpy(write.matrix, write.selected, static_cast<size_t>(write.rows * write.width) * sizeof(T));
        return;
    }
    for (int64_t row = 0; row < write.rows; ++row) {
        T* const target = static_cast<T*>(write.matrix) + row * write.width;
        const T* const source = static_cast<const T*>(write.selected) + row * write.n_selected;
        for (int64_t i = 0; i < write.n_selected; ++i) target[write.indices[i]] = source[i];
    }
}

}  // namespace

void zenflow_take(const void* gradient, uint32_t dtype, int64_t rows, int64_t columns, float* row_energy, float* column_energy,
                  void* copy, const int64_t* indices, int64_t n_selected, void* selected) {
    kernels(dtype).take(gradient, rows, columns, row_energy, column_energy, copy, indices, n_selected, selected);
}

bool zenflow_factored_step(const float* row_energy, int64_t rows, const float* column_energy, int64_t columns, float scale,
                           double beta2, double lr, float* row, float* column, float* steps, float* of_rows, float* of_columns) {
    return kernels(static_cast<uint32_t>(DataType::kFloat32))
        .factored_step(row_energy, rows, column_energy, columns, scale, beta2, lr, row, column, steps, of_rows, of_columns);
}

void zenflow_stand_in(void* weights, const void* gradient, uint32_t dtype, int64_t rows, int64_t columns, const float* of_rows,
                      float size, const float* of_columns, const int32_t* noise, int64_t noise_mask, int64_t first) {
    kernels(dtype).stand_in(weights, gradient, rows, columns, of_rows, size, of_columns, noise, noise_mask, first);
}

void zenflow_adamw(float* master, float* exp_avg, float* exp_avg_sq, const void* gradient, void* weights, uint32_t dtype,
                   int64_t n, const zenflow::Hyperparameters* hyperparameters, int64_t count, float factor) {
    const DataType type = static_cast<DataType>(dtype);
    const zenflow::StepCoefficients coefficients = zenflow::step_coefficients(*hyperparameters, count, factor);
    const zenflow::WindowView window{zenflow::Rule::kReplay, 1, &gradient, &coefficients, 0.0f};
    zenflow::replay_kernel(type, type, zenflow::best_instruction_set())(master, exp_avg, exp_avg_sq, window,
                                                                        static_cast<size_t>(n), weights, nullptr);
}

void zenflow_gather_columns(const void* matrix, uint32_t dtype, int64_t rows, int64_t width, const int64_t* indices,
                            int64_t n_selected, void* selected) {
    const auto copy = dtype == static_cast<uint32_t>(DataType::kFloat32) ? gather<uint32_t> : gather<uint16_t>;
    copy(matrix, rows, width, indices, n_selected, selected);
}

void zenflow_scatter_columns(const zenflow_column_write* writes, int64_t n_writes, uint32_t dtype) {
    const auto copy = dtype == static_cast<uint32_t>(DataType::kFloat32) ? scatter<uint32_t> : scatter<uint16_t>;
    for (int64_t i = 0; i < n_writes; ++i) copy(writes[i]);
}
