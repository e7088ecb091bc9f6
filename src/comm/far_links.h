// Links to a rank's partners on other machines (comm/far_routes.h), with the engine below them.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "comm/comm.h"
#include "comm/far_routes.h"
#include "net/links.h"

namespace xd {

class FarLinks {
 public:
  // Collective: opens an engine, and connects to the partners; throws as open_engine_together(),
  // and TIMEOUT or SYSTEM where no data come through to a partner that control messages reach.
  // `slots` of `slot_bytes` are the same on all ranks. `memory`: LinkConfig::memory.
  FarLinks(Comm& comm, CollectiveCall call, int slots, std::size_t slot_bytes,
           std::span<std::byte> memory = {});

  // Ends nothing: the connections are those of the process that this one is a fork of.
  void leave_behind() {
    [[maybe_unused]] const net::Links* links = links_.release();
    [[maybe_unused]] const net::Engine* engine = engine_.release();
  }

  net::Links& links() { return *links_; }
  const net::Links& links() const { return *links_; }
  const FarRoutes& routes() const { return routes_; }

 private:
  void connect(Comm& comm, CollectiveCall call);
  void greet(Comm& comm);

  const FarRoutes routes_;
  std::unique_ptr<net::Engine> engine_;  // outlives the links
  std::unique_ptr<net::Links> links_;
};

}  // namespace xd
