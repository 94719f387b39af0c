#include "common/cpu_features.h"

#include <cstdlib>
#include <cstring>

#include "common/error.h"

namespace zenflow {

const char* name(InstructionSet instruction_set) {
    constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};
    return kNames[static_cast<int>(instruction_set)];
}

bool available(InstructionSet instruction_set) {
#ifdef ZENFLOW_X86_KERNELS
    // Exactly the features that CMakeLists.txt compiles these kernels for.
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
    const char* highest = std::getenv("ZENFLOW_MAX_CPU_ISA");
    InstructionSet best = InstructionSet::kBaseline;
    for (const InstructionSet candidate : kInstructionSets) {
        if (available(candidate)) best = candidate;
        if (highest != nullptr && std::strcmp(highest, name(candidate)) == 0) return best;
    }
    require(highest == nullptr, "ZENFLOW_MAX_CPU_ISA must be baseline, avx2 or avx512, got ", highest ? highest : "");
    return best;
}

}  // namespace zenflow
