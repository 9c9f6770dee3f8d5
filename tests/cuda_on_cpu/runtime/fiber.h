// Fibers of the scheduler (grid.cpp).

#pragma once

namespace cuda_on_cpu {

struct Fiber;

void start_on_new_stack(Fiber* fiber, void (*entry)());

// False when the fiber wrote beyond the end of its stack.
bool give_stack_back(Fiber* fiber);

// From the scheduler to a fiber, and from the current fiber to the scheduler.
void resume(Fiber* fiber);
void suspend();

}  // namespace cuda_on_cpu
