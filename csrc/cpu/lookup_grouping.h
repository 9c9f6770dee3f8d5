// Groups the lookups of a chunk: equal rows are folded into one, and the distinct rows are put into
// the order in which rows with a common TT prefix are neighbours (key_order.h).
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/aligned_buffer.h"
#include "cpu/lookup_chunks.h"

namespace flowtt {

struct GroupedLookups {
  int64_t num_lookups = 0;
  int64_t num_rows = 0;                  // distinct (table, row) pairs
  AlignedBuffer<uint64_t> keys;          // [num_rows], ascending
  AlignedBuffer<uint32_t> lookup_begin;  // [num_rows + 1], into positions
  AlignedBuffer<uint32_t> positions;     // [num_lookups], chunk positions, ascending within a row
  AlignedBuffer<uint32_t> row_of;        // [num_lookups], row of each position; when asked for
  std::vector<int64_t> table_begin;      // first row of each of the chunk's tables, and the end

  // Scratch of the sort, kept to be used again by the next chunk.
  AlignedBuffer<uint64_t> records;
  AlignedBuffer<uint64_t> other_records;
};

// The number of worker threads worth starting for some work, given in lookups.
int64_t useful_workers(const EmbeddingBagCall& call, int64_t num_lookups);

// `rows_of_positions`: also fill row_of. Throws std::out_of_range, naming the first bad index of
// the chunk, its feature and its table.
void group_lookups(const EmbeddingBagCall& call, const LookupChunk& chunk, bool rows_of_positions,
                   GroupedLookups& grouped);

}  // namespace flowtt
