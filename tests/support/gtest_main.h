// The parts of a GoogleTest program over several ranks: its World, and a call that runs a body on
// all ranks.
#pragma once

#include <functional>

#include "support/world.h"

namespace xd::test {

// Exit code of a launch that cannot run here; CTest knows it.
inline constexpr int kSkipped = 77;

// The launch this program is part of; made by main before any test.
World& world();

// Executes body on every rank of this process. A rank that fails makes the test fail.
void on_every_rank(const std::function<void(Rank&)>& body);

}  // namespace xd::test
