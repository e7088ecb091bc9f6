// Threads that tell XLA that an operation has finished.
#pragma once

#include <functional>

namespace xdjax {

// Runs `task` soon, whatever earlier tasks wait for; any thread, does not wait. XLA goes on with
// the program in it, up to a collective of its own that waits for other ranks: neither a rank's
// worker nor a fixed number of threads could take that.
void run_soon(std::function<void()> task);

}  // namespace xdjax
