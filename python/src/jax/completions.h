// Threads that tell XLA that an operation has finished.
#pragma once

#include <functional>

namespace xdjax {

// Runs `task` soon, even if earlier tasks wait; any thread, does not wait. XLA continues its
// program in the task, up to a collective that waits for other ranks, so neither a rank's worker
// nor a fixed number of threads would do.
void run_soon(std::function<void()> task);

}  // namespace xdjax
