#include "cpu/bag_gradients.h"

#include <algorithm>

#include "cpu/kernel_interface.h"

namespace flowtt {
namespace {

StridedMatrix at_column(const StridedMatrix& matrix, int64_t column) {
  StridedMatrix moved = matrix;
  int64_t element = 2;
  if (matrix.type == ElementType::kFloat32) {
    element = 4;
  } else if (matrix.type == ElementType::kFloat64) {
    element = 8;
  }
  moved.data = static_cast<const char*>(matrix.data) + column * matrix.column_stride * element;
  return moved;
}

}  // namespace

void BagGradients::load(const EmbeddingBagCall& call, const LookupChunk& chunk,
                        const std::vector<TableKernelArguments>& tables,
                        const StridedMatrix& grad_output, bool weighted) {
  const CpuKernels& kernels = cpu_kernels(call.core_type);
  const int64_t element = accumulation_bytes(call.core_type);
  int64_t bytes = 0;
  int64_t largest_dim = 1;
  table_bytes.clear();
  for (size_t table = 0; table < tables.size(); ++table) {
    const int64_t dim = tables[table].shape.embedding_dim;
    table_bytes.push_back(bytes);
    bytes += chunk.tables[table].num_bags * dim * element;
    largest_dim = std::max(largest_dim, dim);
  }
  gradients.ensure(bytes);
  slot_of.ensure(chunk.num_lookups);
  if (weighted) {
    weight_of.ensure(chunk.num_lookups * element);
  }
  const int64_t workers = useful_workers(call, chunk.num_lookups);
  if (static_cast<int64_t>(scratch.size()) < workers) {
    scratch.resize(workers);
  }
  call.threads.run(workers, [&](int64_t worker) {
    scratch[worker].ensure(largest_dim * element);
    for (const BagShare& share : bag_share(call, chunk, worker, workers)) {
      const BagSegment& segment = *share.segment;
      const size_t position = table_position(chunk, segment.table);
      const TableKernelArguments& table = tables[position];
      const int64_t dim = table.shape.embedding_dim;
      BagGradientArguments arguments{};
      arguments.bags = &call.bags;
      arguments.feature = segment.feature;
      arguments.bag_begin = segment.bag_begin;
      arguments.lookup_begin = segment.lookup_begin;
      arguments.lookup_end = segment.lookup_end;
      arguments.grad_output = at_column(grad_output, call.features[segment.feature].column);
      arguments.left_columns = table.left_columns;
      arguments.right_columns = dim / table.left_columns;
      arguments.transposed_rows = table.transposed_rows;
      arguments.bag_gradients =
          gradients.data() + table_bytes[position] + segment.first_slot * dim * element;
      arguments.first_slot = static_cast<uint32_t>(segment.first_slot);
      arguments.slot_of = slot_of.data() + segment.first_position;
      arguments.weight_of =
          weighted ? weight_of.data() + segment.first_position * element : nullptr;
      kernels.load_bag_gradients(arguments, share.bag_begin, share.bag_end, scratch[worker].data());
    }
  });
}

}  // namespace flowtt
