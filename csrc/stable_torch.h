// The parts of the LibTorch stable ABI in use. Only argument parsing and bindings include this.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

// Only CUDA builds of torch define these. Weak, they are null on CPU-only torch, where no CUDA
// operator can run, and the library loads there too.
#pragma weak aoti_torch_get_current_cuda_stream
#pragma weak torch_c10_cuda_check_msg
#pragma weak torch_c10_cuda_free_error_msg

namespace flowtt {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

}  // namespace flowtt
