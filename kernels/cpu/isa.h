// The instruction sets that kernels are compiled for, from the least on, and which of them this machine has.

#ifndef JAXSERVE_KERNELS_CPU_ISA_H_
#define JAXSERVE_KERNELS_CPU_ISA_H_

namespace jaxserve {

enum Level { kNone, kAvx2, kAvx512, kAvx512Bf16, kAmx };  // as library.LEVELS names them

// Whether the CPU has what a level needs, and the system lets this process use it. AMX is asked of the system once, when it is first
// asked of us: Linux then makes room for tiles in the signal frames of the process.
bool has_level(int level);

// The highest that it has. kNone: not even AVX2 and FMA.
int best_level();

}  // namespace jaxserve

#endif
