#include "cpu/lookup_grouping.h"

#include <algorithm>
#include <bit>
#include <sstream>
#include <stdexcept>
#include <utility>

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

// Counts the runs of equal keys in records[begin:end].
template <typename Record>
int64_t count_rows(const Record* records, int64_t begin, int64_t end, const RecordFormat& format) {
  int64_t rows = begin < end ? 1 : 0;
  for (int64_t i = begin + 1; i < end; ++i) {
    rows += key_of(records[i], format) != key_of(records[i - 1], format);
  }
  return rows;
}

// Writes the rows of the sorted records[begin:end], which begin with row `row`.
template <typename Record>
void write_rows(const Record* records, int64_t begin, int64_t end, const RecordFormat& format,
                bool rows_of_positions, int64_t row, GroupedLookups& grouped) {
  uint64_t* keys = grouped.keys.data();
  uint32_t* lookup_begin = grouped.lookup_begin.data();
  uint32_t* positions = grouped.positions.data();
  uint32_t* row_of = grouped.row_of.data();
  --row;
  for (int64_t i = begin; i < end; ++i) {
    const uint64_t key = key_of(records[i], format);
    if (i == begin || key != key_of(records[i - 1], format)) {
      ++row;
      keys[row] = key;
      lookup_begin[row] = static_cast<uint32_t>(i);
    }
    const uint32_t position = position_of(records[i], format);
    positions[i] = position;
    if (rows_of_positions) {
      row_of[position] = static_cast<uint32_t>(row);
    }
  }
}

// Buckets by the top bits of the keys.
struct Buckets {
  int shift;
  int64_t count;
  std::vector<int64_t> next;   // [workers, count]: where a worker's next record goes
  std::vector<int64_t> begin;  // [count + 1]

  Buckets(int64_t workers, KeyBits bits) {
    constexpr int kTopBits = 8;
    const int top_bits = std::min(bits.num_bits, kTopBits);
    shift = bits.first_bit + bits.num_bits - top_bits;
    count = int64_t{1} << top_bits;
    next.assign(workers * count, 0);
    begin.assign(count + 1, 0);
  }

  // From counts to places, in the order of buckets, then workers.
  void place(int64_t workers) {
    int64_t total = 0;
    for (int64_t bucket = 0; bucket < count; ++bucket) {
      begin[bucket] = total;
      for (int64_t worker = 0; worker < workers; ++worker) {
        total += std::exchange(next[worker * count + bucket], total);
      }
    }
    begin[count] = total;
  }

  // The first bucket of a worker's share of the buckets.
  int64_t share(int64_t worker, int64_t workers) const {
    const int64_t first = begin[count] * worker / workers;
    return std::lower_bound(begin.begin(), begin.end() - 1, first) - begin.begin();
  }
};

template <typename Record>
void sort_and_fold(const EmbeddingBagCall& call, const LookupChunk& chunk,
                   const RecordFormat& format, KeyBits bits, bool rows_of_positions,
                   GroupedLookups& grouped) {
  const int64_t count = chunk.num_lookups;
  const int64_t words = static_cast<int64_t>(sizeof(Record) / sizeof(uint64_t));
  grouped.records.ensure(count * words);
  grouped.other_records.ensure(count * words);
  Record* packed = reinterpret_cast<Record*>(grouped.records.data());
  Record* bucketed = reinterpret_cast<Record*>(grouped.other_records.data());
  const int64_t workers = useful_workers(call, count);
  const auto word = [](const Record& record) {
    if constexpr (sizeof(Record) == sizeof(uint64_t)) {
      return record.bits;
    } else {
      return record.key;
    }
  };

  Buckets buckets(workers, bits);
  const auto bucket_of = [&](const Record& record) {
    // A packed key fills the word up to its top, so nothing is above the bucket's bits.
    return static_cast<int64_t>(word(record) >> buckets.shift);
  };
  std::vector<int64_t> bad(workers, -1);
  call.threads.run(workers, [&](int64_t worker) {
    const int64_t begin = count * worker / workers;
    const int64_t end = count * (worker + 1) / workers;
    bad[worker] = pack_lookups(call, chunk, begin, end, format, packed);
    if (bad[worker] < 0) {
      int64_t* counts = buckets.next.data() + worker * buckets.count;
      for (int64_t i = begin; i < end; ++i) {
        ++counts[bucket_of(packed[i])];
      }
    }
  });
  for (int64_t position : bad) {
    if (position >= 0) {
      fail_index(call, chunk, position);
    }
  }
  buckets.place(workers);
  call.threads.run(workers, [&](int64_t worker) {
    int64_t* next = buckets.next.data() + worker * buckets.count;
    const int64_t end = count * (worker + 1) / workers;
    for (int64_t i = count * worker / workers; i < end; ++i) {
      bucketed[next[bucket_of(packed[i])]++] = packed[i];
    }
  });

  const RadixSort<Record, decltype(word)> radix(word);
  const KeyBits low_bits{bits.first_bit, buckets.shift - bits.first_bit};
  std::vector<int64_t> first_row(workers + 1, 0);
  call.threads.run(workers, [&](int64_t worker) {
    const int64_t end = buckets.share(worker + 1, workers);
    for (int64_t bucket = buckets.share(worker, workers); bucket < end; ++bucket) {
      const int64_t begin = buckets.begin[bucket];
      radix.sort(bucketed + begin, packed + begin, buckets.begin[bucket + 1] - begin, low_bits);
    }
    first_row[worker + 1] = count_rows(bucketed, buckets.begin[buckets.share(worker, workers)],
                                       buckets.begin[end], format);
  });
  for (int64_t worker = 0; worker < workers; ++worker) {
    first_row[worker + 1] += first_row[worker];
  }
  grouped.num_rows = first_row[workers];
  grouped.keys.ensure(grouped.num_rows);
  grouped.lookup_begin.ensure(grouped.num_rows + 1);
  grouped.positions.ensure(count);
  if (rows_of_positions) {
    grouped.row_of.ensure(count);
  }
  call.threads.run(workers, [&](int64_t worker) {
    write_rows(bucketed, buckets.begin[buckets.share(worker, workers)],
               buckets.begin[buckets.share(worker + 1, workers)], format, rows_of_positions,
               first_row[worker], grouped);
  });
  grouped.lookup_begin[grouped.num_rows] = static_cast<uint32_t>(count);
}

}  // namespace

int64_t useful_workers(const EmbeddingBagCall& call, int64_t num_lookups) {
  constexpr int64_t kLookupsPerWorker = 256;  // below, starting a thread costs more than it saves
  return std::max<int64_t>(1, std::min(call.threads.num_threads, num_lookups / kLookupsPerWorker));
}

void group_lookups(const EmbeddingBagCall& call, const LookupChunk& chunk, bool rows_of_positions,
                   GroupedLookups& grouped) {
  grouped.num_lookups = chunk.num_lookups;
  RecordFormat format{};
  format.position_bits = std::bit_width(static_cast<uint64_t>(chunk.num_lookups - 1));
  format.position_mask = (uint64_t{1} << format.position_bits) - 1;
  const int key_bits = std::bit_width(chunk.num_keys - 1);
  if (key_bits + format.position_bits < 64) {
    const KeyBits bits{format.position_bits, key_bits};
    sort_and_fold<PackedRecord>(call, chunk, format, bits, rows_of_positions, grouped);
  } else {
    sort_and_fold<WideRecord>(call, chunk, format, {0, key_bits}, rows_of_positions, grouped);
  }

  grouped.table_begin.clear();
  const uint64_t* keys = grouped.keys.data();
  for (const ChunkTable& table : chunk.tables) {
    grouped.table_begin.push_back(std::lower_bound(keys, keys + grouped.num_rows, table.first_key) -
                                  keys);
  }
  grouped.table_begin.push_back(grouped.num_rows);
}

}  // namespace flowtt
