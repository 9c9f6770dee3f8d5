// Reads indices and offsets of either integer type.
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

}  // namespace flowtt
