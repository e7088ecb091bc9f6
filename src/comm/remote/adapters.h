// Which network adapter a rank takes to other machines, out of those that libfabric finds.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/pci_place.h"
#include "base/wire.h"
#include "comm/hosts.h"
#include "net/fabric/fabric.h"

namespace xd {

struct AdapterWish {
  std::string name{};            // XD_NET_DEVICE; empty = none
  std::string address{};         // at which other machines reach the rank; empty = not known
  bool names_interface = false;  // the caller has named this address, or its interface
  PciPlace device{};             // of the rank
};

// Adapters of one provider, all equally good for the rank; at least one.
struct AdapterChoice {
  std::string provider;
  std::vector<net::Adapter> adapters;
  const char* why;  // for logs
};

// The adapters that a rank may take, the best provider first. One that is named goes before all;
// then the interface that the caller has named, or on which a rank stays whose device is on no bus;
// then the adapters nearest to the device. Throws INVALID_ARGUMENT where the name is none, with
// those that there are.
std::vector<AdapterChoice> choose_adapters(const net::FabricLibrary& library,
                                           const AdapterWish& wish,
                                           const std::filesystem::path& sysfs = kSysfs);

// As ranks tell one another of their choices.
struct OfferedAdapters {
  std::string provider;
  std::vector<net::AdapterId> ids;
};
Bytes write_offer(std::span<const AdapterChoice> choices);
std::vector<OfferedAdapters> read_offer(std::span<const std::byte> bytes, int rank);

// The one of its adapters that a rank takes, as its near ranks expect it. `offers` by rank.
std::size_t place_of_adapter(const HostMap& hosts, const std::string& provider,
                             std::span<const std::vector<OfferedAdapters>> offers);

// The place of a device of this process on PCI buses.
PciPlace place_of_device(DLDevice device);

// An adapter, and the CUDA devices of this process by which ranks would take it, if each device had
// a rank: bit d stands for device d. The address of ranks may change the choice, and is not known
// here unless an interface is named.
struct ListedAdapter {
  net::Adapter adapter;
  std::uint64_t cuda_devices = 0;
};
// One for each name, with its best provider. `wish` is that of all devices, but for its place, and
// `devices` has their places, by ordinal. Throws as choose_adapters().
std::vector<ListedAdapter> list_adapters(const net::FabricLibrary& library, AdapterWish wish,
                                         std::span<const PciPlace> devices,
                                         const std::filesystem::path& sysfs = kSysfs);
// The same of this process. Throws UNSUPPORTED as load_fabric(), INVALID_ARGUMENT also as
// choose_address().
std::vector<ListedAdapter> list_adapters();

}  // namespace xd
