// The scheduler: which thread runs next, which blocks are resident, what waits for what.

#include "grid.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>

#include "fiber.h"

namespace cuda_on_cpu {

Device device;
Fiber* current;
dim3 block_dimensions;
dim3 grid_dimensions;
int next_variable;

namespace {

constexpr int kThreadsPerMultiprocessor = 2048;
constexpr size_t kSharedBytesPerMultiprocessor = 228 << 10;
constexpr size_t kMaxDynamicBytes = 227 << 10;
constexpr size_t kGapBytes = 256;
constexpr size_t kVariableBytes = 48 << 10;
constexpr uint32_t kFirstAddress = 1024;
// Shared memory starts as NaN and huge counts.
constexpr int kUninitialised = 0xff;
// So many turns in a row without a thread that arrives or ends: it will not happen any more.
constexpr int64_t kMaxIdleTurns = 20'000'000;

std::deque<Fiber*> ready;
std::mt19937_64 generator;
const std::function<void()>* body;
bool failed;
int64_t idle_turns;

// Of a burst: the block, and for how many turns yet.
const Block* favoured;
int64_t favoured_turns;

bool is_random() { return device.order == Order::kRandom || device.order == Order::kBursts; }

// A thread that can run, of the favoured block if some tries find one.
size_t choose_in_bursts() {
  constexpr int kTries = 64;
  if (favoured_turns-- <= 0) {
    favoured = ready[generator() % ready.size()]->block;
    favoured_turns = int64_t{1} << (4 + generator() % 11);
  }
  size_t chosen = 0;
  for (int i = 0; i < kTries; ++i) {
    chosen = generator() % ready.size();
    if (ready[chosen]->block == favoured) return chosen;
  }
  favoured_turns = 0;
  return chosen;
}

Fiber* next_fiber() {
  Fiber* fiber = nullptr;
  if (is_random()) {
    const size_t chosen =
        device.order == Order::kBursts ? choose_in_bursts() : generator() % ready.size();
    std::swap(ready[chosen], ready.back());
  }
  if (device.order == Order::kAscending) {
    fiber = ready.front();
    ready.pop_front();
  } else {
    fiber = ready.back();
    ready.pop_back();
  }
  return fiber;
}

void end_fiber() {
  Fiber& fiber = *current;
  if (!fiber.copies.empty()) fail("a thread ends before its asynchronous copies have arrived");
  fiber.ended = true;
  fiber.warp->barrier.leave();
  fiber.block->barrier.leave();
  idle_turns = 0;
}

void run_fiber() {
  (*body)();
  end_fiber();
  suspend();
}

std::unique_ptr<Block> make_block(size_t dynamic_bytes) {
  auto block = std::make_unique<Block>();
  constexpr size_t kAlignment = 1024;
  const size_t bytes = dynamic_bytes + kGapBytes + kVariableBytes;
  block->storage = std::make_unique_for_overwrite<std::byte[]>(bytes + kAlignment);
  void* start = block->storage.get();
  size_t space = bytes + kAlignment;
  block->shared = static_cast<std::byte*>(std::align(kAlignment, bytes, start, space));
  block->dynamic_bytes = dynamic_bytes;
  block->shared_bytes = dynamic_bytes + kGapBytes;
  std::memset(block->shared, kUninitialised, bytes);
  return block;
}

std::unique_ptr<Block> start_block(unsigned number, size_t dynamic_bytes) {
  auto block = make_block(dynamic_bytes);
  const int threads = static_cast<int>(block_dimensions.x);
  block->index = {number % grid_dimensions.x, number / grid_dimensions.x, 0};
  block->barrier.members = threads;
  block->warps.resize((threads + kLanes - 1) / kLanes);
  for (int thread = 0; thread < threads; ++thread) {
    auto fiber = std::make_unique<Fiber>();
    fiber->thread = {static_cast<unsigned>(thread), 0, 0};
    fiber->lane = thread % kLanes;
    fiber->warp = &block->warps[thread / kLanes];
    ++fiber->warp->barrier.members;
    fiber->block = block.get();
    start_on_new_stack(fiber.get(), run_fiber);
    ready.push_back(fiber.get());
    block->fibers.push_back(std::move(fiber));
  }
  block->live = block->fibers.size();
  return block;
}

void end_block(const Block& block) {
  for (const auto& fiber : block.fibers) {
    if (!give_stack_back(fiber.get())) {
      std::fprintf(stderr, "cuda_on_cpu: the stack of a thread was too small\n");
      failed = true;
    }
  }
  const std::byte* gap = block.shared + block.dynamic_bytes;
  if (!std::all_of(gap, gap + kGapBytes,
                   [](std::byte value) { return value == std::byte{kUninitialised}; })) {
    std::fprintf(stderr, "cuda_on_cpu: block %u wrote beyond its shared memory\n", block.index.x);
    failed = true;
  }
}

std::vector<unsigned> order_of_blocks(unsigned count) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (device.order == Order::kDescending) std::reverse(order.begin(), order.end());
  if (is_random()) std::shuffle(order.begin(), order.end(), generator);
  return order;
}

size_t resident_blocks(size_t dynamic_bytes) {
  const size_t by_threads = kThreadsPerMultiprocessor / block_dimensions.x;
  const size_t by_memory = kSharedBytesPerMultiprocessor / (dynamic_bytes + 1024);
  const size_t blocks = std::max<size_t>(std::min(by_threads, by_memory), 1);
  return std::max<size_t>(device.multiprocessors * blocks, 1);
}

}  // namespace

uint64_t Barrier::arrive() {
  const uint64_t arrival = generation;
  idle_turns = 0;
  if (++arrived == members) release();
  return arrival;
}

void Barrier::wait(uint64_t arrival) {
  if (generation != arrival) return;
  waiting.push_back(current);
  suspend();
}

void Barrier::leave() {
  if (--members > 0 && arrived == members) release();
}

void Barrier::release() {
  arrived = 0;
  ++generation;
  ready.insert(ready.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

void* Block::variable(int number, size_t bytes, size_t alignment) {
  const auto [entry, is_new] = variables.try_emplace(number, 0);
  if (is_new) {
    entry->second = (shared_bytes + alignment - 1) / alignment * alignment;
    shared_bytes = entry->second + bytes;
    if (shared_bytes > dynamic_bytes + kGapBytes + kVariableBytes) {
      fail("the static shared variables take more than %zu bytes", kVariableBytes);
    }
  }
  return shared + entry->second;
}

uint32_t shared_address(const void* pointer) {
  const Block& block = *current->block;
  const auto offset = static_cast<const std::byte*>(pointer) - block.shared;
  if (offset < 0 || offset > static_cast<ptrdiff_t>(block.shared_bytes)) {
    fail("the address of something that is not in shared memory");
  }
  return static_cast<uint32_t>(offset) + kFirstAddress;
}

void* shared_pointer(const Block& block, uint32_t address, size_t bytes) {
  const size_t offset = address - size_t{kFirstAddress};
  if (address < kFirstAddress || offset + bytes > block.shared_bytes || address % bytes != 0) {
    fail("%zu bytes of shared memory at %zu of %zu", bytes, offset, block.shared_bytes);
  }
  return block.shared + offset;
}

void fail(const char* format, ...) {
  std::fprintf(stderr, "cuda_on_cpu: block %u, thread %u: ", current->block->index.x,
               current->thread.x);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  failed = true;
  while (true) suspend();
}

void give_way() {
  // Where the next thread is the last that could run, a turn at the other end lets the others go.
  if (device.order == Order::kDescending) {
    ready.push_front(current);
  } else {
    ready.push_back(current);
  }
  suspend();
}

bool toss() { return is_random() && (generator() & 1) != 0; }

const Exchange& exchange(Operation operation, unsigned mask, const void* value, size_t bytes) {
  Warp& warp = *current->warp;
  if (mask != kWholeWarp) fail("a warp-wide operation of lanes %08x, not of all", mask);
  Exchange& values = warp.exchanges[warp.barrier.generation & 1];
  if (warp.barrier.arrived == 0) {
    values.operation = operation;
    values.present = 0;
  }
  if (values.operation != operation) fail("lanes of a warp meet in different operations");
  values.present |= 1u << current->lane;
  std::memcpy(values.slots[current->lane], value, bytes);
  warp.barrier.wait(warp.barrier.arrive());
  return values;
}

bool run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  const unsigned blocks = grid.x * grid.y;
  if (blocks == 0 || shared_bytes > kMaxDynamicBytes || block.x > 1024 ||
      grid.z * block.y * block.z != 1) {
    std::fprintf(
        stderr, "cuda_on_cpu: a launch of %u blocks of %u threads and %zu bytes of shared memory\n",
        blocks, block.x, shared_bytes);
    return false;
  }
  block_dimensions = block;
  grid_dimensions = grid;
  body = &kernel;
  failed = false;
  idle_turns = 0;
  favoured_turns = 0;
  const std::vector<unsigned> order = order_of_blocks(blocks);
  const size_t most = resident_blocks(shared_bytes);
  std::map<const Block*, std::unique_ptr<Block>> resident;
  size_t started = 0;
  while (!failed) {
    while (resident.size() < most && started < order.size()) {
      auto next = start_block(order[started++], shared_bytes);
      resident.emplace(next.get(), std::move(next));
    }
    if (resident.empty()) break;
    if (ready.empty() || ++idle_turns > kMaxIdleTurns) {
      std::fprintf(stderr, "cuda_on_cpu: %zu blocks wait for ever\n", resident.size());
      failed = true;
      break;
    }
    current = next_fiber();
    resume(current);
    if (!current->ended) continue;
    Block& its_block = *current->block;
    if (--its_block.live > 0) continue;
    end_block(its_block);
    resident.erase(&its_block);
  }
  for (const auto& [key, left] : resident) {
    for (const auto& fiber : left->fibers) give_stack_back(fiber.get());
  }
  ready.clear();
  current = nullptr;
  return !failed;
}

}  // namespace cuda_on_cpu

extern "C" __attribute__((visibility("default"))) void cuda_on_cpu_set_device(int multiprocessors,
                                                                              int capability_major,
                                                                              int order,
                                                                              uint64_t seed) {
  cuda_on_cpu::device = {multiprocessors, capability_major, static_cast<cuda_on_cpu::Order>(order),
                         seed};
  cuda_on_cpu::generator.seed(seed);
}
