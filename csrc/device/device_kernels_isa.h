// The functions of device_kernels.h that are compiled once per instruction set.
#pragma once

#include "common/cpu_features.h"
#include "device/device_kernels.h"

namespace zenflow {

struct DeviceKernels {
    void (*route)(const zenflow_route_args& args);
    void (*provisional_update)(const zenflow_provisional_update_args& args);
    bool (*factored_step)(const zenflow_factored_step_args& args);
};

// Kernels for one element type. `instruction_set` must be available.
DeviceKernels device_kernels(DataType dtype, InstructionSet instruction_set);

ZENFLOW_DECLARE_PER_ISA(DeviceKernels select_device_kernels(DataType dtype))

}  // namespace zenflow
