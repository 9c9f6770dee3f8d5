// The launches around the tiled backward pass of tables of four cores, and their memory.

#include "tiled_backward_pairs.h"

#include <algorithm>

#include "suffix_gradients.cuh"
#include "tiled_tilings.h"
#include "workspace_layout.h"

namespace flowtt::cuda {
namespace {

// Blocks of the launches over pairs.
constexpr int64_t kMinPairBlocks = 1024;
constexpr int kCastThreads = 256;

__global__ void __launch_bounds__(kCastThreads)
    cast_to_fp32_kernel(const void* from, ElementType type, int64_t count, float* to) {
  for (int64_t i = int64_t{blockIdx.x} * kCastThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kCastThreads) {
    to[i] = load_element<float>(from, type, i);
  }
}

// The memory of a table. Elements of cores 1 and 2 are there where they have to be cast.
struct PairMemory {
  float* cast[2];
  float* values;
  float* gradients;
  uint8_t* touched;
};

int64_t core_elements(const TiledFeature& feature, int k) {
  const int64_t left = k == 0 ? 1 : feature.r[k - 1];
  return int64_t{feature.p[k]} * left * feature.q[k] * feature.r[k];
}

int64_t pair_elements(const TiledFeature& feature) {
  return int64_t{feature.p[2]} * feature.p[3] * feature.r[1] * feature.q[2] * feature.q[3];
}

// Whether feature f of a group is the first of its table.
bool owns_table(const TiledGroup& group, int32_t f) {
  return f == 0 || group.features[f - 1].table != group.features[f].table;
}

PairMemory take_memory(const BackwardPlan& plan, int32_t f, WorkspaceLayout* layout) {
  const TiledFeature& feature = plan.group.features[f];
  PairMemory memory{};
  if (plan.core_type != ElementType::kFloat32) {
    for (int k = 0; k < 2; ++k) memory.cast[k] = layout->take<float>(core_elements(feature, k));
  }
  memory.values = layout->take<float>(pair_elements(feature));
  memory.gradients = layout->take<float>(pair_elements(feature));
  // Even if nobody asks: zeros times an infinite slice are not zeros.
  memory.touched = layout->take<uint8_t>(int64_t{feature.p[2]} * feature.p[3]);
  return memory;
}

PairedTable paired_table(const BackwardPlan& plan, int32_t f, const PairMemory& memory) {
  const TiledFeature& feature = plan.group.features[f];
  const GradientTargets& targets = plan.targets[f];
  PairedTable table{};
  table.third = feature.cores[2];
  table.fourth = feature.cores[3];
  table.core_type = plan.core_type;
  table.p3 = feature.p[2];
  table.p4 = feature.p[3];
  table.rows = feature.r[1] * feature.q[2];
  table.r3 = feature.r[2];
  table.q4 = feature.q[3];
  table.values = memory.values;
  table.gradients = memory.gradients;
  table.touched = memory.touched;
  table.third_gradient = targets.gradients[2];
  table.fourth_gradient = targets.gradients[3];
  table.third_touched = targets.touched[2];
  table.fourth_touched = targets.touched[3];
  return table;
}

unsigned ceil_blocks(int64_t size, int64_t of_block) {
  return static_cast<unsigned>(ceil_div(size, of_block));
}

// Parts that the work of `blocks` blocks is cut into, at most so many.
unsigned parts(int64_t blocks, int64_t most) {
  return static_cast<unsigned>(std::clamp<int64_t>(kMinPairBlocks / blocks, 1, most));
}

}  // namespace

int64_t pair_elements(const TableShape& shape) {
  return shape.p[2] * shape.p[3] * shape.r[2] * shape.q[2] * shape.q[3];
}

int64_t pair_bytes(const BackwardPlan& plan) {
  WorkspaceLayout layout(nullptr);
  for (int32_t f = 0; f < plan.group.count; ++f) {
    if (owns_table(plan.group, f)) take_memory(plan, f, &layout);
  }
  return layout.bytes();
}

cudaError_t launch_pairs(const BackwardPlan& plan, void* memory, cudaStream_t stream,
                         BackwardPlan* paired) {
  WorkspaceLayout layout(memory);
  *paired = plan;
  paired->core_type = ElementType::kFloat32;
  PairMemory pairs{};
  for (int32_t f = 0; f < plan.group.count; ++f) {
    TiledFeature& feature = paired->group.features[f];
    if (owns_table(plan.group, f)) {
      pairs = take_memory(plan, f, &layout);
      const PairedTable table = paired_table(plan, f, pairs);
      for (int k = 0; k < 2; ++k) {
        if (pairs.cast[k] == nullptr) continue;
        const int64_t elements = core_elements(feature, k);
        cast_to_fp32_kernel<<<ceil_blocks(elements, 4 * kCastThreads), kCastThreads, 0, stream>>>(
            feature.cores[k], plan.core_type, elements, pairs.cast[k]);
      }
      const dim3 grid(table.p3, parts(table.p3, table.p4));
      expand_pairs_kernel<<<grid, kPairThreads, 0, stream>>>(table);
    }
    GradientTargets& targets = paired->targets[f];
    for (int k = 0; k < 2; ++k) {
      if (pairs.cast[k] != nullptr) feature.cores[k] = pairs.cast[k];
    }
    feature.cores[2] = pairs.values;
    targets.gradients[2] = pairs.gradients;
    targets.touched[2] = pairs.touched;
    set_three_cores(&feature);
  }
  return cudaGetLastError();
}

cudaError_t launch_pair_gradients(const BackwardPlan& plan, void* memory, cudaStream_t stream) {
  WorkspaceLayout layout(memory);
  for (int32_t f = 0; f < plan.group.count; ++f) {
    if (!owns_table(plan.group, f)) continue;
    const PairedTable table = paired_table(plan, f, take_memory(plan, f, &layout));
    const dim3 third(table.p3, ceil_blocks(table.rows, kPairRows));
    third_gradient_kernel<<<third, kPairThreads, 0, stream>>>(table);
    const dim3 fourth(table.p4, parts(table.p4, table.p3));
    fourth_gradient_kernel<<<fourth, kPairThreads, 0, stream>>>(table);
  }
  return cudaGetLastError();
}

}  // namespace flowtt::cuda
