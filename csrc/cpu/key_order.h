// The order in which the rows of a table are visited.
//
// Rows that share a prefix of TT slices should be neighbours. Sorting by row index does that; with
// three or more cores the keys below do it better: the index of the second core, whose slices are
// the largest, comes first, so that one slice serves many neighbouring prefixes and its gradient
// has one owner.
//
//   2 cores: key = i1 * p2 + i2           (the row index itself)
//   3 cores: key = (i2 * p1 + i1) * p3 + i3
//   4 cores: key = ((i2 * p1 + i1) * p3 + i3) * p4 + i4
//
// Functions here are internal to each translation unit on purpose: the kernels are compiled several
// times for different instruction sets and must not share symbols.
#pragma once

#include <cstdint>

#include "fast_division.h"
#include "tt_shape.h"

namespace flowtt {

struct KeyOrder {
  FastDivisor tail;    // rows per prefix: p2 with 2 cores, else p3 (* p4)
  FastDivisor second;  // p2, to split a row's prefix
  FastDivisor first;   // p1, to split a key's prefix
  FastDivisor last;    // p4 (4 cores): rows per i3
  bool swapped;        // 3 or 4 cores
};

static inline KeyOrder key_order(const TableShape& shape) {
  int64_t tail = 1;
  for (int k = shape.num_cores == 2 ? 1 : 2; k < shape.num_cores; ++k) {
    tail *= shape.p[k];
  }
  return {fast_divisor(tail), fast_divisor(shape.p[1]), fast_divisor(shape.p[0]),
          fast_divisor(shape.p[shape.num_cores - 1]), shape.num_cores > 2};
}

__attribute__((always_inline)) static inline uint64_t key_of_row(const KeyOrder& order,
                                                                 uint64_t row) {
  if (!order.swapped) {
    return row;
  }
  const uint64_t prefix = divide(row, order.tail);
  const uint64_t i1 = divide(prefix, order.second);
  const uint64_t i2 = prefix - i1 * order.second.divisor;
  return (i2 * order.first.divisor + i1) * order.tail.divisor + (row - prefix * order.tail.divisor);
}

// The index into core `core` that a key (relative to its table) stands for.
static inline int64_t slice_of_key(const KeyOrder& order, int num_cores, uint64_t key, int core) {
  const uint64_t prefix = divide(key, order.tail);
  const uint64_t rest = key - prefix * order.tail.divisor;
  if (num_cores == 2) {
    return static_cast<int64_t>(core == 0 ? prefix : rest);
  }
  if (core < 2) {
    const uint64_t i2 = divide(prefix, order.first);
    return static_cast<int64_t>(core == 1 ? i2 : prefix - i2 * order.first.divisor);
  }
  if (num_cores == 3) {
    return static_cast<int64_t>(rest);
  }
  const uint64_t i3 = divide(rest, order.last);
  return static_cast<int64_t>(core == 2 ? i3 : rest - i3 * order.last.divisor);
}

}  // namespace flowtt
