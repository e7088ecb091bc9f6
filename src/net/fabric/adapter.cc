#include "net/fabric/adapter.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <tuple>

#include "base/error.h"

namespace xd::net {

bool is_rdma(const Adapter& adapter) { return !adapter.provider.starts_with("tcp"); }

bool fits(const Adapter& adapter, const std::string& control) {
  const auto is_ipv6 = [](const std::string& text) { return text.find(':') != std::string::npos; };
  return adapter.address.empty() || control.empty() || is_ipv6(adapter.address) == is_ipv6(control);
}

std::string names_of(std::span<const Adapter> adapters) {
  std::string text;
  for (const Adapter& adapter : adapters)
    text += concat(text.empty() ? "" : ", ", adapter.name, " (", adapter.provider, ")");
  return text.empty() ? "none" : text;
}

std::vector<Adapter> nearest_adapters(const PciPlace& device, const std::string& control,
                                      std::vector<Adapter> adapters) {
  std::erase_if(adapters, [](const Adapter& a) { return a.link == Adapter::Link::down; });
  const auto has_physical_one = [whole = adapters](const Adapter& adapter) {
    return adapter.place.physical != adapter.place.function &&
           std::ranges::any_of(
               whole, [&](const Adapter& a) { return a.place.function == adapter.place.physical; });
  };
  std::erase_if(adapters, has_physical_one);
  Nearness best;
  for (const Adapter& adapter : adapters) best = std::max(best, nearness(device, adapter.place));
  std::erase_if(adapters, [&](const Adapter& a) { return nearness(device, a.place) < best; });
  const auto is_own = [&](const Adapter& a) { return !control.empty() && a.address == control; };
  if (best == Nearness{} && std::ranges::any_of(adapters, is_own))
    std::erase_if(adapters, std::not_fn(is_own));
  std::uint64_t rate = 0;
  for (const Adapter& adapter : adapters) rate = std::max(rate, adapter.bits_per_second);
  std::erase_if(adapters, [&](const Adapter& a) { return a.bits_per_second < rate; });
  std::ranges::sort(adapters, {},
                    [](const Adapter& a) { return std::tie(a.place.path, a.name, a.provider); });
  return adapters;
}

AdapterId id_of(const Adapter& adapter) {
  if (!adapter.place.is_known()) return {adapter.name, adapter.name};
  return {adapter.place.function, adapter.place.physical};
}

std::vector<std::size_t> spread_over_adapters(std::span<const std::vector<AdapterId>> of_ranks) {
  std::map<std::string, int> takers, takers_of_port;
  std::vector<std::size_t> places;
  for (const std::vector<AdapterId>& adapters : of_ranks) {
    const auto burden = [&](const AdapterId& id) {
      return std::pair(takers_of_port[id.physical], takers[id.name]);
    };
    const auto found = std::ranges::min_element(adapters, {}, burden);  // the first of equals
    places.push_back(static_cast<std::size_t>(std::distance(adapters.begin(), found)));
    if (found == adapters.end()) continue;
    ++takers[found->name];
    ++takers_of_port[found->physical];
  }
  return places;
}

}  // namespace xd::net
