// Ranks meet at a point that a unique id names: the meaning of its bytes, and both sides of it.
#pragma once

#include <crossdock/comm.h>

#include <cstdint>
#include <memory>
#include <string>

#include "meet/bootstrap.h"
#include "meet/handshake.h"

namespace xd {

struct MeetingPoint {
  std::string address;  // numeric
  std::uint16_t port = 0;
  Secret secret{};
};

xd_unique_id encode_unique_id(const MeetingPoint& point);

// Throws INVALID_ARGUMENT if the bytes are no unique id of this version, or are damaged.
MeetingPoint decode_unique_id(const xd_unique_id& id);

// The work of xd_unique_id_create, with its config read and its timeout resolved.
xd_unique_id create_unique_id(const xd_unique_id_config& config, int timeout_ms);

std::unique_ptr<Bootstrap> meet_at(const MeetingPoint& point, int rank, int num_ranks);

}  // namespace xd
