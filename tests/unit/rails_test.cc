// The ways between ranks on several hosts, and the addresses at which they reach one another.
#include "meet/rails.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/interfaces.h"
#include "base/math.h"
#include "meet/control_address.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

// ---- The ways between hosts ----

std::vector<int> linked(const std::vector<int>& host_of, int rank) {
  const Rails rails(rank, host_of);
  std::vector<int> result;
  for (int r = 0; r < rails.num_ranks(); ++r)
    if (rails.is_rail(r)) result.push_back(r);
  return result;
}

TEST(Rails, OneHostHasNone) {
  const std::vector<int> one{0, 0, 0};
  const Rails rails(1, one);
  EXPECT_EQ(rails.num_hosts(), 1);
  EXPECT_TRUE(rails.is_linked(0) && rails.is_linked(2) && !rails.is_linked(1));
  EXPECT_TRUE(linked(one, 1).empty());
  EXPECT_TRUE(rails.followers_of(0).empty());
}

TEST(Rails, HostsOfEqualSizesAreConnectedPlaceByPlace) {
  const std::vector<int> host_of{0, 1, 0, 1, 2, 2};
  EXPECT_EQ(linked(host_of, 0), (std::vector{1, 4}));
  EXPECT_EQ(linked(host_of, 5), (std::vector{2, 3}));
  const Rails rails(0, host_of);
  EXPECT_EQ(rails.source_of(1), 1);
  EXPECT_EQ(rails.source_of(3), 2) << "through the near rank of the same place";
  EXPECT_EQ(rails.followers_of(1), std::vector{2});
  EXPECT_TRUE(rails.followers_of(3).empty()) << "not connected";
  EXPECT_TRUE(rails.followers_of(2).empty()) << "near";
}

// For any sizes: every rank hears every other by exactly one way, and the ways of both ends agree.
TEST(Rails, EveryRankHearsEveryOtherByOneWay) {
  const std::vector<std::vector<int>> maps{
      {0, 1}, {0, 1, 1}, {0, 0, 0, 1, 1}, {0, 1, 2, 1, 0}, {0, 0, 1, 2, 2, 2, 2, 1}};
  for (const std::vector<int>& host_of : maps) {
    const int n = static_cast<int>(host_of.size());
    std::vector<Rails> rails;
    for (int r = 0; r < n; ++r) rails.emplace_back(r, host_of);
    for (int to = 0; to < n; ++to) {
      for (int from = 0; from < n; ++from) {
        if (from == to) continue;
        EXPECT_EQ(rails[at(to)].is_linked(from), rails[at(from)].is_linked(to));
        int ways = rails[at(to)].is_linked(from) ? 1 : 0;
        for (int by = 0; by < n; ++by) {
          if (by == from) continue;
          const auto followers = rails[at(by)].followers_of(from);
          if (std::ranges::count(followers, to) == 0) continue;
          ++ways;
          EXPECT_EQ(rails[at(to)].source_of(from), by);
          EXPECT_TRUE(rails[at(to)].is_near(by) && !rails[at(to)].is_near(from));
        }
        EXPECT_EQ(ways, 1) << testing::PrintToString(host_of) << ": " << from << " to " << to;
      }
    }
  }
}

// ---- Addresses ----

std::vector<InterfaceAddress> host_with(
    const std::vector<std::pair<const char*, const char*>>& of) {
  std::vector<InterfaceAddress> result;
  for (const auto& [interface, address] : of)
    result.push_back({interface, numeric_address(address).value()});
  return result;
}

const InterfaceWish kNoWish{};

TEST(ControlAddress, IsTheWayToTheMeetingOrTheOnlyOneOrTheCallersChoice) {
  const auto host = host_with({{"lo", "127.0.0.1"},
                               {"lo", "::1"},
                               {"eth0", "10.0.0.1"},
                               {"eth0", "fd00::1"},
                               {"eth0", "fe80::1"}});
  const TcpAddress meeting = numeric_address("fd00::1").value();
  EXPECT_EQ(choose_address(host, kNoWish, nullptr).host(), "10.0.0.1");
  EXPECT_EQ(choose_address(host, kNoWish, &meeting).host(), "fd00::1");
  EXPECT_EQ(choose_address(host, {"eth0", "config.net_interface"}, nullptr).host(), "10.0.0.1");
  EXPECT_EQ(choose_address(host, {"eth0", "config.net_interface"}, &meeting).host(), "fd00::1");
  EXPECT_EQ(choose_address(host, {"fd00::1", "XD_NET_IFACE"}, nullptr).host(), "fd00::1");
  EXPECT_EQ(choose_address(host, {"lo", "XD_NET_IFACE"}, nullptr).host(), "127.0.0.1");
  const auto six = host_with({{"lo", "::1"}, {"eth0", "fd00::1"}, {"eth0", "fe80::1"}});
  EXPECT_EQ(choose_address(six, kNoWish, nullptr).host(), "fd00::1");
}

TEST(ControlAddress, TheTextSaysWhatThereIs) {
  const auto two = host_with({{"lo", "127.0.0.1"}, {"eth0", "10.0.0.1"}, {"eth1", "10.1.0.1"}});
  expect_error(error_of([&] { choose_address(two, kNoWish, nullptr); }), XD_ERROR_INVALID_ARGUMENT,
               "several addresses that other hosts could reach (eth0 10.0.0.1, eth1 10.1.0.1)");
  expect_error(error_of([&] {
                 choose_address(two, {"eth7", "XD_NET_IFACE"}, nullptr);
               }),
               XD_ERROR_INVALID_ARGUMENT,
               "XD_NET_IFACE = eth7, expected an interface or address of this host that other "
               "hosts can reach: lo 127.0.0.1, eth0 10.0.0.1, eth1 10.1.0.1");
  const auto none = host_with({{"lo", "127.0.0.1"}, {"eth0", "fe80::1"}});
  expect_error(error_of([&] { choose_address(none, kNoWish, nullptr); }), XD_ERROR_INVALID_ARGUMENT,
               "has no address that other hosts could reach (none)");
  const TcpAddress link_local = numeric_address("fe80::1").value();
  expect_error(error_of([&] { choose_address(none, kNoWish, &link_local); }),
               XD_ERROR_INVALID_ARGUMENT, "fe80::1, which is a link-local address");
  expect_error(error_of([&] {
                 choose_address(none, {"fe80::1", "XD_NET_IFACE"}, nullptr);
               }),
               XD_ERROR_INVALID_ARGUMENT, "XD_NET_IFACE = fe80::1");
}

}  // namespace
}  // namespace xd::test
