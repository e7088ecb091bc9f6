#include "unit/fabric_fake.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace xd::test {
namespace {

FabricFake& fake() {
  static FabricFake all;
  return all;
}

template <class T>
T* fresh() {
  return static_cast<T*>(std::calloc(1, sizeof(T)));
}

template <class T>
T* copied(const T* from) {
  if (from == nullptr) return nullptr;
  T* const copy = fresh<T>();
  *copy = *from;
  return copy;
}

char* copied_text(const char* text) { return text != nullptr ? ::strdup(text) : nullptr; }

void set_address(fi_info& info, const std::string& address) {
  const bool is_six = address.find(':') != std::string::npos;
  info.addr_format = is_six ? FI_SOCKADDR_IN6 : FI_SOCKADDR_IN;
  info.src_addrlen = is_six ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  info.src_addr = std::calloc(1, info.src_addrlen);
  if (is_six) {
    auto& six = *static_cast<sockaddr_in6*>(info.src_addr);
    six.sin6_family = AF_INET6;
    ::inet_pton(AF_INET6, address.c_str(), &six.sin6_addr);
  } else {
    auto& four = *static_cast<sockaddr_in*>(info.src_addr);
    four.sin_family = AF_INET;
    ::inet_pton(AF_INET, address.c_str(), &four.sin_addr);
  }
}

void set_nic(fi_info& info, const FakeAdapter& adapter) {
  info.nic = fresh<fid_nic>();
  info.nic->device_attr = fresh<fi_device_attr>();
  info.nic->device_attr->name = ::strdup(adapter.device.c_str());
  info.nic->bus_attr = fresh<fi_bus_attr>();
  if (!adapter.pci.empty()) {
    const auto number = [&](std::size_t begin, std::size_t digits) {
      return std::stoul(adapter.pci.substr(begin, digits), nullptr, 16);
    };
    fi_pci_attr& pci = info.nic->bus_attr->attr.pci;
    info.nic->bus_attr->bus_type = FI_BUS_PCI;
    pci.domain_id = static_cast<std::uint16_t>(number(0, 4));
    pci.bus_id = static_cast<std::uint8_t>(number(5, 2));
    pci.device_id = static_cast<std::uint8_t>(number(8, 2));
    pci.function_id = static_cast<std::uint8_t>(number(11, 1));
  }
  info.nic->link_attr = fresh<fi_link_attr>();
  info.nic->link_attr->speed = adapter.speed;
  info.nic->link_attr->state = static_cast<fi_link_state>(adapter.link);
}

std::string text_of(const char* text) { return text != nullptr ? text : ""; }

}  // namespace
}  // namespace xd::test

using xd::test::FakeAdapter;

extern "C" {

xd::test::FabricFake* fabric_fake() { return &xd::test::fake(); }

std::uint32_t fi_version() { return FI_VERSION(1, 17); }
const char* fi_strerror(int) { return "fake reason"; }

fi_info* fi_dupinfo(const fi_info* from) {
  using namespace xd::test;
  if (from == nullptr) {
    fi_info* const info = fresh<fi_info>();
    info->tx_attr = fresh<fi_tx_attr>();
    info->rx_attr = fresh<fi_rx_attr>();
    info->ep_attr = fresh<fi_ep_attr>();
    info->domain_attr = fresh<fi_domain_attr>();
    info->fabric_attr = fresh<fi_fabric_attr>();
    return info;
  }
  fi_info* const info = copied(from);
  info->next = nullptr;
  info->tx_attr = copied(from->tx_attr);
  info->rx_attr = copied(from->rx_attr);
  info->ep_attr = copied(from->ep_attr);
  info->domain_attr = copied(from->domain_attr);
  info->domain_attr->name = copied_text(from->domain_attr->name);
  info->fabric_attr = copied(from->fabric_attr);
  info->fabric_attr->name = copied_text(from->fabric_attr->name);
  info->fabric_attr->prov_name = copied_text(from->fabric_attr->prov_name);
  if (from->src_addr != nullptr) {
    info->src_addr = std::malloc(from->src_addrlen);
    std::memcpy(info->src_addr, from->src_addr, from->src_addrlen);
  }
  info->nic = nullptr;  // of no use for opening
  return info;
}

void fi_freeinfo(fi_info* info) {
  while (info != nullptr) {
    fi_info* const next = info->next;
    if (info->nic != nullptr) {
      std::free(info->nic->device_attr->name);
      std::free(info->nic->device_attr);
      std::free(info->nic->bus_attr);
      std::free(info->nic->link_attr);
      std::free(info->nic);
    }
    std::free(info->domain_attr->name);
    std::free(info->fabric_attr->name);
    std::free(info->fabric_attr->prov_name);
    for (void* part :
         {static_cast<void*>(info->tx_attr), static_cast<void*>(info->rx_attr),
          static_cast<void*>(info->ep_attr), static_cast<void*>(info->domain_attr),
          static_cast<void*>(info->fabric_attr), info->src_addr, static_cast<void*>(info)})
      std::free(part);
    info = next;
  }
}

// As providers do: addresses of IP choose among adapters of IP, and no others have them.
int fi_getinfo(std::uint32_t, const char* node, const char*, std::uint64_t flags,
               const fi_info* hints, fi_info** found) {
  using namespace xd::test;
  const std::string provider = text_of(hints->fabric_attr->prov_name), from = text_of(node);
  fake().calls.push_back("getinfo " + provider + " from " + (from.empty() ? "anywhere" : from));
  if (from.empty() != ((flags & FI_SOURCE) == 0)) return -FI_EINVAL;
  fi_info** end = found;
  *end = nullptr;
  for (const FakeAdapter& adapter : fake().adapters) {
    if (!provider.empty() && adapter.provider != provider) continue;
    if (!from.empty() && adapter.address != from) continue;
    fi_info* const info = fi_dupinfo(nullptr);
    info->caps = FI_RMA;
    info->domain_attr->cq_data_size = 8;
    info->domain_attr->name = ::strdup(adapter.domain.c_str());
    info->fabric_attr->name = ::strdup(adapter.fabric.c_str());
    info->fabric_attr->prov_name = ::strdup(adapter.provider.c_str());
    if (!adapter.address.empty()) set_address(*info, adapter.address);
    if (!adapter.device.empty()) set_nic(*info, adapter);
    *end = info;
    end = &info->next;
  }
  return *found != nullptr ? 0 : -FI_ENODATA;
}

int fi_fabric(fi_fabric_attr* attributes, fid_fabric**, void*) {
  using namespace xd::test;
  fake().calls.push_back("fabric " + text_of(attributes->prov_name) + " " +
                         text_of(attributes->name));
  return -FI_ENOSYS;
}
}
