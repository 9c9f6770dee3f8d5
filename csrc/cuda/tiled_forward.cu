// Host side of the tiled forward path, and the pass that rounds sums to a 16-bit output.

#include "tiled_forward.h"

#include <algorithm>

#include "tiled_launch.cuh"

namespace flowtt::cuda {

// Defined in tiled_kernels_*.cu.
cudaError_t launch_tiling_16_4(const TiledLaunch& launch);
cudaError_t launch_tiling_16_8(const TiledLaunch& launch);
cudaError_t launch_tiling_32_4(const TiledLaunch& launch);
cudaError_t launch_tiling_32_8(const TiledLaunch& launch);

namespace {

constexpr int32_t kMaxTiledRank = 32;
constexpr int32_t kMaxTiledColumns = 8;  // q3
constexpr int64_t kAlignment = 256;

// Kernels address packed cores with 32 bits of bytes.
constexpr int64_t kMaxPackedHalves = (int64_t{1} << 31) - 1;

// Bounds of the workspace, whatever the batch.
constexpr int64_t kMaxLookupsPerRange = int64_t{1} << 20;
constexpr int64_t kMaxSumsBytes = int64_t{8} << 20;

// Batches of fewer lookups take the general kernel, which needs no packed cores.
constexpr int64_t kMinLookups = 1024;
constexpr int64_t kLargeChunksFrom = int64_t{1} << 18;  // lookups of a feature

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

int64_t round_up(int64_t value, int64_t multiple) { return ceil_div(value, multiple) * multiple; }

// Pieces of the workspace, one after the other.
class Layout {
 public:
  explicit Layout(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    T* piece = count == 0 ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return piece;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

int32_t max_chunks(const TiledPlan& plan, int64_t lookups) {
  return lookups == 0
             ? 0
             : static_cast<int32_t>(ceil_div(lookups, plan.chunk_lookups) + plan.group.count - 1);
}

int32_t starts_stride(const TiledPlan& plan) {
  int32_t bins = 0;
  for (int32_t f = 0; f < plan.group.count; ++f) {
    bins = std::max(bins, plan.group.features[f].p[1]);
  }
  return static_cast<int32_t>(round_up(bins + 1, 8));
}

TiledWorkspace place_workspace(const TiledPlan& plan, const PooledOutput& output, Layout* layout) {
  TiledWorkspace workspace{};
  workspace.packed_high = layout->take<__half>(plan.packed_halves);
  workspace.packed_low = layout->take<__half>(plan.three_products ? plan.packed_halves : 0);
  workspace.exponents = layout->take<int32_t>(plan.num_exponents);
  workspace.entries = layout->take<uint2>(plan.lookups_per_range);
  workspace.factors = layout->take<float>(plan.has_factors ? plan.lookups_per_range : 0);
  workspace.starts = layout->take<uint16_t>(
      static_cast<int64_t>(max_chunks(plan, plan.lookups_per_range)) * starts_stride(plan));
  workspace.sums =
      layout->take<float>(plan.has_sums ? plan.samples_per_range * output.row_stride : 0);
  return workspace;
}

// Rounds the sums of bags that do not have exactly one lookup; the others are stored already.
__global__ void __launch_bounds__(256)
    tiled_round_kernel(const __grid_constant__ TiledGroup group,
                       const __grid_constant__ BagBatch batch,
                       const __grid_constant__ TiledRange range, const float* sums,
                       const __grid_constant__ PooledOutput output) {
  const int64_t samples = range.end_sample - range.first_sample;
  const int64_t bag = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / 32;
  if (bag >= samples * group.count) return;
  const TiledFeature& feature = group.features[bag / samples];
  const int64_t row = bag % samples;
  const int64_t sample = range.first_sample + row;
  const int64_t offset = feature.feature * batch.batch_size + sample;
  const int64_t begin = load_index(batch.offsets, batch.offsets_are_int64, offset);
  const int64_t end = load_index(batch.offsets, batch.offsets_are_int64, offset + 1);
  if (end - begin == 1) return;
  for (int j = threadIdx.x % 32; j < feature.embedding_dim; j += 32) {
    const int64_t column = feature.output_column + j;
    store_element<float>(output.data, output.type, sample * output.row_stride + column,
                         sums[row * output.row_stride + column]);
  }
}

cudaError_t launch_tiling(const TiledLaunch& launch) {
  const Tiling& tiling = launch.plan.tiling;
  if (tiling.rank1 == 16) {
    return tiling.q3 == 4 ? launch_tiling_16_4(launch) : launch_tiling_16_8(launch);
  }
  return tiling.q3 == 4 ? launch_tiling_32_4(launch) : launch_tiling_32_8(launch);
}

}  // namespace

bool find_tiling(ElementType core_type, int64_t batch_size, const TableShape& shape,
                 Tiling* tiling) {
  if (core_type == ElementType::kFloat64 || shape.num_cores != 3) return false;
  if (batch_size >= int64_t{kLoneLookup}) return false;
  if (shape.q[0] > kMaxTiledQ || shape.q[1] > kMaxTiledQ || shape.q[2] > kMaxTiledColumns) {
    return false;
  }
  if (shape.r[1] > kMaxTiledRank || shape.r[2] > kMaxTiledRank) return false;
  if (shape.p[0] > kMaxTiledOuterFactor || shape.p[2] > kMaxTiledOuterFactor ||
      shape.p[1] > kMaxTiledBins) {
    return false;
  }
  const int64_t packed_halves = shape.p[0] * kMaxTiledQ * kMaxTiledRank +
                                shape.p[1] * kMaxTiledQ * kMaxTiledRank * kMaxTiledRank +
                                shape.p[2] * kMaxTiledColumns * kMaxTiledRank;
  if (packed_halves > kMaxPackedHalves / kTiledFeaturesPerLaunch) return false;
  tiling->rank1 = tiling->rank2 = std::max(shape.r[1], shape.r[2]) > 16 ? 32 : 16;
  tiling->q3 = shape.q[2] > 4 ? 8 : 4;
  tiling->exact = shape.q[0] == 4 && shape.q[1] == 4 && shape.q[2] == tiling->q3;
  return true;
}

bool tiling_pays(int64_t nnz) { return nnz >= kMinLookups; }

cudaError_t plan_tiled_forward(const BagBatch& batch, const PooledOutput& output, TiledPlan* plan) {
  plan->lookups_per_range = std::min(batch.nnz, kMaxLookupsPerRange);
  plan->chunk_lookups =
      batch.nnz / batch.num_features >= kLargeChunksFrom ? kLargeChunk : kSmallChunk;
  plan->has_factors =
      batch.per_sample_weights != nullptr || batch.pooling_mode == PoolingMode::kMean;
  plan->has_sums = output.type != ElementType::kFloat32;
  plan->samples_per_range = batch.batch_size;
  if (plan->has_sums) {
    const int64_t row_bytes = output.row_stride * static_cast<int64_t>(sizeof(float));
    plan->samples_per_range = std::clamp<int64_t>(kMaxSumsBytes / row_bytes, 1, batch.batch_size);
  }

  // Whole vectors need rows that are aligned to them.
  bool aligned = output.row_stride % 4 == 0 && reinterpret_cast<uintptr_t>(output.data) % 16 == 0;
  for (int32_t f = 0; f < plan->group.count; ++f) {
    aligned = aligned && plan->group.features[f].output_column % 4 == 0;
  }
  plan->tiling.exact = plan->tiling.exact && aligned;

  const Tiling& tiling = plan->tiling;
  plan->packed_halves = 0;
  plan->num_exponents = 0;
  plan->group.pack_blocks = 0;
  for (int32_t f = 0; f < plan->group.count; ++f) {
    TiledFeature& feature = plan->group.features[f];
    const bool shares = f > 0 && plan->group.features[f - 1].table == feature.table;
    feature.first_pack_block = plan->group.pack_blocks;
    if (shares) {
      const TiledFeature& owner = plan->group.features[f - 1];
      std::copy(owner.packed, owner.packed + 3, feature.packed);
      std::copy(owner.exponents, owner.exponents + 3, feature.exponents);
      continue;
    }
    const int64_t slices[3] = {int64_t{kMaxTiledQ} * tiling.rank1,
                               int64_t{kMaxTiledQ} * tiling.rank1 * tiling.rank2,
                               int64_t{tiling.q3} * tiling.rank2};
    for (int k = 0; k < 3; ++k) {
      feature.packed[k] = static_cast<uint32_t>(plan->packed_halves);
      feature.exponents[k] = static_cast<int32_t>(plan->num_exponents);
      plan->packed_halves += round_up(feature.p[k] * slices[k], kAlignment / 2);
      plan->num_exponents += feature.p[k];
    }
    plan->group.pack_blocks += static_cast<int32_t>(
        ceil_div(feature.p[1], tiling.rank2 == 16 ? kSecondSlicesPerBlock<16, 16>
                                                  : kSecondSlicesPerBlock<32, 32>) +
        ceil_div(int64_t{feature.p[0]} + feature.p[2], kPrepareWarps));
  }
  // A feature that shares its predecessor's cores has no packing blocks: the search for a block's
  // feature takes the last one that starts there, whose places are the same.
  Layout layout(nullptr);
  place_workspace(*plan, output, &layout);
  plan->workspace_bytes = static_cast<size_t>(layout.bytes());
  return cudaSuccess;
}

cudaError_t launch_tiled_forward(const TiledPlan& plan, const BagBatch& batch,
                                 const PooledOutput& output, void* workspace, cudaStream_t stream) {
  int device = 0;
  int major = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  Layout layout(workspace);
  const TiledWorkspace pieces = place_workspace(plan, output, &layout);
  TiledRange range{};
  range.chunk_lookups = plan.chunk_lookups;
  range.starts_stride = starts_stride(plan);
  bool packs_cores = true;
  for (int64_t sample = 0; sample < batch.batch_size; sample += plan.samples_per_range) {
    range.first_sample = sample;
    range.end_sample = std::min(batch.batch_size, sample + plan.samples_per_range);
    for (int64_t lookup = 0; lookup == 0 || lookup < batch.nnz; lookup += plan.lookups_per_range) {
      range.first_lookup = lookup;
      range.end_lookup = std::min(batch.nnz, lookup + plan.lookups_per_range);
      range.max_chunks = max_chunks(plan, range.end_lookup - range.first_lookup);
      error = launch_tiling(TiledLaunch{plan, batch, range, pieces, output, packs_cores,
                                        multiprocessors, major >= 9, stream});
      if (error != cudaSuccess) return error;
      packs_cores = false;
      if (batch.nnz == 0) break;
    }
    if (pieces.sums != nullptr) {
      const int64_t warps = (range.end_sample - range.first_sample) * plan.group.count;
      tiled_round_kernel<<<static_cast<unsigned>(ceil_div(warps, 8)), 256, 0, stream>>>(
          plan.group, batch, range, pieces.sums, output);
      error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace flowtt::cuda
