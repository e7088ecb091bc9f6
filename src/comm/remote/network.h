// The network of a communicator: it decides which ranks share memory, and how bytes reach the
// others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "comm/collective.h"
#include "net/engine.h"

namespace xd {

class Comm;

// The machine's own: memory is shared on a machine, and libfabric reaches the others.
class Network {
 public:
  Network() = default;
  virtual ~Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // The part of its machine that a rank is on which names `host`, empty = none. Parts of a machine
  // share no memory, as if they were machines.
  virtual std::uint32_t part_of_host(std::string_view host) const;
  // Collective: opens an engine that all ranks agree on. Throws UNSUPPORTED where a rank has no
  // libfabric, and MISMATCH where ranks have no provider in common.
  virtual std::unique_ptr<net::Engine> open_together(Comm& comm, CollectiveCall call) const;
  // Frames of links that pay, where nobody asks for others.
  struct Frames {
    std::size_t bytes;  // of a frame with its header
    int most;           // of a direction, of which links have two
  };
  virtual Frames usual_frames() const;
};

// The network of this library, alone in its file: the shared library of the tests is linked with
// another definition in its place.
const Network& network();

}  // namespace xd
