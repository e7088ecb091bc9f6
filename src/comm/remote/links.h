// Links to a rank's neighbours on other machines, with the engine below them.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "base/error.h"
#include "comm/comm.h"
#include "net/links.h"

namespace xd {

class RemoteLinks {
 public:
  struct Config {
    std::vector<int> neighbours;    // ranks; each is a neighbour of its neighbours
    int frames;                     // for each neighbour and direction; the same on all ranks
    std::size_t frame_bytes;        // likewise
    std::span<std::byte> memory{};  // LinkConfig::memory
  };
  // Collective: opens an engine, unless it is given, and connects to the neighbours; throws as
  // Network::open_together(), and TIMEOUT or SYSTEM where no data come through to a neighbour that
  // control messages reach.
  RemoteLinks(Comm& comm, CollectiveCall call, Config config,
              std::unique_ptr<net::Engine> engine = nullptr);

  // Ends nothing: the connections are those of the process that this one is a fork of.
  void leave_behind() {
    [[maybe_unused]] const net::Links* links = links_.release();
    [[maybe_unused]] const net::Engine* engine = engine_.release();
  }

  // Closes nothing, and gives no memory back: messages may be under way to it. For groups that go
  // while peers are still in an operation, after an error as a rule.
  void keep_for_good() noexcept;

  net::Links& links() { return *links_; }
  const net::Links& links() const { return *links_; }

  // Calls body(), which uses the links on the host while an operation waits at `site()`. An
  // exception of the links is fatal for the communicator, as ranks on other machines wait for what
  // is not sent.
  template <class Site, class Body>
  static void use(Comm& comm, Site&& site, Body&& body) {
    try {
      body();
    } catch (const std::bad_alloc&) {
      give_up(comm, site(), Error(XD_ERROR_OUT_OF_MEMORY, "no memory for a message"));
    } catch (const Error& error) {
      give_up(comm, site(), error);
    }
  }

 private:
  [[noreturn]] static void give_up(Comm& comm, const HostWait& site, const Error& error);
  void connect(Comm& comm, CollectiveCall call);
  void greet(Comm& comm);

  const std::vector<int> neighbours_;
  std::unique_ptr<net::Engine> engine_;  // outlives the links
  std::unique_ptr<net::Links> links_;
};

}  // namespace xd
