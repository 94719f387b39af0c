#include "replay_adamw.h"

#include <cmath>

namespace zenflow {

namespace baseline {
ReplayKernel select_kernel(DataType gradient, DataType published);
}
#ifdef ZENFLOW_X86_KERNELS
namespace avx2 {
ReplayKernel select_kernel(DataType gradient, DataType published);
}
namespace avx512 {
ReplayKernel select_kernel(DataType gradient, DataType published);
}
#endif

StepCoefficients step_coefficients(const Hyperparameters& hyperparameters, int64_t count, float clip) {
    const double bias_correction1 = 1.0 - std::pow(hyperparameters.beta1, static_cast<double>(count));
    const double bias_correction2 = 1.0 - std::pow(hyperparameters.beta2, static_cast<double>(count));
    StepCoefficients c{};
    c.grad_scale = clip;
    c.beta1 = static_cast<float>(hyperparameters.beta1);
    c.one_minus_beta1 = static_cast<float>(1.0 - hyperparameters.beta1);
    c.beta2 = static_cast<float>(hyperparameters.beta2);
    c.one_minus_beta2 = static_cast<float>(1.0 - hyperparameters.beta2);
    c.inv_sqrt_bias_correction2 = static_cast<float>(1.0 / std::sqrt(bias_correction2));
    c.eps = static_cast<float>(hyperparameters.eps);
    c.step_size = static_cast<float>(-hyperparameters.lr / bias_correction1);
    if (hyperparameters.weight_decay == 0.0) {
        c.decay = Decay::kNone;
    } else if (hyperparameters.decoupled != 0) {
        c.decay = Decay::kWeight;
        c.decay_factor = static_cast<float>(-hyperparameters.lr * hyperparameters.weight_decay);
    } else {
        c.decay = Decay::kGradient;
        c.decay_factor = static_cast<float>(hyperparameters.weight_decay);
    }
    return c;
}

const char* name(InstructionSet instruction_set) {
    switch (instruction_set) {
        case InstructionSet::kAvx512:
            return "avx512";
        case InstructionSet::kAvx2:
            return "avx2";
        case InstructionSet::kBaseline:
            break;
    }
    return "baseline";
}

bool available(InstructionSet instruction_set) {
#ifdef ZENFLOW_X86_KERNELS
    // Exactly the features CMakeLists.txt compiles these kernels for.
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (instruction_set == InstructionSet::kAvx2) return has_avx2;
    if (instruction_set == InstructionSet::kAvx512) {
        return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
#endif
    return instruction_set == InstructionSet::kBaseline;
}

InstructionSet best_instruction_set() {
    InstructionSet best = InstructionSet::kBaseline;
    for (const InstructionSet candidate : kInstructionSets) {
        if (available(candidate)) best = candidate;
    }
    return best;
}

ReplayKernel replay_kernel(DataType gradient, DataType published, InstructionSet instruction_set) {
#ifdef ZENFLOW_X86_KERNELS
    if (instruction_set == InstructionSet::kAvx512) return avx512::select_kernel(gradient, published);
    if (instruction_set == InstructionSet::kAvx2) return avx2::select_kernel(gradient, published);
#endif
    (void)instruction_set;
    return baseline::select_kernel(gradient, published);
}

}  // namespace zenflow
