// Ranks meet where the environment says that torchrun and similar launchers give to each rank.
#pragma once

#include <crossdock/comm.h>

#include <cstdint>
#include <memory>
#include <string>

#include "meet/bootstrap.h"
#include "meet/handshake.h"

namespace xd {

struct RankEnvironment {
  int rank = 0;
  int num_ranks = 0;
  std::string master_address;
  std::uint16_t first_port = 0;  // the first port on which rank 0 may serve
  std::uint16_t last_port = 0;
  Key key{Secret{}};
};

// Reads RANK and WORLD_SIZE (unless config.num_ranks > 0 gives both), MASTER_ADDR and MASTER_PORT.
// Throws INVALID_ARGUMENT naming the variable that is missing or malformed.
RankEnvironment read_rank_environment(const xd_comm_config& config);

// Rank 0 serves on the first free port of the range; the others try them all, over and over.
std::unique_ptr<Bootstrap> meet_by_environment(RankEnvironment environment);

}  // namespace xd
