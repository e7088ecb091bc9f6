// Relays and neighbours of ranks on several machines.
#include "comm/remote/routes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/math.h"

namespace xd::test {
namespace {

RemoteRoutes routes_of(const std::vector<int>& machine_of, int rank) {
  return RemoteRoutes(Rails(rank, machine_of));
}

TEST(RemoteRoutes, EqualMachinesMeetPlaceByPlace) {
  const std::vector<int> machine_of{0, 1, 0, 1, 2, 2};
  const RemoteRoutes routes = routes_of(machine_of, 2);
  EXPECT_EQ(routes.remote_machines(), (std::vector{1, 2}));
  EXPECT_EQ(routes.remote_ranks(), (std::vector{1, 3, 4, 5}));
  EXPECT_EQ(routes.neighbours(), (std::vector{3, 5}));
  EXPECT_EQ(routes.relay(1), 0);
  EXPECT_EQ(routes.relay(2), 1);
  EXPECT_EQ(routes.sources(), (std::vector{0, 1}));
}

TEST(RemoteRoutes, ASingleRankIsTheGatewayOfAllRanksElsewhere) {
  const std::vector<int> machine_of{0, 1, 1};
  const RemoteRoutes single = routes_of(machine_of, 0), second = routes_of(machine_of, 2);
  EXPECT_EQ(single.neighbours(), (std::vector{1, 2}));
  EXPECT_EQ(single.relay(1), 0) << "the lowest";
  EXPECT_EQ(single.sources(), (std::vector{0, 1}));
  EXPECT_EQ(second.neighbours(), std::vector{0});
  EXPECT_TRUE(second.sources().empty()) << "rank 1 is the relay";
}

// For any sizes: each rank has one relay on every other machine, which knows it as a source, and
// neighbours know one another. So what a source sends is expected, and nothing else is.
TEST(RemoteRoutes, BothEndsOfEveryWayAgree) {
  const std::vector<std::vector<int>> maps{
      {0, 1}, {0, 1, 1}, {0, 0, 0, 1, 1}, {0, 1, 2, 1, 0}, {0, 0, 1, 2, 2, 2, 2, 1}};
  for (const std::vector<int>& machine_of : maps) {
    std::vector<RemoteRoutes> routes;
    std::vector<int> ranks;
    for (int r = 0; r < static_cast<int>(machine_of.size()); ++r) {
      ranks.push_back(r);
      routes.push_back(routes_of(machine_of, r));
    }
    for (const int a : ranks) {
      for (const int machine : routes[at(a)].remote_machines()) {
        const int relay = routes[at(a)].neighbours()[at(routes[at(a)].relay(machine))];
        EXPECT_EQ(machine_of[at(relay)], machine);
        std::vector<int> sources;
        for (const int s : routes[at(relay)].sources())
          sources.push_back(routes[at(relay)].neighbours()[at(s)]);
        EXPECT_EQ(std::ranges::count(sources, a), 1) << a << " at " << relay;
      }
      for (const int b : routes[at(a)].neighbours()) {
        EXPECT_EQ(std::ranges::count(routes[at(b)].neighbours(), a), 1) << a << " and " << b;
        EXPECT_TRUE(Rails(a, machine_of).is_rail(b)) << a << " and " << b;
      }
    }
    std::size_t most = 0;
    for (const RemoteRoutes& of : routes) most = std::max(most, of.neighbours().size());
    for (const int a : ranks) EXPECT_EQ(at(most_neighbours(Rails(a, machine_of))), most);
  }
}

}  // namespace
}  // namespace xd::test
