#include "comm/remote/network.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/log.h"
#include "base/math.h"
#include "comm/comm.h"
#include "comm/remote/adapters.h"
#include "net/fabric/fabric.h"
#include "net/link_tag.h"

namespace xd {
namespace {

std::vector<AdapterChoice> choose_adapters(const Comm& comm, const net::FabricLibrary& library) {
  return xd::choose_adapters(library, {.name = env().net_device,
                                       .address = comm.address(),
                                       .names_interface = comm.names_interface(),
                                       .device = place_of_device(comm.device())});
}

// The provider that all ranks agree on.
std::string agree_on_provider(std::span<const std::vector<OfferedAdapters>> offers) {
  std::vector<std::vector<std::string>> providers(offers.size());
  for (std::size_t rank = 0; rank < offers.size(); ++rank)
    for (const OfferedAdapters& offered : offers[rank]) providers[rank].push_back(offered.provider);
  return net::agree_on_provider(providers);
}

}  // namespace

std::uint32_t Network::part_of_host(std::string_view) const { return 0; }

Network::Frames Network::usual_frames() const {
  return {.bytes = std::size_t{256} << 10, .most = net::kMaxLinkFrames / 2};
}

std::unique_ptr<net::Engine> Network::open_together(Comm& comm, CollectiveCall call) const {
  std::shared_ptr<const net::FabricLibrary> library;
  std::vector<AdapterChoice> choices;
  const auto items = comm.collective().agree(call, [&] {
    library = net::load_fabric();
    choices = choose_adapters(comm, *library);
    return Collective::Contribution{.blob = write_offer(choices)};
  });
  std::vector<std::vector<OfferedAdapters>> offers;
  for (std::size_t rank = 0; rank < items.size(); ++rank)
    offers.push_back(read_offer(items[rank].blob, static_cast<int>(rank)));
  const std::string provider = agree_on_provider(offers);
  const auto choice = std::ranges::find(choices, provider, &AdapterChoice::provider);
  XD_CHECK(choice != choices.end());
  const net::Adapter& adapter = choice->adapters[place_of_adapter(comm.hosts(), provider, offers)];
  std::unique_ptr<net::Engine> engine;
  comm.collective().agree(call, [&] {
    engine = net::open_fabric(library, adapter);
    return Collective::Contribution{};
  });
  log_topic("comm", "rank ", comm.rank(), " reaches other machines by libfabric ",
            net::fabric_version(*library), ", ", provider, ", adapter ", adapter.name, " (",
            choice->why, adapter.place.is_known() ? ", at " : "", adapter.place.path, "), from ",
            adapter.address.empty() ? adapter.name : adapter.address);
  return engine;
}

}  // namespace xd
