// Chooses the kernels by what this machine can execute.
//
// FLOWTT_CPU_LEVEL=baseline|avx2|avx512 in the environment asks for a lower level, to test or to
// compare; it is read once.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/kernel_interface.h"

namespace flowtt {

const CpuKernels& cpu_kernels_baseline(ElementType core_type);
#if defined(FLOWTT_X86_LEVELS)
const CpuKernels& cpu_kernels_avx2(ElementType core_type);
const CpuKernels& cpu_kernels_avx512(ElementType core_type);
#endif

namespace {

struct Level {
  const char* name;
  const CpuKernels& (*kernels)(ElementType);
};

Level choose_level() {
#if defined(FLOWTT_X86_LEVELS)
  const char* asked = std::getenv("FLOWTT_CPU_LEVEL");
  const std::string most = asked == nullptr ? "avx512" : asked;
  if (most != "baseline" && most != "avx2" && most != "avx512") {
    throw std::invalid_argument("FLOWTT_CPU_LEVEL must be baseline, avx2 or avx512, got '" + most +
                                "'");
  }
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && most == "avx512") {
    return {"avx512", &cpu_kernels_avx512};
  }
  if (avx2 && most != "baseline") {
    return {"avx2", &cpu_kernels_avx2};
  }
#endif
  return {"baseline", &cpu_kernels_baseline};
}

const Level& level() {
  static const Level chosen = choose_level();
  return chosen;
}

}  // namespace

const CpuKernels& cpu_kernels(ElementType core_type) { return level().kernels(core_type); }

const char* cpu_kernel_level() { return level().name; }

}  // namespace flowtt

// For torchrec_flowtt.ops.cpu_kernel_level.
extern "C" __attribute__((visibility("default"))) const char* flowtt_cpu_kernel_level() {
  return flowtt::cpu_kernel_level();
}
