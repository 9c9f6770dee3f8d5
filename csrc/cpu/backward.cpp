#include <algorithm>
#include <cmath>

#include "cpu/bag_gradients.h"
#include "cpu/embedding_bag_cpu.h"
#include "cpu/kernel_interface.h"
#include "cpu/lookup_chunks.h"
#include "cpu/lookup_grouping.h"
#include "cpu/slice_gradient_sums.h"
#include "cpu/work_division.h"

namespace flowtt {
namespace {

// One worker's share of a chunk: rows [begin, end).
class ShareOfRows {
 public:
  ShareOfRows(const EmbeddingBagCall& call, const LookupChunk& chunk, const GroupedLookups& grouped,
              const std::vector<TableKernelArguments>& tables, const BagGradients& bags,
              SliceGradientSums& sums)
      : call_(call), chunk_(chunk), grouped_(grouped), tables_(tables), bags_(bags), sums_(sums) {}

  // The owned slice that row `begin` shares with the row before, or -1; and its table.
  int64_t shared_slice(int64_t begin, int32_t& table_number) const {
    if (begin == 0 || begin >= grouped_.num_rows) {
      return -1;
    }
    size_t table = 0;
    while (begin >= grouped_.table_begin[table + 1]) {
      ++table;
    }
    if (begin == grouped_.table_begin[table]) {
      return -1;
    }
    const TableKernelArguments& arguments = tables_[table];
    const int cores = arguments.shape.num_cores;
    const auto slice_of = [&](int64_t row) {
      return slice_of_key(arguments.order, cores, grouped_.keys[row] - arguments.first_key,
                          owned_core(cores));
    };
    table_number = chunk_.tables[table].table;
    const int64_t slice = slice_of(begin);
    return slice == slice_of(begin - 1) ? slice : -1;
  }

  void accumulate(int64_t begin, int64_t end, bool continues, int64_t worker, void* scratch) {
    const CpuKernels& kernels = cpu_kernels(call_.core_type);
    for (size_t table = 0; table < tables_.size(); ++table) {
      const int64_t from = std::max(begin, grouped_.table_begin[table]);
      const int64_t to = std::min(end, grouped_.table_begin[table + 1]);
      if (from >= to) {
        continue;
      }
      GradientArguments arguments{};
      arguments.keys = grouped_.keys.data();
      arguments.lookup_begin = grouped_.lookup_begin.data();
      arguments.positions = grouped_.positions.data();
      arguments.slot_of_position = bags_.slot_of.data();
      arguments.weight_of_position =
          call_.bags.per_sample_weights == nullptr ? nullptr : bags_.weight_of.data();
      arguments.bag_gradients = bags_.gradients.data() + bags_.table_bytes[table];
      for (int k = 0; k < tables_[table].shape.num_cores; ++k) {
        arguments.gradients[k] = sums_.target(chunk_.tables[table].table, k, worker);
      }
      kernels.accumulate_gradients(tables_[table], arguments, from, to, continues && from == begin,
                                   scratch);
    }
  }

 private:
  const EmbeddingBagCall& call_;
  const LookupChunk& chunk_;
  const GroupedLookups& grouped_;
  const std::vector<TableKernelArguments>& tables_;
  const BagGradients& bags_;
  SliceGradientSums& sums_;
};

void sum_gradients(const EmbeddingBagCall& call, const StridedMatrix& grad_output,
                   SliceGradientSums& sums) {
  const CpuKernels& kernels = cpu_kernels(call.core_type);
  ChunkPlanner planner(call);
  LookupChunk chunk;
  GroupedLookups grouped;
  BagGradients bags;
  std::vector<AlignedBuffer<char>> scratch;
  while (planner.next(chunk)) {
    group_lookups(call, chunk, false, grouped);
    const std::vector<TableKernelArguments> tables = table_arguments(call, chunk);
    bags.load(call, chunk, tables, grad_output, call.bags.per_sample_weights != nullptr);
    const int64_t workers = std::min(sums.max_workers(), useful_workers(call, chunk.num_lookups));
    sums.prepare(chunk, grouped, tables, workers);
    int64_t scratch_bytes = 0;
    for (const TableKernelArguments& table : tables) {
      scratch_bytes = std::max(scratch_bytes, kernels.scratch_bytes(table));
    }
    if (static_cast<int64_t>(scratch.size()) < workers) {
      scratch.resize(workers);
    }
    const std::vector<int64_t> bounds = divide_rows(call, chunk, grouped, workers, 1.0);
    ShareOfRows share(call, chunk, grouped, tables, bags, sums);
    std::vector<int64_t> heads(workers, -1);
    std::vector<int32_t> head_tables(workers, 0);
    for (int64_t worker = 0; worker < workers; ++worker) {
      if (bounds[worker] < bounds[worker + 1]) {
        heads[worker] = share.shared_slice(bounds[worker], head_tables[worker]);
      }
    }
    call.threads.run(workers, [&](int64_t worker) {
      sums.prepare_worker(chunk, worker);
      scratch[worker].ensure(scratch_bytes);
      share.accumulate(bounds[worker], bounds[worker + 1], heads[worker] >= 0, worker,
                       scratch[worker].data());
    });
    sums.add_heads(head_tables, heads);
  }
}

// q_d of a core whose summed gradients are stored transposed, else 0.
int64_t transposed_rows(const EmbeddingBagCall& call, int64_t core) {
  size_t table = call.first_core.size() - 1;
  while (call.first_core[table] > core) {
    --table;
  }
  const TableShape& shape = call.tables[table];
  const bool last = core == call.first_core[table] + shape.num_cores - 1;
  return last && rows_are_transposed(shape) ? shape.q[shape.num_cores - 1] : 0;
}

}  // namespace

void embedding_bag_backward(const EmbeddingBagCall& call, const StridedMatrix& grad_output,
                            const std::vector<void*>& core_grads) {
  check_offsets(call);
  SliceGradientSums sums(call);
  sum_gradients(call, grad_output, sums);
  sums.finish([&](int64_t core) {
    SliceUpdate update{};
    update.transposed_rows = transposed_rows(call, core);
    update.dense_gradient = core_grads[core];
    return update;
  });
}

void embedding_bag_backward_update(const EmbeddingBagCall& call, const StridedMatrix& grad_output,
                                   const OptimizerArguments& optimizer,
                                   const std::vector<void*>& momentum1,
                                   const std::vector<void*>& momentum2) {
  check_offsets(call);
  SliceGradientSums sums(call);
  sum_gradients(call, grad_output, sums);
  const auto iteration = static_cast<double>(++*optimizer.iteration);
  sums.finish([&](int64_t core) {
    SliceUpdate update{};
    update.transposed_rows = transposed_rows(call, core);
    update.optimizer = optimizer.type;
    update.core = call.cores[core];
    update.momentum1 = momentum1[core];
    update.momentum2 = momentum2[core];
    update.learning_rate = static_cast<double>(*optimizer.learning_rate);
    update.eps = optimizer.eps;
    update.beta1 = optimizer.beta1;
    update.beta2 = optimizer.beta2;
    update.correction1 = 1 - std::pow(optimizer.beta1, iteration);
    update.correction2 = 1 - std::pow(optimizer.beta2, iteration);
    update.weight_decay = optimizer.weight_decay;
    return update;
  });
}

}  // namespace flowtt
