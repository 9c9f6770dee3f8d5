// One call of an operator on CUDA: its device, its stream, its allocations and its errors.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include <vector>

#include "arguments.h"
#include "cuda/launchers.h"
#include "stable_torch.h"

namespace flowtt {

// Launches are asynchronous, so the failure of one kernel may surface in a later one.
inline void check_cuda(cudaError_t error, const char* operator_name) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that does not outlive this call must not surface in the next
  const bool kernel_failed = error == cudaErrorLaunchFailure;
  STD_TORCH_CHECK(false, "flowtt::", operator_name, " on CUDA: ", cudaGetErrorName(error), ": ",
                  cudaGetErrorString(error),
                  kernel_failed ? " in a kernel launched earlier; an index or offset out of range "
                                  "is reported on the standard output"
                                : "");
}

// One operator call: its arguments, with the cores' device current and that device's stream.
class CudaCall {
 public:
  CudaCall(const char* operator_name, const EmbeddingBagArguments& arguments)
      : operator_name_(operator_name),
        arguments_(arguments),
        guard_(arguments.cores[0].get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(arguments.cores[0].get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
    for (size_t table = 0; table < arguments.tables.size(); ++table) {
      STD_TORCH_CHECK(cuda::has_32_bit_levels(arguments.tables[table]), "flowtt::", operator_name,
                      " on CUDA: table ", table, ": a core slice or an intermediate product has ",
                      "more than ", cuda::kMaxLevelElements, " elements; lower its tt_ranks");
    }
  }

  const EmbeddingBagArguments& arguments() const { return arguments_; }
  cudaStream_t stream() const { return stream_; }
  void check(cudaError_t error) const { check_cuda(error, operator_name_); }

  Tensor empty(int64_t numel, ScalarType dtype) const {
    return torch::stable::new_empty(arguments_.cores[0], std::vector<int64_t>{numel}, dtype);
  }

 private:
  const char* operator_name_;
  const EmbeddingBagArguments& arguments_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace flowtt
