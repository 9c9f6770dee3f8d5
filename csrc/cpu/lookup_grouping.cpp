#include "cpu/lookup_grouping.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <sstream>
#include <stdexcept>

#include "cpu/key_order.h"
#include "cpu/radix_sort.h"

namespace flowtt {
namespace {

// Key and position in one word, when both fit; else side by side.
struct PackedRecord {
  uint64_t bits;
};
struct WideRecord {
  uint64_t key;
  uint64_t position;
};

struct RecordFormat {
  int position_bits;
  uint64_t position_mask;
};

__attribute__((always_inline)) inline void pack(PackedRecord& record, uint64_t key,
                                                uint64_t position, const RecordFormat& format) {
  record.bits = key << format.position_bits | position;
}
__attribute__((always_inline)) inline void pack(WideRecord& record, uint64_t key, uint64_t position,
                                                const RecordFormat&) {
  record = {key, position};
}
__attribute__((always_inline)) inline uint64_t key_of(const PackedRecord& record,
                                                      const RecordFormat& format) {
  return record.bits >> format.position_bits;
}
__attribute__((always_inline)) inline uint64_t key_of(const WideRecord& record,
                                                      const RecordFormat&) {
  return record.key;
}
__attribute__((always_inline)) inline uint32_t position_of(const PackedRecord& record,
                                                           const RecordFormat& format) {
  return static_cast<uint32_t>(record.bits & format.position_mask);
}
__attribute__((always_inline)) inline uint32_t position_of(const WideRecord& record,
                                                           const RecordFormat&) {
  return static_cast<uint32_t>(record.position);
}

[[noreturn]] void fail_index(const EmbeddingBagCall& call, const LookupChunk& chunk,
                             int64_t position) {
  const BagSegment* segment = chunk.segments.data();
  while (position >= segment->first_position + segment->lookup_end - segment->lookup_begin) {
    ++segment;
  }
  const int64_t i = segment->lookup_begin + position - segment->first_position;
  const int64_t rows = call.tables[segment->table].num_embeddings;
  std::ostringstream message;
  message << "indices[" << i << "] of feature " << segment->feature << ": expected 0 to "
          << rows - 1 << " (table " << segment->table << " has " << rows << " rows), got "
          << index_at(call.bags, i);
  throw std::out_of_range(message.str());
}

template <typename Index, typename Record>
int64_t pack_segment(const Index* indices, const BagSegment& segment, int64_t begin, int64_t end,
                     const KeyOrder& order, uint64_t num_embeddings, uint64_t first_key,
                     const RecordFormat& format, Record* records) {
  const Index* of_position = indices + segment.lookup_begin - segment.first_position;
  for (int64_t position = begin; position < end; ++position) {
    const uint64_t row = static_cast<uint64_t>(static_cast<int64_t>(of_position[position]));
    if (row >= num_embeddings) {
      return position;
    }
    pack(records[position], first_key + key_of_row(order, row), position, format);
  }
  return -1;
}

// Fills records[begin:end]. Returns the position of the first bad index, or -1.
template <typename Record>
int64_t pack_lookups(const EmbeddingBagCall& call, const LookupChunk& chunk, int64_t begin,
                     int64_t end, const RecordFormat& format, Record* records) {
  size_t table = 0;
  for (const BagSegment& segment : chunk.segments) {
    const int64_t segment_end = segment.first_position + segment.lookup_end - segment.lookup_begin;
    const int64_t from = std::max(begin, segment.first_position);
    const int64_t to = std::min(end, segment_end);
    if (from >= to) {
      continue;
    }
    while (chunk.tables[table].table != segment.table) {
      ++table;
    }
    const TableShape& shape = call.tables[segment.table];
    const KeyOrder order = key_order(shape);
    const auto packed = [&](auto indices) {
      return pack_segment(indices, segment, from, to, order,
                          static_cast<uint64_t>(shape.num_embeddings),
                          chunk.tables[table].first_key, format, records);
    };
    const int64_t bad = call.bags.indices_are_int64
                            ? packed(static_cast<const int64_t*>(call.bags.indices))
                            : packed(static_cast<const int32_t*>(call.bags.indices));
    if (bad >= 0) {
      return bad;
    }
  }
  return -1;
}

// Writes keys, lookup_begin and positions from sorted records.
template <typename Record>
void fold(const EmbeddingBagCall& call, const Record* records, const RecordFormat& format,
          int64_t workers, GroupedLookups& grouped) {
  const int64_t count = grouped.num_lookups;
  std::vector<int64_t> heads(workers + 1, 0);
  const auto starts_row = [&](int64_t i) {
    return i == 0 || key_of(records[i], format) != key_of(records[i - 1], format);
  };
  call.threads.run(workers, [&](int64_t worker) {
    int64_t found = 0;
    const int64_t end = count * (worker + 1) / workers;
    for (int64_t i = count * worker / workers; i < end; ++i) {
      found += starts_row(i);
    }
    heads[worker + 1] = found;
  });
  for (int64_t worker = 0; worker < workers; ++worker) {
    heads[worker + 1] += heads[worker];
  }
  grouped.num_rows = heads[workers];
  grouped.keys.ensure(grouped.num_rows);
  grouped.lookup_begin.ensure(grouped.num_rows + 1);
  grouped.positions.ensure(count);
  call.threads.run(workers, [&](int64_t worker) {
    int64_t row = heads[worker];
    const int64_t end = count * (worker + 1) / workers;
    for (int64_t i = count * worker / workers; i < end; ++i) {
      if (starts_row(i)) {
        grouped.keys[row] = key_of(records[i], format);
        grouped.lookup_begin[row] = static_cast<uint32_t>(i);
        ++row;
      }
      grouped.positions[i] = position_of(records[i], format);
    }
  });
  grouped.lookup_begin[grouped.num_rows] = static_cast<uint32_t>(count);
}

template <typename Record>
void sort_and_fold(const EmbeddingBagCall& call, const LookupChunk& chunk,
                   const RecordFormat& format, int first_bit, int key_bits,
                   GroupedLookups& grouped) {
  const int64_t count = chunk.num_lookups;
  const int64_t words = static_cast<int64_t>(sizeof(Record) / sizeof(uint64_t));
  grouped.records.ensure(count * words);
  grouped.other_records.ensure(count * words);
  Record* records = reinterpret_cast<Record*>(grouped.records.data());
  Record* other = reinterpret_cast<Record*>(grouped.other_records.data());
  const int64_t workers = useful_workers(call, count);

  std::vector<int64_t> bad(workers, -1);
  call.threads.run(workers, [&](int64_t worker) {
    bad[worker] = pack_lookups(call, chunk, count * worker / workers,
                               count * (worker + 1) / workers, format, records);
  });
  for (int64_t position : bad) {
    if (position >= 0) {
      fail_index(call, chunk, position);
    }
  }
  const auto word = [](const Record& record) {
    if constexpr (sizeof(Record) == sizeof(uint64_t)) {
      return record.bits;
    } else {
      return record.key;
    }
  };
  const Record* sorted =
      radix_sort(call.threads, workers, records, other, count, first_bit, key_bits, word);
  fold(call, sorted, format, workers, grouped);
}

}  // namespace

int64_t useful_workers(const EmbeddingBagCall& call, int64_t num_lookups) {
  constexpr int64_t kLookupsPerWorker = 256;  // below, starting a thread costs more than it saves
  return std::max<int64_t>(1, std::min(call.threads.num_threads, num_lookups / kLookupsPerWorker));
}

void group_lookups(const EmbeddingBagCall& call, const LookupChunk& chunk,
                   GroupedLookups& grouped) {
  grouped.num_lookups = chunk.num_lookups;
  RecordFormat format{};
  format.position_bits = std::bit_width(static_cast<uint64_t>(chunk.num_lookups - 1));
  format.position_mask = (uint64_t{1} << format.position_bits) - 1;
  const int key_bits = std::bit_width(chunk.num_keys - 1);
  if (key_bits + format.position_bits <= 64) {
    sort_and_fold<PackedRecord>(call, chunk, format, format.position_bits, key_bits, grouped);
  } else {
    sort_and_fold<WideRecord>(call, chunk, format, 0, key_bits, grouped);
  }

  grouped.table_begin.clear();
  const uint64_t* keys = grouped.keys.data();
  for (const ChunkTable& table : chunk.tables) {
    grouped.table_begin.push_back(std::lower_bound(keys, keys + grouped.num_rows, table.first_key) -
                                  keys);
  }
  grouped.table_begin.push_back(grouped.num_rows);
}

void rows_of_positions(const EmbeddingBagCall& call, const GroupedLookups& grouped,
                       uint32_t* row_of) {
  const int64_t workers = useful_workers(call, grouped.num_lookups);
  const uint32_t* lookup_begin = grouped.lookup_begin.data();
  call.threads.run(workers, [&](int64_t worker) {
    // Cut at rows, so that the lookups of a row have one writer.
    const auto row_at = [&](int64_t part) {
      const auto lookup = static_cast<uint32_t>(grouped.num_lookups * part / workers);
      return std::lower_bound(lookup_begin, lookup_begin + grouped.num_rows, lookup) - lookup_begin;
    };
    const int64_t end = row_at(worker + 1);
    size_t table = 0;
    for (int64_t row = row_at(worker); row < end; ++row) {
      while (row >= grouped.table_begin[table + 1]) {
        ++table;
      }
      const auto in_table = static_cast<uint32_t>(row - grouped.table_begin[table]);
      for (uint32_t i = lookup_begin[row]; i < lookup_begin[row + 1]; ++i) {
        row_of[grouped.positions[i]] = in_table;
      }
    }
  });
}

}  // namespace flowtt
