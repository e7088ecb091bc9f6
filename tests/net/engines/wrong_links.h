// An engine that makes the links above it wrong: it changes what they put and what they hear, as if
// they kept other rules than theirs. The engine below sees the wrong links, and so do neighbours.
#pragma once

#include <memory>

#include "net/engine.h"
#include "net/engines/mutant.h"

namespace xd::net {

// For links of so many frames. Mutants that are not of links change nothing.
std::unique_ptr<Engine> make_wrong_links(std::unique_ptr<Engine> below, Mutant mutant, int frames);

}  // namespace xd::net
