// Packed cores that a caller keeps between lookups: those of all tables that have a tiling, one
// table after the other, in a layout that depends on the tables, the cores' type and the number of
// products alone.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments.h"
#include "cuda/tiled_forward.h"
#include "cuda_call.h"
#include "stable_torch.h"

namespace flowtt {

// Whether operands are kept in two parts of fp16, which costs three products. Cores of 16 bits have
// no second part, but their intermediates have; an output of 16 bits would not show it.
bool needs_three_products(ElementType core_type, ElementType output_type, bool allow_tf32);

// What the tiled kernels are told of a table, whichever feature looks it up.
cuda::TiledFeature describe_table(const EmbeddingBagArguments& arguments, int32_t table);

// Packs the cores, which later changes of them do not reach.
Tensor pack_cores(const CudaCall& call, ElementType output_type, bool allow_tf32);

// The same, in the place of what pack_cores returned for cores of the same shapes and types.
void repack_cores(const CudaCall& call, ElementType output_type, bool allow_tf32,
                  const Tensor& packed);

struct PackedTable {
  bool is_packed;  // otherwise it has no tiling, or no room was left
  cuda::Tiling tiling;
  cuda::TiledFeature description;  // with the places of the packed cores
};

// What was packed, as a lookup finds it.
struct KeptCores {
  std::vector<PackedTable> tables;  // all of the call
  cuda::PackedCores memory;

  // Sets the places of its table's packed cores.
  void find_cores(cuda::TiledFeature* feature) const;
};

// Checks that `packed` has the size, type and place of what pack_cores returned.
KeptCores parse_kept_cores(const EmbeddingBagArguments& arguments, const Tensor& packed,
                           bool three_products);

}  // namespace flowtt
