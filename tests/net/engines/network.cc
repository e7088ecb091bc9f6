// The network of the tests' shared library, as XD_NET_TEST wants it. There is no other place in
// which that variable means anything to the library.
#include <crossdock/status.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/math.h"
#include "comm/comm.h"
#include "comm/remote/network.h"
#include "net/engines/chaos.h"
#include "net/engines/in_process.h"
#include "net/link_map.h"

// Test programs look for this name, to know which library they have.
extern "C" XD_API void xd_test_instruments(void) {}

namespace xd {
namespace {

struct Wishes {
  bool apart = false;  // declared hosts of one machine share no memory
  // Ranks, which are threads of one process, reach one another by copies in memory, and through the
  // chaos engine with this seed.
  bool memory = false;
  std::optional<std::uint64_t> chaos;
  net::ChaosConfig config;      // of the chaos engine; its seed follows from the one above
  std::size_t frame_bytes = 0;  // of links, for their chunks; 0 = the usual number
};

std::uint64_t number_in(std::string_view word, std::string_view name) {
  std::uint64_t number = 0;
  const char* const end = word.data() + word.size();
  const auto read = std::from_chars(word.data() + name.size(), end, number);
  XD_REQUIRE(read.ec == std::errc() && read.ptr == end, "XD_NET_TEST: '", word,
             "', expected a number behind ", name);
  return number;
}

Wishes read_wishes() {
  Wishes wishes;
  const char* const variable = std::getenv("XD_NET_TEST");
  std::string_view rest = variable != nullptr ? variable : "";
  while (!rest.empty()) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view word = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    if (word == "apart") {
      wishes.apart = true;
    } else if (word == "memory") {
      wishes.memory = true;
    } else if (word.starts_with("chaos=")) {
      wishes.memory = true;
      wishes.chaos = number_in(word, "chaos=");
    } else if (word.starts_with("damage=")) {
      wishes.config.damaged_in = static_cast<unsigned>(number_in(word, "damage="));
    } else if (word.starts_with("frame=")) {
      wishes.frame_bytes = number_in(word, "frame=");
    } else if (word.starts_with("put=")) {
      wishes.config.longest_put = number_in(word, "put=");
    } else {
      fail(XD_ERROR_INVALID_ARGUMENT, "XD_NET_TEST: '", word,
           "', expected apart, memory, chaos=SEED, damage=PIECES, frame=BYTES or put=BYTES");
    }
  }
  return wishes;
}

// Throws INVALID_ARGUMENT.
const Wishes& wishes() {
  static const Wishes read = read_wishes();
  return read;
}

// Engines of all ranks, which are threads of this process. Rank 0 makes and keeps them until each
// rank has taken its own.
struct EnginesOfThreads {
  std::vector<std::unique_ptr<net::Engine>> engines;
  std::shared_ptr<net::ChaosWorld> world = net::make_chaos_world();
};

// The engines that are being opened in this process, by numbers that are given once.
class Openings {
 public:
  static Openings& instance() {
    static Openings all;
    return all;
  }
  std::uint64_t add(const std::shared_ptr<EnginesOfThreads>& made) {
    const std::lock_guard lock(mutex_);
    std::erase_if(by_number_, [](const auto& opening) { return opening.second.expired(); });
    by_number_[++last_] = made;
    return last_;
  }
  std::shared_ptr<EnginesOfThreads> find(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    return by_number_.at(number).lock();
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<EnginesOfThreads>> by_number_;
  std::uint64_t last_ = 0;
};

std::unique_ptr<net::Engine> open_in_memory_together(Comm& comm, CollectiveCall call) {
  struct Opening {
    std::int64_t process;
    std::uint64_t number;  // rank 0's
  };
  const auto made = std::make_shared<EnginesOfThreads>();
  const auto of_rank = comm.collective().agree_on(call, [&] {
    if (comm.rank() != 0) return Opening{::getpid(), 0};
    made->engines = net::make_in_process_engines(comm.num_ranks());
    return Opening{::getpid(), Openings::instance().add(made)};
  });
  const auto& chaos = wishes().chaos;
  const std::uint64_t own_seed =
      chaos.value_or(0) + of_rank[0].number - 1;  // each call has its own
  std::unique_ptr<net::Engine> engine;
  comm.collective().agree(call, [&] {
    for (const Opening& rank : of_rank) {
      XD_REQUIRE(rank.process == ::getpid(),
                 "XD_NET_TEST: memory and chaos are for ranks that are threads of one process");
    }
    const auto all = Openings::instance().find(of_rank[0].number);
    XD_REQUIRE(all, "XD_NET_TEST: rank 0 has left before this rank could take its engine");
    net::ChaosConfig config = wishes().config;
    config.seed = own_seed * at(comm.num_ranks()) + at(comm.rank());
    engine = std::move(all->engines[at(comm.rank())]);
    if (chaos) engine = net::make_chaos(std::move(engine), all->world, config);
    return Collective::Contribution{};
  });
  log_topic("comm", "rank ", comm.rank(), " reaches other machines by memory",
            chaos ? concat(" through chaos, seed ", own_seed) : "");
  return engine;
}

class NetworkOfTests final : public Network {
 public:
  std::uint32_t part_of_host(std::string_view host) const override {
    if (host.empty() || !wishes().apart) return Network::part_of_host(host);
    return static_cast<std::uint32_t>(hash_bytes(1, host.data(), host.size()) >> 32) | 1;
  }
  std::unique_ptr<net::Engine> open_together(Comm& comm, CollectiveCall call) const override {
    return wishes().memory ? open_in_memory_together(comm, call)
                           : Network::open_together(comm, call);
  }
  // Small frames are few, so that ranks wait for them.
  Frames usual_frames() const override {
    const std::size_t chunk = wishes().frame_bytes;
    if (chunk == 0) return Network::usual_frames();
    return {.bytes = sizeof(net::LinkHeader) + chunk, .most = 2};
  }
};

}  // namespace

const Network& network() {
  static const NetworkOfTests of_tests;
  return of_tests;
}

}  // namespace xd
