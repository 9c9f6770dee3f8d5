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

#include <algorithm>
#include <cmath>

#include "chain.cuh"
#include "dependent_launch.cuh"
#include "device_attributes.h"
#include "launchers.h"
#include "optimizer_elements.cuh"
#include "tensor_core.cuh"

namespace flowtt::cuda {
namespace {

constexpr int kStepThreads = 256;
constexpr int64_t kMaxBlocksPerCore = 1024;
// Elements that are moved at once, if slices are whole vectors of so many.
constexpr int kVector = 4;
// Vectors of a thread that are loaded before the first is stored.
constexpr int kAhead = 2;

// Blocks of a multiprocessor: with as many, all slices of a few tables are under way at once.
template <typename core_t>
constexpr int kStepBlocks = sizeof(core_t) == 8 ? 1 : 4;

// How a core is shared out, beside the core itself.
struct StepTask : CoreTask {
  int64_t parts;  // of a slice, a team each
  uint32_t first_block;
  int32_t team_shift;  // log2 of the threads of a team
  int32_t vector;      // kVector or 1
};

// The cores of a launch, the same in all but their number. The parameters of few cores stay below
// the 4 KB that every driver takes at full speed.
template <int kCores>
struct StepGroup {
  int32_t count;
  int32_t first;  // the first one's number in the call
  uint32_t blocks;
  double log_beta1;
  double log_beta2;
  StepTask tasks[kCores];
};
constexpr int kFewCores = 48;
static_assert(sizeof(StepGroup<kFewCores>) + sizeof(OptimizerArguments) <= 4096 - 32);
static_assert(sizeof(StepGroup<kCoresPerLaunch>) + sizeof(OptimizerArguments) <= 16384);

// A thread's place among those that step one core.
struct TeamMember {
  int64_t team;
  int thread;  // of the team

  __device__ __forceinline__ TeamMember(const StepTask& task, int64_t first_team)
      : team(first_team + (threadIdx.x >> task.team_shift)),
        thread(threadIdx.x & ((1 << task.team_shift) - 1)) {}
};

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
  const acc_t result = step_sizes[threadIdx.x >> task.team_shift];
  __syncthreads();  // before the next slices' are written
  return active ? result : acc_t(0);
}

// Steps elements [begin, end) of a core by a team, kCount elements of a thread at a time.
template <typename core_t, int kCount>
__device__ __forceinline__ void step_elements(const StepTask& task,
                                              const OptimizerArguments& params,
                                              const StepConstants<accumulator_t<core_t>>& step,
                                              accumulator_t<core_t> step_size, int thread,
                                              int64_t begin, int64_t end) {
  const int64_t stride = int64_t{kCount} << task.team_shift;
  for (int64_t e = begin + thread * kCount; e < end; e += kAhead * stride) {
    SteppedElements<core_t, kCount> elements[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (e + i * stride < end) elements[i].load(task, params.type, e + i * stride);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (e + i * stride < end) {
        elements[i].step_and_store(task, params, step, step_size, e + i * stride);
      }
    }
  }
}

// A slice that was not looked up keeps its values and its state, also under Adam.
template <typename core_t, typename Group>
__global__ void __launch_bounds__(kStepThreads, (kStepBlocks<core_t>))
    optimizer_step_kernel(const __grid_constant__ Group group,
                          const __grid_constant__ OptimizerArguments params) {
  using acc_t = accumulator_t<core_t>;
  int core = 0;
  while (core + 1 < group.count && group.tasks[core + 1].first_block <= blockIdx.x) ++core;
  const StepTask& task = group.tasks[core];
  const uint32_t end_block =
      core + 1 < group.count ? group.tasks[core + 1].first_block : group.blocks;
  const int64_t teams_per_block = kStepThreads >> task.team_shift;
  const int64_t stride = (end_block - task.first_block) * teams_per_block;
  const int64_t teams = task.num_slices * task.parts;
  const int64_t units = task.slice_numel / task.vector;
  const int64_t part_numel = (units + task.parts - 1) / task.parts * task.vector;
  // The kernel starts while the one before it ends.
  wait_for_previous_kernel();
  const StepConstants<acc_t> step = load_step_constants(params, acc_t(group.log_beta1),
                                                        acc_t(group.log_beta2), group.first + core);
  // The same number of rounds for all threads, which meet where slices are summed.
  for (int64_t first = (blockIdx.x - task.first_block) * teams_per_block; first < teams;
       first += stride) {
    const TeamMember member(task, first);
    const int64_t slice = task.parts == 1 ? member.team : member.team / task.parts;
    const bool active = member.team < teams && task.touched[slice] != 0;
    acc_t step_size = 0;
    if (params.type == OptimizerType::kRowWiseAdagrad) {
      step_size = row_wise_step_size(step, task, slice, member.thread, active);
    }
    if (!active) continue;
    const int64_t slice_begin = slice * task.slice_numel;
    const int64_t part = member.team - slice * task.parts;
    const int64_t begin = slice_begin + part * part_numel;
    const int64_t end = min(begin + part_numel, slice_begin + task.slice_numel);
    if (task.vector == kVector) {
      step_elements<core_t, kVector>(task, params, step, step_size, member.thread, begin, end);
    } else {
      step_elements<core_t, 1>(task, params, step, step_size, member.thread, begin, end);
    }
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
  // One team sums up a slice.
  task->parts = type == OptimizerType::kRowWiseAdagrad
                    ? 1
                    : std::max<int64_t>(units / (int64_t{kAhead} << task->team_shift), 1);
  const int64_t teams_per_block = kStepThreads >> task->team_shift;
  const int64_t blocks = (core.num_slices * task->parts + teams_per_block - 1) / teams_per_block;
  return std::clamp<int64_t>(blocks, 1, kMaxBlocksPerCore);
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
    group.tasks[i].first_block = group.blocks;
    group.blocks += static_cast<uint32_t>(
        share_out(cores.tasks[i], params.type, element_bytes, &group.tasks[i]));
  }
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    return launch_kernel(optimizer_step_kernel<core_t, StepGroup<kCores>>, int64_t{group.blocks},
                         kStepThreads, 0, dependent_launch, stream, group, params);
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
