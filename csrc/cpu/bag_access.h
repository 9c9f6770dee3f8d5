// Reads indices and offsets of either integer type, and says where the bags are.
#pragma once

#include <cstdint>

#include "tt_shape.h"

namespace flowtt {

__attribute__((always_inline)) static inline int64_t offset_at(const BagBatch& bags, int64_t i) {
  return bags.offsets_are_int64 ? static_cast<const int64_t*>(bags.offsets)[i]
                                : static_cast<const int32_t*>(bags.offsets)[i];
}

__attribute__((always_inline)) static inline int64_t index_at(const BagBatch& bags, int64_t i) {
  return bags.indices_are_int64 ? static_cast<const int64_t*>(bags.indices)[i]
                                : static_cast<const int32_t*>(bags.indices)[i];
}

// Bags of a feature. Without pooling each of its lookups is one, and the offsets only tell where
// the feature's lookups begin.
__attribute__((always_inline)) static inline int64_t num_bags(const BagBatch& bags,
                                                              int64_t feature) {
  const int64_t first = feature * bags.batch_size;
  return bags.pooling_mode == PoolingMode::kNone
             ? offset_at(bags, first + bags.batch_size) - offset_at(bags, first)
             : bags.batch_size;
}

// First lookup of bag `bag` of a feature; with bag = num_bags, where its lookups end.
__attribute__((always_inline)) static inline int64_t bag_begin(const BagBatch& bags,
                                                               int64_t feature, int64_t bag) {
  const int64_t first = feature * bags.batch_size;
  return bags.pooling_mode == PoolingMode::kNone ? offset_at(bags, first) + bag
                                                 : offset_at(bags, first + bag);
}

// The bag's row of the output.
__attribute__((always_inline)) static inline int64_t output_row(const BagBatch& bags,
                                                                int64_t feature, int64_t bag) {
  return bags.pooling_mode == PoolingMode::kNone ? bag_begin(bags, feature, bag) : bag;
}

}  // namespace flowtt
