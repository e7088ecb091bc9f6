// The meaning of the bytes of an xd_unique_id.
#pragma once

#include <crossdock/comm.h>

#include <cstdint>
#include <string>

#include "bootstrap/secret.h"

namespace xd {

struct MeetingPoint {
  std::string address;  // numeric
  std::uint16_t port = 0;
  Secret secret{};
};

xd_unique_id encode_unique_id(const MeetingPoint& point);

// Throws INVALID_ARGUMENT if the bytes are no unique id of this version, or are damaged.
MeetingPoint decode_unique_id(const xd_unique_id& id);

}  // namespace xd
