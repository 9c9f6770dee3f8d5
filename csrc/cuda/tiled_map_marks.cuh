// The launch that marks ids in their map (tiled_id_map.cuh).
//
// A block first puts the marks of its lookups together in shared memory, word by word of the map,
// so that a word of hot ids gets one atomic operation from each block and not from each lookup.

#pragma once

#include "tiled_id_map.cuh"
#include "tiled_lookup_checks.cuh"
#include "tiled_side_work.cuh"

namespace flowtt::cuda {

// A thread's lookups are kPrepareThreads apart.
inline constexpr int kMarkedPerThread = (1 << kMaxMapChunkShift) / kPrepareThreads;
static_assert(kMarkedPerThread <= kBatch);

// In shared memory: words of the map that the block's lookups have bits of, found by hash.
struct MarkScratch {
  static constexpr int kPlacesShift = kMaxMapChunkShift + 1;
  static constexpr uint32_t kPlaces = 1u << kPlacesShift;
  static constexpr uint32_t kNoWord = ~0u;

  uint32_t words[kPlaces];  // number in the map, or kNoWord
  // What the block's lookups make of the word; from the second barrier on, what it was before.
  uint32_t bits[kPlaces];
  SortedChunk chunk;

  // Called by all threads; a barrier must follow.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t i = 0; i < kPlaces; i += kPrepareThreads) {
      words[i + threadIdx.x] = kNoWord;
      bits[i + threadIdx.x] = 0;
    }
  }
  // The place of a word. *is_new: the thread is the first that asks for it.
  __device__ __forceinline__ uint32_t find(uint32_t word, bool* is_new) {
    uint32_t place = word * 0x9e3779b1u >> (32 - kPlacesShift);
    for (;;) {
      uint32_t found = *static_cast<volatile uint32_t*>(&words[place]);
      if (found == kNoWord) found = atomicCAS(&words[place], kNoWord, word);
      *is_new = found == kNoWord;
      if (*is_new || found == word) return place;
      place = (place + 1) & (kPlaces - 1);
    }
  }
};

// Marks the ids of a chunk, and notes which of its lookups were the first of an id: one of all that
// have it. Called by all threads of a block.
__device__ __forceinline__ void mark_chunk(MarkScratch& scratch, const TiledGroup& group,
                                           const BagBatch& batch, const TiledRange& range,
                                           const TiledWorkspace& workspace, int32_t number) {
  scratch.clear();
  const SortedChunk chunk = find_chunk(scratch.chunk, group, batch, range, number);
  if (chunk.feature < 0) return;
  const TiledFeature& feature = group.features[chunk.feature];
  const IdSplitter splitter(feature);
  const int32_t existing = chunk.count - static_cast<int32_t>(threadIdx.x);
  const int64_t first = range.first_lookup + chunk.first + threadIdx.x;
  int64_t ids[kBatch];
  load_ids(ids, batch, first, existing);
  __syncthreads();
  uint32_t places[kMarkedPerThread];
  uint32_t seen[kMarkedPerThread];
  bool is_first[kMarkedPerThread];  // of its id, in the block
  bool writes[kMarkedPerThread];    // the word
  bool is_bad = false;
#pragma unroll
  for (int i = 0; i < kMarkedPerThread; ++i) {
    is_first[i] = writes[i] = false;
    places[i] = seen[i] = 0;
    if (i * kPrepareThreads >= existing) continue;
    const bool exists = has_row(feature, ids[i]);
    is_bad |= !exists;
    const MapPlace place =
        find_map_place(feature, splitter.split(exists ? static_cast<uint32_t>(ids[i]) : 0));
    seen[i] = place.seen();
    places[i] = scratch.find(place.part * kPartWords + place.word, &writes[i]);
    const uint32_t before = atomicOr(&scratch.bits[places[i]], seen[i]);
    is_first[i] = (before & seen[i]) == 0;
    if (!is_first[i] && (before & seen[i] << 1) == 0) {
      atomicOr(&scratch.bits[places[i]], seen[i] << 1);
    }
  }
  __syncthreads();
  wait_for_previous_kernel();
  uint32_t* const map = reinterpret_cast<uint32_t*>(workspace.id_map);
  uint32_t before[kMarkedPerThread];
#pragma unroll
  for (int i = 0; i < kMarkedPerThread; ++i) {
    if (writes[i]) before[i] = atomicOr(map + scratch.words[places[i]], scratch.bits[places[i]]);
  }
#pragma unroll
  for (int i = 0; i < kMarkedPerThread; ++i) {
    if (!writes[i]) continue;
    const uint32_t own = scratch.bits[places[i]];
    // Ids that other blocks have too.
    const uint32_t shared = (before[i] & own & kSeenBits) << 1;
    if ((shared & ~(before[i] | own)) != 0) atomicOr(map + scratch.words[places[i]], shared);
    scratch.bits[places[i]] = before[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMarkedPerThread; ++i) {
    const uint32_t lanes =
        __ballot_sync(kAllLanes, is_first[i] && (scratch.bits[places[i]] & seen[i]) == 0);
    const int32_t item = i * kPrepareThreads + static_cast<int32_t>(threadIdx.x);
    if (item % 32 == 0 && item < 1 << range.chunk_shift) {
      workspace.first_lookups[(static_cast<int64_t>(number) << range.chunk_shift | item) / 32] =
          lanes;
    }
  }
  if (is_bad) {
    find_bad_lookup(feature, batch, first, range.first_lookup + chunk.first + chunk.count);
  }
}

// The grid: `marking` blocks, a chunk each, then those of the side work.
template <typename Packing>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    tiled_map_mark_kernel(const __grid_constant__ TiledGroup group,
                          const __grid_constant__ BagBatch batch,
                          const __grid_constant__ TiledRange range,
                          const __grid_constant__ TiledWorkspace workspace,
                          const __grid_constant__ PooledOutput output,
                          const __grid_constant__ SideWork work, int32_t marking) {
  union Scratch {
    MarkScratch marks;
    typename Packing::Scratch packing;
  };
  __shared__ Scratch scratch;
  allow_dependent_launch();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < marking) {
    mark_chunk(scratch.marks, group, batch, range, workspace, block);
  } else {
    do_side_work<Packing>(work, group, batch, range, workspace, output, &scratch.packing,
                          block - marking);
  }
  // The end of this launch is to mean the end of the one before.
  wait_for_previous_kernel();
}

}  // namespace flowtt::cuda
