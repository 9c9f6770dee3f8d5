// What happens to the accumulated core gradients after the backward kernel: a cast into the
// gradient tensors, or one optimizer step on the slices that were touched.
//
// Both kernels: blockIdx.y is the core, blocks of a core stride over its elements or slices.

#include "chain.cuh"
#include "dependent_launch.cuh"
#include "device_attributes.h"
#include "launchers.h"
#include "stochastic_rounding.cuh"
#include "tensor_core.cuh"

namespace flowtt::cuda {
namespace {

constexpr int kCastThreads = 256;
constexpr int kStepThreads = 256;
constexpr int64_t kMaxBlocksPerCore = 1024;

template <typename core_t>
__global__ void __launch_bounds__(kCastThreads)
    cast_core_gradients_kernel(const __grid_constant__ CoreGroup group) {
  using acc_t = accumulator_t<core_t>;
  const CoreTask& task = group.tasks[blockIdx.y];
  const int64_t numel = task.num_slices * task.slice_numel;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; e < numel;
       e += stride) {
    static_cast<core_t*>(task.values)[e] =
        from_accumulator<core_t>(static_cast<const acc_t*>(task.gradient)[e]);
  }
}

// Constants of a step, the same for all elements.
template <typename acc_t>
struct StepConstants {
  acc_t learning_rate;
  acc_t eps;
  acc_t beta1;
  acc_t beta2;
  acc_t weight_decay;
  acc_t bias_correction1;  // 1 - beta1^iter
  acc_t bias_correction2;  // 1 - beta2^iter
  // Of the step and the core: what elements are rounded by, with stochastic rounding.
  uint64_t seed;
};

template <typename acc_t>
__device__ StepConstants<acc_t> load_step_constants(const OptimizerArguments& params,
                                                    int32_t core) {
  StepConstants<acc_t> step{acc_t(*params.learning_rate),
                            acc_t(params.eps),
                            acc_t(params.beta1),
                            acc_t(params.beta2),
                            acc_t(params.weight_decay),
                            acc_t(1),
                            acc_t(1),
                            rounding_seed(*params.iteration, core)};
  if (params.type == OptimizerType::kAdam) {
    const double iter = static_cast<double>(*params.iteration);
    step.bias_correction1 = acc_t(1 - pow(params.beta1, iter));
    step.bias_correction2 = acc_t(1 - pow(params.beta2, iter));
  }
  return step;
}

// What an optimizer subtracts from one element, whose state it updates. step_size: of row-wise
// Adagrad.
template <typename acc_t>
__device__ __forceinline__ acc_t element_delta(OptimizerType type, const StepConstants<acc_t>& step,
                                               acc_t step_size, acc_t value, acc_t gradient,
                                               acc_t& momentum1, acc_t& momentum2) {
  switch (type) {
    case OptimizerType::kAdagrad:
      momentum1 += gradient * gradient;
      return step.learning_rate * gradient / (sqrt(momentum1) + step.eps);
    case OptimizerType::kRowWiseAdagrad:
      return step_size * gradient;
    case OptimizerType::kAdam: {
      momentum1 = step.beta1 * momentum1 + (1 - step.beta1) * gradient;
      momentum2 = step.beta2 * momentum2 + (1 - step.beta2) * gradient * gradient;
      const acc_t direction = (momentum1 / step.bias_correction1) /
                              (sqrt(momentum2 / step.bias_correction2) + step.eps);
      return step.learning_rate * (direction + step.weight_decay * value);
    }
    default:
      return step.learning_rate * gradient;
  }
}

// Neighbours in memory, moved at once.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Neighbours {
  T elements[kCount];

  static __device__ __forceinline__ Neighbours& at(void* data, int64_t first) {
    return *reinterpret_cast<Neighbours*>(static_cast<T*>(data) + first);
  }
};

// Elements [first, first + kCount) of a core on their way through a step.
template <typename core_t, int kCount>
struct SteppedElements {
  using acc_t = accumulator_t<core_t>;
  using State = Neighbours<acc_t, kCount>;
  Neighbours<core_t, kCount> values;
  State gradients;
  State momentum1;
  State momentum2;

  static __device__ __forceinline__ bool has_momentum1(OptimizerType type) {
    return type == OptimizerType::kAdagrad || type == OptimizerType::kAdam;
  }

  __device__ __forceinline__ void load(const CoreTask& task, OptimizerType type, int64_t first) {
    values = Neighbours<core_t, kCount>::at(task.values, first);
    gradients = State::at(const_cast<void*>(task.gradient), first);
    if (has_momentum1(type)) momentum1 = State::at(task.momentum1, first);
    if (type == OptimizerType::kAdam) momentum2 = State::at(task.momentum2, first);
  }

  __device__ __forceinline__ void step_and_store(const CoreTask& task,
                                                 const OptimizerArguments& params,
                                                 const StepConstants<acc_t>& step, acc_t step_size,
                                                 int64_t first) {
    const OptimizerType type = params.type;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const acc_t value = to_accumulator<acc_t>(values.elements[i]);
      const acc_t stepped =
          value - element_delta(type, step, step_size, value, gradients.elements[i],
                                momentum1.elements[i], momentum2.elements[i]);
      if constexpr (sizeof(core_t) == 2) {
        if (params.stochastic_rounding) {
          values.elements[i] =
              round_stochastically<core_t>(stepped, random_bits(step.seed, first + i));
          continue;
        }
      }
      values.elements[i] = from_accumulator<core_t>(stepped);
    }
    Neighbours<core_t, kCount>::at(task.values, first) = values;
    if (has_momentum1(type)) State::at(task.momentum1, first) = momentum1;
    if (type == OptimizerType::kAdam) State::at(task.momentum2, first) = momentum2;
  }
};

// Row-wise Adagrad's step size for one slice: one accumulated mean square per slice.
template <typename acc_t>
__device__ acc_t row_wise_step_size(const StepConstants<acc_t>& step, const CoreTask& task,
                                    int64_t slice) {
  __shared__ acc_t slots[kReductionSlots];
  __shared__ acc_t step_size;
  const acc_t* const gradient = static_cast<const acc_t*>(task.gradient) + slice * task.slice_numel;
  acc_t partial = 0;
#pragma unroll 4
  for (int64_t e = threadIdx.x; e < task.slice_numel; e += kStepThreads) {
    partial += gradient[e] * gradient[e];
  }
  const acc_t square_sum = block_sum(partial, slots);
  if (threadIdx.x == 0) {
    acc_t& state = static_cast<acc_t*>(task.momentum1)[slice];
    state += square_sum / acc_t(task.slice_numel);
    step_size = step.learning_rate / (sqrt(state) + step.eps);
  }
  __syncthreads();
  const acc_t result = step_size;
  __syncthreads();
  return result;
}

// One step of a slice, kCount elements of a thread at a time. Called by all threads.
template <typename core_t, int kCount>
__device__ __forceinline__ void step_slice(const CoreTask& task, const OptimizerArguments& params,
                                           const StepConstants<accumulator_t<core_t>>& step,
                                           accumulator_t<core_t> step_size, int64_t slice) {
  // Loaded before the first is stored.
  constexpr int kAhead = 2;
  constexpr int64_t kStride = kStepThreads * kCount;
  const int64_t end = (slice + 1) * task.slice_numel;
  for (int64_t e = slice * task.slice_numel + threadIdx.x * kCount; e < end;
       e += kAhead * kStride) {
    SteppedElements<core_t, kCount> elements[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (e + i * kStride < end) elements[i].load(task, params.type, e + i * kStride);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (e + i * kStride < end) {
        elements[i].step_and_store(task, params, step, step_size, e + i * kStride);
      }
    }
  }
}

// Whether slices are whole vectors of four elements, in the core, its gradient and its state.
template <typename acc_t>
__device__ __forceinline__ bool has_vectors(const CoreTask& task) {
  constexpr uintptr_t kAlignment = 4 * sizeof(acc_t);
  const uintptr_t addresses =
      reinterpret_cast<uintptr_t>(task.values) | reinterpret_cast<uintptr_t>(task.gradient) |
      reinterpret_cast<uintptr_t>(task.momentum1) | reinterpret_cast<uintptr_t>(task.momentum2);
  return task.slice_numel % 4 == 0 && addresses % kAlignment == 0;
}

// One block a slice. An untouched slice keeps its values and its state, also under Adam.
template <typename core_t>
__global__ void __launch_bounds__(kStepThreads)
    optimizer_step_kernel(const __grid_constant__ CoreGroup group,
                          const __grid_constant__ OptimizerArguments params) {
  using acc_t = accumulator_t<core_t>;
  const CoreTask& task = group.tasks[blockIdx.y];
  // The kernel starts while the one before it ends.
  wait_for_previous_kernel();
  const StepConstants<acc_t> step = load_step_constants<acc_t>(params, group.first + blockIdx.y);
  const bool by_vectors = has_vectors<acc_t>(task);
  for (int64_t slice = blockIdx.x; slice < task.num_slices; slice += gridDim.x) {
    if (!task.touched[slice]) continue;
    const acc_t step_size = params.type == OptimizerType::kRowWiseAdagrad
                                ? row_wise_step_size(step, task, slice)
                                : acc_t(0);
    if (by_vectors) {
      step_slice<core_t, 4>(task, params, step, step_size, slice);
    } else {
      step_slice<core_t, 1>(task, params, step, step_size, slice);
    }
  }
}

template <typename Work>
dim3 core_grid(const CoreGroup& group, Work&& blocks_wanted) {
  int64_t blocks = 1;
  for (int i = 0; i < group.count; ++i) {
    const int64_t wanted = blocks_wanted(group.tasks[i]);
    if (wanted > blocks) blocks = wanted;
  }
  if (blocks > kMaxBlocksPerCore) blocks = kMaxBlocksPerCore;
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(group.count));
}

}  // namespace

cudaError_t launch_cast_core_gradients(ElementType core_type, const CoreGroup& group,
                                       cudaStream_t stream) {
  if (group.count == 0) return cudaSuccess;
  const dim3 grid = core_grid(group, [](const CoreTask& task) {
    return (task.num_slices * task.slice_numel + kCastThreads - 1) / kCastThreads;
  });
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    cast_core_gradients_kernel<core_t><<<grid, kCastThreads, 0, stream>>>(group);
    return cudaGetLastError();
  });
}

cudaError_t launch_optimizer_step(ElementType core_type, const CoreGroup& group,
                                  const OptimizerArguments& params, cudaStream_t stream) {
  if (group.count == 0) return cudaSuccess;
  bool dependent_launch = false;
  const cudaError_t error = read_dependent_launch(&dependent_launch);
  if (error != cudaSuccess) return error;
  const dim3 grid = core_grid(group, [](const CoreTask& task) { return task.num_slices; });
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    return launch_kernel(optimizer_step_kernel<core_t>, grid, kStepThreads, 0, dependent_launch,
                         stream, group, params);
  });
}

}  // namespace flowtt::cuda
