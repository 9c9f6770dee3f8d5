// What becomes of a core slice's summed gradient: a dense gradient, or an optimizer step.
//
// The steps are those of FBGEMM's table-batched embeddings, one "row" being one core slice.
#pragma once

#include "cpu/kernel_interface.h"
#include "cpu/simd/element_conversion.h"
#include "cpu/simd/transpose.h"
#include "cpu/simd/vector.h"

namespace flowtt {
namespace {

FLOWTT_INLINE float square_root(float value) { return __builtin_sqrtf(value); }
FLOWTT_INLINE double square_root(double value) { return __builtin_sqrt(value); }

// weight -= step, all [count], in the accumulation type.
template <typename A>
FLOWTT_INLINE void optimizer_step(const SliceUpdate& update, int64_t slice, const A* gradient,
                                  A* weight) {
  const int64_t count = update.slice_numel;
  const A rate = static_cast<A>(update.learning_rate);
  const A eps = static_cast<A>(update.eps);
  A* momentum1 = static_cast<A*>(update.momentum1);
  A* momentum2 = static_cast<A*>(update.momentum2);
  switch (update.optimizer) {
    case OptimizerType::kSgd:
      for (int64_t i = 0; i < count; ++i) {
        weight[i] -= rate * gradient[i];
      }
      return;
    case OptimizerType::kAdagrad:
      momentum1 += slice * count;
      for (int64_t i = 0; i < count; ++i) {
        momentum1[i] += gradient[i] * gradient[i];
        weight[i] -= rate * gradient[i] / (square_root(momentum1[i]) + eps);
      }
      return;
    case OptimizerType::kRowWiseAdagrad: {
      double squares = 0;
      for (int64_t i = 0; i < count; ++i) {
        squares += static_cast<double>(gradient[i]) * static_cast<double>(gradient[i]);
      }
      momentum1[slice] += static_cast<A>(squares / static_cast<double>(count));
      const A multiplier = rate / (square_root(momentum1[slice]) + eps);
      for (int64_t i = 0; i < count; ++i) {
        weight[i] -= multiplier * gradient[i];
      }
      return;
    }
    case OptimizerType::kAdam: {
      momentum1 += slice * count;
      momentum2 += slice * count;
      const A beta1 = static_cast<A>(update.beta1);
      const A beta2 = static_cast<A>(update.beta2);
      const A rest1 = static_cast<A>(1 - update.beta1);
      const A rest2 = static_cast<A>(1 - update.beta2);
      const A correction1 = static_cast<A>(update.correction1);
      const A correction2 = static_cast<A>(update.correction2);
      const A decay = static_cast<A>(update.weight_decay);
      for (int64_t i = 0; i < count; ++i) {
        momentum1[i] = beta1 * momentum1[i] + rest1 * gradient[i];
        momentum2[i] = beta2 * momentum2[i] + rest2 * gradient[i] * gradient[i];
        const A direction =
            momentum1[i] / correction1 / (square_root(momentum2[i] / correction2) + eps);
        weight[i] -= rate * (direction + decay * weight[i]);
      }
      return;
    }
  }
}

// scratch: A [2 * slice_numel].
template <typename T, typename A>
void update_slice(const SliceUpdate& update, int64_t slice, int64_t slot, void* scratch) {
  const int64_t count = update.slice_numel;
  A* gradient = static_cast<A*>(scratch);
  A* other = gradient + count;
  __builtin_memcpy(gradient, static_cast<const A*>(update.partials[0]) + slot * count,
                   static_cast<unsigned long>(count) * sizeof(A));
  for (int64_t n = 1; n < update.num_partials; ++n) {
    add_to(gradient, static_cast<const A*>(update.partials[n]) + slot * count, count);
  }
  if (update.transposed_rows != 0) {
    transpose(update.transposed_rows, count / update.transposed_rows, gradient, other);
    A* turned = other;
    other = gradient;
    gradient = turned;
  }
  if (update.dense_gradient != nullptr) {
    store_elements(gradient, static_cast<T*>(update.dense_gradient) + slice * count, count);
    return;
  }
  T* weights = static_cast<T*>(update.core) + slice * count;
  if constexpr (__is_same(T, A)) {
    optimizer_step(update, slice, gradient, weights);
  } else {
    load_elements(weights, other, count);
    optimizer_step(update, slice, gradient, other);
    store_elements(other, weights, count);
  }
}

}  // namespace
}  // namespace flowtt
