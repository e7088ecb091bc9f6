#include "comm/remote/adapters.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/env.h"
#include "base/error.h"
#include "base/interfaces.h"
#include "base/math.h"
#include "comm/device/kinds.h"
#include "meet/control_address.h"

namespace xd {
namespace {

AdapterChoice& choice_of(std::vector<AdapterChoice>& choices, const std::string& provider,
                         const char* why) {
  const auto known = std::ranges::find(choices, provider, &AdapterChoice::provider);
  if (known != choices.end()) return *known;
  return choices.emplace_back(AdapterChoice{provider, {}, why});
}

std::vector<AdapterChoice> named_adapter(std::span<const net::Adapter> all,
                                         const AdapterWish& wish) {
  std::vector<AdapterChoice> choices;
  const net::Adapter* unfit = nullptr;
  for (const net::Adapter& adapter : all) {
    if (adapter.name != wish.name && adapter.device != wish.name) continue;
    if (!net::fits(adapter, wish.address)) {
      unfit = &adapter;
      continue;
    }
    AdapterChoice& choice = choice_of(choices, adapter.provider, "XD_NET_DEVICE names it");
    if (choice.adapters.empty()) choice.adapters.push_back(adapter);
  }
  XD_REQUIRE(!choices.empty() || unfit != nullptr, "XD_NET_DEVICE = ", wish.name,
             ", expected an adapter that libfabric can use here: ", net::names_of(all));
  XD_REQUIRE(!choices.empty(), "XD_NET_DEVICE = ", wish.name, ", whose address is ", unfit->address,
             ", expected an adapter with an address of the family of ", wish.address,
             ", at which other machines reach this rank");
  return choices;
}

void add_nearest(std::vector<AdapterChoice>& choices, std::span<const net::Adapter> all,
                 const AdapterWish& wish) {
  constexpr const char* kWhy = "none is nearer to its device";
  constexpr std::size_t kMost = 128;  // more than a machine has ranks, and short to tell
  std::vector<AdapterChoice> found;
  for (const net::Adapter& adapter : all) {
    if (!net::is_rdma(adapter) || !net::fits(adapter, wish.address)) continue;
    choice_of(found, adapter.provider, kWhy).adapters.push_back(adapter);
  }
  for (AdapterChoice& choice : found) {
    choice.adapters = net::nearest_adapters(wish.device, wish.address, std::move(choice.adapters));
    choice.adapters.resize(std::min(choice.adapters.size(), kMost));
    if (!choice.adapters.empty()) choices.push_back(std::move(choice));
  }
}

// libfabric finds these at the interface with the address of the rank.
std::vector<net::Adapter> own_adapters(const net::FabricLibrary& library, const AdapterWish& wish,
                                       const std::filesystem::path& sysfs) {
  if (!wish.name.empty() || wish.address.empty()) return {};
  return net::fabric_adapters(library, wish.address, net::Where::at_address, sysfs);
}

// Out of all adapters and those of the rank's address.
std::vector<AdapterChoice> choose_among(std::span<const net::Adapter> all,
                                        std::span<const net::Adapter> own,
                                        const AdapterWish& wish) {
  if (!wish.name.empty()) return named_adapter(all, wish);
  std::vector<AdapterChoice> choices;
  if (!wish.names_interface && wish.device.is_known()) add_nearest(choices, all, wish);
  const char* const why = wish.names_interface     ? "its interface is named"
                          : wish.device.is_known() ? "no other network has an adapter here"
                                                   : "its device has no known place on PCI buses";
  for (const net::Adapter& adapter : own) {
    AdapterChoice& choice = choice_of(choices, adapter.provider, why);
    if (choice.adapters.empty()) choice.adapters.push_back(adapter);
  }
  return choices;
}

void put_text(WireWriter& writer, const std::string& text) {
  writer.put(static_cast<std::uint16_t>(text.size()));
  writer.put_bytes(std::as_bytes(std::span(text)));
}

std::string take_text(WireReader& reader) {
  const auto bytes = reader.take_bytes(reader.take<std::uint16_t>());
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<net::AdapterId> ids_of(std::span<const net::Adapter> adapters) {
  std::vector<net::AdapterId> ids;
  for (const net::Adapter& adapter : adapters) ids.push_back(net::id_of(adapter));
  return ids;
}

}  // namespace

std::vector<AdapterChoice> choose_adapters(const net::FabricLibrary& library,
                                           const AdapterWish& wish,
                                           const std::filesystem::path& sysfs) {
  std::vector<net::Adapter> all;
  if (!wish.name.empty() || (!wish.names_interface && wish.device.is_known()))
    all = net::fabric_adapters(library, wish.address, net::Where::anywhere, sysfs);
  return choose_among(all, own_adapters(library, wish, sysfs), wish);
}

Bytes write_offer(std::span<const AdapterChoice> choices) {
  WireWriter writer;
  writer.put(static_cast<std::uint32_t>(choices.size()));
  for (const AdapterChoice& choice : choices) {
    put_text(writer, choice.provider);
    const auto ids = ids_of(choice.adapters);
    writer.put(static_cast<std::uint32_t>(ids.size()));
    for (const net::AdapterId& id : ids) {
      put_text(writer, id.name);
      put_text(writer, id.physical);
    }
  }
  return writer.take();
}

std::vector<OfferedAdapters> read_offer(std::span<const std::byte> bytes, int rank) {
  WireReader reader(bytes);
  std::vector<OfferedAdapters> offer;
  const auto choices = reader.take<std::uint32_t>();
  for (std::uint32_t c = 0; c < choices && reader.ok(); ++c) {
    OfferedAdapters& one = offer.emplace_back(OfferedAdapters{take_text(reader), {}});
    const auto ids = reader.take<std::uint32_t>();
    for (std::uint32_t i = 0; i < ids && reader.ok(); ++i) {
      std::string name = take_text(reader);
      one.ids.push_back({std::move(name), take_text(reader)});
    }
  }
  if (!reader.at_end())
    fail(XD_ERROR_MISMATCH, "rank ", rank, " offers its adapters in ", bytes.size(),
         " bytes that this rank cannot read");
  return offer;
}

std::size_t place_of_adapter(const HostMap& hosts, const std::string& provider,
                             std::span<const std::vector<OfferedAdapters>> offers) {
  std::vector<std::vector<net::AdapterId>> of_near;
  std::size_t own = 0;
  for (const NearRank rank : hosts.near()) {
    if (rank == hosts.self()) own = of_near.size();
    const auto found = std::ranges::find(offers[at(rank)], provider, &OfferedAdapters::provider);
    of_near.push_back(found != offers[at(rank)].end() ? found->ids : std::vector<net::AdapterId>{});
  }
  return net::spread_over_adapters(of_near)[own];
}

PciPlace place_of_device(DLDevice device) {
  const DeviceKind& kind = kind_of(device);
  if (kind.pci_address == nullptr) return {};
  return pci_place(kSysfs, kind.pci_address(device.device_id));
}

std::vector<ListedAdapter> list_adapters(const net::FabricLibrary& library, AdapterWish wish,
                                         std::span<const PciPlace> devices,
                                         const std::filesystem::path& sysfs) {
  const auto all = net::fabric_adapters(library, wish.address, net::Where::anywhere, sysfs);
  const auto own = own_adapters(library, wish, sysfs);
  std::vector<ListedAdapter> listed;
  for (const net::Adapter& adapter : all) {
    const bool is_known = std::ranges::any_of(
        listed, [&](const ListedAdapter& other) { return other.adapter.name == adapter.name; });
    if (!is_known) listed.push_back({adapter});
  }
  if (devices.empty()) choose_among(all, own, wish);  // tells of a bad name
  std::vector<std::vector<net::Adapter>> choices;
  std::vector<std::vector<net::AdapterId>> ids;
  for (const PciPlace& device : devices) {
    wish.device = device;
    auto found = choose_among(all, own, wish);
    choices.push_back(found.empty() ? std::vector<net::Adapter>{}
                                    : std::move(found.front().adapters));
    ids.push_back(ids_of(choices.back()));
  }
  const std::vector<std::size_t> places = net::spread_over_adapters(ids);
  for (std::size_t d = 0; d < std::min<std::size_t>(devices.size(), 64); ++d) {
    if (choices[d].empty()) continue;
    const std::string& name = choices[d][places[d]].name;
    for (ListedAdapter& one : listed)
      if (one.adapter.name == name) one.cuda_devices |= std::uint64_t{1} << d;
  }
  return listed;
}

std::vector<ListedAdapter> list_adapters() {
  const auto library = net::load_fabric();
  const InterfaceWish interface = interface_wish(nullptr);
  AdapterWish wish{.name = env().net_device, .address = {}, .names_interface = false};
  if (!interface.text.empty()) {
    wish.address = choose_address(interface_addresses(), interface, nullptr).host();
    wish.names_interface = true;
  }
  std::vector<PciPlace> devices;
  const DeviceKind& cuda = *find_device_kind(kDLCUDA);
  if (cuda.availability().available)
    for (int ordinal = 0, count = cuda.count(); ordinal < count; ++ordinal)
      devices.push_back(place_of_device({kDLCUDA, ordinal}));
  return list_adapters(*library, std::move(wish), devices);
}

}  // namespace xd
