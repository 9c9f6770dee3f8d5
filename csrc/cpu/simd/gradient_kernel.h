// Gradients of the cores' slices, from the gradients of the bags.
//
// With g the gradient of a row [Q, q_d] and P its prefix product [Q, r]: dG_d = P^T g and
// dP = g G_d^T. Going down a level, P = (P' as [Q', r']) G_k gives dG_k = P'^T dP, dP' = dP G_k^T.
// Lookups of one row are summed first, then the rows of one prefix, then the prefixes of a tile.
#pragma once

#include "cpu/simd/chain.h"

namespace flowtt {
namespace {

template <typename T, typename A>
struct GradientKernel {
  Chain<T, A> chain;
  const GradientArguments& arguments;

  A* row_gradient;         // [D]
  A* turned_row_gradient;  // [D]
  A* turned_gradient;      // [r_(d-1), Q]: dP of the last prefix, transposed
  A* second_gradient;      // [tile, q1 q2, r2]
  A* turned_second;        // [q2 r2, r1]: the second slice transposed
  A* first_gradient;       // [tile, q1, r1]
  A* third_gradient;       // [q1 q2 q3, r3]
  A* turned_third;         // [q3 r3, r2]

  GradientKernel(const TableKernelArguments& table, const GradientArguments& gradient_arguments,
                 ScratchAllocator<A>& scratch)
      : chain(table, scratch), arguments(gradient_arguments) {
    const bool two = chain.cores == 2;
    const bool four = chain.cores == 4;
    row_gradient = scratch.take(chain.left * chain.last_q);
    turned_row_gradient = scratch.take(table.transposed_rows ? 0 : chain.left * chain.last_q);
    turned_gradient = scratch.take(chain.last_rank * chain.left);
    second_gradient = scratch.take(two ? 0 : chain.tile_limit * chain.q1 * chain.q2 * chain.r2);
    turned_second = scratch.take(two ? 0 : chain.r1 * chain.q2 * chain.r2);
    first_gradient = scratch.take(chain.tile_limit * chain.q1 * chain.r1);
    third_gradient = scratch.take(four ? chain.left * chain.r3 : 0);
    turned_third = scratch.take(four ? chain.r2 * chain.q3 * chain.r3 : 0);
  }

  // Where the gradient of a slice is summed.
  FLOWTT_INLINE A* target(int core, int64_t index) const {
    const SliceGradients& gradients = arguments.gradients[core];
    const int64_t slot = gradients.slot_of == nullptr ? index : gradients.slot_of[index];
    if (gradients.touched != nullptr) {
      __atomic_store_n(gradients.touched + slot, uint8_t{1}, __ATOMIC_RELAXED);
    }
    return static_cast<A*>(gradients.slices) +
           slot * (chain.shape.r[core] * chain.shape.q[core] * chain.shape.r[core + 1]);
  }

  // The target of an owned slice, or the head for the one shared with the worker before.
  FLOWTT_INLINE A* owned_target(int core, int64_t index, bool continues) const {
    A* own = target(core, index);
    return continues ? static_cast<A*>(arguments.gradients[core].head) : own;
  }

  // The gradient of a row: the weighted sum of its lookups' bag gradients, in row layout.
  FLOWTT_INLINE const A* sum_lookups(int64_t row) {
    const int64_t dim = chain.left * chain.last_q;
    const A* bags = static_cast<const A*>(arguments.bag_gradients);
    const A* weights = static_cast<const A*>(arguments.weight_of_position);
    const uint32_t* slots = arguments.slot_of_position;
    const uint32_t* positions = arguments.positions;
    const int64_t begin = arguments.lookup_begin[row];
    const int64_t end = arguments.lookup_begin[row + 1];
    if (end - begin == 1 && weights == nullptr) {
      return bags + static_cast<int64_t>(slots[positions[begin]]) * dim;
    }
    // Blocks of lookups are summed on their own: the error then grows with the number of blocks and
    // the length of a block, not with their product.
    constexpr int64_t kBlock = 64;
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t block_end = block + kBlock < end ? block + kBlock : end;
      for_each_vector_group(dim, [&]<int W, int N>(int64_t column) {
        Vector<A, W> sum[N] = {};
        for (int64_t i = block; i < block_end; ++i) {
          const uint32_t position = positions[i];
          const A* bag = bags + static_cast<int64_t>(slots[position]) * dim + column;
          if (weights == nullptr) {
            for (int n = 0; n < N; ++n) {
              sum[n] += load<A, W>(bag + n * W);
            }
          } else {
            for (int n = 0; n < N; ++n) {
              sum[n] += weights[position] * load<A, W>(bag + n * W);
            }
          }
        }
        for (int n = 0; n < N; ++n) {
          A* result = row_gradient + column + n * W;
          store<A, W>(result, block == begin ? sum[n] : load<A, W>(result) + sum[n]);
        }
      });
    }
    return row_gradient;
  }

  template <typename Body>
  static FLOWTT_INLINE void for_each_vector_group(int64_t dim, const Body& body) {
    constexpr int W = kLanes<A>;
    int64_t column = 0;
    for (; column + 4 * W <= dim; column += 4 * W) {
      body.template operator()<W, 4>(column);
    }
    for_each_vector<A>(dim, [&]<int V>(int64_t at) { body.template operator()<V, 1>(at); }, column);
  }

  // Rows [begin, end) share the prefix product [Q, r]. Writes its gradient to product_gradient.
  FLOWTT_INLINE void group(const A* product, int64_t begin, int64_t end, uint64_t first_key,
                           A* product_gradient) {
    const int64_t left = chain.left;
    const int64_t rank = chain.last_rank;
    const int64_t last_q = chain.last_q;
    const int last_core = chain.cores - 1;
    for (int64_t row = begin; row < end; ++row) {
      const auto last = static_cast<int64_t>(arguments.keys[row] - first_key);
      const A* slice = chain.slice(last_core, last, chain.last_slice);
      const A* gradient = sum_lookups(row);
      A* slice_gradient = target(last_core, last);
      const A* turned = gradient;  // [q_d, Q]
      if (chain.table.transposed_rows) {
        matrix_product<Accumulate::kYes, Order::kRowMajor>(last_q, rank, left, gradient, left,
                                                           product, rank, slice_gradient, rank);
      } else {
        matrix_product<Accumulate::kYes, Order::kColumnMajor>(
            rank, last_q, left, product, rank, gradient, last_q, slice_gradient, last_q);
        transpose(left, last_q, gradient, turned_row_gradient);
        turned = turned_row_gradient;
      }
      if (row == begin) {
        matrix_product<Accumulate::kNo, Order::kRowMajor>(rank, left, last_q, slice, last_q, turned,
                                                          left, turned_gradient, left);
      } else {
        matrix_product<Accumulate::kYes, Order::kRowMajor>(rank, left, last_q, slice, last_q,
                                                           turned, left, turned_gradient, left);
      }
    }
    transpose(rank, left, turned_gradient, product_gradient);
  }

  // Rows [begin, end) of one prefix of a 4-core table; product and product_gradient are its second
  // product and the gradient of that.
  void third_level(const A* product, int64_t begin, int64_t end, uint64_t tail_key,
                   A* product_gradient) {
    const int64_t rows = chain.q1 * chain.q2;
    const int64_t columns = chain.q3 * chain.r3;
    int64_t i3 = 0;
    bool first = true;
    for_each_third_slice(
        chain, product, arguments.keys, begin, end, tail_key,
        [&](int64_t index, const A* slice) {
          i3 = index;
          transpose(chain.r2, columns, slice, turned_third);
        },
        [&](const A* third_product, int64_t group_begin, int64_t group_end, uint64_t first_key) {
          group(third_product, group_begin, group_end, first_key, third_gradient);
          matrix_product<Accumulate::kYes, Order::kColumnMajor>(chain.r2, columns, rows, product,
                                                                chain.r2, third_gradient, columns,
                                                                target(2, i3), columns);
          if (first) {
            set_zero(product_gradient, rows * chain.r2);
            first = false;
          }
          matrix_product<Accumulate::kYes, Order::kRowMajor>(rows, chain.r2, columns,
                                                             third_gradient, columns, turned_third,
                                                             chain.r2, product_gradient, chain.r2);
        });
  }

  void two_cores(int64_t begin, int64_t end, bool continues) {
    for_each_first_slice(
        chain, arguments.keys, begin, end,
        [&](int64_t i1, int64_t group_begin, int64_t group_end, uint64_t first_key) {
          group(chain.slice(0, i1, chain.first_slices), group_begin, group_end, first_key,
                first_gradient);
          add_to(owned_target(0, i1, continues && group_begin == begin), first_gradient,
                 chain.q1 * chain.r1);
        });
  }

  void tiles(int64_t begin, int64_t end, bool continues) {
    const int64_t columns = chain.q2 * chain.r2;
    const int64_t product_numel = chain.q1 * columns;
    const int64_t first_numel = chain.q1 * chain.r1;
    PrefixTile tile;
    int64_t loaded_i2 = -1;
    const A* second = nullptr;
    A* second_target = nullptr;
    int64_t row = begin;
    while (row < end) {
      chain.collect_tile(arguments.keys, row, end, tile);
      if (tile.i2 != loaded_i2) {
        continues = continues && loaded_i2 < 0;
        loaded_i2 = tile.i2;
        second = chain.slice(1, tile.i2, chain.second_slice);
        transpose(chain.r1, columns, second, turned_second);
        second_target = owned_target(1, tile.i2, continues);
      }
      chain.tile_product(tile, second);
      for (int64_t n = 0; n < tile.count; ++n) {
        const A* product = chain.second_product + n * product_numel;
        A* product_gradient = second_gradient + n * product_numel;
        if (chain.cores == 3) {
          group(product, tile.row_begin[n], tile.row_begin[n + 1], tile.tail_key[n],
                product_gradient);
        } else {
          third_level(product, tile.row_begin[n], tile.row_begin[n + 1], tile.tail_key[n],
                      product_gradient);
        }
      }
      const int64_t stacked = tile.count * chain.q1;
      matrix_product<Accumulate::kYes, Order::kColumnMajor>(
          chain.r1, columns, stacked, chain.first_slices, chain.r1, second_gradient, columns,
          second_target, columns);
      matrix_product<Accumulate::kNo, Order::kRowMajor>(stacked, chain.r1, columns, second_gradient,
                                                        columns, turned_second, chain.r1,
                                                        first_gradient, chain.r1);
      for (int64_t n = 0; n < tile.count; ++n) {
        add_to(target(0, tile.i1[n]), first_gradient + n * first_numel, first_numel);
      }
      row = tile.row_begin[tile.count];
    }
  }
};

template <typename T, typename A>
void accumulate_gradients(const TableKernelArguments& table, const GradientArguments& arguments,
                          int64_t begin, int64_t end, bool continues, void* scratch_memory) {
  ScratchAllocator<A> scratch(scratch_memory);
  GradientKernel<T, A> kernel(table, arguments, scratch);
  if (table.shape.num_cores == 2) {
    kernel.two_cores(begin, end, continues);
  } else {
    kernel.tiles(begin, end, continues);
  }
}

// The gradient kernel needs everything the row kernel does, and more.
template <typename T, typename A>
int64_t scratch_bytes(const TableKernelArguments& table) {
  ScratchAllocator<A> scratch(nullptr);
  const GradientArguments none{};
  GradientKernel<T, A> kernel(table, none, scratch);
  return scratch.bytes();
}

}  // namespace
}  // namespace flowtt
