#include "unit/link_support.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "base/math.h"
#include "net/engines/in_process.h"
#include "net/engines/wrong_links.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

constexpr std::size_t kLongest = 160;

// The first 8 bytes are the chunk's number.
Bytes chunk_of(std::uint64_t seed, int from, int to, std::uint64_t number) {
  const std::uint64_t key = mix(seed, at(from), at(to), number);
  Bytes bytes(sizeof(number) + mix(key) % (kLongest - sizeof(number) + 1));
  std::memcpy(bytes.data(), &number, sizeof(number));
  for (std::size_t i = sizeof(number); i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(mix(key, i));
  return bytes;
}

bool is_readable(int fd) {
  pollfd one{fd, POLLIN, 0};
  return ::poll(&one, 1, 0) > 0;
}

// The ranks of one run, which take their steps as the seed wants.
class Crew {
 public:
  Crew(std::uint64_t seed, net::Mutant mutant)
      : random_(mix(seed, 1)),
        ranks_(2 + static_cast<int>(random_.below(3))),
        chunks_(8 + static_cast<int>(random_.below(16))),
        failing_(seed % 3 == 0),
        links_{.frames = 1 + static_cast<int>(random_.below(4)), .frame_bytes = kLongest},
        fleet_{engines(seed, mutant), links_},
        left_(at(ranks_)) {
    for (int r = 0; r < ranks_; ++r)
      traffic_.emplace_back(*fleet_.links[at(r)], seed, r, ranks_, chunks_, mutant);
  }

  Run run() {
    Run run;
    try {
      while (!over()) {
        if (++run.steps > 200'000) throw std::runtime_error("there is no end");
        step();
      }
      if (failing_ && failed_.empty()) throw std::runtime_error("nobody was told of the failure");
      for (int r = 0; failing_ && r < ranks_; ++r)
        if (!left_[at(r)]) end_of_failure(r);
    } catch (const std::exception& error) {
      run.complaint = error.what();
    }
    return run;
  }

 private:
  Engines engines(std::uint64_t seed, net::Mutant mutant) {
    net::ChaosConfig config;
    config.seed = seed;
    config.mutant = mutant;
    if (failing_) config.failed_put = random_.below(2 * at(chunks_));  // chunks and credits
    Engines made = chaos_engines(ranks_, config);
    for (auto& engine : made)
      engine = net::make_wrong_links(std::move(engine), mutant, links_.frames);
    return made;
  }

  bool over() const {
    return !failed_.empty() || std::ranges::all_of(left_, [](bool left) { return left; });
  }

  // Takes a step of one rank that is not asleep.
  void step() {
    const auto first = static_cast<int>(random_.below(at(ranks_)));
    for (int i = 0; i < ranks_; ++i) {
      const int rank = (first + i) % ranks_;
      if (left_[at(rank)] || is_asleep(rank)) continue;
      try {
        traffic_[at(rank)].step();
        if (traffic_[at(rank)].done()) leave(rank);
      } catch (const Error& error) {
        if (!failing_ || error.status() != XD_ERROR_SYSTEM) throw;
        failed_ = error.text();
        failed_rank_ = rank;
      }
      return;
    }
    throw std::runtime_error("all ranks sleep");
  }
  bool is_asleep(int rank) {
    if (!traffic_[at(rank)].must_wait()) return false;
    const int fd = fleet_.links[at(rank)]->sleep_on();
    return fd >= 0 && !is_readable(fd);
  }

  // A rank that is at rest does nothing any more, and may close: the others need it no longer.
  void leave(int rank) {
    left_[at(rank)] = true;
    if (random_.one_in(2)) fleet_.engines[at(rank)]->close();
  }

  // Expects the text that a rank is told after one has failed, by the engine or by the watch.
  void end_of_failure(int rank) {
    net::Links& links = *fleet_.links[at(rank)];
    if (rank != failed_rank_) links.lose(neighbour_of_rank(rank, failed_rank_), "is gone");
    const std::string name = concat("rank ", failed_rank_, " on host host", failed_rank_ / 2);
    try {
      links.wait_for(Deadline::after_ms(60000), 0, "news", [] { return false; });
    } catch (const Error& error) {
      const bool right = rank == failed_rank_
                             ? error.status() == XD_ERROR_SYSTEM && error.text() == failed_ &&
                                   failed_.find("has failed, as chaos wanted") != failed_.npos
                             : error.status() == XD_ERROR_PEER_LOST &&
                                   error.peer() == failed_rank_ && error.text().starts_with(name);
      if (!right) throw;
    }
  }

  Random random_;
  const int ranks_, chunks_;
  const bool failing_;
  const net::LinkConfig links_;
  Fleet fleet_;
  std::vector<Traffic> traffic_;
  std::vector<bool> left_;
  std::string failed_;
  int failed_rank_ = -1;
};

}  // namespace

Engines chaos_engines(int ranks, const net::ChaosConfig& config) {
  const auto world = net::make_chaos_world();
  Engines engines = net::make_in_process_engines(ranks);
  for (int r = 0; r < ranks; ++r) {
    net::ChaosConfig own = config;
    own.seed = mix(config.seed, at(r));
    if (at(r) != mix(config.seed) % at(ranks)) own.failed_put.reset();
    engines[at(r)] = net::make_chaos(std::move(engines[at(r)]), world, own);
  }
  return engines;
}

int rank_of_neighbour(int rank, int neighbour) {
  return neighbour < rank ? neighbour : neighbour + 1;
}
int neighbour_of_rank(int rank, int other) { return other < rank ? other : other - 1; }

Fleet::Fleet(Engines of_ranks, net::LinkConfig config, bool lends_memory)
    : engines(std::move(of_ranks)), memory(engines.size()) {
  const auto ranks = static_cast<int>(engines.size());
  for (int r = 0; r < ranks; ++r) {
    std::vector<net::LinkNeighbour> neighbours;
    for (int p = 0; p + 1 < ranks; ++p) {
      const int other = rank_of_neighbour(r, p);
      neighbours.push_back({other, concat("host", other / 2)});
    }
    config.rank = r;
    if (lends_memory) {
      const net::LinkMap map{neighbours.size(), at(config.frames), config.frame_bytes};
      memory[at(r)].resize(map.bytes());
      config.memory = memory[at(r)];
    }
    links.push_back(std::make_unique<net::Links>(*engines[at(r)], config, std::move(neighbours)));
  }
  for (int r = 0; r < ranks; ++r) {
    for (int p = 0; p + 1 < ranks; ++p) {
      const int other = rank_of_neighbour(r, p);
      links[at(r)]->accept(p, links[at(other)]->offer(neighbour_of_rank(other, r)));
    }
  }
}

Traffic::Traffic(net::Links& links, std::uint64_t seed, int rank, int ranks, int chunks,
                 net::Mutant mutant)
    : links_(links),
      seed_(seed),
      rank_(rank),
      neighbours_(ranks - 1),
      chunks_(chunks),
      gives_back_early_(mutant == net::Mutant::credit_before_read),
      random_(mix(seed, 2, at(rank))),
      sent_(at(neighbours_)),
      received_(at(neighbours_), std::vector<bool>(at(chunks))) {}

void Traffic::step() {
  bool news = links_.poll();
  for (int p = 0; p < neighbours_; ++p) {
    if (random_.one_in(2)) news |= send(p);
    if (random_.one_in(2)) news |= take_in(p);
  }
  std::erase_if(held_, [&](Held& held) {
    if (held.steps-- > 0) return false;
    finish(held.chunk);
    return true;
  });
  // The dice may have kept something back.
  for (int p = 0; !news && p < neighbours_; ++p) news = send(p) || take_in(p);
  idle_ = !news;
}

bool Traffic::done() const {
  const auto all = [](const std::vector<bool>& of_neighbour) {
    return std::ranges::all_of(of_neighbour, [](bool came) { return came; });
  };
  return held_.empty() && links_.at_rest() && std::ranges::all_of(received_, all) &&
         std::ranges::all_of(sent_, [&](int sent) { return sent == chunks_; });
}

void Traffic::run(const Deadline& deadline) {
  for (int p = 0; p < neighbours_; ++p) {
    links_.wait_for(deadline, p, "all chunks", [&] {
      for (int q = 0; q < neighbours_; ++q) {
        while (send(q) || take_in(q)) {
          for (const Held& held : held_) finish(held.chunk);
          held_.clear();
        }
      }
      return sent_[at(p)] == chunks_ &&
             std::ranges::all_of(received_[at(p)], [](bool came) { return came; });
    });
  }
  links_.wait_for(deadline, -1, "credits", [&] { return links_.at_rest(); });
}

bool Traffic::send(int neighbour) {
  int& number = sent_[at(neighbour)];
  if (number == chunks_) return false;
  const auto frame = links_.take(neighbour);
  if (!frame) return false;
  const Bytes bytes =
      chunk_of(seed_, rank_, rank_of_neighbour(rank_, neighbour), static_cast<unsigned>(number++));
  std::ranges::copy(bytes, frame->bytes.begin());
  links_.send(*frame, bytes.size());
  return true;
}

bool Traffic::take_in(int neighbour) {
  const auto chunk = links_.next(neighbour);
  if (!chunk) return false;
  held_.push_back({*chunk, random_.below(8)});
  if (gives_back_early_) links_.give_back(*chunk);
  return true;
}

void Traffic::finish(const net::Links::Chunk& chunk) {
  read(chunk);
  if (!gives_back_early_) links_.give_back(chunk);
}

void Traffic::read(const net::Links::Chunk& chunk) {
  std::uint64_t number = 0;
  if (chunk.bytes.size() >= sizeof(number))
    std::memcpy(&number, chunk.bytes.data(), sizeof(number));
  auto& received = received_[at(chunk.neighbour)];
  const int from = rank_of_neighbour(rank_, chunk.neighbour);
  const std::string name = concat("chunk ", number, " from rank ", from, " to rank ", rank_);
  if (number >= received.size()) fail(XD_ERROR_INTERNAL, name, " was never sent");
  if (received[number]) fail(XD_ERROR_INTERNAL, name, " came twice");
  if (!std::ranges::equal(chunk.bytes, chunk_of(seed_, from, rank_, number)))
    fail(XD_ERROR_INTERNAL, name, " has other bytes than were sent");
  received[number] = true;
}

net::LinkConfig config_of(int frames, std::size_t frame_bytes) {
  net::LinkConfig config;
  config.frames = frames;
  config.frame_bytes = frame_bytes;
  return config;
}

void run_on_threads(Fleet& fleet, int chunks) {
  const auto ranks = static_cast<int>(fleet.links.size());
  expect_no_errors(on_threads(ranks, [&](int rank) {
    Traffic(*fleet.links[at(rank)], 7, rank, ranks, chunks).run(Deadline::after_ms(kGenerousMs));
  }));
}

Run run_chaos(std::uint64_t seed, net::Mutant mutant) { return Crew(seed, mutant).run(); }

}  // namespace xd::test
