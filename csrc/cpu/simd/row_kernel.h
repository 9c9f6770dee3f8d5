// Rows of a table, from its distinct keys.
#pragma once

#include "cpu/simd/chain.h"

namespace flowtt {
namespace {

template <typename T, typename A>
struct RowKernel {
  Chain<T, A> chain;
  const uint64_t* keys;
  A* rows;
  int64_t first_row;

  // The rows [begin, end), which share the prefix product [Q, r_(d-1)].
  FLOWTT_INLINE void group(const A* product, int64_t begin, int64_t end, uint64_t first_key) {
    const int64_t left = chain.left;
    const int64_t rank = chain.last_rank;
    const int64_t last_q = chain.last_q;
    const int64_t dim = left * last_q;
    if (chain.table.transposed_rows) {
      transpose(left, rank, product, chain.turned);
    }
    for (int64_t row = begin; row < end; ++row) {
      const auto last = static_cast<int64_t>(keys[row] - first_key);
      const A* slice = chain.slice(chain.cores - 1, last, chain.last_slice);
      A* target = rows + (row - first_row) * dim;
      if (chain.table.transposed_rows) {
        matrix_product<Accumulate::kNo, Order::kColumnMajor>(last_q, left, rank, slice, last_q,
                                                             chain.turned, left, target, left);
      } else {
        matrix_product<Accumulate::kNo, Order::kRowMajor>(left, last_q, rank, product, rank, slice,
                                                          last_q, target, last_q);
      }
    }
  }
};

template <typename T, typename A>
void compute_rows(const TableKernelArguments& table, const uint64_t* keys, int64_t begin,
                  int64_t end, void* rows, void* scratch_memory) {
  ScratchAllocator<A> scratch(scratch_memory);
  RowKernel<T, A> kernel{Chain<T, A>(table, scratch), keys, static_cast<A*>(rows), begin};
  Chain<T, A>& chain = kernel.chain;
  if (chain.cores == 2) {
    for_each_first_slice(
        chain, keys, begin, end,
        [&](int64_t i1, int64_t group_begin, int64_t group_end, uint64_t first_key) {
          kernel.group(chain.slice(0, i1, chain.first_slices), group_begin, group_end, first_key);
        });
    return;
  }
  PrefixTile tile;
  int64_t row = begin;
  int64_t loaded_i2 = -1;
  const A* second = nullptr;
  while (row < end) {
    chain.collect_tile(keys, row, end, tile);
    if (tile.i2 != loaded_i2) {
      second = chain.slice(1, tile.i2, chain.second_slice);
      loaded_i2 = tile.i2;
    }
    chain.tile_product(tile, second);
    for (int64_t n = 0; n < tile.count; ++n) {
      const A* product = chain.second_product + n * chain.q1 * chain.q2 * chain.r2;
      if (chain.cores == 3) {
        kernel.group(product, tile.row_begin[n], tile.row_begin[n + 1], tile.tail_key[n]);
      } else {
        for_each_third_slice(
            chain, product, keys, tile.row_begin[n], tile.row_begin[n + 1], tile.tail_key[n],
            [](int64_t, const A*) {},
            [&](const A* third_product, int64_t group_begin, int64_t group_end,
                uint64_t first_key) {
              kernel.group(third_product, group_begin, group_end, first_key);
            });
      }
    }
    row = tile.row_begin[tile.count];
  }
}

}  // namespace
}  // namespace flowtt
