// The host side of the sort: how lookups are cut into chunks, and its first and last launch.

#pragma once

#include "tiled_clearing.cuh"
#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {

// Fills in how the ids of a feature are divided and which bins its lookups are sorted into, at most
// so many. Returns how many are used, rounded up as TiledRange::bins is.
int32_t set_sort_order(int32_t most_bins, TiledFeature* feature);

// Of a range of the batch: the length that all of its bags have, if they may have one.
void set_bag_length(const BagBatch& batch, TiledRange* range);

// As in TiledRange.
int32_t choose_chunk_shift(int64_t lookups, int32_t multiprocessors);

// Chunks of a range of so many lookups, at most.
int32_t max_chunks(const TiledPlan& plan, int64_t lookups);

// The sums of the range, if they can be cleared as a whole; otherwise launch_scatter clears those
// that rows are added to one by one.
ClearedVectors whole_sums(const TiledLaunch& launch);

// What later kernels of the launch count in.
ClearedVectors counters_of(const TiledLaunch& launch);

// The launches that are the same for all tables. cleared: what is to be zeros after them.
cudaError_t launch_count(const TiledLaunch& launch);
cudaError_t launch_starts(const TiledLaunch& launch);

}  // namespace flowtt::cuda
