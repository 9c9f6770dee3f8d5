// What the vectorised kernels are given. They are compiled once per instruction set (simd/) and
// chosen at run time; "A" is the accumulation type, float or double.
//
// Rows and their gradients are kept in "row layout": [Q, q_d] as the table has them, or, when that
// makes the longer vectors, transposed to [q_d, Q], with Q = q_1 .. q_(d-1). Sums over rows are
// taken in row layout and turned around once per bag.
#pragma once

#include <cstdint>

#include "cpu/key_order.h"
#include "tt_shape.h"

namespace flowtt {

struct TableKernelArguments {
  TableShape shape;
  KeyOrder order;
  const void* cores[kMaxCores];
  uint64_t first_key;    // of the table within the chunk
  int64_t left_columns;  // Q
  bool transposed_rows;
};

// The bags of one segment, pooled from the rows of its table.
struct PoolArguments {
  const BagBatch* bags;
  int64_t feature;
  int64_t lookup_begin;  // the segment's lookups
  int64_t lookup_end;
  const uint32_t* row_of;  // of lookup_begin and on
  uint32_t first_row;      // of the table: rows[0]
  const void* rows;        // A [rows of the table, D]
  int64_t left_columns;
  int64_t right_columns;  // q_d
  bool transposed_rows;
  void* output;  // first column of the feature
  ElementType output_type;
  int64_t output_stride;
  const void* carried_in;  // A [D]: sum of the first bag's earlier lookups, or null
  void* carried_out;       // A [D]: takes the sum of a bag that goes on in the next chunk
};

// Gradients of the bags of one segment, put into row layout and, for mean pooling, divided by the
// number of lookups.
struct BagGradientArguments {
  const BagBatch* bags;
  int64_t feature;
  int64_t bag_begin;     // of the segment: the bag written to bag_gradients[0]
  int64_t lookup_begin;  // the segment's lookups
  int64_t lookup_end;
  StridedMatrix grad_output;  // data at the feature's first column
  int64_t left_columns;
  int64_t right_columns;
  bool transposed_rows;
  void* bag_gradients;  // A [bags of the segment, D]
  uint32_t first_slot;  // of bag_begin among the bags of its table
  uint32_t* slot_of;    // of lookup_begin and on: takes the lookup's bag
  void* weight_of;      // A, likewise, or null without per-sample weights
};

// Where the gradient of one core's slices is summed.
struct SliceGradients {
  void* slices;            // A [slots, slice]; the last core's slices are transposed to [q_d, r]
                           // under transposed_rows
  const int32_t* slot_of;  // slot of each slice, or null when slot = slice
  uint8_t* touched;        // per slot, set to 1; null when every slot is touched
  void* head;              // A [slice], or null: see GradientArguments
};

// The distinct rows of one table for one worker. The worker owns the slices of core `owned_core`
// that begin within its range; if its first one is shared with the worker before, its part of that
// slice's gradient goes to `head`.
struct GradientArguments {
  const uint64_t* keys;
  const uint32_t* lookup_begin;
  const uint32_t* positions;
  const uint32_t* slot_of_position;
  const void* weight_of_position;  // A, or null
  const void* bag_gradients;       // A [bags of the table, D]
  SliceGradients gradients[kMaxCores];
};

inline constexpr int owned_core(int num_cores) { return num_cores == 2 ? 0 : 1; }

// weights_grad[lookup] = row of the lookup . gradient of its bag, both in row layout.
struct DotArguments {
  const void* rows;           // A [rows of the table, D]
  const void* bag_gradients;  // A [bags of the table, D]
  const uint32_t* row_of;     // of the first lookup and on
  uint32_t first_row;         // of the table: rows[0]
  const uint32_t* slot_of;
  void* weights_grad;  // A
  int64_t dim;
};

// How a core's summed gradient leaves: as a dense gradient, or as an optimizer step.
struct SliceUpdate {
  const void* const* partials;  // A* [num_partials]: the buffers of the workers, same slots
  int64_t num_partials;
  int64_t slice_numel;
  int64_t transposed_rows;  // 0, or q_d when slices are stored [q_d, r]
  void* dense_gradient;     // core's type, or null for a step
  OptimizerType optimizer;
  void* core;
  void* momentum1;
  void* momentum2;
  double learning_rate;
  double eps;
  double beta1;
  double beta2;
  double correction1;  // 1 - beta1^iteration
  double correction2;
  double weight_decay;
};

struct CpuKernels {
  // Bytes a worker needs for compute_rows and accumulate_gradients.
  int64_t (*scratch_bytes)(const TableKernelArguments&);
  // rows[i - begin] = row of keys[i], for i in [begin, end).
  void (*compute_rows)(const TableKernelArguments&, const uint64_t* keys, int64_t begin,
                       int64_t end, void* rows, void* scratch);
  void (*pool_bags)(const PoolArguments&, int64_t bag_begin, int64_t bag_end, void* scratch);
  void (*load_bag_gradients)(const BagGradientArguments&, int64_t bag_begin, int64_t bag_end,
                             void* scratch);
  void (*accumulate_gradients)(const TableKernelArguments&, const GradientArguments&, int64_t begin,
                               int64_t end, bool continues, void* scratch);
  void (*dot_rows)(const DotArguments&, int64_t begin, int64_t end);
  // scratch: A [2 * slice_numel].
  void (*update_slice)(const SliceUpdate&, int64_t slice, int64_t slot, void* scratch);
};

// The kernels for a core type, for the best instruction set of this machine.
const CpuKernels& cpu_kernels(ElementType core_type);

// "avx512", "avx2" or "baseline": what cpu_kernels chose.
const char* cpu_kernel_level();

}  // namespace flowtt
