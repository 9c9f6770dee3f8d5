// The kernels of one instruction set. Compiled once for each, with FLOWTT_CPU_LEVEL naming it; the
// one symbol it exports is cpu_kernels_<level>.
#include "cpu/kernel_interface.h"
#include "cpu/simd/bag_kernels.h"
#include "cpu/simd/gradient_kernel.h"
#include "cpu/simd/row_kernel.h"
#include "cpu/simd/update_kernel.h"

#define FLOWTT_CONCATENATE_(a, b) a##b
#define FLOWTT_CONCATENATE(a, b) FLOWTT_CONCATENATE_(a, b)

namespace flowtt {
namespace {

template <typename T, typename A>
constexpr CpuKernels make_kernels() {
  return {&scratch_bytes<T, A>,   &compute_rows<T, A>,         &pool_bags<A>,
          &load_bag_gradients<A>, &accumulate_gradients<T, A>, &dot_rows<A>,
          &update_slice<T, A>};
}

constexpr CpuKernels kFloat32Kernels = make_kernels<float, float>();
constexpr CpuKernels kFloat16Kernels = make_kernels<Half, float>();
constexpr CpuKernels kBFloat16Kernels = make_kernels<BFloat16, float>();
constexpr CpuKernels kFloat64Kernels = make_kernels<double, double>();

}  // namespace

const CpuKernels& FLOWTT_CONCATENATE(cpu_kernels_, FLOWTT_CPU_LEVEL)(ElementType core_type) {
  switch (core_type) {
    case ElementType::kFloat16:
      return kFloat16Kernels;
    case ElementType::kBFloat16:
      return kBFloat16Kernels;
    case ElementType::kFloat64:
      return kFloat64Kernels;
    case ElementType::kFloat32:
      break;
  }
  return kFloat32Kernels;
}

}  // namespace flowtt
