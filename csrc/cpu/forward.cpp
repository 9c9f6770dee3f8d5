#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/chunk_rows.h"
#include "cpu/embedding_bag_cpu.h"
#include "cpu/kernel_interface.h"
#include "cpu/lookup_chunks.h"
#include "cpu/lookup_grouping.h"
#include "cpu/work_division.h"

namespace flowtt {

void ChunkRows::compute(const EmbeddingBagCall& call, const LookupChunk& chunk,
                        const GroupedLookups& grouped,
                        const std::vector<TableKernelArguments>& tables) {
  const CpuKernels& kernels = cpu_kernels(call.core_type);
  const int64_t element = accumulation_bytes(call.core_type);
  const int64_t workers = useful_workers(call, grouped.num_lookups);

  int64_t bytes = 0;
  int64_t scratch_bytes = 0;
  table_bytes.clear();
  for (size_t table = 0; table < tables.size(); ++table) {
    table_bytes.push_back(bytes);
    bytes += (grouped.table_begin[table + 1] - grouped.table_begin[table]) *
             tables[table].shape.embedding_dim * element;
    scratch_bytes = std::max(scratch_bytes, kernels.scratch_bytes(tables[table]));
  }
  rows.ensure(bytes);
  if (static_cast<int64_t>(scratch.size()) < workers) {
    scratch.resize(workers);
  }
  const std::vector<int64_t> bounds = divide_rows(call, chunk, grouped, workers, 0.0);
  call.threads.run(workers, [&](int64_t worker) {
    scratch[worker].ensure(scratch_bytes);
    for (size_t table = 0; table < tables.size(); ++table) {
      const int64_t begin = std::max(bounds[worker], grouped.table_begin[table]);
      const int64_t end = std::min(bounds[worker + 1], grouped.table_begin[table + 1]);
      if (begin < end) {
        char* target =
            rows.data() + table_bytes[table] +
            (begin - grouped.table_begin[table]) * tables[table].shape.embedding_dim * element;
        kernels.compute_rows(tables[table], grouped.keys.data(), begin, end, target,
                             scratch[worker].data());
      }
    }
  });
}

namespace {

void zero_output(const EmbeddingBagCall& call, void* output, int64_t bytes) {
  constexpr int64_t kBytesPerTask = int64_t{1} << 22;
  const int64_t tasks =
      std::max<int64_t>(1, std::min(call.threads.num_threads, bytes / kBytesPerTask));
  call.threads.run(tasks, [&](int64_t task) {
    const int64_t begin = bytes * task / tasks;
    const int64_t end = bytes * (task + 1) / tasks;
    std::memset(static_cast<char*>(output) + begin, 0, static_cast<size_t>(end - begin));
  });
}

int64_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
      return 8;
    case ElementType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

}  // namespace

void embedding_bag_forward(const EmbeddingBagCall& call, void* output, ElementType output_type,
                           int64_t total_columns) {
  if (check_offsets(call) == EmptyBags::kSome) {
    zero_output(call, output, call.bags.batch_size * total_columns * element_bytes(output_type));
  }
  const CpuKernels& kernels = cpu_kernels(call.core_type);
  const int64_t element = accumulation_bytes(call.core_type);
  int64_t largest_dim = 1;
  for (const TableShape& shape : call.tables) {
    largest_dim = std::max(largest_dim, shape.embedding_dim);
  }
  // The sum of a bag that a chunk cuts in two.
  AlignedBuffer<char> carried_in(largest_dim * element);
  AlignedBuffer<char> carried_out(largest_dim * element);
  char* carried[2] = {carried_in.data(), carried_out.data()};

  ChunkPlanner planner(call);
  LookupChunk chunk;
  GroupedLookups grouped;
  ChunkRows rows;
  while (planner.next(chunk)) {
    group_lookups(call, chunk, true, grouped);
    const std::vector<TableKernelArguments> tables = table_arguments(call, chunk);
    rows.compute(call, chunk, grouped, tables);
    const int64_t workers = useful_workers(call, chunk.num_lookups);
    call.threads.run(workers, [&](int64_t worker) {
      AlignedBuffer<char>& scratch = rows.scratch[worker];
      scratch.ensure(2 * largest_dim * element);
      for (const BagShare& share : bag_share(call, chunk, worker, workers)) {
        const BagSegment& segment = *share.segment;
        const size_t position = table_position(chunk, segment.table);
        const TableKernelArguments& table = tables[position];
        PoolArguments arguments{};
        arguments.bags = &call.bags;
        arguments.feature = segment.feature;
        arguments.lookup_begin = segment.lookup_begin;
        arguments.lookup_end = segment.lookup_end;
        arguments.row_of = grouped.row_of.data() + segment.first_position;
        arguments.first_row = static_cast<uint32_t>(grouped.table_begin[position]);
        arguments.rows = rows.rows.data() + rows.table_bytes[position];
        arguments.left_columns = table.left_columns;
        arguments.right_columns = table.shape.embedding_dim / table.left_columns;
        arguments.transposed_rows = table.transposed_rows;
        arguments.output = static_cast<char*>(output) +
                           call.features[segment.feature].column * element_bytes(output_type);
        arguments.output_type = output_type;
        arguments.output_stride = total_columns;
        arguments.carried_in = carried[0];
        arguments.carried_out = carried[1];
        kernels.pool_bags(arguments, share.bag_begin, share.bag_end, scratch.data());
      }
    });
    std::swap(carried[0], carried[1]);
  }
}

}  // namespace flowtt
