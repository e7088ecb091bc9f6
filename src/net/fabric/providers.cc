// Which of libfabric's providers and adapters will do: what they can do decides, as libfabric tells
// it.
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/tcp.h"
#include "net/fabric/abi.h"
#include "net/fabric/library.h"

namespace xd::net {
namespace {

// The best first. Not among them are shm, which never tells of a peer that has died, and sockets
// and udp, which are not meant for use. libfabric 1.x does TCP between unconnected ranks by a layer
// on top of it, 2.x by itself.
constexpr std::array<const char*, 5> kProviders{"efa", "cxi", "verbs;ofi_rxm", "tcp",
                                                "tcp;ofi_rxm"};

std::string text_of(const char* text) { return text != nullptr ? text : ""; }

bool will_do(const fi_info& info) {
  // The provider efa also has a fabric efa-direct, whose writes are as long as the adapter takes
  // them and no longer.
  const std::string fabric = text_of(info.fabric_attr->name);
  if (std::strcmp(info.fabric_attr->prov_name, "efa") == 0 && fabric != "efa") return false;
  return (info.caps & FI_RMA) != 0 && info.domain_attr->cq_data_size >= sizeof(std::uint32_t);
}

std::size_t rank_of_provider(const std::string& provider) {
  return static_cast<std::size_t>(std::ranges::find(kProviders, provider) - kProviders.begin());
}

bool has_ip(const fi_info& info) {
  return info.addr_format == FI_SOCKADDR || info.addr_format == FI_SOCKADDR_IN ||
         info.addr_format == FI_SOCKADDR_IN6 || info.addr_format == FI_SOCKADDR_IB;
}

// The address of an adapter of IP, if ranks elsewhere can use it.
std::optional<TcpAddress> source_of(const fi_info& info) {
  if (info.src_addr == nullptr || info.src_addrlen < sizeof(sockaddr)) return std::nullopt;
  const auto& source = *static_cast<const sockaddr*>(info.src_addr);
  if (source.sa_family != AF_INET && source.sa_family != AF_INET6) return std::nullopt;
  const TcpAddress address = from_sockaddr(source);
  if (address.flaw() != nullptr || address.is_link_local()) return std::nullopt;
  return address;
}

PciPlace place_of(const fi_info& info, const std::filesystem::path& sysfs,
                  const std::string& device) {
  const fi_bus_attr* const bus = info.nic != nullptr ? info.nic->bus_attr : nullptr;
  if (bus != nullptr && bus->bus_type == FI_BUS_PCI) {
    const fi_pci_attr& pci = bus->attr.pci;
    std::array<char, 32> address;
    std::snprintf(address.data(), address.size(), "%04x:%02x:%02x.%x", pci.domain_id, pci.bus_id,
                  pci.device_id, pci.function_id);
    if (PciPlace place = pci_place(sysfs, address.data()); place.is_known()) return place;
  }
  for (const char* class_name : {"infiniband", "cxi", "net"}) {
    PciPlace place = pci_place_in_class(sysfs, class_name, device);
    if (place.is_known()) return place;
  }
  return {};
}

void describe(Adapter& adapter, const fi_info& info, const std::filesystem::path& sysfs) {
  const fi_device_attr* const device = info.nic != nullptr ? info.nic->device_attr : nullptr;
  if (device != nullptr) adapter.device = text_of(device->name);
  adapter.place = place_of(info, sysfs, adapter.device.empty() ? adapter.name : adapter.device);
  const fi_link_attr* const link = info.nic != nullptr ? info.nic->link_attr : nullptr;
  if (link == nullptr) return;
  adapter.bits_per_second = link->speed;
  if (link->state == FI_LINK_UP) adapter.link = Adapter::Link::up;
  if (link->state == FI_LINK_DOWN) adapter.link = Adapter::Link::down;
}

// How well the adapter's address serves a rank that is reached at `control`.
int fitness(const Adapter& adapter, const std::string& control) {
  return (fits(adapter, control) ? 1 : 0) + (adapter.address == control ? 1 : 0);
}

// libfabric 1.17, 1.18.0 to 1.18.2 and 1.19.0 give mlx5_10 the address of mlx5_1, and would open
// mlx5_1 by it.
void drop_misnamed(std::vector<Adapter>& adapters) {
  const auto has_anothers_address = [all = adapters](const Adapter& adapter) {
    return !adapter.address.empty() && std::ranges::any_of(all, [&](const Adapter& other) {
      return adapter.provider == other.provider && adapter.address == other.address &&
             adapter.name != other.name && adapter.name.starts_with(other.name);
    });
  };
  std::erase_if(adapters, has_anothers_address);
}

}  // namespace

Infos find_infos(const FabricLibrary& library, const std::string& address,
                 const std::string& provider) {
  const FreeInfo freed{library.freeinfo};
  const Infos hints(library.dupinfo(nullptr), freed);
  if (!hints) fail(XD_ERROR_OUT_OF_MEMORY, "libfabric has no memory for an info");
  hints->caps = FI_RMA;  // messages, for which strangers need no key, are of no use here
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->tx_attr->op_flags = FI_TRANSMIT_COMPLETE;  // as Engine promises of `sent`
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  if (!provider.empty()) hints->fabric_attr->prov_name = ::strdup(provider.c_str());
  fi_info* found = nullptr;
  const bool anywhere = address.empty();
  const int result = library.getinfo(FI_VERSION(1, 17), anywhere ? nullptr : address.c_str(),
                                     nullptr, anywhere ? 0 : FI_SOURCE, hints.get(), &found);
  if (result != -FI_ENODATA) library.check(result, "fi_getinfo");
  return Infos(found, freed);
}

// An interface is known by its address: libfabric calls it "tcp" while it is down.
Infos find_info(const FabricLibrary& library, const Adapter& adapter) {
  const Infos infos = find_infos(library, adapter.address, adapter.provider);
  for (const fi_info* info = infos.get(); info != nullptr; info = info->next) {
    if (adapter.provider != text_of(info->fabric_attr->prov_name) || !will_do(*info)) continue;
    if (!is_rdma(adapter) || adapter.name == text_of(info->domain_attr->name))
      return Infos(library.dupinfo(info), FreeInfo{library.freeinfo});
  }
  return Infos(nullptr, FreeInfo{library.freeinfo});
}

// libfabric's list has an adapter once for each of its addresses, and for each variant of its
// provider. An adapter with addresses of IP and none that ranks elsewhere can use is left out: its
// provider connects by them.
std::vector<Adapter> fabric_adapters(const FabricLibrary& library, const std::string& control,
                                     Where where, const std::filesystem::path& sysfs) {
  const Infos infos = find_infos(library, where == Where::at_address ? control : "", "");
  std::vector<Adapter> found;
  for (const fi_info* info = infos.get(); info != nullptr; info = info->next) {
    Adapter adapter{.provider = text_of(info->fabric_attr->prov_name),
                    .name = text_of(info->domain_attr->name)};
    if (rank_of_provider(adapter.provider) == kProviders.size() || !will_do(*info)) continue;
    if (where == Where::at_address) {
      adapter.address = control;
    } else if (has_ip(*info)) {
      const auto source = source_of(*info);
      if (!source) continue;
      adapter.address = source->host();
    }
    const auto known = std::ranges::find_if(found, [&](const Adapter& other) {
      return other.provider == adapter.provider && other.name == adapter.name;
    });
    if (known == found.end()) {
      describe(adapter, *info, sysfs);
      found.push_back(std::move(adapter));
    } else if (fitness(adapter, control) > fitness(*known, control)) {
      known->address = adapter.address;
    }
  }
  drop_misnamed(found);
  std::ranges::stable_sort(
      found, {}, [](const Adapter& adapter) { return rank_of_provider(adapter.provider); });
  return found;
}

}  // namespace xd::net
