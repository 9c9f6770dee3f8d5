// Divides the rows and the bags of a chunk among workers, in shares of about equal cost.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/embedding_bag_cpu.h"
#include "cpu/kernel_interface.h"
#include "cpu/lookup_chunks.h"
#include "cpu/lookup_grouping.h"

namespace flowtt {

// Whether [q_d, Q] makes the longer vectors for rows (kernel_interface.h).
bool rows_are_transposed(const TableShape& shape);

// Kernel arguments of each of the chunk's tables.
std::vector<TableKernelArguments> table_arguments(const EmbeddingBagCall& call,
                                                  const LookupChunk& chunk);

// Bounds [workers + 1] of the workers' shares of the distinct rows; a lookup costs lookup_weight
// times the reading of its row.
std::vector<int64_t> divide_rows(const EmbeddingBagCall& call, const LookupChunk& chunk,
                                 const GroupedLookups& grouped, int64_t workers,
                                 double lookup_weight);

// A worker's share of the bags: parts of segments.
struct BagShare {
  const BagSegment* segment;
  int64_t bag_begin;
  int64_t bag_end;
};
std::vector<BagShare> bag_share(const EmbeddingBagCall& call, const LookupChunk& chunk,
                                int64_t worker, int64_t workers);

// Where the table of each segment is in chunk.tables.
size_t table_position(const LookupChunk& chunk, int32_t table);

inline int64_t accumulation_bytes(ElementType core_type) {
  return core_type == ElementType::kFloat64 ? 8 : 4;
}

}  // namespace flowtt
