// Stands in for csrc/cuda_call.h: one call of an operator whose kernels run on the CPU.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "arguments.h"
#include "cuda/launchers.h"
#include "stable_torch.h"

namespace flowtt {

class CudaCall {
 public:
  CudaCall(const char* operator_name, const EmbeddingBagArguments& arguments)
      : operator_name_(operator_name), arguments_(arguments) {}

  const EmbeddingBagArguments& arguments() const { return arguments_; }
  cudaStream_t stream() const { return nullptr; }

  // Kernels have ended here: what they may not write to has to be as it was.
  void check(cudaError_t error) const {
    cudaGetLastError();
    STD_TORCH_CHECK(error == cudaSuccess, "cuda_on_cpu: ", operator_name_, ": ",
                    cudaGetErrorName(error));
    for (const Tensor& guard : guards_) {
      const auto* bytes = static_cast<const unsigned char*>(guard.const_data_ptr());
      STD_TORCH_CHECK(
          std::all_of(bytes, bytes + kGuardBytes, [](unsigned char c) { return c == kPoison; }),
          "cuda_on_cpu: ", operator_name_, ": a kernel wrote beyond its device memory");
    }
  }

  // Of bytes. Kernels have to take memory in any state: it is full of NaN.
  Tensor empty(int64_t bytes, ScalarType dtype) const {
    Tensor memory = torch::stable::new_empty(
        arguments_.cores[0], std::vector<int64_t>{bytes + kAlignment + kGuardBytes}, dtype);
    auto* data = static_cast<unsigned char*>(memory.mutable_data_ptr());
    std::memset(data, kPoison, bytes + kAlignment + kGuardBytes);
    const int64_t shift = kAlignment - reinterpret_cast<uintptr_t>(data) % kAlignment;
    guards_.push_back(torch::stable::narrow(memory, 0, shift + bytes, kGuardBytes));
    return torch::stable::narrow(memory, 0, shift, bytes);
  }

 private:
  static constexpr unsigned char kPoison = 0xff;
  static constexpr int64_t kAlignment = 256;
  static constexpr int64_t kGuardBytes = 4096;

  const char* operator_name_;
  const EmbeddingBagArguments& arguments_;
  mutable std::vector<Tensor> guards_;
};

}  // namespace flowtt
