#include "comm/far_links.h"

#include <unistd.h>

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
};

std::unique_ptr<net::Engine> open_chaos_together(Comm& comm, CollectiveCall call,
                                                 std::uint64_t seed) {
  EnginesOfThreads made;
  const auto of_rank = comm.collective().agree_on(call, [&] {
    if (comm.rank() == 0) made.engines = net::make_in_process_engines(comm.num_ranks());
    return WhereTheyAre{::getpid(), reinterpret_cast<std::uint64_t>(&made)};
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
    chaos.seed = seed * at(comm.num_ranks()) + at(comm.rank());
    engine = net::make_chaos(std::move(all.engines[at(comm.rank())]), all.world, chaos);
    return Collective::Contribution{};
  });
  return engine;  // rank 0's list may go: all ranks have taken theirs
}

std::vector<net::LinkPartner> name_partners(const Comm& comm, const FarRoutes& routes) {
  std::vector<net::LinkPartner> partners;
  for (const int rank : routes.partners())
    partners.push_back({rank, std::to_string(comm.hosts().host_of(rank))});
  return partners;
}

}  // namespace

FarLinks::FarLinks(Comm& comm, CollectiveCall call, int slots, std::size_t slot_bytes)
    : routes_(comm.machines()) {
  const auto& chaos = net_test().chaos;
  engine_ = chaos ? open_chaos_together(comm, call, *chaos) : open_fabric_together(comm, call);
  const std::size_t asked = net_test().slot_bytes;
  const net::LinkConfig config{.rank = comm.rank(),
                               .slots = slots,
                               .slot_bytes = slot_bytes,
                               .digests = asked != 0 || chaos.has_value()};
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
}

}  // namespace xd
