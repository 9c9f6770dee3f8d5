// Cuts the lookups of a call into chunks of bounded workspace.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/bag_access.h"
#include "cpu/embedding_bag_cpu.h"
#include "tt_shape.h"

namespace flowtt {

// Consecutive lookups of one feature. The first and the last bag may reach beyond the lookups.
struct BagSegment {
  int64_t feature;
  int32_t table;
  int64_t bag_begin;  // bags of the feature, [bag_begin, bag_end)
  int64_t bag_end;
  int64_t lookup_begin;  // positions in `indices`
  int64_t lookup_end;
  int64_t first_position;  // of lookup_begin among the chunk's lookups
  int64_t first_bag;       // of bag_begin among the chunk's bags
  int64_t first_slot;      // of bag_begin among the chunk's bags of the same table
};

// The lookups of one table are neighbours within a chunk.
struct ChunkTable {
  int32_t table;
  uint64_t first_key;  // keys of the table are first_key + key_of_row(..)
  int64_t num_bags;
};

struct LookupChunk {
  std::vector<BagSegment> segments;
  std::vector<ChunkTable> tables;
  int64_t num_lookups = 0;
  int64_t num_bags = 0;
  uint64_t num_keys = 0;  // keys of the chunk are below this
};

// Element count of the largest per-chunk buffer, [lookups or bags, D].
inline constexpr int64_t kChunkElements = int64_t{1} << 24;
inline constexpr int64_t kChunkLookups = int64_t{1} << 20;

enum class EmptyBags { kNone, kSome };

// Throws std::invalid_argument unless offsets start at 0, never decrease and end at nnz.
EmptyBags check_offsets(const EmbeddingBagCall& call);

// Hands out the chunks of a call one after another; bags without lookups are left out where a chunk
// would hold nothing else.
class ChunkPlanner {
 public:
  explicit ChunkPlanner(const EmbeddingBagCall& call);

  // False when all lookups have been handed out.
  bool next(LookupChunk& chunk);

 private:
  bool add_segment(LookupChunk& chunk, int64_t& free_elements);

  const EmbeddingBagCall& call_;
  std::vector<int64_t> features_;  // ordered by table
  size_t at_feature_ = 0;
  int64_t at_bag_ = 0;
  int64_t at_lookup_ = 0;  // position in `indices`, within at_bag_
};

}  // namespace flowtt
