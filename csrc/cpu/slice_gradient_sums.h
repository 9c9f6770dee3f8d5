// Memory in which the gradients of core slices are summed over a whole call.
//
// The core whose index leads the key order has one owner per slice: one buffer for all workers. The
// others are shared by everyone, so each worker has its own buffer, and these are added up in the
// order of the workers at the end: the result depends on the number of threads, never on timing.
// Buffers have room for the slices looked up, not for more than the core has.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/aligned_buffer.h"
#include "cpu/embedding_bag_cpu.h"
#include "cpu/kernel_interface.h"
#include "cpu/lookup_chunks.h"
#include "cpu/lookup_grouping.h"

namespace flowtt {

class SliceGradientSums {
 public:
  explicit SliceGradientSums(const EmbeddingBagCall& call);

  // Workers to use: as many as are useful for the lookups and as the buffers' memory allows.
  int64_t max_workers() const { return max_workers_; }

  // Makes room for the rows of a chunk: first once, then each worker for itself.
  void prepare(const LookupChunk& chunk, const GroupedLookups& grouped,
               const std::vector<TableKernelArguments>& tables, int64_t workers);
  void prepare_worker(const LookupChunk& chunk, int64_t worker);

  // Where a worker adds the gradients of a core of a table; head only with the owned core.
  SliceGradients target(int32_t table, int core, int64_t worker);

  // Adds the workers' heads (zero after prepare_worker) to the slices they belong to. heads[w] is
  // the slice of worker w's head, or -1, and head_tables[w] its table.
  void add_heads(const std::vector<int32_t>& head_tables, const std::vector<int64_t>& heads);

  // Calls update_slice for every slice that was looked up. `base` tells what to do with the core of
  // the given number in the flat list.
  template <typename MakeUpdate>
  void finish(const MakeUpdate& make_update);

 private:
  struct CoreSums {
    int32_t table = 0;
    int core = 0;
    int64_t slice_numel = 0;
    int64_t num_slices = 0;
    int64_t num_slots = 0;
    bool owned = false;
    bool every_slice = false;  // slot = slice, with `touched` flags
    std::vector<uint8_t> touched;
    std::vector<int32_t> slot_of;
    std::vector<int64_t> slice_of;          // of each slot
    std::vector<AlignedBuffer<char>> sums;  // one, or one per worker
    std::vector<int64_t> zeroed;            // slots of `sums` in use
  };

  void assign_slots(CoreSums& core, const TableKernelArguments& table, const uint64_t* keys,
                    int64_t begin, int64_t end);
  void make_room(CoreSums& core, int64_t buffer);
  void update_slots(const CoreSums& core, const SliceUpdate& update, int64_t worker,
                    int64_t workers, AlignedBuffer<char>& scratch);

  const EmbeddingBagCall& call_;
  const CpuKernels& kernels_;
  int64_t element_;
  int64_t max_workers_ = 1;
  std::vector<CoreSums> cores_;  // as call.cores
  std::vector<AlignedBuffer<char>> heads_;
};

template <typename MakeUpdate>
void SliceGradientSums::finish(const MakeUpdate& make_update) {
  std::vector<SliceUpdate> updates(cores_.size());
  std::vector<std::vector<const void*>> partials(cores_.size());
  int64_t elements = 0;
  for (size_t core = 0; core < cores_.size(); ++core) {
    if (cores_[core].num_slots == 0) {
      continue;
    }
    for (size_t n = 0; n < cores_[core].sums.size(); ++n) {
      if (cores_[core].zeroed[n] > 0) {
        partials[core].push_back(cores_[core].sums[n].data());
      }
    }
    updates[core] = make_update(static_cast<int64_t>(core));
    updates[core].partials = partials[core].data();
    updates[core].num_partials = static_cast<int64_t>(partials[core].size());
    updates[core].slice_numel = cores_[core].slice_numel;
    elements += cores_[core].num_slots * cores_[core].slice_numel;
  }
  constexpr int64_t kElementsPerWorker = 8192;
  const int64_t workers =
      std::max<int64_t>(1, std::min(call_.threads.num_threads, elements / kElementsPerWorker));
  call_.threads.run(workers, [&](int64_t worker) {
    AlignedBuffer<char> scratch;
    for (size_t core = 0; core < cores_.size(); ++core) {
      if (cores_[core].num_slots > 0) {
        update_slots(cores_[core], updates[core], worker, workers, scratch);
      }
    }
  });
}

}  // namespace flowtt
