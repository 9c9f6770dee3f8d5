// The gradients of a chunk's bags, ready to be summed by row.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/aligned_buffer.h"
#include "cpu/work_division.h"

namespace flowtt {

struct BagGradients {
  AlignedBuffer<char> gradients;     // accumulation type; [bags of the table, D] for each table
  std::vector<int64_t> table_bytes;  // where each table's bags begin
  AlignedBuffer<uint32_t> slot_of;   // [num_lookups], bag of each position, within its table
  AlignedBuffer<char> weight_of;     // [num_lookups], accumulation type
  std::vector<AlignedBuffer<char>> scratch;

  // `weighted`: also fill weight_of from the per-sample weights.
  void load(const EmbeddingBagCall& call, const LookupChunk& chunk,
            const std::vector<TableKernelArguments>& tables, const StridedMatrix& grad_output,
            bool weighted);
};

}  // namespace flowtt
