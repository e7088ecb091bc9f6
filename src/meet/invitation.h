// The meaning of an invitation's bytes: the doors (comm/join/door.h) at which a new process asks
// ranks of a communicator to let it in, and the secret that it shows there.
#pragma once

#include <crossdock/comm.h>

#include <array>
#include <cstddef>
#include <vector>

#include "meet/handshake.h"

namespace xd {

struct Invitation {
  static constexpr std::size_t kMostDoors = 4;

  Secret secret{};
  std::vector<Tag> doors;  // names of Unix sockets, at most kMostDoors
};

xd_unique_id encode_invitation(const Invitation& invitation);

// Throws INVALID_ARGUMENT if the bytes are no invitation of this version, or are damaged.
Invitation decode_invitation(const xd_unique_id& bytes);

// The secret of a communicator's doors, from that of its connections.
Secret door_secret(const Secret& of_mesh);

}  // namespace xd
