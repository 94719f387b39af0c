// The functions of device_kernels.h that are compiled once per instruction set. Arguments are as there.
#pragma once

#include <cstdint>

#include "protocol.h"
#include "replay_adamw.h"

namespace zenflow {

struct DeviceKernels {
    void (*take)(const void* gradient, int64_t rows, int64_t columns, float* row_energy, float* column_energy, void* copy,
                 const int64_t* indices, int64_t n_selected, void* selected);
    void (*stand_in)(void* weights, const void* gradient, int64_t rows, int64_t columns, const float* of_rows, float size,
                     const float* of_columns, const int32_t* noise, int64_t noise_mask, int64_t first);
    bool (*factored_step)(const float* row_energy, int64_t rows, const float* column_energy, int64_t columns, float scale,
                          double beta2, double lr, float* row, float* column, float* steps, float* of_rows, float* of_columns);
};

// Those for `instruction_set`, which must be available.
DeviceKernels device_kernels(DataType dtype, InstructionSet instruction_set);

namespace baseline {
DeviceKernels select_device_kernels(DataType dtype);
}
namespace avx2 {
DeviceKernels select_device_kernels(DataType dtype);
}
namespace avx512 {
DeviceKernels select_device_kernels(DataType dtype);
}

}  // namespace zenflow
