// One optimizer step on the slices of the cores that were looked up, after the backward kernel has
// summed up their gradients.
//
// A slice, or a part of a large one, is stepped by a team of neighbouring threads, about half as
// many as it has vectors, so that small slices share a block:
//
//     core 1 (slices of 128 elements)         core 2 (slices of 4,096 elements)
//     ┌ block 0 ──────────────┐ ┌ 1 ──        ┌ block 13 ─┐ ┌ 14 ───────┐ ┌ 15 ──
//     │ 0 │ 1 │ 2 │ ... │ 15  │ │ 16 │        │ 0, first  │ │ 0, second │ │ 1, first
//     │ 16 threads each       │ │             │ half      │ │ half      │ │ half
//     └───────────────────────┘ └────         └───────────┘ └───────────┘ └────

#include <cmath>

#include "chain.cuh"
#include "dependent_launch.cuh"
#include "device_attributes.h"
#include "launchers.h"
#include "optimizer_elements.cuh"
#include "tensor_core.cuh"
#include "workspace_layout.h"

namespace flowtt::cuda {
namespace {

constexpr int kStepThreads = 256;
// Elements that are moved at once, if slices are whole vectors of so many.
constexpr int kVector = 4;
// Vectors of a thread that are loaded before the first is stored.
constexpr int kAhead = 2;

// Blocks of a multiprocessor: the more there are, the more slices are under way at once.
template <typename core_t, OptimizerType kType>
constexpr int kStepBlocks = sizeof(core_t) == 8             ? 1
                            : kType == OptimizerType::kAdam ? 4
                                                            : 6;

// How a core is shared out, beside the core itself.
struct StepTask : CoreTask {
  int64_t parts;       // of a slice, a team each
  int64_t part_numel;  // of all but a slice's last part
  int32_t team_shift;  // log2 of the threads of a team
  int32_t vector;      // kVector or 1
};

// The cores of a launch, the same in all but their number. The parameters of few cores stay below
// the 4 KB that every driver takes at full speed.
template <int kCores>
struct StepGroup {
  int32_t count;
  int32_t first;  // the first one's number in the call
  double log_beta1;
  double log_beta2;
  uint32_t first_block[kCores + 1];
  StepTask tasks[kCores];

  // The core that a block works on: the last that starts no later.
  __device__ __forceinline__ int core_of(uint32_t block) const {
    int core = 0;
    int end = count;
    while (end - core > 1) {
      const int middle = (core + end) / 2;
      (first_block[middle] <= block ? core : end) = middle;
    }
    return core;
  }
};
constexpr int kFewCores = 42;
static_assert(sizeof(StepGroup<kFewCores>) + sizeof(OptimizerArguments) <= 4096 - 32);
static_assert(sizeof(StepGroup<kCoresPerLaunch>) + sizeof(OptimizerArguments) <= 16384);

// Row-wise Adagrad's step size for the slice of each team: one accumulated mean square per slice.
// Called by all threads; teams without a slice that was looked up are not `active`.
template <typename acc_t>
__device__ __forceinline__ acc_t row_wise_step_size(const StepConstants<acc_t>& step,
                                                    const StepTask& task, int64_t slice, int thread,
                                                    bool active) {
  constexpr int kWarps = kStepThreads / kWarpSize;
  __shared__ acc_t warp_sums[kWarps];
  __shared__ acc_t step_sizes[kStepThreads];
  const int threads = 1 << task.team_shift;
  const acc_t* const gradient = static_cast<const acc_t*>(task.gradient) + slice * task.slice_numel;
  acc_t sum = 0;
  if (active) {
#pragma unroll 4
    for (int64_t e = thread; e < task.slice_numel; e += threads) sum += gradient[e] * gradient[e];
  }
  for (int offset = min(threads, kWarpSize) / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
  const int warp = threadIdx.x / kWarpSize;
  if (threads > kWarpSize) {
    if (threadIdx.x % kWarpSize == 0) warp_sums[warp] = sum;
    __syncthreads();
    if (thread == 0) {
      sum = 0;
      for (int i = 0; i < threads / kWarpSize; ++i) sum += warp_sums[warp + i];
    }
  }
  if (active && thread == 0) {
    acc_t& state = static_cast<acc_t*>(task.momentum1)[slice];
    state += sum / acc_t(task.slice_numel);
    step_sizes[threadIdx.x >> task.team_shift] = step.learning_rate / (sqrt(state) + step.eps);
  }
  __syncthreads();
  return active ? step_sizes[threadIdx.x >> task.team_shift] : acc_t(0);
}

// Steps `count` neighbouring elements of a slice by a team, kCount of a thread at a time.
template <typename core_t, OptimizerType kType, int kCount>
__device__ __forceinline__ void step_elements(const SteppedCore<core_t>& core,
                                              const OptimizerArguments& params,
                                              const StepConstants<accumulator_t<core_t>>& step,
                                              accumulator_t<core_t> step_size, int thread,
                                              int team_shift, uint32_t count) {
  const uint32_t stride = uint32_t{kCount} << team_shift;
#pragma unroll 1
  for (uint32_t e = thread * kCount; e < count; e += kAhead * stride) {
    SteppedElements<core_t, kType, kCount> elements[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (e + i * stride < count) elements[i].load(core, e + i * stride);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (e + i * stride < count) {
        elements[i].step_and_store(core, params, step, step_size, e + i * stride);
      }
    }
  }
}

// A slice that was not looked up keeps its values and its state, also under Adam.
template <typename core_t, OptimizerType kType, typename Group>
__global__ void __launch_bounds__(kStepThreads, (kStepBlocks<core_t, kType>))
    optimizer_step_kernel(const __grid_constant__ Group group,
                          const __grid_constant__ OptimizerArguments params) {
  using acc_t = accumulator_t<core_t>;
  const int core = group.core_of(blockIdx.x);
  const StepTask& task = group.tasks[core];
  const int64_t team =
      (int64_t{blockIdx.x - group.first_block[core]} * kStepThreads + threadIdx.x) >>
      task.team_shift;
  const int thread = threadIdx.x & ((1 << task.team_shift) - 1);
  const int64_t slice = task.parts == 1 ? team : team / task.parts;
  const int64_t first_of_part = (team - slice * task.parts) * task.part_numel;
  // The kernel starts while the one before it ends.
  wait_for_previous_kernel();
  const bool active = slice < task.num_slices && task.touched[slice] != 0;
  const StepConstants<acc_t> step = load_step_constants<kType>(
      params, acc_t(group.log_beta1), acc_t(group.log_beta2), group.first + core);
  acc_t step_size = 0;
  if constexpr (kType == OptimizerType::kRowWiseAdagrad) {
    step_size = row_wise_step_size(step, task, slice, thread, active);
  }
  const int64_t count = min(task.part_numel, task.slice_numel - first_of_part);
  if (!active || count <= 0) return;
  const SteppedCore<core_t> stepped(task, slice * task.slice_numel + first_of_part);
  const auto step_part = [&]<int kCount>() {
    step_elements<core_t, kType, kCount>(stepped, params, step, step_size, thread, task.team_shift,
                                         static_cast<uint32_t>(count));
  };
  if (task.vector == kVector) {
    step_part.template operator()<kVector>();
  } else {
    step_part.template operator()<1>();
  }
}

__global__ void count_step_kernel(int64_t* steps) { ++*steps; }

// Whether slices are whole vectors, in the core, its gradient and its state.
bool has_vectors(const CoreTask& task, int64_t element_bytes) {
  const uintptr_t addresses =
      reinterpret_cast<uintptr_t>(task.values) | reinterpret_cast<uintptr_t>(task.gradient) |
      reinterpret_cast<uintptr_t>(task.momentum1) | reinterpret_cast<uintptr_t>(task.momentum2);
  return task.slice_numel % kVector == 0 && addresses % (kVector * element_bytes) == 0;
}

// Fills in how a core is shared out. Returns its blocks.
int64_t share_out(const CoreTask& core, OptimizerType type, int64_t element_bytes, StepTask* task) {
  static_cast<CoreTask&>(*task) = core;
  task->vector = has_vectors(core, element_bytes) ? kVector : 1;
  const int64_t units = core.slice_numel / task->vector;
  task->team_shift = 0;
  while (1 << task->team_shift < kStepThreads && units > int64_t{kAhead} << task->team_shift) {
    ++task->team_shift;
  }
  // One team sums up a slice; otherwise a thread has no more than it loads at once.
  task->parts = type == OptimizerType::kRowWiseAdagrad
                    ? 1
                    : ceil_div(units, int64_t{kAhead} << task->team_shift);
  task->part_numel = ceil_div(units, task->parts) * task->vector;
  return ceil_div(core.num_slices * task->parts, kStepThreads >> task->team_shift);
}

template <int kCores>
cudaError_t launch_step(ElementType core_type, const CoreGroup& cores,
                        const OptimizerArguments& params, bool dependent_launch,
                        cudaStream_t stream) {
  StepGroup<kCores> group{};
  group.count = cores.count;
  group.first = cores.first;
  group.log_beta1 = std::log(params.beta1);
  group.log_beta2 = std::log(params.beta2);
  const int64_t element_bytes = core_type == ElementType::kFloat64 ? 8 : 4;
  for (int i = 0; i < cores.count; ++i) {
    group.first_block[i + 1] =
        group.first_block[i] + static_cast<uint32_t>(share_out(cores.tasks[i], params.type,
                                                               element_bytes, &group.tasks[i]));
  }
  const auto launch = [&]<typename core_t, OptimizerType kType>() {
    return launch_kernel(optimizer_step_kernel<core_t, kType, StepGroup<kCores>>,
                         int64_t{group.first_block[cores.count]}, kStepThreads, 0, dependent_launch,
                         stream, group, params);
  };
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    switch (params.type) {
      case OptimizerType::kSgd:
        return launch.template operator()<core_t, OptimizerType::kSgd>();
      case OptimizerType::kAdagrad:
        return launch.template operator()<core_t, OptimizerType::kAdagrad>();
      case OptimizerType::kRowWiseAdagrad:
        return launch.template operator()<core_t, OptimizerType::kRowWiseAdagrad>();
      case OptimizerType::kAdam:
        return launch.template operator()<core_t, OptimizerType::kAdam>();
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace

cudaError_t launch_count_step(int64_t* steps, cudaStream_t stream) {
  count_step_kernel<<<1, 1, 0, stream>>>(steps);
  return cudaGetLastError();
}

cudaError_t launch_optimizer_step(ElementType core_type, const CoreGroup& group,
                                  const OptimizerArguments& params, cudaStream_t stream) {
  if (group.count == 0) return cudaSuccess;
  bool dependent_launch = false;
  const cudaError_t error = read_dependent_launch(&dependent_launch);
  if (error != cudaSuccess) return error;
  return group.count <= kFewCores
             ? launch_step<kFewCores>(core_type, group, params, dependent_launch, stream)
             : launch_step<kCoresPerLaunch>(core_type, group, params, dependent_launch, stream);
}

}  // namespace flowtt::cuda
