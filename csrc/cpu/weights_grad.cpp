#include <algorithm>

#include "cpu/bag_gradients.h"
#include "cpu/chunk_rows.h"
#include "cpu/embedding_bag_cpu.h"
#include "cpu/kernel_interface.h"
#include "cpu/lookup_chunks.h"
#include "cpu/lookup_grouping.h"
#include "cpu/work_division.h"

namespace flowtt {

void embedding_bag_weights_grad(const EmbeddingBagCall& call, const StridedMatrix& grad_output,
                                void* weights_grad) {
  check_offsets(call);
  const CpuKernels& kernels = cpu_kernels(call.core_type);
  const int64_t element = accumulation_bytes(call.core_type);
  ChunkPlanner planner(call);
  LookupChunk chunk;
  GroupedLookups grouped;
  ChunkRows rows;
  BagGradients bags;
  while (planner.next(chunk)) {
    group_lookups(call, chunk, true, grouped);
    const std::vector<TableKernelArguments> tables = table_arguments(call, chunk);
    rows.compute(call, chunk, grouped, tables);
    bags.load(call, chunk, tables, grad_output, false);
    const int64_t workers = useful_workers(call, chunk.num_lookups);
    for (const BagSegment& segment : chunk.segments) {
      const size_t position = table_position(chunk, segment.table);
      DotArguments arguments{};
      arguments.rows = rows.rows.data() + rows.table_bytes[position];
      arguments.bag_gradients = bags.gradients.data() + bags.table_bytes[position];
      arguments.row_of = grouped.row_of.data() + segment.first_position;
      arguments.first_row = static_cast<uint32_t>(grouped.table_begin[position]);
      arguments.slot_of = bags.slot_of.data() + segment.first_position;
      arguments.weights_grad = static_cast<char*>(weights_grad) + segment.lookup_begin * element;
      arguments.dim = tables[position].shape.embedding_dim;
      const int64_t lookups = segment.lookup_end - segment.lookup_begin;
      call.threads.run(workers, [&](int64_t worker) {
        kernels.dot_rows(arguments, lookups * worker / workers, lookups * (worker + 1) / workers);
      });
    }
  }
}

}  // namespace flowtt
