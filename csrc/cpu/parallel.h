// Threads for the torch-free kernels, lent by the caller.
#pragma once

#include <cstdint>
#include <functional>

namespace flowtt {

using ParallelTask = std::function<void(int64_t)>;

// run(n, task) calls task(0) .. task(n - 1), possibly at the same time, and returns when all are
// done. Within another parallel region the calls may come one after another, so a task must never
// wait for another.
struct ParallelRunner {
  int64_t num_threads;
  std::function<void(int64_t, const ParallelTask&)> run;
};

}  // namespace flowtt
