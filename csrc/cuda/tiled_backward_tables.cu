// Which tables the tiled backward pass takes, and as what.

#include "tiled_backward_tables.h"

#include <algorithm>

#include "tiled_backward_launch.cuh"
#include "tiled_backward_pairs.h"
#include "tiled_tilings.h"

namespace flowtt::cuda {
namespace {

// Sizes of slices are counted in 32 bits.
constexpr int64_t kMaxSliceElements = int64_t{1} << 30;
constexpr int64_t kMaxSize = int64_t{1} << 14;  // of ranks and q
// Items of work, of up to 2^20 tiles, are numbered in 32 bits.
constexpr int64_t kMaxBlocks = int64_t{1} << 11;

bool is_aligned(const void* data, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Rows are numbered in vectors of four floats: kExact needs 32 bits for them.
constexpr int64_t kMaxVectors = int64_t{1} << 32;

// A table as the kernels see it: sizes of three cores.
TiledFeature three_core_sizes(const TableShape& shape) {
  TiledFeature feature{};
  feature.num_cores = static_cast<int16_t>(shape.num_cores);
  for (int k = 0; k < shape.num_cores; ++k) {
    feature.q[k] = static_cast<int16_t>(shape.q[k]);
    if (k > 0) feature.r[k - 1] = static_cast<int16_t>(shape.r[k]);
  }
  GradientTargets none{};
  set_three_gradient_cores(&feature, &none);
  if (feature.num_cores == 4) set_three_cores(&feature);
  return feature;
}

}  // namespace

GradientShape find_gradient_shape(const BackwardPlan& plan, const StridedMatrix& grad_output,
                                  int64_t output_rows) {
  bool even = grad_output.type == ElementType::kFloat32 && grad_output.column_stride == 1 &&
              grad_output.row_stride % 2 == 0 && is_aligned(grad_output.data, 8);
  bool exact = grad_output.row_stride % 4 == 0 && is_aligned(grad_output.data, 16) &&
               output_rows * (grad_output.row_stride / 4) < kMaxVectors;
  bool blocks = exact && plan.tables.rank == kGradientRank;
  for (int32_t f = 0; f < plan.group.count; ++f) {
    const TiledFeature& feature = plan.group.features[f];
    blocks = blocks && feature.q[0] % kGradientQ == 0 && feature.q[1] == kGradientQ &&
             feature.q[2] == kGradientColumns && feature.r[0] % kGradientRank == 0 &&
             feature.r[1] % kGradientRank == 0 && feature.output_column % 4 == 0;
    exact = exact && feature.q[0] == kGradientQ && feature.q[1] == kGradientQ &&
            feature.q[2] == plan.tables.rank / kGradientQ && feature.r[0] == plan.tables.rank &&
            feature.r[1] == plan.tables.rank && feature.output_column % 4 == 0;
    even = even && feature.q[2] % 2 == 0 && feature.r[1] % 2 == 0 &&
           (feature.r[0] % 2 == 0 || feature.cores[1] == nullptr) && feature.output_column % 2 == 0;
    for (int k = 0; k < 3; ++k) {
      const bool aligned =
          is_aligned(feature.cores[k], 16) && is_aligned(plan.targets[f].gradients[k], 16);
      exact = exact && aligned;
      blocks = blocks && aligned && feature.cores[k] != nullptr;
      even = even && is_aligned(feature.cores[k], 8) && is_aligned(plan.targets[f].gradients[k], 8);
    }
  }
  if (plan.tables.cores == 2) {
    return even ? GradientShape::kTwoCoresEven : GradientShape::kTwoCoresAny;
  }
  if (!even) return GradientShape::kAny;
  return exact    ? GradientShape::kExact
         : blocks ? GradientShape::kExactBlocks
                  : GradientShape::kEven;
}

bool has_tiled_backward(ElementType core_type, int64_t output_rows, const TableShape& shape,
                        int shared_limit) {
  if (core_type == ElementType::kFloat64 || shape.num_cores < 2) return false;
  if (output_rows >= kLoneLookup) return false;  // entries have 31 bits for them
  for (int k = 0; k < shape.num_cores; ++k) {
    if (shape.p[k] > kMaxTiledFactor || shape.q[k] > kMaxSize || shape.r[k] > kMaxSize ||
        shape.slice_numel(k) > kMaxSliceElements) {
      return false;
    }
  }
  if (shape.num_cores == 4 &&
      (shape.p[2] * shape.p[3] > kMaxTiledFactor || shape.q[2] * shape.q[3] > kMaxSize ||
       pair_elements(shape) > kMaxPairElements)) {
    return false;
  }
  const GradientClass tables = gradient_class(shape);
  const size_t needed =
      tables.rank == 16 ? kBackwardSharedBytes<16> : kBackwardSharedBytes<kGradientRank>;
  return tables.blocks <= kMaxBlocks && needed <= static_cast<size_t>(shared_limit);
}

GradientClass gradient_class(const TableShape& shape) {
  const TiledFeature feature = three_core_sizes(shape);
  GradientClass tables{};
  tables.cores = shape.num_cores;
  // Two cores have kernels of one rank.
  tables.rank = tables.cores == 2 || std::max(feature.r[0], feature.r[1]) > 16 ? kGradientRank : 16;
  tables.blocks = GradientBlocks(feature.q, feature.r, tables.rank).all();
  return tables;
}

void set_three_gradient_cores(TiledFeature* feature, GradientTargets* targets) {
  if (feature->num_cores != 2) return;
  // Rows of core 1 are those of P: as many of them as fill a tile belong to one j1.
  int16_t q2 = kGradientQ;
  while (feature->q[0] % q2 != 0) --q2;
  feature->cores[2] = feature->cores[1];
  feature->p[2] = feature->p[1];
  feature->q[2] = feature->q[1];
  feature->r[1] = feature->r[0];
  targets->gradients[2] = targets->gradients[1];
  targets->touched[2] = targets->touched[1];
  feature->cores[1] = nullptr;
  feature->p[1] = 1;
  feature->q[1] = q2;
  feature->q[0] = static_cast<int16_t>(feature->q[0] / q2);
  feature->r[0] = 1;
  targets->gradients[1] = nullptr;
  targets->touched[1] = nullptr;
  feature->num_cores = 3;
}

}  // namespace flowtt::cuda
