#include "comm/far_links.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
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
    engine = net::make_chaos(std::move(all.engines[at(comm.rank())]), all.world, chaos);
    return Collective::Contribution{};
  });
  log_topic("comm", "rank ", comm.rank(), " reaches other machines through chaos, seed ",
            seed + of_rank[0].number);
  return engine;  // rank 0's list may go: all ranks have taken theirs
}

// Links that are polled while a rank waits.
class PolledLinks final : public Progress {
 public:
  explicit PolledLinks(net::Links& links) : links_(links) {}
  bool poll() override { return links_.poll(); }
  bool is_busy() override { return links_.sleep_on() < 0; }

 private:
  net::Links& links_;
};

// Half of the time is left for telling the others.
constexpr int kLongestGreetingMs = 60'000;
int greeting_ms(const Comm& comm) { return std::min(comm.timeout_ms() / 2, kLongestGreetingMs); }

HostWait site_of_greeting(int ms, Progress* progress) {
  return {.phase = XD_PHASE_HOST,
          .group = -1,
          .operation = 0,
          .epoch = 0,
          .deadline = Deadline::after_ms(ms),
          .timeout_ms = ms,
          .needs_all_ranks = true,
          .progress = progress};
}

[[noreturn]] void fail_data(const Comm& comm, xd_status status, int rank, const std::string& place,
                            const std::string& why) {
  fail(status, "control reaches ", comm.errors().names().of(rank), ", data do not (", place,
       "): ", why);
}

std::vector<net::LinkPartner> name_partners(const Comm& comm, const FarRoutes& routes) {
  std::vector<net::LinkPartner> partners;
  for (const int rank : routes.partners())
    partners.push_back({rank, std::to_string(comm.hosts().host_of(rank))});
  return partners;
}

}  // namespace

std::unique_ptr<net::Engine> open_engine_together(Comm& comm, CollectiveCall call) {
  const auto& chaos = net_test().chaos;
  return chaos ? open_chaos_together(comm, call, *chaos) : open_fabric_together(comm, call);
}

FarLinks::FarLinks(Comm& comm, CollectiveCall call, int slots, std::size_t slot_bytes,
                   std::span<std::byte> memory)
    : routes_(comm.machines()) {
  engine_ = open_engine_together(comm, call);
  const std::size_t asked = net_test().slot_bytes;
  const net::LinkConfig config{
      .rank = comm.rank(),
      .slots = slots,
      .slot_bytes = slot_bytes,
      .digests = (asked != 0 || net_test().chaos) && net_test().damaged_in == 0,
      .memory = memory};
  comm.collective().agree(call, [&] {
    links_ = std::make_unique<net::Links>(*engine_, config, name_partners(comm, routes_));
    return Collective::Contribution{};
  });
  connect(comm, call);
}

// Every rank gives all ranks its offers, each with the rank that it is for.
void FarLinks::connect(Comm& comm, CollectiveCall call) {
  const auto& partners = routes_.partners();
  const auto items = comm.collective().agree(call, [&] {
    WireWriter writer;
    for (std::size_t p = 0; p < partners.size(); ++p) {
      const Bytes offer = links_->offer(static_cast<int>(p));
      writer.put(static_cast<std::int32_t>(partners[p]));
      writer.put(static_cast<std::uint32_t>(offer.size()));
      writer.put_bytes(offer);
    }
    Bytes offers = writer.take();
    if (offers.size() + 256 > Mesh::kMaxBlob) {
      fail(XD_ERROR_UNSUPPORTED, "the addresses for ", partners.size(), " partners on other ",
           "machines have ", offers.size(), " bytes, expected at most ", Mesh::kMaxBlob - 256,
           ": there are too many machines");
    }
    return Collective::Contribution{.blob = std::move(offers)};
  });
  comm.collective().agree(call, [&] {
    for (std::size_t p = 0; p < partners.size(); ++p) {
      WireReader reader(items[at(partners[p])].blob);
      for (;;) {
        const auto to = reader.take<std::int32_t>();
        const auto bytes = reader.take_bytes(reader.take<std::uint32_t>());
        if (!reader.ok())
          fail(XD_ERROR_MISMATCH, "rank ", partners[p], " offers no link to rank ", comm.rank());
        if (to != comm.rank()) continue;
        links_->accept(static_cast<int>(p), bytes);
        break;
      }
    }
    return Collective::Contribution{};
  });
  comm.collective().agree(call, [&] {
    greet(comm);
    return Collective::Contribution{};
  });
}

// Makes the engine's connections. Where the watch loses a rank meanwhile, this rank goes on to the
// collective step, which fails with its name.
void FarLinks::greet(Comm& comm) {
  const int ms = greeting_ms(comm);
  int silent = 0;
  try {
    links_->greet();
    PolledLinks polled(*links_);
    const auto site = site_of_greeting(ms, &polled);
    const auto all_here = [&] { return links_->all_connected(); };
    if (comm.wait(comm.rank(), site, all_here) != Waited::late) return;
    silent = std::max(links_->first_ungreeted(), 0);
  } catch (const Error& error) {
    if (error.status() != XD_ERROR_SYSTEM || error.peer() < 0) throw;
    if (comm.is_lost_by_verdict(error.peer(), site_of_greeting(ms, nullptr))) return;
    const auto& partners = routes_.partners();
    const auto place = std::ranges::find(partners, error.peer()) - partners.begin();
    fail_data(comm, error.status(), error.peer(), links_->place_of(static_cast<int>(place)),
              error.text());
  }
  fail_data(comm, XD_ERROR_TIMEOUT, routes_.partners()[at(silent)], links_->place_of(silent),
            concat("no greeting came within ", ms, " ms"));
}

}  // namespace xd
