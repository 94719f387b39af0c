#include "adamw/replay_adamw.h"

#include <cmath>

namespace zenflow {

ZENFLOW_DECLARE_PER_ISA(ReplayKernel select_replay_kernel(DataType model, DataType moments))

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

ReplayKernel replay_kernel(DataType model, DataType moments, InstructionSet instruction_set) {
    return ZENFLOW_FUNCTION_FOR(instruction_set, select_replay_kernel)(model, moments);
}

}  // namespace zenflow
