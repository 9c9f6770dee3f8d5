// Packed cores: where those of several tables lie, and their packing apart from any lookup.

#pragma once

#include "tiled_forward.h"
#include "workspace_layout.h"

namespace flowtt::cuda {

// Describes the feature as one of three cores, whose slices are packed for this tiling.
void set_packed_slices(const Tiling& tiling, TiledFeature* feature);

// Places the packed cores of the feature's table behind the others that `sizes` counts, and counts
// them too.
void place_packed_cores(TiledFeature* feature, PackedSizes* sizes);

// Whether kernels can address so many.
bool is_addressable(const PackedSizes& sizes);

PackedCores take_packed_cores(const PackedSizes& sizes, bool three_products,
                              WorkspaceLayout* layout);

// Packs the cores of tables that have one tiling. Of the features cores, packed slices and their
// places are set, each has a table of its own. Kernels ahead may still read what was packed before.
cudaError_t launch_packing(ElementType core_type, const Tiling& tiling, const TiledGroup& group,
                           const PackedCores& packed, cudaStream_t stream);

}  // namespace flowtt::cuda
