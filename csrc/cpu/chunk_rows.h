// The rows of a chunk, computed once each.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/aligned_buffer.h"
#include "cpu/work_division.h"

namespace flowtt {

struct ChunkRows {
  AlignedBuffer<char> rows;          // accumulation type; [rows of the table, D] for each table
  std::vector<int64_t> table_bytes;  // where each table's rows begin
  std::vector<AlignedBuffer<char>> scratch;  // of each worker

  // Fills all of the above for the grouped lookups of a chunk.
  void compute(const EmbeddingBagCall& call, const LookupChunk& chunk,
               const GroupedLookups& grouped, const std::vector<TableKernelArguments>& tables);
};

}  // namespace flowtt
