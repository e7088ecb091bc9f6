// An engine that does, to the ranks of one process, much that the contract of Engine does not
// forbid. It stands on any engine, and its numbers come from a seed, so that what happened once
// happens again.
//
// Puts travel in up to seven pieces, which are written late and in any order. The pieces of half of
// the puts leave one by one, each by a put of the engine below. The pieces of the others leave at
// once: they may be `sent` long before they arrive, and arrive though their sender closes. Tags and
// `sent` are reported late and in any order, but no tag before the last piece of its own put, and
// no put is taken at times. It also looks after the caller: a source that changes before `sent` is
// an INTERNAL error. It never fails a put of which a part has landed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "net/engine.h"
#include "net/engines/mutant.h"

namespace xd::net {

// The knowledge that the engines of one process share: to which put a piece belongs.
class ChaosWorld;
std::shared_ptr<ChaosWorld> make_chaos_world();

struct ChaosConfig {
  std::uint64_t seed = 0;
  unsigned longest_delay = 50;              // in calls of poll()
  std::optional<std::uint64_t> failed_put;  // a put of this rank, counted from 0
  unsigned damaged_in = 0;                  // of so many pieces one arrives with a changed bit
  std::size_t longest_put = SIZE_MAX;       // or that of the engine below, if it is shorter
  Mutant mutant = Mutant::none;
};

std::unique_ptr<Engine> make_chaos(std::unique_ptr<Engine> below, std::shared_ptr<ChaosWorld> world,
                                   const ChaosConfig& config);

}  // namespace xd::net
