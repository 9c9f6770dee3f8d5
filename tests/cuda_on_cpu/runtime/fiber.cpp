// Fibers: their stacks, and the switch from one to another (System V x86-64).

#include "fiber.h"

#include <sys/mman.h>

#include <cstring>

#include "grid.h"

namespace cuda_on_cpu {

// Saves the registers that a call preserves, and continues on another stack.
extern "C" void cuda_on_cpu_switch(void** from, void* to);
asm(R"(
.text
.hidden cuda_on_cpu_switch
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");

namespace {

constexpr size_t kStackBytes = 96 << 10;
constexpr uint64_t kStackMark = 0x5afe5afe5afe5afe;

// Stacks begin at different places of their pages: at equal ones they would share a few lines of
// the caches.
constexpr size_t kShiftBytes = 16 * 21;
constexpr size_t kMaxShiftBytes = 4 << 10;

std::vector<std::byte*> free_stacks;
size_t next_shift;
void* scheduler_stack_pointer;

}  // namespace

void start_on_new_stack(Fiber* fiber, void (*entry)()) {
  if (free_stacks.empty()) {
    free_stacks.push_back(
        static_cast<std::byte*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)));
  }
  fiber->stack = free_stacks.back();
  free_stacks.pop_back();
  std::memcpy(fiber->stack, &kStackMark, sizeof(kStackMark));
  // Six registers and the entry's address, such that the entry finds the stack as after a call.
  next_shift = (next_shift + kShiftBytes) % kMaxShiftBytes;
  void** top = reinterpret_cast<void**>(fiber->stack + kStackBytes - next_shift) - 1;
  *top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber->stack_pointer = top;
}

bool give_stack_back(Fiber* fiber) {
  const bool intact = std::memcmp(fiber->stack, &kStackMark, sizeof(kStackMark)) == 0;
  free_stacks.push_back(fiber->stack);
  fiber->stack = nullptr;
  return intact;
}

void resume(Fiber* fiber) { cuda_on_cpu_switch(&scheduler_stack_pointer, fiber->stack_pointer); }

void suspend() { cuda_on_cpu_switch(&current->stack_pointer, scheduler_stack_pointer); }

}  // namespace cuda_on_cpu
