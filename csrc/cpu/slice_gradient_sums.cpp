#include "cpu/slice_gradient_sums.h"

#include <algorithm>
#include <cstring>

#include "cpu/work_division.h"

namespace flowtt {
namespace {

// All workers' own buffers together.
constexpr int64_t kMaxPrivateBytes = int64_t{256} << 20;
// Cores smaller than this, or with fewer slices than lookups, get a slot for every slice: no map is
// needed.
constexpr int64_t kSmallCoreBytes = int64_t{1} << 15;

std::vector<int64_t> lookups_per_table(const EmbeddingBagCall& call) {
  std::vector<int64_t> lookups(call.tables.size(), 0);
  const BagBatch& bags = call.bags;
  for (int64_t feature = 0; feature < bags.num_features; ++feature) {
    lookups[call.features[feature].table] += offset_at(bags, (feature + 1) * bags.batch_size) -
                                             offset_at(bags, feature * bags.batch_size);
  }
  return lookups;
}

template <typename A>
void add(char* target, const char* source, int64_t count) {
  A* to = reinterpret_cast<A*>(target);
  const A* from = reinterpret_cast<const A*>(source);
  for (int64_t i = 0; i < count; ++i) {
    to[i] += from[i];
  }
}

}  // namespace

SliceGradientSums::SliceGradientSums(const EmbeddingBagCall& call)
    : call_(call),
      kernels_(cpu_kernels(call.core_type)),
      element_(accumulation_bytes(call.core_type)),
      cores_(call.cores.size()) {
  const std::vector<int64_t> lookups = lookups_per_table(call);
  int64_t private_bytes = 1;
  for (size_t table = 0; table < call.tables.size(); ++table) {
    const TableShape& shape = call.tables[table];
    for (int k = 0; k < shape.num_cores; ++k) {
      CoreSums& core = cores_[call.first_core[table] + k];
      core.table = static_cast<int32_t>(table);
      core.core = k;
      core.slice_numel = shape.slice_numel(k);
      core.num_slices = shape.p[k];
      core.owned = k == owned_core(shape.num_cores);
      core.every_slice = core.num_slices * core.slice_numel * element_ <= kSmallCoreBytes ||
                         core.num_slices <= lookups[table];
      if (!core.owned) {
        private_bytes += std::min(core.num_slices, lookups[table]) * core.slice_numel * element_;
      }
    }
  }
  max_workers_ =
      std::max<int64_t>(1, std::min(call.threads.num_threads, kMaxPrivateBytes / private_bytes));
}

void SliceGradientSums::assign_slots(CoreSums& core, const TableKernelArguments& table,
                                     const uint64_t* keys, int64_t begin, int64_t end) {
  if (core.every_slice) {
    core.num_slots = core.num_slices;
    core.touched.resize(core.num_slices, 0);
    return;
  }
  core.slot_of.resize(core.num_slices, -1);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t slice =
        slice_of_key(table.order, table.shape.num_cores, keys[row] - table.first_key, core.core);
    if (core.slot_of[slice] < 0) {
      core.slot_of[slice] = static_cast<int32_t>(core.slice_of.size());
      core.slice_of.push_back(slice);
    }
  }
  core.num_slots = static_cast<int64_t>(core.slice_of.size());
}

// Gives buffer `buffer` all slots, the new ones zero.
void SliceGradientSums::make_room(CoreSums& core, int64_t buffer) {
  const int64_t slot_bytes = core.slice_numel * element_;
  const int64_t used = core.zeroed[buffer] * slot_bytes;
  const int64_t needed = core.num_slots * slot_bytes;
  if (needed == used) {
    return;
  }
  AlignedBuffer<char> larger(needed);
  if (used > 0) {
    std::memcpy(larger.data(), core.sums[buffer].data(), static_cast<size_t>(used));
  }
  std::memset(larger.data() + used, 0, static_cast<size_t>(needed - used));
  std::swap(core.sums[buffer], larger);
  core.zeroed[buffer] = core.num_slots;
}

void SliceGradientSums::prepare(const LookupChunk& chunk, const GroupedLookups& grouped,
                                const std::vector<TableKernelArguments>& tables, int64_t workers) {
  struct Task {
    CoreSums* core;
    size_t table;
  };
  std::vector<Task> tasks;
  bool all_slices = true;
  for (size_t table = 0; table < tables.size(); ++table) {
    for (int k = 0; k < tables[table].shape.num_cores; ++k) {
      CoreSums& core = cores_[call_.first_core[chunk.tables[table].table] + k];
      tasks.push_back({&core, table});
      all_slices = all_slices && core.every_slice;
      const size_t buffers = core.owned ? 1 : static_cast<size_t>(workers);
      if (core.sums.size() < buffers) {
        core.sums.resize(buffers);
        core.zeroed.resize(buffers, 0);
      }
    }
  }
  const auto assign = [&](int64_t task) {
    const size_t table = tasks[task].table;
    assign_slots(*tasks[task].core, tables[table], grouped.keys.data(), grouped.table_begin[table],
                 grouped.table_begin[table + 1]);
  };
  const auto num_tasks = static_cast<int64_t>(tasks.size());
  if (all_slices || workers == 1) {
    for (int64_t task = 0; task < num_tasks; ++task) {
      assign(task);
    }
  } else {
    call_.threads.run(num_tasks, assign);
  }
  for (const Task& task : tasks) {
    if (task.core->owned) {
      make_room(*task.core, 0);
    }
  }
  if (static_cast<int64_t>(heads_.size()) < workers) {
    heads_.resize(workers);
  }
}

void SliceGradientSums::prepare_worker(const LookupChunk& chunk, int64_t worker) {
  int64_t largest_owned = 1;
  for (const ChunkTable& table : chunk.tables) {
    for (int k = 0; k < call_.tables[table.table].num_cores; ++k) {
      CoreSums& core = cores_[call_.first_core[table.table] + k];
      if (core.owned) {
        largest_owned = std::max(largest_owned, core.slice_numel);
      } else {
        make_room(core, worker);
      }
    }
  }
  heads_[worker].ensure(largest_owned * element_);
  std::memset(heads_[worker].data(), 0, static_cast<size_t>(largest_owned * element_));
}

SliceGradients SliceGradientSums::target(int32_t table, int core, int64_t worker) {
  CoreSums& sums = cores_[call_.first_core[table] + core];
  SliceGradients target{};
  target.slices = sums.sums[sums.owned ? 0 : worker].data();
  target.slot_of = sums.every_slice ? nullptr : sums.slot_of.data();
  target.touched = sums.every_slice ? sums.touched.data() : nullptr;
  target.head = sums.owned ? heads_[worker].data() : nullptr;
  return target;
}

void SliceGradientSums::add_heads(const std::vector<int32_t>& head_tables,
                                  const std::vector<int64_t>& heads) {
  for (size_t worker = 0; worker < heads.size(); ++worker) {
    if (heads[worker] < 0) {
      continue;
    }
    const int32_t table = head_tables[worker];
    const int owned = owned_core(call_.tables[table].num_cores);
    CoreSums& core = cores_[call_.first_core[table] + owned];
    const int64_t slot = core.every_slice ? heads[worker] : core.slot_of[heads[worker]];
    char* target = core.sums[0].data() + slot * core.slice_numel * element_;
    if (element_ == 8) {
      add<double>(target, heads_[worker].data(), core.slice_numel);
    } else {
      add<float>(target, heads_[worker].data(), core.slice_numel);
    }
  }
}

void SliceGradientSums::update_slots(const CoreSums& core, const SliceUpdate& update,
                                     int64_t worker, int64_t workers,
                                     AlignedBuffer<char>& scratch) {
  scratch.ensure(2 * core.slice_numel * element_);
  const int64_t end = core.num_slots * (worker + 1) / workers;
  for (int64_t slot = core.num_slots * worker / workers; slot < end; ++slot) {
    if (core.every_slice && core.touched[slot] == 0) {
      continue;
    }
    const int64_t slice = core.every_slice ? slot : core.slice_of[slot];
    kernels_.update_slice(update, slice, slot, scratch.data());
  }
}

}  // namespace flowtt
