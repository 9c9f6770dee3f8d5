// The host side of maps of ids (tiled_id_map.cuh).

#pragma once

#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {

// Sets plan->map_parts, and where the parts of each feature begin, if the call is one for a map.
void plan_id_map(TiledPlan* plan);

// As in TiledRange, where lookups are not sorted but mapped.
int32_t choose_map_chunk_shift(int64_t lookups);

// Of a plan with a map: the pieces of its memory, one after the other.
struct MapBytes {
  int64_t parts;
  int64_t tiles;
  int64_t first_lookups;

  int64_t all() const { return parts + tiles + first_lookups; }
};
MapBytes map_bytes(const TiledPlan& plan);

// The launches that are the same for all tables: the first one, and those after the ids have been
// marked.
cudaError_t launch_map_clear(const TiledLaunch& launch);
cudaError_t launch_map_rows(const TiledLaunch& launch);

}  // namespace flowtt::cuda
