// Runs the MPI peer, which mpirun starts, and reads its numbers from a pipe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bench {

struct PeerResults {
  std::string unavailable;  // the reason why there are no results; empty: there are some
  std::string version;
  // One vector of seconds per kind of store; the maximum over the ranks.
  std::vector<std::vector<double>> dispatch, combine;
  std::vector<std::uint64_t> recv_checksums, out_checksums;
  std::vector<std::int64_t> sent_rows;
};

// Throws std::runtime_error if the peer starts and fails: a benchmark must not hide that.
PeerResults run_peer(int ranks, const std::vector<std::string>& arguments);

}  // namespace bench
