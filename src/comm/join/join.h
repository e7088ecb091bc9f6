// How a new process takes the place of a rank whose process has ended: comm/join/door.h, seen from
// its side.
#pragma once

#include <crossdock/comm.h>

#include <memory>
#include <string>

#include "comm/comm.h"
#include "comm/join/catalogue.h"

namespace xd {

// The parts of a config that have been read.
struct JoinWish {
  DLDevice device;
  int timeout_ms;
  std::string host;  // as the caller names it; empty = as the rank before has
};
// The work of xd_comm_create with XD_BOOTSTRAP_JOIN.
std::shared_ptr<Comm> join_comm(const xd_comm_config& config, const JoinWish& wish);

// The next group behind `number` that the others have made by `call`, with its memory, for a rank
// that has joined. Throws UNSUPPORTED where there is none.
AdoptedGroup adopt_group(Comm& comm, int number, const std::string& call);

}  // namespace xd
