// The chain of one table: slices in the accumulation type, prefix products, and the walk over
// distinct rows in key order that computes every shared prefix once.
//
// Prefixes with the same second slice are handled in tiles: their first slices are stacked, so that
// one matrix product with G_2[i2] serves the whole tile.
#pragma once

#include <cstdint>

#include "cpu/kernel_interface.h"
#include "cpu/simd/element_conversion.h"
#include "cpu/simd/matrix_product.h"
#include "cpu/simd/transpose.h"
#include "cpu/simd/vector.h"

namespace flowtt {
namespace {

inline constexpr int64_t kMaxTilePrefixes = 16;

// Hands out parts of a worker's scratch; with a null base it only adds up their sizes.
template <typename A>
class ScratchAllocator {
 public:
  explicit ScratchAllocator(void* base) : base_(static_cast<A*>(base)) {}
  A* take(int64_t count) {
    A* part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count + 15) / 16 * 16;
    return part;
  }
  int64_t bytes() const { return used_ * static_cast<int64_t>(sizeof(A)); }

 private:
  A* base_;
  int64_t used_ = 0;
};

// Prefixes (i1, i2) with a common i2. Prefix n has the distinct rows [row_begin[n], row_begin[n +
// 1]), whose keys are tail_key[n] + index within the prefix.
struct PrefixTile {
  int64_t i2;
  int64_t count;
  int64_t i1[kMaxTilePrefixes];
  uint64_t tail_key[kMaxTilePrefixes];
  int64_t row_begin[kMaxTilePrefixes + 1];
};

template <typename T, typename A>
struct Chain {
  const TableKernelArguments& table;
  const TableShape& shape;
  int cores;
  int64_t q1, r1, q2, r2, q3, r3;
  int64_t left;       // Q: rows of the last prefix product
  int64_t last_rank;  // r_(d-1)
  int64_t last_q;     // q_d
  int64_t tile_limit;

  // Scratch. Converted slices are used when T is not A.
  A* first_slices;    // [tile, q1, r1]
  A* second_slice;    // [r1, q2 r2]
  A* third_slice;     // [r2, q3 r3], 4 cores
  A* last_slice;      // [r_(d-1), q_d]
  A* second_product;  // [tile, q1 q2, r2]
  A* third_product;   // [q1 q2 q3, r3], 4 cores
  A* turned;          // [r_(d-1), Q]

  Chain(const TableKernelArguments& arguments, ScratchAllocator<A>& scratch)
      : table(arguments), shape(arguments.shape), cores(arguments.shape.num_cores) {
    q1 = shape.q[0];
    r1 = shape.r[1];
    q2 = shape.q[1];
    r2 = shape.r[2];
    q3 = cores == 4 ? shape.q[2] : 1;
    r3 = cores == 4 ? shape.r[3] : 1;
    left = table.left_columns;
    last_rank = shape.r[cores - 1];
    last_q = shape.q[cores - 1];
    // Tiles long enough to use the second slice well, and short enough to stay in the L1 cache.
    constexpr int64_t kTileBytes = 16384;
    const int64_t product_bytes = q1 * q2 * r2 * static_cast<int64_t>(sizeof(A));
    tile_limit = kTileBytes / product_bytes;
    tile_limit = tile_limit < 1 ? 1 : tile_limit;
    tile_limit = tile_limit > kMaxTilePrefixes ? kMaxTilePrefixes : tile_limit;
    if (cores == 2) {
      tile_limit = 1;
    }
    first_slices = scratch.take(tile_limit * q1 * r1);
    second_slice = scratch.take(cores == 2 ? 0 : r1 * q2 * r2);
    third_slice = scratch.take(cores == 4 ? r2 * q3 * r3 : 0);
    last_slice = scratch.take(last_rank * last_q);
    second_product = scratch.take(cores == 2 ? 0 : tile_limit * q1 * q2 * r2);
    third_product = scratch.take(cores == 4 ? left * r3 : 0);
    turned = scratch.take(last_rank * left);
  }

  // The slice itself when it has the accumulation type, else a converted copy in `buffer`.
  FLOWTT_INLINE const A* slice(int core, int64_t index, A* buffer) const {
    const int64_t numel = shape.r[core] * shape.q[core] * shape.r[core + 1];
    const T* source = static_cast<const T*>(table.cores[core]) + index * numel;
    if constexpr (__is_same(T, A)) {
      return source;
    } else {
      load_elements(source, buffer, numel);
      return buffer;
    }
  }

  // The tile of prefixes that starts at row `begin`; ends at `end`, at another second slice, or
  // when full. 3 or 4 cores.
  FLOWTT_INLINE void collect_tile(const uint64_t* keys, int64_t begin, int64_t end,
                                  PrefixTile& tile) const {
    const uint64_t tail = table.order.tail.divisor;
    const uint64_t firsts = table.order.first.divisor;
    uint64_t prefix = divide(keys[begin] - table.first_key, table.order.tail);
    const uint64_t i2 = divide(prefix, table.order.first);
    const uint64_t end_key = table.first_key + (i2 + 1) * firsts * tail;
    tile.i2 = static_cast<int64_t>(i2);
    tile.count = 0;
    int64_t row = begin;
    while (true) {
      const uint64_t tail_key = table.first_key + prefix * tail;
      tile.i1[tile.count] = static_cast<int64_t>(prefix - i2 * firsts);
      tile.tail_key[tile.count] = tail_key;
      tile.row_begin[tile.count] = row;
      ++tile.count;
      const uint64_t next_prefix_key = tail_key + tail;
      ++row;
      while (row < end && keys[row] < next_prefix_key) {
        ++row;
      }
      if (row == end || keys[row] >= end_key || tile.count == tile_limit) {
        break;
      }
      prefix = divide(keys[row] - table.first_key, table.order.tail);
    }
    tile.row_begin[tile.count] = row;
  }

  // second_product = first_slices . G_2[i2] for the tile. `second` is that slice.
  FLOWTT_INLINE void tile_product(const PrefixTile& tile, const A* second) {
    for (int64_t n = 0; n < tile.count; ++n) {
      A* target = first_slices + n * q1 * r1;
      const A* source = slice(0, tile.i1[n], target);
      if (source != target) {
        __builtin_memcpy(target, source, static_cast<unsigned long>(q1 * r1) * sizeof(A));
      }
    }
    matrix_product<Accumulate::kNo, Order::kRowMajor>(tile.count * q1, q2 * r2, r1, first_slices,
                                                      r1, second, q2 * r2, second_product, q2 * r2);
  }
};

// Below, group(product, begin, end, first_key) is called for every run of rows that share a prefix
// product [Q, r_(d-1)]; the last core's slice of a row is keys[row] - first_key.

// The rows [begin, end) of a 2-core table, by their first slice.
template <typename T, typename A, typename Group>
FLOWTT_INLINE void for_each_first_slice(const Chain<T, A>& chain, const uint64_t* keys,
                                        int64_t begin, int64_t end, const Group& group) {
  const TableKernelArguments& table = chain.table;
  const uint64_t last_p = table.order.tail.divisor;
  int64_t row = begin;
  while (row < end) {
    const uint64_t i1 = divide(keys[row] - table.first_key, table.order.tail);
    const uint64_t first_key = table.first_key + i1 * last_p;
    int64_t row_end = row + 1;
    while (row_end < end && keys[row_end] < first_key + last_p) {
      ++row_end;
    }
    group(static_cast<int64_t>(i1), row, row_end, first_key);
    row = row_end;
  }
}

// The rows [begin, end) of one prefix (i1, i2) of a 4-core table, by their third slice;
// before(i3, slice) is called ahead of each group.
template <typename T, typename A, typename Before, typename Group>
FLOWTT_INLINE void for_each_third_slice(Chain<T, A>& chain, const A* second_product,
                                        const uint64_t* keys, int64_t begin, int64_t end,
                                        uint64_t tail_key, const Before& before,
                                        const Group& group) {
  const uint64_t last_p = chain.table.order.last.divisor;
  const int64_t columns = chain.q3 * chain.r3;
  int64_t row = begin;
  while (row < end) {
    const uint64_t i3 = divide(keys[row] - tail_key, chain.table.order.last);
    const uint64_t first_key = tail_key + i3 * last_p;
    int64_t row_end = row + 1;
    while (row_end < end && keys[row_end] < first_key + last_p) {
      ++row_end;
    }
    const A* slice = chain.slice(2, static_cast<int64_t>(i3), chain.third_slice);
    matrix_product<Accumulate::kNo, Order::kRowMajor>(chain.q1 * chain.q2, columns, chain.r2,
                                                      second_product, chain.r2, slice, columns,
                                                      chain.third_product, columns);
    before(static_cast<int64_t>(i3), slice);
    group(chain.third_product, row, row_end, first_key);
    row = row_end;
  }
}

}  // namespace
}  // namespace flowtt
