// Gateways and partners of ranks on several machines.
#include "comm/remote/routes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/math.h"

namespace xd::test {
namespace {

FarRoutes routes_of(const std::vector<int>& machine_of, int rank) {
  return FarRoutes(Rails(rank, machine_of));
}

TEST(FarRoutes, EqualMachinesMeetPlaceByPlace) {
  const std::vector<int> machine_of{0, 1, 0, 1, 2, 2};
  const FarRoutes routes = routes_of(machine_of, 2);
  EXPECT_EQ(routes.far_machines(), (std::vector{1, 2}));
  EXPECT_EQ(routes.far_ranks(), (std::vector{1, 3, 4, 5}));
  EXPECT_EQ(routes.partners(), (std::vector{3, 5}));
  EXPECT_EQ(routes.gateway(1), 0);
  EXPECT_EQ(routes.gateway(2), 1);
  EXPECT_EQ(routes.sources(), (std::vector{0, 1}));
}

TEST(FarRoutes, ASingleRankIsTheGatewayOfAllRanksElsewhere) {
  const std::vector<int> machine_of{0, 1, 1};
  const FarRoutes single = routes_of(machine_of, 0), second = routes_of(machine_of, 2);
  EXPECT_EQ(single.partners(), (std::vector{1, 2}));
  EXPECT_EQ(single.gateway(1), 0) << "the lowest";
  EXPECT_EQ(single.sources(), (std::vector{0, 1}));
  EXPECT_EQ(second.partners(), std::vector{0});
  EXPECT_TRUE(second.sources().empty()) << "rank 1 is the gateway";
}

// For any sizes: each rank has one gateway on every other machine, which knows it as a source, and
// partners know one another. So what a source sends is expected, and nothing else is.
TEST(FarRoutes, BothEndsOfEveryWayAgree) {
  const std::vector<std::vector<int>> maps{
      {0, 1}, {0, 1, 1}, {0, 0, 0, 1, 1}, {0, 1, 2, 1, 0}, {0, 0, 1, 2, 2, 2, 2, 1}};
  for (const std::vector<int>& machine_of : maps) {
    std::vector<FarRoutes> routes;
    std::vector<int> ranks;
    for (int r = 0; r < static_cast<int>(machine_of.size()); ++r) {
      ranks.push_back(r);
      routes.push_back(routes_of(machine_of, r));
    }
    for (const int a : ranks) {
      for (const int machine : routes[at(a)].far_machines()) {
        const int gateway = routes[at(a)].partners()[at(routes[at(a)].gateway(machine))];
        EXPECT_EQ(machine_of[at(gateway)], machine);
        std::vector<int> sources;
        for (const int s : routes[at(gateway)].sources())
          sources.push_back(routes[at(gateway)].partners()[at(s)]);
        EXPECT_EQ(std::ranges::count(sources, a), 1) << a << " at " << gateway;
      }
      for (const int b : routes[at(a)].partners()) {
        EXPECT_EQ(std::ranges::count(routes[at(b)].partners(), a), 1) << a << " and " << b;
        EXPECT_TRUE(Rails(a, machine_of).is_rail(b)) << a << " and " << b;
      }
    }
  }
}

}  // namespace
}  // namespace xd::test
