#include "cpu/lookup_chunks.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>

namespace flowtt {
namespace {

uint64_t num_keys(const TableShape& shape) {
  uint64_t keys = 1;
  for (int k = 0; k < shape.num_cores; ++k) {
    keys *= static_cast<uint64_t>(shape.p[k]);
  }
  return keys;
}

// The first bag in [begin, end) whose lookups begin after `lookup`.
int64_t first_bag_after(const BagBatch& bags, int64_t feature, int64_t begin, int64_t end,
                        int64_t lookup) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (bag_begin(bags, feature, middle) <= lookup) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

}  // namespace

EmptyBags check_offsets(const EmbeddingBagCall& call) {
  const BagBatch& bags = call.bags;
  const int64_t last = bags.num_features * bags.batch_size;
  std::ostringstream message;
  if (offset_at(bags, 0) != 0) {
    message << "offsets[0]: expected 0, got " << offset_at(bags, 0);
    throw std::invalid_argument(message.str());
  }
  const int64_t tasks = std::max<int64_t>(1, std::min(call.threads.num_threads, last / 131072));
  std::atomic<int64_t> bad{last};
  std::atomic<bool> some_empty{false};
  call.threads.run(tasks, [&](int64_t task) {
    const int64_t end = last * (task + 1) / tasks;
    int64_t begin_of_bag = offset_at(bags, last * task / tasks);
    bool empty = false;
    for (int64_t i = last * task / tasks; i < end; ++i) {
      const int64_t end_of_bag = offset_at(bags, i + 1);
      if (end_of_bag < begin_of_bag) {
        int64_t seen = bad.load();
        while (i < seen && !bad.compare_exchange_weak(seen, i)) {
        }
        return;
      }
      empty |= end_of_bag == begin_of_bag;
      begin_of_bag = end_of_bag;
    }
    if (empty) {
      some_empty.store(true);
    }
  });
  const int64_t i = bad.load();
  if (i < last && offset_at(bags, i) > bags.nnz) {
    message << "offsets[" << i << "]: expected at most the number of indices, " << bags.nnz
            << ", got " << offset_at(bags, i) << " (feature " << i / bags.batch_size << ", bag "
            << i % bags.batch_size << ")";
    throw std::invalid_argument(message.str());
  }
  if (i < last) {
    message << "offsets: expected non-decreasing values, but offsets[" << i
            << "] = " << offset_at(bags, i) << " and offsets[" << i + 1
            << "] = " << offset_at(bags, i + 1) << " (feature " << i / bags.batch_size << ", bag "
            << i % bags.batch_size << ")";
    throw std::invalid_argument(message.str());
  }
  if (offset_at(bags, last) != bags.nnz) {
    message << "offsets[" << last << "]: expected the number of indices, " << bags.nnz << ", got "
            << offset_at(bags, last);
    throw std::invalid_argument(message.str());
  }
  const bool pools = bags.pooling_mode != PoolingMode::kNone;
  return pools && some_empty.load() ? EmptyBags::kSome : EmptyBags::kNone;
}

ChunkPlanner::ChunkPlanner(const EmbeddingBagCall& call)
    : call_(call), features_(call.features.size()) {
  std::iota(features_.begin(), features_.end(), 0);
  std::stable_sort(features_.begin(), features_.end(), [&](int64_t a, int64_t b) {
    return call.features[a].table < call.features[b].table;
  });
  if (!features_.empty()) {
    at_lookup_ = bag_begin(call.bags, features_[0], 0);
  }
}

bool ChunkPlanner::next(LookupChunk& chunk) {
  do {
    chunk = LookupChunk{};
    int64_t free_elements = kChunkElements;
    while (at_feature_ < features_.size() && add_segment(chunk, free_elements)) {
    }
  } while (chunk.num_lookups == 0 && at_feature_ < features_.size());
  return chunk.num_lookups > 0;
}

// Adds the rest of the current feature, or what fits of it. False when the chunk is full.
bool ChunkPlanner::add_segment(LookupChunk& chunk, int64_t& free_elements) {
  const BagBatch& bags = call_.bags;
  const int64_t feature = features_[at_feature_];
  const int32_t table = call_.features[feature].table;
  const TableShape& shape = call_.tables[table];
  const int64_t bags_of_feature = num_bags(bags, feature);

  const bool new_table = chunk.tables.empty() || chunk.tables.back().table != table;
  constexpr uint64_t kMaxKeys = std::numeric_limits<int64_t>::max();
  if (new_table && num_keys(shape) > kMaxKeys - chunk.num_keys) {
    return false;
  }
  int64_t room = std::min(free_elements / shape.embedding_dim, kChunkLookups - chunk.num_lookups);
  if (chunk.segments.empty()) {
    room = std::max<int64_t>(room, 1);  // a row may be larger than a chunk
  }
  if (room <= 0) {
    return false;
  }

  BagSegment segment{};
  segment.feature = feature;
  segment.table = table;
  segment.bag_begin = at_bag_;
  segment.lookup_begin = at_lookup_;
  segment.first_position = chunk.num_lookups;
  segment.first_bag = chunk.num_bags;
  segment.bag_end = std::min(bags_of_feature, at_bag_ + room);
  segment.lookup_end = bag_begin(bags, feature, segment.bag_end);
  if (segment.lookup_end - at_lookup_ > room) {
    segment.lookup_end = at_lookup_ + room;
    segment.bag_end =
        first_bag_after(bags, feature, at_bag_, segment.bag_end, segment.lookup_end - 1);
  }
  const int64_t lookups = segment.lookup_end - segment.lookup_begin;
  if (lookups > 0) {
    if (new_table) {
      chunk.tables.push_back({table, chunk.num_keys, 0});
      chunk.num_keys += num_keys(shape);
    }
    segment.first_slot = chunk.tables.back().num_bags;
    chunk.tables.back().num_bags += segment.bag_end - segment.bag_begin;
    chunk.segments.push_back(segment);
    chunk.num_lookups += lookups;
    chunk.num_bags += segment.bag_end - segment.bag_begin;
    free_elements -= std::max(lookups, segment.bag_end - segment.bag_begin) * shape.embedding_dim;
  }

  const bool cut_bag =
      segment.bag_end > 0 && bag_begin(bags, feature, segment.bag_end) > segment.lookup_end;
  at_bag_ = cut_bag ? segment.bag_end - 1 : segment.bag_end;
  at_lookup_ = segment.lookup_end;
  if (at_bag_ < bags_of_feature) {
    return lookups == 0;  // only empty bags so far: go on
  }
  if (++at_feature_ < features_.size()) {
    at_bag_ = 0;
    at_lookup_ = bag_begin(bags, features_[at_feature_], 0);
  }
  return true;
}

}  // namespace flowtt
