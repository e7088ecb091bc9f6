#include "comm/remote/engine.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/wire.h"
#include "comm/net_test.h"
#include "net/chaos.h"
#include "net/fabric/fabric.h"
#include "net/in_process.h"

namespace xd {
namespace {

std::vector<std::string> lines_of(const Bytes& bytes) {
  std::vector<std::string> lines;
  std::string line;
  for (const std::byte byte : bytes) {
    if (byte != std::byte{'\n'}) {
      line.push_back(static_cast<char>(byte));
    } else {
      lines.push_back(std::exchange(line, {}));
    }
  }
  return lines;
}

std::unique_ptr<net::Engine> open_fabric_together(Comm& comm, CollectiveCall call) {
  std::shared_ptr<const net::FabricLibrary> library;
  const std::string address = comm.address();
  const auto items = comm.collective().agree(call, [&] {
    library = net::load_fabric();
    Collective::Contribution mine;
    for (const std::string& provider : net::fabric_providers(*library, address)) {
      const auto bytes = std::as_bytes(std::span(provider));
      mine.blob.insert(mine.blob.end(), bytes.begin(), bytes.end());
      mine.blob.push_back(std::byte{'\n'});
    }
    return mine;
  });
  std::vector<std::vector<std::string>> of_ranks;
  for (const auto& item : items) of_ranks.push_back(lines_of(item.blob));
  const std::string provider = net::agree_on_provider(of_ranks);
  std::unique_ptr<net::Engine> engine;
  comm.collective().agree(call, [&] {
    engine = net::open_fabric(library, provider, address);
    return Collective::Contribution{};
  });
  log_topic("comm", "rank ", comm.rank(), " reaches other machines by libfabric ",
            net::fabric_version(*library), ", ", provider, ", from ", address);
  return engine;
}

// Engines of all ranks, which are threads of this process, made by rank 0.
struct EnginesOfThreads {
  std::vector<std::unique_ptr<net::Engine>> engines;
  std::shared_ptr<net::ChaosWorld> world = net::make_chaos_world();
};
struct WhereTheyAre {
  std::int64_t process;
  std::uint64_t address;  // of rank 0's
  std::uint64_t number;   // of rank 0's calls: each has a seed of its own
};
std::atomic<std::uint64_t> chaos_calls{0};

std::unique_ptr<net::Engine> open_chaos_together(Comm& comm, CollectiveCall call,
                                                 std::uint64_t seed) {
  EnginesOfThreads made;
  const auto of_rank = comm.collective().agree_on(call, [&] {
    if (comm.rank() == 0) made.engines = net::make_in_process_engines(comm.num_ranks());
    return WhereTheyAre{::getpid(), reinterpret_cast<std::uint64_t>(&made),
                        comm.rank() == 0 ? chaos_calls++ : 0};
  });
  std::unique_ptr<net::Engine> engine;
  comm.collective().agree(call, [&] {
    for (const WhereTheyAre& rank : of_rank) {
      XD_REQUIRE(rank.process == ::getpid(),
                 "XD_NET_TEST: chaos is for ranks that are threads of "
                 "one process");
    }
    // NOLINTNEXTLINE(performance-no-int-to-ptr): rank 0's address, in this process
    auto& all = *reinterpret_cast<EnginesOfThreads*>(of_rank[0].address);
    net::ChaosConfig chaos;
    chaos.seed = (seed + of_rank[0].number) * at(comm.num_ranks()) + at(comm.rank());
    chaos.damaged_in = net_test().damaged_in;
    if (net_test().longest_put != 0) chaos.longest_put = net_test().longest_put;
    engine = net::make_chaos(std::move(all.engines[at(comm.rank())]), all.world, chaos);
    return Collective::Contribution{};
  });
  log_topic("comm", "rank ", comm.rank(), " reaches other machines through chaos, seed ",
            seed + of_rank[0].number);
  return engine;  // rank 0's list may go: all ranks have taken theirs
}

// Half of the time is left for telling the others.
constexpr int kLongestContactMs = 60'000;

}  // namespace

std::unique_ptr<net::Engine> open_engine_together(Comm& comm, CollectiveCall call) {
  const auto& chaos = net_test().chaos;
  return chaos ? open_chaos_together(comm, call, *chaos) : open_fabric_together(comm, call);
}

FirstContact::FirstContact(Comm& comm)
    : comm_(comm), ms_(std::min(comm.timeout_ms() / 2, kLongestContactMs)) {}

HostWait FirstContact::site(Progress* progress) const {
  return {.phase = XD_PHASE_HOST,
          .group = -1,
          .operation = 0,
          .epoch = 0,
          .deadline = Deadline::after_ms(ms_),
          .timeout_ms = ms_,
          .needs_all_ranks = true,
          .progress = progress};
}

void FirstContact::fail_data(xd_status status, int rank, const std::string& place,
                             const std::string& why) const {
  fail(status, "control reaches ", comm_.errors().names().of(rank), ", data do not (", place,
       "): ", why);
}

void FirstContact::fail_silent(int rank, const std::string& place) const {
  fail_data(
      XD_ERROR_TIMEOUT, rank, place,
      concat("no greeting came within ", ms_, " ms; does a firewall let control through alone?"));
}

}  // namespace xd
