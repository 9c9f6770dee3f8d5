// Shapes of Tensor-Train embedding tables and of the bags looked up in them.
// Plain data, no torch: shared by the CPU and the CUDA kernels.
#pragma once

#include <cstdint>

namespace flowtt {

inline constexpr int kMinCores = 2;
inline constexpr int kMaxCores = 4;

// One table: core k is a contiguous tensor [p[k], r[k], q[k], r[k + 1]] with r[0] = r[num_cores]
// = 1. Row i = ((i1 * p2) + i2) * p3 + i3 of the table is G1[i1] G2[i2] G3[i3]; its column j = ((j1
// * q2) + j2) * q3 + j3.
struct TableShape {
  int32_t num_cores;
  int64_t num_embeddings;
  int64_t embedding_dim;  // product of q
  int64_t p[kMaxCores];
  int64_t q[kMaxCores];
  int64_t r[kMaxCores + 1];

  // Elements of one slice G_k[i_k].
  constexpr int64_t slice_numel(int k) const { return r[k] * q[k] * r[k + 1]; }
  constexpr int64_t core_numel(int k) const { return p[k] * slice_numel(k); }
};

// A feature reads one table and fills embedding_dim columns of the output from `column` on.
struct FeatureColumns {
  int32_t table;
  int64_t column;
};

// kNone: no pooling. Each lookup is a bag of its own, the row of the output has its number, and all
// features have the same column 0 and embedding_dim.
enum class PoolingMode : int32_t { kSum = 0, kMean = 1, kNone = 2 };

// Element types of cores, outputs and gradients. The accumulation type is double for kFloat64 and
// float for the others.
enum class ElementType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat64 = 3 };

// The bags of one call, feature-major as in a KeyedJaggedTensor: the lookups of bag (f, b) are
// indices[offsets[f * batch_size + b] : offsets[f * batch_size + b + 1]].
struct BagBatch {
  const void* indices;             // [nnz], int64 or int32
  const void* offsets;             // [num_features * batch_size + 1], int64 or int32
  const void* per_sample_weights;  // [nnz] in the accumulation type, or null
  bool indices_are_int64;
  bool offsets_are_int64;
  int64_t nnz;
  int64_t batch_size;
  int64_t num_features;
  PoolingMode pooling_mode;
};

// A [batch_size, total columns] matrix with any strides (in elements).
struct StridedMatrix {
  const void* data;
  ElementType type;
  int64_t row_stride;
  int64_t column_stride;
};

enum class OptimizerType : int32_t { kSgd = 0, kAdagrad = 1, kRowWiseAdagrad = 2, kAdam = 3 };

// learning_rate and iteration are read on the cores' device, so that a captured CUDA graph sees
// their current values. A step makes iteration one more before it uses it: 1 in the first step.
struct OptimizerArguments {
  OptimizerType type;
  const float* learning_rate;
  int64_t* iteration;
  double eps;
  double beta1;
  double beta2;
  double weight_decay;
  // 16-bit cores are rounded up or down with the probabilities that make up for the error on
  // average.
  bool stochastic_rounding;
};

}  // namespace flowtt
