// Communicators whose ranks are threads of this process.
#pragma once

#include <memory>
#include <vector>

#include "base/math.h"
#include "comm/comm.h"
#include "unit/net_support.h"

namespace xd::test {

// One of each rank, as `like` says; waits are long enough for a busy machine unless it says
// otherwise.
inline std::vector<std::shared_ptr<xd::Comm>> make_comms(
    int num_ranks, xd_comm_config like = XD_COMM_CONFIG_INIT) {
  std::vector<std::shared_ptr<xd::Comm>> comms(at(num_ranks));
  const xd_unique_id id = new_id();
  expect_no_errors(on_threads(num_ranks, [&](int rank) {
    xd_comm_config config = like;
    config.unique_id = &id;
    config.rank = rank;
    config.num_ranks = num_ranks;
    if (config.timeout_ms == 0) config.timeout_ms = 20000;
    comms[at(rank)] = xd::Comm::create(config);
  }));
  return comms;
}

// Communicators of ranks that share CUDA device 0.
inline std::vector<std::shared_ptr<xd::Comm>> make_cuda_comms(int num_ranks,
                                                              std::size_t heap_bytes = 0) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.device = {kDLCUDA, 0};
  config.heap_bytes = heap_bytes;
  return make_comms(num_ranks, config);
}

}  // namespace xd::test
