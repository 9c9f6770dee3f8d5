// Prefix products that several warps use, in a buffer of bounded size that stays in L2: whoever
// computes a heavy prefix first leaves it there for the others. Nobody waits for anybody: a warp
// that finds no finished product computes it itself.

#pragma once

#include "tiled_queue.cuh"

namespace flowtt::cuda {

inline constexpr int kMaxCheckpoints = 512;
static_assert(kMaxQueues + 2 * kMaxCheckpoints <= kSharedSlotsWord);

enum class CheckpointState { kReady, kOwned, kOthers };

// The place of one prefix: its tag in `control` is 0, its key once somebody computes it, and its
// key | 1 when the product is there. By whole warps.
template <typename Chain>
class Checkpoint {
 public:
  // `first`, `second`: where the packed slices start, in bytes.
  __device__ __forceinline__ Checkpoint(const TiledWorkspace& workspace, uint32_t first,
                                        uint32_t second)
      : key_(static_cast<uint64_t>(first) << 32 | second | 2) {
    constexpr uint32_t kPlaces =
        kCheckpointBytes / kBytes < kMaxCheckpoints ? kCheckpointBytes / kBytes : kMaxCheckpoints;
    const uint32_t hash =
        first / Chain::kFirstSlice * 0x9e3779b1u ^ second / Chain::kSecondSlice * 0x85ebca6bu;
    const uint32_t place = (hash >> 8) % kPlaces;
    tag_ = reinterpret_cast<unsigned long long*>(workspace.control + kMaxQueues) + place;
    product_ = static_cast<char*>(workspace.checkpoints) + place * kBytes +
               threadIdx.x % 32 * sizeof(uint4);
  }

  // kOwned: the caller is to compute and to publish it.
  __device__ __forceinline__ CheckpointState find() const {
    uint64_t seen = 0;
    if (threadIdx.x % 32 == 0) {
      seen = load_acquire(tag_);
      // Only what load_acquire has seen ready may be read.
      if (seen == 0 && atomicCAS(tag_, 0ull, key_) != 0) seen = key_;
    }
    seen = __shfl_sync(kAllLanes, seen, 0);
    __syncwarp();
    return seen == 0            ? CheckpointState::kOwned
           : seen == (key_ | 1) ? CheckpointState::kReady
                                : CheckpointState::kOthers;
  }

  __device__ __forceinline__ void load(typename Chain::Prefix& prefix) const {
#pragma unroll
    for (int i = 0; i < Chain::kParts * Chain::kSteps2; ++i) {
      uint32_t (&words)[4] = prefix.words[i / Chain::kSteps2][i % Chain::kSteps2];
      const uint4 v = __ldcg(reinterpret_cast<const uint4*>(product_ + i * 512));
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
  }

  __device__ __forceinline__ void publish(const typename Chain::Prefix& prefix) const {
#pragma unroll
    for (int i = 0; i < Chain::kParts * Chain::kSteps2; ++i) {
      const uint32_t (&words)[4] = prefix.words[i / Chain::kSteps2][i % Chain::kSteps2];
      __stcg(reinterpret_cast<uint4*>(product_ + i * 512),
             make_uint4(words[0], words[1], words[2], words[3]));
    }
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) store_release(tag_, key_ | 1);
  }

 private:
  static constexpr uint32_t kBytes = Chain::kParts * Chain::kPrefixData;

  unsigned long long key_;
  unsigned long long* tag_;
  char* product_;
};

}  // namespace flowtt::cuda
