// Where packed cores lie, and the launch that packs them apart from a lookup.

#include "tiled_packed_cores.h"

#include "device_attributes.h"
#include "tiled_tilings.h"

namespace flowtt::cuda {

void set_packed_slices(const Tiling& tiling, TiledFeature* feature) {
  set_three_cores(feature);
  for (int k = 0; k < feature->num_cores; ++k) {
    feature->slice_halves[k] = static_cast<uint32_t>(packed_slice_halves(tiling, *feature, k));
  }
}

void place_packed_cores(TiledFeature* feature, PackedSizes* sizes) {
  for (int k = 0; k < feature->num_cores; ++k) {
    feature->packed[k] = static_cast<uint32_t>(sizes->halves);
    feature->exponents[k] = static_cast<int32_t>(sizes->exponents);
    sizes->halves +=
        round_up(int64_t{feature->p[k]} * feature->slice_halves[k], kWorkspaceAlignment / 2);
    sizes->exponents += feature->p[k];
  }
}

bool is_addressable(const PackedSizes& sizes) {
  // Slices have 64 halves or more, but for the one of the third core that two do not have, so that
  // their exponents are fewer.
  return sizes.halves <= kMaxPackedHalves;
}

PackedCores take_packed_cores(const PackedSizes& sizes, bool three_products,
                              WorkspaceLayout* layout) {
  PackedCores packed{};
  packed.high = layout->take<__half>(sizes.halves);
  packed.low = layout->take<__half>(three_products ? sizes.halves : 0);
  packed.exponents = layout->take<int32_t>(sizes.exponents);
  return packed;
}

cudaError_t launch_packing(ElementType core_type, const Tiling& tiling, const TiledGroup& group,
                           const PackedCores& packed, cudaStream_t stream) {
  TiledPlan plan{};
  plan.tiling = tiling;
  plan.core_type = core_type;
  plan.three_products = packed.low != nullptr;
  plan.group = group;
  for (int32_t f = 0; f < group.count; ++f) {
    TiledFeature& feature = plan.group.features[f];
    feature.first_pack_block = plan.group.pack_blocks;
    plan.group.pack_blocks += static_cast<int32_t>(packing_pieces(tiling, feature));
  }
  const cudaError_t error = read_attribute(cudaDevAttrMultiProcessorCount, &plan.multiprocessors);
  if (error != cudaSuccess) return error;
  TiledWorkspace workspace{};
  workspace.packed_high = packed.high;
  workspace.packed_low = packed.low;
  workspace.exponents = packed.exponents;
  // Not a dependent launch, as blocks that pack do not wait for what is ahead.
  return launch_tiling({plan,
                        {},
                        {},
                        workspace,
                        {},
                        /*packs_cores=*/true,
                        /*clears_sums=*/false,
                        /*ends_sums=*/false,
                        stream});
}

}  // namespace flowtt::cuda
