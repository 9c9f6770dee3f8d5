// The launches that read a map of ids (tiled_id_map.cuh): one counts them, the other finds the row
// of each lookup and writes down the rows, as folding does.

#pragma once

#include "tiled_id_map.cuh"
#include "tiled_lookup_bags.cuh"
#include "tiled_window.cuh"

namespace flowtt::cuda {

// Writes down the ranks of a tile of parts.
__global__ void __launch_bounds__(kRankThreads)
    tiled_map_rank_kernel(const __grid_constant__ TiledGroup group,
                          const __grid_constant__ TiledWorkspace workspace) {
  constexpr int kWarps = kRankThreads / 32;
  __shared__ uint32_t warp_rows[kWarps];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const uint32_t tile = blockIdx.x;
  const uint32_t part = tile * kPartsPerTile + threadIdx.x;
  allow_dependent_launch();
  wait_for_previous_kernel();
  const uint32_t own = MapPart(workspace.id_map, part).count([](uint32_t) { return ~0u; });
  const uint32_t up_to = inclusive_sum(own);
  if (lane == 31) warp_rows[warp] = up_to;
  __syncthreads();
  const uint32_t of_warp = lane < kWarps ? warp_rows[lane] : 0;
  const uint32_t before = __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0);
  if (own != 0) {
    reinterpret_cast<uint32_t*>(workspace.id_map)[part * kPartWords + kMapWords] =
        before + up_to - own;
  }
  if (warp != 0) return;
  const uint32_t all = __reduce_add_sync(kAllLanes, of_warp);
  const uint32_t rows = all & 0xffffu;
  const uint32_t shared = all >> 16;
  if (rows == 0) return;
  int f = 0;
  while (f + 1 < group.count && group.features[f + 1].first_part <= tile * kPartsPerTile) ++f;
  uint32_t* const counters[3] = {workspace.control + kFoldedRowsWord + f,
                                 workspace.control + kUsedSlotsWord,
                                 workspace.control + kUsedSingleSlotsWord};
  const uint32_t counts[3] = {rows, shared, rows - shared};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (lane == i) {
      reinterpret_cast<uint32_t*>(workspace.tile_ranks + tile)[i] =
          atomicAdd(counters[i], counts[i]);
    }
  }
}

// Numbers of the row that a lookup shares with others, or has alone.
struct MappedRow {
  uint32_t row;  // of the feature
  bool is_shared;
  uint32_t rank;  // of the rows that are shared, or of those that are not

  __device__ __forceinline__ MappedRow(const TiledWorkspace& workspace, const MapPlace& place) {
    const MapPart part(workspace.id_map, place.part);
    const uint4 tile =
        __ldcg(reinterpret_cast<const uint4*>(workspace.tile_ranks) + place.part / kPartsPerTile);
    const uint32_t before = part.words[kMapWords] + part.count([&](uint32_t word) {
      return word < place.word ? ~0u : word == place.word ? place.seen() - 1 : 0u;
    });
    uint32_t own = part.words[0];
#pragma unroll
    for (uint32_t i = 1; i < kMapWords; ++i) own = i == place.word ? part.words[i] : own;
    const uint32_t rows = before & 0xffffu;
    const uint32_t shared = before >> 16;
    row = tile.x + rows;
    is_shared = (own & place.seen() << 1) != 0;
    rank = is_shared ? tile.y + shared : tile.z + rows - shared;
  }
};

// In shared memory.
struct FindScratch {
  SortedChunk chunk;
  BagMarks marks;
};

// Finds the rows of a chunk's lookups. Of each row the first lookup, which tiled_map_mark_kernel
// has noted, writes it down. Called by all threads of a block.
__device__ __forceinline__ void find_rows(FindScratch& scratch, const TiledGroup& group,
                                          const BagBatch& batch, const TiledRange& range,
                                          const TiledWorkspace& workspace, int32_t number,
                                          bool rows_are_fp16) {
  const SortedChunk chunk = find_chunk(scratch.chunk, group, batch, range, number);
  if (chunk.feature < 0) return;
  const TiledFeature& feature = group.features[chunk.feature];
  const IdSplitter splitter(feature);
  const int64_t first = range.first_lookup + chunk.first;
  int64_t ids[kBatch];
  load_ids(ids, batch, first + threadIdx.x, chunk.count - static_cast<int32_t>(threadIdx.x));
  const bool equal_bags = find_bags(scratch.marks, chunk, group, batch, range);
  wait_for_previous_kernel();
  // Rows that lookups share take slots first.
  const uint32_t all_shared = __ldcg(workspace.control + kUsedSlotsWord);
  const uint32_t single_slots = workspace.row_slots - min(all_shared, workspace.row_slots);
#pragma unroll 1
  for (int32_t item = threadIdx.x; item < chunk.count; item += kPrepareThreads) {
    const LookupDigits digits =
        splitter.split(has_row(feature, ids[0]) ? static_cast<uint32_t>(ids[0]) : 0);
    const MappedRow row(workspace, find_map_place(feature, digits));
    const uint32_t lanes = __ldcg(workspace.first_lookups +
                                  (static_cast<int64_t>(number) << range.chunk_shift | item) / 32);
    bool writes = (lanes >> item % 32 & 1) != 0;
    uint32_t entry = chunk.first_entry + row.row;
    uint32_t slot = kAddedRow;
    if (workspace.single_slots == kAnySlots) {
      slot = entry;
    } else if (!row.is_shared) {
      if (row.rank < single_slots) slot = workspace.row_slots - 1 - row.rank;
    } else if (row.rank < workspace.row_slots) {
      slot = row.rank;
    } else if (!writes) {
      // There is no slot for the row: each of its lookups gets a row of its own, which is added.
      writes = true;
      entry =
          chunk.first_entry + atomicAdd(workspace.control + kFoldedRowsWord + chunk.feature, 1u);
    }
    const uint32_t position = chunk.first + item;
    const uint32_t sample =
        find_sample(scratch.marks, chunk, equal_bags, batch, range, item) & ~kLoneLookup;
    const GroupedLookup lookup{digits.outer, digits.i2, slot, sample};
    LookupScale scale = load_scale(lookup, feature, workspace, nullptr, 0);
    if (workspace.folded_factors != nullptr) {
      scale.weight =
          find_factor(batch, feature, first + item, sample, equal_bags ? chunk.bag_length : 0);
    }
    if (writes) {
      reinterpret_cast<uint4*>(workspace.folded_rows)[entry] =
          make_uint4(lookup.outer, lookup.i2, slot, sample);
      if (workspace.folded_factors != nullptr) workspace.folded_factors[entry] = scale.weight;
    }
    const float factor = factor_of(scale) * (rows_are_fp16 ? 1 << kBufferedRowShift : 1);
    workspace.row_of_lookup[position] =
        make_uint2(slot, slot != kAddedRow ? __float_as_uint(factor) : 0u);
#pragma unroll
    for (int i = 1; i < kBatch; ++i) ids[i - 1] = ids[i];
  }
}

// A chunk for each block.
__global__ void __launch_bounds__(kPrepareThreads, 3)
    tiled_map_find_kernel(const __grid_constant__ TiledGroup group,
                          const __grid_constant__ BagBatch batch,
                          const __grid_constant__ TiledRange range,
                          const __grid_constant__ TiledWorkspace workspace, bool rows_are_fp16) {
  __shared__ FindScratch scratch;
  allow_dependent_launch();
  find_rows(scratch, group, batch, range, workspace, static_cast<int32_t>(blockIdx.x),
            rows_are_fp16);
  // The end of this launch is to mean the end of those before.
  wait_for_previous_kernel();
}

}  // namespace flowtt::cuda
