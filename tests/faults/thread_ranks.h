// Ranks as threads of the test program, on a communicator of their own.
#pragma once

#include <functional>

#include "support/world.h"

namespace xd::test {

// Runs body on `num_ranks` ranks. A rank that throws makes the test fail. Its communicator is
// destroyed, so that its peers do not wait for it.
void on_thread_ranks(int num_ranks, int timeout_ms, const std::function<void(Rank&, Comm&)>& body);

}  // namespace xd::test
