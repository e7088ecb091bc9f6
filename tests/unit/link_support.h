// Links between ranks, and an exchange over them that one thread drives: whose turn it is comes
// from a seed, and so does everything else, so that a run can be repeated.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/engines/chaos.h"
#include "net/links.h"
#include "support/random.h"

namespace xd::test {

using Engines = std::vector<std::unique_ptr<net::Engine>>;

// Engines over those of in_process.h, all with one seed, which also picks the rank whose put fails.
Engines chaos_engines(int ranks, const net::ChaosConfig& config);
inline Engines chaos_engines(int ranks, std::uint64_t seed,
                             std::optional<std::uint64_t> failed_put = std::nullopt) {
  net::ChaosConfig config;
  config.seed = seed;
  config.failed_put = failed_put;
  return chaos_engines(ranks, config);
}

// Links between all ranks; those of rank r have every other rank as neighbour, in ascending order.
// The host of rank r is "host<r / 2>".
struct Fleet {
  Engines engines;
  std::vector<std::vector<std::byte>> memory;  // of links that do not have their own
  std::vector<std::unique_ptr<net::Links>> links;

  // config.rank is set here.
  Fleet(Engines of_ranks, net::LinkConfig config, bool lends_memory = false);
};
// The rank of a neighbour of `rank`, and the place of `other` among the neighbours of `rank`.
int rank_of_neighbour(int rank, int neighbour);
int neighbour_of_rank(int rank, int other);

// The chunks that one rank sends to each neighbour and expects from it: chunk i of a pair of ranks
// has a length and bytes that follow from seed, pair and i.
class Traffic {
 public:
  Traffic(net::Links& links, std::uint64_t seed, int rank, int ranks, int chunks,
          net::Mutant mutant = net::Mutant::none);

  // Does some of what can be done now, at random: sends, takes chunks, holds them, reads them and
  // gives them back. Throws INTERNAL if a chunk is not what was sent.
  void step();
  // Nothing can be done before poll() brings something.
  bool must_wait() const { return idle_ && held_.empty(); }
  bool done() const;
  // Likewise with real waits, in order, as a thread of its own.
  void run(const Deadline& deadline);

 private:
  struct Held {
    net::Links::Chunk chunk;
    std::uint64_t steps;
  };

  bool send(int neighbour);
  bool take_in(int neighbour);
  void finish(const net::Links::Chunk& chunk);
  void read(const net::Links::Chunk& chunk);

  net::Links& links_;
  const std::uint64_t seed_;
  const int rank_, neighbours_, chunks_;
  const bool gives_back_early_;
  Random random_;
  std::vector<int> sent_;
  std::vector<std::vector<bool>> received_;
  std::vector<Held> held_;
  bool idle_ = false;
};

constexpr int kGenerousMs = 60000;  // for what is expected to come

net::LinkConfig config_of(int frames, std::size_t frame_bytes);
// `chunks` from each rank to each other, by a thread for each rank, all of which must arrive.
void run_on_threads(Fleet& fleet, int chunks);

struct Run {
  std::string complaint;  // empty = all was right
  int steps = 0;
};
// One exchange through chaos. Ranks, frames, lengths and timing are the seed's, and in every third
// run a put that fails, which must end it on every rank.
Run run_chaos(std::uint64_t seed, net::Mutant mutant = net::Mutant::none);

}  // namespace xd::test
