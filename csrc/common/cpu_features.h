// Instruction sets, and dispatch to code that is compiled once for each of them.
//
// Files named *_isa.cpp are compiled once per instruction set, with ZENFLOW_ISA naming the namespace of the result. Everything
// else in them is local to the file, and they call nothing of the standard library: the linker would keep one copy of a shared
// function, compiled for whichever instruction set came first.
#pragma once

// For functions in headers that such files include, for the same reason.
#define ZENFLOW_INLINE inline __attribute__((always_inline))

// Declares a function in the namespace of every instruction set.
#define ZENFLOW_DECLARE_PER_ISA(declaration) \
    namespace baseline {                     \
    declaration;                             \
    }                                        \
    namespace avx2 {                         \
    declaration;                             \
    }                                        \
    namespace avx512 {                       \
    declaration;                             \
    }

// The function of one instruction set, which must be available. All of them have the same type.
#ifdef ZENFLOW_X86_KERNELS
#define ZENFLOW_FUNCTION_FOR(instruction_set, function)                         \
    ((instruction_set) == ::zenflow::InstructionSet::kAvx512 ? avx512::function \
     : (instruction_set) == ::zenflow::InstructionSet::kAvx2 ? avx2::function   \
                                                             : baseline::function)
#else
#define ZENFLOW_FUNCTION_FOR(instruction_set, function) (static_cast<void>(instruction_set), baseline::function)
#endif

namespace zenflow {

// In ascending order. kBaseline is the minimum of the architecture.
enum class InstructionSet { kBaseline, kAvx2, kAvx512 };
constexpr InstructionSet kInstructionSets[] = {InstructionSet::kBaseline, InstructionSet::kAvx2, InstructionSet::kAvx512};

// Lower-case name for messages, such as "avx512".
const char* name(InstructionSet instruction_set);

// Whether kernels were compiled for it and this CPU and its operating system support it.
bool available(InstructionSet instruction_set);

// The highest available one, or the highest that the environment variable ZENFLOW_MAX_CPU_ISA admits (a name, as above). Throws
// an Error where the variable has another value. Safe for several threads as long as none changes the environment.
InstructionSet best_instruction_set();

}  // namespace zenflow
