#include "packed_cores.h"

#include <algorithm>
#include <utility>

#include "cuda/tiled_packed_cores.h"

namespace flowtt {
namespace {

using cuda::PackedSizes;
using cuda::TiledFeature;
using cuda::Tiling;

struct PackedLayout {
  std::vector<PackedTable> tables;
  PackedSizes sizes;
};

PackedLayout place_tables(const EmbeddingBagArguments& arguments) {
  PackedLayout layout{};
  for (size_t table = 0; table < arguments.tables.size(); ++table) {
    PackedTable& placed = layout.tables.emplace_back();
    // Of any lookup, however many rows it writes.
    if (!cuda::find_tiling(arguments.core_type, /*output_rows=*/0, arguments.tables[table],
                           &placed.tiling)) {
      continue;
    }
    placed.tiling.exact = false;  // which is about the rows that are written
    placed.description = describe_table(arguments, static_cast<int32_t>(table));
    cuda::set_packed_slices(placed.tiling, &placed.description);
    PackedSizes sizes = layout.sizes;
    cuda::place_packed_cores(&placed.description, &sizes);
    placed.is_packed = cuda::is_addressable(sizes);
    if (placed.is_packed) layout.sizes = sizes;
  }
  return layout;
}

int64_t packed_bytes(const PackedLayout& layout, bool three_products) {
  cuda::WorkspaceLayout memory(nullptr);
  cuda::take_packed_cores(layout.sizes, three_products, &memory);
  return memory.bytes();
}

void pack_tables(const CudaCall& call, const PackedLayout& layout, bool three_products,
                 void* data) {
  cuda::WorkspaceLayout memory(data);
  const cuda::PackedCores packed = cuda::take_packed_cores(layout.sizes, three_products, &memory);
  // Tables of one tiling share launches.
  std::vector<const PackedTable*> tables;
  for (const PackedTable& table : layout.tables) {
    if (table.is_packed) tables.push_back(&table);
  }
  std::stable_sort(tables.begin(), tables.end(),
                   [](const PackedTable* left, const PackedTable* right) {
                     return left->tiling < right->tiling;
                   });
  for (size_t first = 0; first < tables.size();) {
    const Tiling& tiling = tables[first]->tiling;
    cuda::TiledGroup group{};
    while (first < tables.size() && tables[first]->tiling == tiling &&
           group.count < cuda::kTiledFeaturesPerLaunch) {
      group.features[group.count++] = tables[first++]->description;
    }
    call.check(
        cuda::launch_packing(call.arguments().core_type, tiling, group, packed, call.stream()));
  }
}

}  // namespace

bool needs_three_products(ElementType core_type, ElementType output_type, bool allow_tf32) {
  if (allow_tf32) return false;
  return core_type == ElementType::kFloat32 || output_type == ElementType::kFloat32;
}

TiledFeature describe_table(const EmbeddingBagArguments& arguments, int32_t table) {
  const TableShape& shape = arguments.tables[table];
  const int64_t first_core = arguments.first_core[table];
  TiledFeature result{};
  result.num_cores = static_cast<int16_t>(shape.num_cores);
  for (int k = 0; k < shape.num_cores; ++k) {
    result.cores[k] = arguments.core_data[first_core + k];
    result.p[k] = static_cast<int32_t>(shape.p[k]);
    result.q[k] = static_cast<int16_t>(shape.q[k]);
    if (k > 0) result.r[k - 1] = static_cast<int16_t>(shape.r[k]);
  }
  result.num_embeddings = shape.num_embeddings;
  result.embedding_dim = static_cast<int32_t>(shape.embedding_dim);
  result.table = table;
  return result;
}

Tensor pack_cores(const CudaCall& call, ElementType output_type, bool allow_tf32) {
  const EmbeddingBagArguments& arguments = call.arguments();
  const bool three_products = needs_three_products(arguments.core_type, output_type, allow_tf32);
  const PackedLayout layout = place_tables(arguments);
  Tensor packed = call.empty(packed_bytes(layout, three_products), ScalarType::Byte);
  pack_tables(call, layout, three_products, packed.mutable_data_ptr());
  return packed;
}

void repack_cores(const CudaCall& call, ElementType output_type, bool allow_tf32,
                  const Tensor& packed) {
  const EmbeddingBagArguments& arguments = call.arguments();
  const bool three_products = needs_three_products(arguments.core_type, output_type, allow_tf32);
  const PackedLayout layout = place_tables(arguments);
  pack_tables(
      call, layout, three_products,
      parse_packed_cores(arguments, packed, packed_bytes(layout, three_products), three_products));
}

void KeptCores::find_cores(TiledFeature* feature) const {
  const TiledFeature& placed = tables[feature->table].description;
  std::copy(placed.packed, placed.packed + kMaxCores, feature->packed);
  std::copy(placed.exponents, placed.exponents + kMaxCores, feature->exponents);
}

KeptCores parse_kept_cores(const EmbeddingBagArguments& arguments, const Tensor& packed,
                           bool three_products) {
  PackedLayout layout = place_tables(arguments);
  cuda::WorkspaceLayout memory(
      parse_packed_cores(arguments, packed, packed_bytes(layout, three_products), three_products));
  return {std::move(layout.tables), cuda::take_packed_cores(layout.sizes, three_products, &memory)};
}

}  // namespace flowtt
