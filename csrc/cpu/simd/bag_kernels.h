// Bags: pooling rows into outputs, and the way back from output gradients.
#pragma once

#include "cpu/bag_access.h"
#include "cpu/kernel_interface.h"
#include "cpu/simd/element_conversion.h"
#include "cpu/simd/transpose.h"
#include "cpu/simd/vector.h"

namespace flowtt {
namespace {

FLOWTT_INLINE void store_as(ElementType type, const float* source, void* target, int64_t offset,
                            int64_t count) {
  switch (type) {
    case ElementType::kFloat32:
      return store_elements(source, static_cast<float*>(target) + offset, count);
    case ElementType::kFloat16:
      return store_elements(source, static_cast<Half*>(target) + offset, count);
    case ElementType::kBFloat16:
      return store_elements(source, static_cast<BFloat16*>(target) + offset, count);
    case ElementType::kFloat64:
      return;  // goes with double cores only
  }
}

FLOWTT_INLINE void store_as(ElementType, const double* source, void* target, int64_t offset,
                            int64_t count) {
  store_elements(source, static_cast<double*>(target) + offset, count);
}

// target[j] = source[j * stride], converted.
template <typename T>
FLOWTT_INLINE void load_strided(const T* source, int64_t stride, float* target, int64_t count) {
  if (stride == 1) {
    load_elements(source, target, count);
    return;
  }
  for (int64_t j = 0; j < count; ++j) {
    target[j] = to_float(source[j * stride]);
  }
}

FLOWTT_INLINE void load_row(const StridedMatrix& matrix, int64_t row, float* target,
                            int64_t count) {
  const int64_t offset = row * matrix.row_stride;
  switch (matrix.type) {
    case ElementType::kFloat32:
      return load_strided(static_cast<const float*>(matrix.data) + offset, matrix.column_stride,
                          target, count);
    case ElementType::kFloat16:
      return load_strided(static_cast<const Half*>(matrix.data) + offset, matrix.column_stride,
                          target, count);
    case ElementType::kBFloat16:
      return load_strided(static_cast<const BFloat16*>(matrix.data) + offset, matrix.column_stride,
                          target, count);
    case ElementType::kFloat64:
      return;
  }
}

FLOWTT_INLINE void load_row(const StridedMatrix& matrix, int64_t row, double* target,
                            int64_t count) {
  const double* source = static_cast<const double*>(matrix.data) + row * matrix.row_stride;
  for (int64_t j = 0; j < count; ++j) {
    target[j] = source[j * matrix.column_stride];
  }
}

template <typename A>
FLOWTT_INLINE void scale(A* values, A factor, int64_t count) {
  for_each_vector<A>(
      count, [&]<int W>(int64_t i) { store<A, W>(values + i, load<A, W>(values + i) * factor); });
}

FLOWTT_INLINE void prefetch_row(const void* row, int64_t bytes) {
  constexpr int64_t kCacheLine = 64;
  constexpr int64_t kMostLines = 8;  // the hardware prefetcher goes on from there
  const int64_t lines = (bytes + kCacheLine - 1) / kCacheLine;
  for (int64_t line = 0; line < (lines < kMostLines ? lines : kMostLines); ++line) {
    __builtin_prefetch(static_cast<const char*>(row) + line * kCacheLine);
  }
}

// sum [dim] (+)= weighted rows of the lookups [begin, end).
template <typename A>
FLOWTT_INLINE void sum_rows(const A* rows, const uint32_t* row_of, uint32_t first_row,
                            const A* weights, int64_t begin, int64_t end, int64_t dim, bool add,
                            A* sum) {
  constexpr int W = kLanes<A>;
  const auto columns = [&]<int V, int N>(int64_t column) {
    Vector<A, V> total[N];
    for (int n = 0; n < N; ++n) {
      total[n] = add ? load<A, V>(sum + column + n * V) : Vector<A, V>{};
    }
    for (int64_t i = begin; i < end; ++i) {
      const A* row = rows + static_cast<int64_t>(row_of[i] - first_row) * dim + column;
      if (weights == nullptr) {
        for (int n = 0; n < N; ++n) {
          total[n] += load<A, V>(row + n * V);
        }
      } else {
        for (int n = 0; n < N; ++n) {
          total[n] += weights[i] * load<A, V>(row + n * V);
        }
      }
    }
    for (int n = 0; n < N; ++n) {
      store<A, V>(sum + column + n * V, total[n]);
    }
  };
  int64_t column = 0;
  for (; column + 4 * W <= dim; column += 4 * W) {
    columns.template operator()<W, 4>(column);
  }
  for_each_vector<A>(
      dim, [&]<int V>(int64_t at) { columns.template operator()<V, 1>(at); }, column);
}

// scratch: A [2 * D].
template <typename A>
void pool_bags(const PoolArguments& arguments, int64_t first_bag, int64_t end_bag, void* scratch) {
  const BagBatch& bags = *arguments.bags;
  const int64_t dim = arguments.left_columns * arguments.right_columns;
  const int64_t segment_lookups = arguments.lookup_end - arguments.lookup_begin;
  const A* rows = static_cast<const A*>(arguments.rows);
  const A* weights = bags.per_sample_weights == nullptr
                         ? nullptr
                         : static_cast<const A*>(bags.per_sample_weights) + arguments.lookup_begin;
  A* sum = static_cast<A*>(scratch);
  A* turned = sum + dim;
  constexpr int64_t kAhead = 24;  // rows come from anywhere in the buffer, so fetch them early
  for (int64_t bag = first_bag; bag < end_bag; ++bag) {
    const int64_t bag_first = bag_begin(bags, arguments.feature, bag);
    const int64_t bag_last = bag_begin(bags, arguments.feature, bag + 1);
    if (bag_first == bag_last) {
      continue;  // the output starts as zeros
    }
    const bool from_before = bag_first < arguments.lookup_begin;
    const bool goes_on = bag_last > arguments.lookup_end;
    const int64_t begin = from_before ? 0 : bag_first - arguments.lookup_begin;
    const int64_t end = goes_on ? segment_lookups : bag_last - arguments.lookup_begin;
    for (int64_t i = begin + kAhead; i < end + kAhead && i < segment_lookups; ++i) {
      prefetch_row(rows + static_cast<int64_t>(arguments.row_of[i] - arguments.first_row) * dim,
                   dim * static_cast<int64_t>(sizeof(A)));
    }
    if (from_before) {
      __builtin_memcpy(sum, arguments.carried_in, static_cast<unsigned long>(dim) * sizeof(A));
    }
    sum_rows(rows, arguments.row_of, arguments.first_row, weights, begin, end, dim, from_before,
             sum);
    if (goes_on) {
      __builtin_memcpy(arguments.carried_out, sum, static_cast<unsigned long>(dim) * sizeof(A));
      continue;
    }
    if (bags.pooling_mode == PoolingMode::kMean) {
      scale(sum, A(1) / static_cast<A>(bag_last - bag_first), dim);
    }
    const A* result = sum;
    if (arguments.transposed_rows) {
      transpose(arguments.right_columns, arguments.left_columns, sum, turned);
      result = turned;
    }
    store_as(arguments.output_type, result, arguments.output,
             output_row(bags, arguments.feature, bag) * arguments.output_stride, dim);
  }
}

// scratch: A [D].
template <typename A>
void load_bag_gradients(const BagGradientArguments& arguments, int64_t first_bag, int64_t end_bag,
                        void* scratch) {
  const BagBatch& bags = *arguments.bags;
  const int64_t dim = arguments.left_columns * arguments.right_columns;
  const A* weights = static_cast<const A*>(bags.per_sample_weights);
  A* weight_of = static_cast<A*>(arguments.weight_of);
  for (int64_t bag = first_bag; bag < end_bag; ++bag) {
    const int64_t bag_first = bag_begin(bags, arguments.feature, bag);
    const int64_t bag_last = bag_begin(bags, arguments.feature, bag + 1);
    if (bag_first == bag_last) {
      continue;
    }
    A* target = static_cast<A*>(arguments.bag_gradients) + (bag - arguments.bag_begin) * dim;
    A* natural = arguments.transposed_rows ? static_cast<A*>(scratch) : target;
    load_row(arguments.grad_output, output_row(bags, arguments.feature, bag), natural, dim);
    if (bags.pooling_mode == PoolingMode::kMean) {
      scale(natural, A(1) / static_cast<A>(bag_last - bag_first), dim);
    }
    if (arguments.transposed_rows) {
      transpose(arguments.left_columns, arguments.right_columns, natural, target);
    }
    const int64_t begin = bag_first < arguments.lookup_begin ? arguments.lookup_begin : bag_first;
    const int64_t end = bag_last > arguments.lookup_end ? arguments.lookup_end : bag_last;
    const uint32_t slot = arguments.first_slot + static_cast<uint32_t>(bag - arguments.bag_begin);
    for (int64_t i = begin; i < end; ++i) {
      arguments.slot_of[i - arguments.lookup_begin] = slot;
    }
    if (weight_of != nullptr) {
      for (int64_t i = begin; i < end; ++i) {
        weight_of[i - arguments.lookup_begin] = weights[i];
      }
    }
  }
}

template <typename A>
void dot_rows(const DotArguments& arguments, int64_t begin, int64_t end) {
  const int64_t dim = arguments.dim;
  A* weights_grad = static_cast<A*>(arguments.weights_grad);
  for (int64_t i = begin; i < end; ++i) {
    const A* row = static_cast<const A*>(arguments.rows) +
                   static_cast<int64_t>(arguments.row_of[i] - arguments.first_row) * dim;
    const A* gradient = static_cast<const A*>(arguments.bag_gradients) +
                        static_cast<int64_t>(arguments.slot_of[i]) * dim;
    constexpr int W = kLanes<A>;
    Vector<A, W> partial = {};
    int64_t j = 0;
    for (; j + W <= dim; j += W) {
      partial += load<A, W>(row + j) * load<A, W>(gradient + j);
    }
    A dot = 0;
    for (int lane = 0; lane < W; ++lane) {
      dot += partial[lane];
    }
    for (; j < dim; ++j) {
      dot += row[j] * gradient[j];
    }
    weights_grad[i] = dot;
  }
}

}  // namespace
}  // namespace flowtt
