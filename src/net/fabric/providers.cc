// Which of libfabric's providers will do: what they can do decides, as libfabric tells it.
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"
#include "net/fabric/library.h"

namespace xd::net {
namespace {

// The best first. Not among them are shm, which never tells of a peer that has died, and sockets
// and udp, which are not meant for use. libfabric 1.x does TCP between unconnected ranks by a layer
// on top of it, 2.x by itself.
constexpr std::array<const char*, 5> kProviders{"efa", "cxi", "verbs;ofi_rxm", "tcp",
                                                "tcp;ofi_rxm"};

bool will_do(const fi_info& info) {
  return (info.caps & FI_RMA) != 0 && info.domain_attr->cq_data_size >= sizeof(std::uint32_t);
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
  const int result =
      library.getinfo(FI_VERSION(1, 17), address.c_str(), nullptr, FI_SOURCE, hints.get(), &found);
  if (result != -FI_ENODATA) library.check(result, "fi_getinfo");
  return Infos(found, freed);
}

std::vector<std::string> fabric_providers(const FabricLibrary& library,
                                          const std::string& address) {
  const Infos infos = find_infos(library, address, "");
  std::vector<std::string> usable;
  for (const char* provider : kProviders) {
    for (const fi_info* info = infos.get(); info != nullptr; info = info->next) {
      if (std::strcmp(info->fabric_attr->prov_name, provider) != 0 || !will_do(*info)) continue;
      usable.emplace_back(provider);
      break;
    }
  }
  return usable;
}

}  // namespace xd::net
