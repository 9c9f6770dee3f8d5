#include "cpu/work_division.h"

#include <algorithm>

namespace flowtt {
namespace {

// Multiplications of one row, with half of its prefix products shared.
double row_cost(const TableShape& shape) {
  double cost = 0;
  double left = static_cast<double>(shape.q[0]);
  for (int k = 1; k < shape.num_cores; ++k) {
    const double product = left * static_cast<double>(shape.r[k] * shape.q[k] * shape.r[k + 1]);
    cost += k + 1 == shape.num_cores ? product : product / 2;
    left *= static_cast<double>(shape.q[k]);
  }
  return cost;
}

// The first bag of the chunk (counted over its segments) at or after `cost`, where a bag costs one
// and a lookup costs one.
BagShare bag_at_cost(const BagBatch& bags, const LookupChunk& chunk, int64_t cost) {
  const auto segment = std::prev(std::upper_bound(
      chunk.segments.begin() + 1, chunk.segments.end(), cost,
      [](int64_t value, const BagSegment& s) { return value < s.first_position + s.first_bag; }));
  const int64_t in_segment = cost - segment->first_position - segment->first_bag;
  int64_t begin = segment->bag_begin;
  int64_t end = segment->bag_end;
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    const int64_t before =
        std::max<int64_t>(0, bag_begin(bags, segment->feature, middle) - segment->lookup_begin) +
        middle - segment->bag_begin;
    if (before < in_segment) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return {&*segment, begin, begin};
}

}  // namespace

bool rows_are_transposed(const TableShape& shape) {
  constexpr int64_t kLongVector = 16;
  const int64_t last_q = shape.q[shape.num_cores - 1];
  return last_q < kLongVector && shape.embedding_dim / last_q > last_q;
}

std::vector<TableKernelArguments> table_arguments(const EmbeddingBagCall& call,
                                                  const LookupChunk& chunk) {
  std::vector<TableKernelArguments> arguments;
  for (const ChunkTable& table : chunk.tables) {
    const TableShape& shape = call.tables[table.table];
    TableKernelArguments next{};
    next.shape = shape;
    next.order = key_order(shape);
    for (int k = 0; k < shape.num_cores; ++k) {
      next.cores[k] = call.cores[call.first_core[table.table] + k];
    }
    next.first_key = table.first_key;
    next.left_columns = shape.embedding_dim / shape.q[shape.num_cores - 1];
    next.transposed_rows = rows_are_transposed(shape);
    arguments.push_back(next);
  }
  return arguments;
}

std::vector<int64_t> divide_rows(const EmbeddingBagCall& call, const LookupChunk& chunk,
                                 const GroupedLookups& grouped, int64_t workers,
                                 double lookup_weight) {
  const uint32_t* lookup_begin = grouped.lookup_begin.data();
  const size_t tables = chunk.tables.size();
  std::vector<double> before(tables + 1, 0.0);
  std::vector<double> per_row(tables);
  std::vector<double> per_lookup(tables);
  const auto cost_in_table = [&](size_t table, int64_t row) {
    const int64_t first = grouped.table_begin[table];
    return per_row[table] * static_cast<double>(row - first) +
           per_lookup[table] * static_cast<double>(lookup_begin[row] - lookup_begin[first]);
  };
  for (size_t table = 0; table < tables; ++table) {
    const TableShape& shape = call.tables[chunk.tables[table].table];
    per_row[table] = row_cost(shape);
    per_lookup[table] = lookup_weight * static_cast<double>(shape.embedding_dim);
    before[table + 1] = before[table] + cost_in_table(table, grouped.table_begin[table + 1]);
  }
  std::vector<int64_t> bounds(workers + 1, grouped.num_rows);
  bounds[0] = 0;
  size_t table = 0;
  for (int64_t worker = 1; worker < workers; ++worker) {
    const double target =
        before[tables] * static_cast<double>(worker) / static_cast<double>(workers);
    while (table + 1 < tables && before[table + 1] <= target) {
      ++table;
    }
    int64_t begin = grouped.table_begin[table];
    int64_t end = grouped.table_begin[table + 1];
    while (begin < end) {
      const int64_t middle = begin + (end - begin) / 2;
      if (before[table] + cost_in_table(table, middle) < target) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    bounds[worker] = std::max(begin, bounds[worker - 1]);
  }
  return bounds;
}

std::vector<BagShare> bag_share(const EmbeddingBagCall& call, const LookupChunk& chunk,
                                int64_t worker, int64_t workers) {
  const int64_t total = chunk.num_lookups + chunk.num_bags;
  const BagSegment* last = &chunk.segments.back();
  BagShare begin = bag_at_cost(call.bags, chunk, total * worker / workers);
  BagShare end = worker + 1 == workers
                     ? BagShare{last, last->bag_end, last->bag_end}
                     : bag_at_cost(call.bags, chunk, total * (worker + 1) / workers);
  std::vector<BagShare> share;
  for (const BagSegment* segment = begin.segment; segment <= end.segment; ++segment) {
    const int64_t from = segment == begin.segment ? begin.bag_begin : segment->bag_begin;
    const int64_t to = segment == end.segment ? end.bag_begin : segment->bag_end;
    if (from < to) {
      share.push_back({segment, from, to});
    }
  }
  return share;
}

size_t table_position(const LookupChunk& chunk, int32_t table) {
  size_t position = 0;
  while (chunk.tables[position].table != table) {
    ++position;
  }
  return position;
}

}  // namespace flowtt
