// The floor of the network alone: bytes between each rank and one rank on another host, both ways
// at once, by puts of the library's links or over one TCP connection; and how long a smallest
// message takes one way.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "net/rank_results.h"

namespace bench::net {

struct FloorConfig {
  std::string address;     // of this rank's host, numeric
  std::string peer;        // of the other rank's host
  std::size_t bytes = 0;   // bytes from this rank
  std::size_t coming = 0;  // bytes from the other rank
};

class Floor {
 public:
  virtual ~Floor() = default;
  // Sends and receives all bytes.
  virtual void stream() = 0;
  // A smallest message there and back, `turns` times; the rank with the lower number begins.
  virtual void ping(int turns) = 0;
};

// Collective over all ranks: the other rank is half of the ranks away.
std::unique_ptr<Floor> make_links_floor(RankResults& rank_results, const FloorConfig& config);
std::unique_ptr<Floor> make_tcp_floor(RankResults& rank_results, const FloorConfig& config);

inline int other_rank(const RankResults& rank_results) {
  return (rank_results.rank() + rank_results.ranks() / 2) % rank_results.ranks();
}

}  // namespace bench::net
