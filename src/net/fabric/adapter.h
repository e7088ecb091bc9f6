// The network adapters of a machine, and which one a rank takes. docs/internals/net.md has the
// rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/pci_place.h"

namespace xd::net {

// An adapter, or an interface, with a provider that can use it, as libfabric tells of it.
struct Adapter {
  std::string provider{};  // "verbs;ofi_rxm"
  std::string name{};      // libfabric's domain: "mlx5_0", "rdmap16s27-rdm", "eth0"
  std::string device{};    // the adapter's own name, where it differs: "rdmap16s27"
  std::string address{};   // numeric IP; empty where the network has addresses of another kind
  PciPlace place{};
  std::uint64_t bits_per_second = 0;  // 0 = not known
  enum class Link { unknown, down, up } link = Link::unknown;
};

// Not TCP.
bool is_rdma(const Adapter& adapter);

// Whether it can connect to adapters of ranks that reach one another at addresses such as `control`
// (empty = not known): those of IP need one family.
bool fits(const Adapter& adapter, const std::string& control);

// "eth0 (tcp), mlx5_0 (verbs;ofi_rxm)"
std::string names_of(std::span<const Adapter> adapters);

// The adapters that are nearest to a device, and of these the fastest, in an order that is the same
// in all processes of a machine. Where none is near, the one with the address `control` (empty =
// not known) stands alone. Adapters whose link is down are left out, and so are virtual functions
// beside the physical one.
std::vector<Adapter> nearest_adapters(const PciPlace& device, const std::string& control,
                                      std::vector<Adapter> adapters);

// As the ranks of a machine know an adapter. Those with the same physical one share its port.
struct AdapterId {
  std::string name, physical;
};
AdapterId id_of(const Adapter& adapter);

// `of_ranks[r]`: the adapters among which rank r may choose, in its order. Returns a place in each
// list: by ascending rank, the adapter whose port the fewest have taken so far. Ranks that have the
// same lists find the same places. For an empty list the place means nothing.
std::vector<std::size_t> spread_over_adapters(std::span<const std::vector<AdapterId>> of_ranks);

}  // namespace xd::net
