// A grid of thread blocks on one CPU thread: every CUDA thread is a fiber, and gives way to another
// where it waits, and at atomics.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace cuda_on_cpu {

struct Fiber;

// Which of the threads that can run comes next: the first, the last, any, or for a while only those
// of one block, so that blocks get far ahead of each other.
enum class Order : int { kAscending, kDescending, kRandom, kBursts };

// The device that kernels are launched on.
struct Device {
  int multiprocessors = 4;
  int capability_major = 9;
  Order order = Order::kAscending;
  uint64_t seed = 1;
};
extern Device device;

// A barrier of those `members` that have not ended.
struct Barrier {
  int members = 0;
  int arrived = 0;
  uint64_t generation = 0;
  std::vector<Fiber*> waiting;

  // The generation to wait for the end of.
  uint64_t arrive();
  void wait(uint64_t arrival);
  void leave();

 private:
  void release();
};

inline constexpr int kLanes = 32;
inline constexpr unsigned kWholeWarp = 0xffffffffu;
inline constexpr int kSlotBytes = 64;

// What meets in a warp-wide operation.
enum class Operation { kNone, kBarrier, kShuffle, kVote, kMatch, kReduce, kProduct, kMatrices };

// A value of each lane, for one operation.
struct Exchange {
  Operation operation = Operation::kNone;
  uint32_t present = 0;  // lanes that have ended give nothing
  alignas(16) std::byte slots[kLanes][kSlotBytes];
};

struct Warp {
  Barrier barrier;
  // A lane may be one operation ahead of another that has still to read.
  Exchange exchanges[2];
};

struct Block {
  dim3 index;
  Barrier barrier;
  Barrier named_barrier;  // of some of the threads
  int votes[2] = {0, 0};
  std::vector<Warp> warps;
  // Dynamic shared memory, a gap that nobody may write to, then the static variables.
  std::byte* shared = nullptr;
  size_t dynamic_bytes = 0;
  size_t shared_bytes = 0;
  std::map<int, size_t> variables;  // offsets of the static variables
  std::unique_ptr<std::byte[]> storage;
  std::vector<std::unique_ptr<Fiber>> fibers;
  size_t live = 0;  // of them

  void* variable(int number, size_t bytes, size_t alignment);
};

// An asynchronous copy that has not arrived.
struct PendingCopy {
  void* target;
  const void* source;
  size_t bytes;
};

struct Fiber {
  void* stack_pointer = nullptr;
  std::byte* stack = nullptr;
  dim3 thread;
  int lane = 0;
  Warp* warp = nullptr;
  Block* block = nullptr;
  bool ended = false;
  std::vector<PendingCopy> copies;
};

extern Fiber* current;
extern dim3 block_dimensions;
extern dim3 grid_dimensions;

// Ends the launch with an error, which is printed.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Other threads may run first.
void give_way();

// True half of the times in a random order or in bursts, else never.
bool toss();

// Runs the kernel to its end; false when it failed.
bool run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel);

// `value` of every lane that has not ended.
const Exchange& exchange(Operation operation, unsigned mask, const void* value, size_t bytes);

// The static shared variable of the block that `Declaration` stands for.
template <typename T, typename Declaration>
T& static_shared(Declaration) {
  extern int next_variable;
  static const int number = next_variable++;
  return *static_cast<T*>(current->block->variable(number, sizeof(T), alignof(T)));
}

template <typename T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(current->block->shared);
}

// Shared memory by 32-bit addresses, of which 0 is none.
uint32_t shared_address(const void* pointer);
void* shared_pointer(const Block& block, uint32_t address, size_t bytes);

}  // namespace cuda_on_cpu
