// Prefix products that several blocks need, in a bounded buffer that stays in the L2 cache. A tile
// with a single prefix that goes on in the lookups before or behind it looks here: the first block
// to do so computes the product and publishes it, later ones reload it. Nobody waits: a product
// that is not there yet, or whose place is taken by another prefix, is computed.

#pragma once

#include "tiled_segments.cuh"
#include "wide_queue.cuh"
#include "wide_tile.cuh"

namespace flowtt::cuda {

// Rests in shared memory.
class Checkpoints {
 public:
  // `bytes`: the largest product of the launch's features, all parts.
  __device__ __forceinline__ void start(int32_t bytes) {
    bytes_ = bytes;
    last_ = claimed_key_ = published_key_ = 0;
  }

  // Where the product of a tile's only prefix comes from; called by one thread, always the same.
  // `entries` of the tile start at `begin`.
  __device__ __forceinline__ ProductSource find(const TiledWorkspace& workspace,
                                                const TiledRange& range, const Segments& segments,
                                                int32_t feature, int32_t prefixes, uint32_t i1,
                                                uint32_t i2, int32_t begin, int32_t entries,
                                                int32_t* checkpoint) {
    const unsigned long long last = last_;
    last_ = 0;
    if (prefixes != 1 || (range.disabled & kSharingDisabled) != 0) {
      return ProductSource::kComputed;
    }
    const unsigned long long key = static_cast<unsigned long long>(feature + 1) << 40 |
                                   static_cast<unsigned long long>(i2) << 20 | i1 << 2;
    last_ = key;
    if (last == key) return ProductSource::kLeftBehind;
    if ((range.disabled & kCheckpointsDisabled) != 0 || workspace.checkpoints == nullptr) {
      return ProductSource::kComputed;
    }
    const auto goes_on = [&](int32_t entry) {
      return entry >= segments.first_entry[feature] && entry < segments.first_entry[feature + 1] &&
             (workspace.entries[entry].outer & 0xffffu) == i1 && workspace.entries[entry].i2 == i2;
    };
    if (!goes_on(begin - 1) && !goes_on(begin + entries)) return ProductSource::kComputed;
    const int32_t places = min(kCheckpointTags, static_cast<int32_t>(kCheckpointBytes) / bytes_);
    const int32_t place = static_cast<int32_t>((key * 0x9e3779b97f4a7c15ull >> 40) % places);
    *checkpoint = place;
    const unsigned long long found = atomicCAS(tags(workspace) + place, 0ull, key | kClaimed);
    if (found == 0) {
      claimed_place_ = place;
      claimed_key_ = key;
      return ProductSource::kPublished;
    }
    if (found != (key | kReady)) return ProductSource::kComputed;
    __threadfence();  // what was published before the tag is visible
    return ProductSource::kReloaded;
  }

  // Both by the whole block, from and to the place of the tile's first prefix.
  __device__ __forceinline__ void publish(const TiledWorkspace& workspace, int32_t checkpoint,
                                          const WideArena& arena, int parts) const {
    for (int i = 0; i < parts; ++i) {
      const uint32_t source = arena.products + i * arena.product_part_bytes;
      for (uint32_t byte = threadIdx.x * 16; byte < arena.product_bytes; byte += blockDim.x * 16) {
        *place(workspace, checkpoint, i * arena.product_bytes + byte) =
            load_shared_vector(source + byte);
      }
    }
  }
  __device__ __forceinline__ void reload(const TiledWorkspace& workspace, int32_t checkpoint,
                                         const WideArena& arena, int parts) const {
    for (int i = 0; i < parts; ++i) {
      const uint32_t target = arena.products + i * arena.product_part_bytes;
      for (uint32_t byte = threadIdx.x * 16; byte < arena.product_bytes; byte += blockDim.x * 16) {
        store_shared_vector(target + byte,
                            __ldcg(place(workspace, checkpoint, i * arena.product_bytes + byte)));
      }
    }
  }

  // The product that was claimed has been published by the calling thread, which is the one that
  // finds. Before it finds again; then the claim may be that of another tile.
  __device__ __forceinline__ void note_published() {
    published_place_ = claimed_place_;
    published_key_ = claimed_key_;
    claimed_key_ = 0;
  }

  // Called by the thread that finds, after a barrier behind publish().
  __device__ __forceinline__ void announce(const TiledWorkspace& workspace) {
    if (published_key_ == 0) return;
    __threadfence();
    atomicExch(tags(workspace) + published_place_, published_key_ | kReady);
    published_key_ = 0;
  }

 private:
  static constexpr unsigned long long kClaimed = 1;
  static constexpr unsigned long long kReady = 2;

  static __device__ __forceinline__ unsigned long long* tags(const TiledWorkspace& workspace) {
    return reinterpret_cast<unsigned long long*>(workspace.control + kQueueWords);
  }
  __device__ __forceinline__ uint4* place(const TiledWorkspace& workspace, int32_t checkpoint,
                                          uint32_t byte) const {
    return reinterpret_cast<uint4*>(static_cast<char*>(workspace.checkpoints) +
                                    static_cast<int64_t>(checkpoint) * bytes_ + byte);
  }

  int32_t bytes_;
  int32_t claimed_place_;
  int32_t published_place_;
  unsigned long long last_;         // prefix of the tile planned last, if it has only one
  unsigned long long claimed_key_;  // to be published with its tile
  unsigned long long published_key_;
};

// With fusion disabled, products go through the block's scratch in device memory and back.
__device__ __forceinline__ void pass_through_memory(const TiledWorkspace& workspace,
                                                    const WideArena& arena, int32_t prefixes,
                                                    int parts, int32_t scratch_bytes) {
  uint4* const scratch = reinterpret_cast<uint4*>(static_cast<char*>(workspace.scratch) +
                                                  static_cast<int64_t>(blockIdx.x) * scratch_bytes);
  const uint32_t part_units = prefixes * arena.product_bytes / 16;
  const uint32_t units = part_units * parts;
  for (uint32_t unit = threadIdx.x; unit < units; unit += blockDim.x) {
    const uint32_t part = unit / part_units;
    __stcg(scratch + unit, load_shared_vector(arena.products + part * arena.product_part_bytes +
                                              (unit - part * part_units) * 16));
  }
  __syncthreads();
  for (uint32_t unit = threadIdx.x; unit < units; unit += blockDim.x) {
    const uint32_t part = unit / part_units;
    store_shared_vector(
        arena.products + part * arena.product_part_bytes + (unit - part * part_units) * 16,
        __ldcg(scratch + unit));
  }
  __syncthreads();
}

}  // namespace flowtt::cuda
