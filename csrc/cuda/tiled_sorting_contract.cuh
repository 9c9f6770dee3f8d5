// The contraction that sorts its lookups itself: clusters of persistent blocks, whose warps take
// windows from the shared memory of their cluster. See tiled_share.cuh.

#pragma once

#include "tiled_contract.cuh"
#include "tiled_share.cuh"

namespace flowtt::cuda {

// In shared memory, before the block's slice of the run.
template <typename Storage, int kWarps>
struct __align__(128) SortingBlock {
  union {
    ShareScratch scratch;
    Storage warps[kWarps];
  };
  SortedRun run;
  int32_t used_slots;
};

// Which windows of a sorted run a warp works on: those of its block, then what other blocks of the
// cluster have left. Called by whole warps.
class RunQueue {
 public:
  __device__ __forceinline__ RunQueue(SortedRun& run, int32_t warps)
      : run_(run), warps_(warps), owner_(cluster_rank()), windows_(run.windows_of(owner_)) {
    window_ = static_cast<int32_t>(threadIdx.x / 32);
  }

  // False when there are no windows left.
  __device__ __forceinline__ bool take() { return has_own() || (run_.has_queues && steal()); }
  __device__ __forceinline__ bool has_own() const { return window_ < windows_; }
  // Draws the ticket of the next window, some time before it is needed by advance.
  __device__ __forceinline__ void ask() {
    if (run_.has_queues && threadIdx.x % 32 == 0) ticket_ = RemoteWord(&run_.taken, owner_).add(1);
  }
  __device__ __forceinline__ void advance() {
    window_ = warps_ + (run_.has_queues ? static_cast<int32_t>(__shfl_sync(kAllLanes, ticket_, 0))
                                        : window_);
  }
  // The block whose window it is, the window's first lookup in its slice, and how many there are.
  __device__ __forceinline__ uint32_t owner() const { return owner_; }
  __device__ __forceinline__ int32_t first() const { return window_ * run_.window; }
  __device__ __forceinline__ int32_t count() const {
    return min(run_.window, run_.lookups_of(owner_) - first());
  }

 private:
  // Looks at all queues at once; from the next block on, so that not all meet at one.
  __device__ __forceinline__ bool steal() {
    const uint32_t blocks = cluster_blocks();
    const uint32_t lane = threadIdx.x % 32;
    for (;;) {
      uint32_t distance = ~0u;
      if (lane < blocks) {
        const uint32_t other = (owner_ + lane) & (blocks - 1);
        const int32_t taken = warps_ + static_cast<int32_t>(RemoteWord(&run_.taken, other).load());
        if (taken < run_.windows_of(other)) distance = lane;
      }
      distance = __reduce_min_sync(kAllLanes, distance);
      if (distance == ~0u) return false;
      owner_ = (owner_ + distance) & (blocks - 1);
      windows_ = run_.windows_of(owner_);
      ask();
      advance();
      if (window_ < windows_) return true;
    }
  }

  SortedRun& run_;
  int32_t warps_;
  uint32_t owner_;
  int32_t windows_;
  int32_t window_;
  uint32_t ticket_ = 0;
};

// What a lookup's row is multiplied by.
__device__ __forceinline__ float lookup_weight(const BagBatch& batch, const TiledRange& range,
                                               const TiledFeature& feature,
                                               const GroupedLookup& lookup) {
  if (batch.per_sample_weights == nullptr && batch.pooling_mode != PoolingMode::kMean) return 1.0f;
  const float weight = load_sample_weight<float>(batch, range.first_lookup + lookup.position);
  if (batch.pooling_mode != PoolingMode::kMean || (lookup.sample & kLoneLookup) != 0) return weight;
  const int64_t bag = feature.feature * batch.batch_size + lookup.sample;
  return weight / static_cast<float>(bag_length(batch, bag));
}

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact, bool kFused, int kHeld,
          int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1)
    tiled_sorting_contract_kernel(const __grid_constant__ TiledGroup group,
                                  const __grid_constant__ BagBatch batch,
                                  const __grid_constant__ TiledRange range,
                                  const __grid_constant__ TiledWorkspace workspace,
                                  const __grid_constant__ PooledOutput output) {
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts, kHeld>;
  using Storage = WarpStorage<Chain, kFused>;
  using Block = SortingBlock<Storage, kWarps>;
  extern __shared__ __align__(128) char block_storage[];
  Block& block = *reinterpret_cast<Block*>(block_storage);
  GroupedLookup* const slice = reinterpret_cast<GroupedLookup*>(block_storage + sizeof(Block));
  const SortedRun& run = block.run;
  Storage& storage = block.warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;

  allow_dependent_launch();
  if (threadIdx.x == 0) block.used_slots = 0;
  const int32_t clusters = static_cast<int32_t>(gridDim.x / cluster_blocks());
  int32_t number = static_cast<int32_t>(blockIdx.x / cluster_blocks());
  bool others_may_read = false;
#pragma unroll 1
  while (sort_share<kWarps * 32>(block.scratch, block.run, slice, group, batch, range, number)) {
    wait_for_previous_kernel();
    clear_plan(storage.plan);
    const TiledFeature& feature = group.features[run.feature];
    RunQueue queue(block.run, kWarps);
    // The slice of core 2 that the first window begins with, loaded while that is planned; some
    // slice if there is none, so that no registers are kept for it while the next run is sorted.
    const uint32_t first_i2 =
        queue.has_own() ? load_shared_word(shared_address(&slice[queue.first()].i2)) : 0;
    uint32_t resident = feature.packed[1] * static_cast<uint32_t>(sizeof(__half)) +
                        first_i2 * Chain::kSecondSlice + Chain::second_offset(lane);
    typename Chain::Second second;
    Chain::load_second(second, workspace, resident);
    while (queue.take()) {
      const int count = queue.count();
      const uint4* const own =
          reinterpret_cast<const uint4*>(slice) + queue.first() + min(lane, count - 1);
      const uint4 entry = queue.owner() == cluster_rank() ? load_shared_vector(shared_address(own))
                                                          : RemoteVector(own, queue.owner()).load();
      const GroupedLookup lookup{entry.x, entry.y, entry.z, entry.w};
      const float weight = lookup_weight(batch, range, feature, lookup);
      const int first_entry =
          run.first_entry + static_cast<int32_t>(queue.owner()) * run.slice + queue.first();
      work_on_window<Chain, kExact, kFused>(storage, lookup, weight, feature, range, workspace,
                                            output, first_entry, count, &block.used_slots, queue,
                                            second, resident);
      queue.advance();
    }
    others_may_read = run.has_queues;
    number += clusters;
    __syncthreads();  // before the scratch is used again
  }
  // A grid counts as finished when its blocks are, whether they had anything to do or not.
  wait_for_previous_kernel();
  if (others_may_read) {
    arrive_at_cluster(false);
    wait_for_cluster();
  }
}

}  // namespace flowtt::cuda
