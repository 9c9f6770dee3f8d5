// Conversions between storage types and the accumulator type, and the host-side choice of a
// kernel's instantiation. Only the core type is a template parameter of the general kernels; index,
// offset and output types are uniform branches, which keeps the binary small.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "kernel_params.h"

namespace flowtt::cuda {

// fp32 for every core type but fp64, which is there for checking gradients.
template <typename core_t>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <typename core_t>
using accumulator_t = typename AccumulatorOf<core_t>::type;

template <typename acc_t>
__device__ __forceinline__ acc_t to_accumulator(float value) {
  return static_cast<acc_t>(value);
}
template <typename acc_t>
__device__ __forceinline__ acc_t to_accumulator(double value) {
  return static_cast<acc_t>(value);
}
template <typename acc_t>
__device__ __forceinline__ acc_t to_accumulator(__half value) {
  return static_cast<acc_t>(__half2float(value));
}
template <typename acc_t>
__device__ __forceinline__ acc_t to_accumulator(__nv_bfloat16 value) {
  return static_cast<acc_t>(__bfloat162float(value));
}

// Round to nearest even.
template <typename storage_t, typename acc_t>
__device__ __forceinline__ storage_t from_accumulator(acc_t value) {
  if constexpr (std::is_same_v<storage_t, __half>) {
    return __float2half_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<storage_t, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(value));
  } else {
    return static_cast<storage_t>(value);
  }
}

__device__ __forceinline__ int64_t load_index(const void* data, bool is_int64, int64_t i) {
  return is_int64 ? static_cast<const int64_t*>(data)[i]
                  : static_cast<int64_t>(static_cast<const int32_t*>(data)[i]);
}

template <typename acc_t>
__device__ __forceinline__ acc_t load_element(const void* data, ElementType type, int64_t i) {
  switch (type) {
    case ElementType::kFloat16:
      return to_accumulator<acc_t>(static_cast<const __half*>(data)[i]);
    case ElementType::kBFloat16:
      return to_accumulator<acc_t>(static_cast<const __nv_bfloat16*>(data)[i]);
    case ElementType::kFloat64:
      return to_accumulator<acc_t>(static_cast<const double*>(data)[i]);
    default:
      return to_accumulator<acc_t>(static_cast<const float*>(data)[i]);
  }
}

template <typename acc_t>
__device__ __forceinline__ void store_element(void* data, ElementType type, int64_t i,
                                              acc_t value) {
  switch (type) {
    case ElementType::kFloat16:
      static_cast<__half*>(data)[i] = from_accumulator<__half>(value);
      break;
    case ElementType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[i] = from_accumulator<__nv_bfloat16>(value);
      break;
    case ElementType::kFloat64:
      static_cast<double*>(data)[i] = from_accumulator<double>(value);
      break;
    default:
      static_cast<float*>(data)[i] = from_accumulator<float>(value);
  }
}

// Elements i ... i + kCount - 1, in one store where their address allows it.
template <typename acc_t, int kCount>
__device__ __forceinline__ void store_elements(void* data, ElementType type, int64_t i,
                                               const acc_t (&values)[kCount]) {
  const auto store = [&]<typename storage_t>(storage_t* target) {
    struct alignas(kCount * sizeof(storage_t)) Vector {
      storage_t elements[kCount];
    };
    Vector vector;
#pragma unroll
    for (int k = 0; k < kCount; ++k) vector.elements[k] = from_accumulator<storage_t>(values[k]);
    if (reinterpret_cast<uintptr_t>(target) % sizeof(Vector) == 0) {
      *reinterpret_cast<Vector*>(target) = vector;
      return;
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) target[k] = vector.elements[k];
  };
  switch (type) {
    case ElementType::kFloat16:
      store(static_cast<__half*>(data) + i);
      break;
    case ElementType::kBFloat16:
      store(static_cast<__nv_bfloat16*>(data) + i);
      break;
    case ElementType::kFloat64:
      store(static_cast<double*>(data) + i);
      break;
    default:
      store(static_cast<float*>(data) + i);
  }
}

// Calls launch.template operator()<core_t>() for the type of the cores.
template <typename Launch>
cudaError_t dispatch_core_type(ElementType core_type, Launch&& launch) {
  switch (core_type) {
    case ElementType::kFloat32:
      return launch.template operator()<float>();
    case ElementType::kFloat16:
      return launch.template operator()<__half>();
    case ElementType::kBFloat16:
      return launch.template operator()<__nv_bfloat16>();
    case ElementType::kFloat64:
      return launch.template operator()<double>();
  }
  return cudaErrorInvalidValue;
}

}  // namespace flowtt::cuda
