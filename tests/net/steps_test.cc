// Steps of expert parallelism over a network that does what networks do.
#include <gtest/gtest.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "net/job.h"

namespace xd::test {
namespace {

using NetSteps = Net;

TEST_F(NetSteps, ThreeRanksWithOnePartnerAreServed) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 0, 1});
  job.all_fine("steps 15");
}

TEST_F(NetSteps, ADeadLinkEndsThemOnBothHalves) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1});
  job.tell("steps 1000000");
  sleep_ms(500);
  const auto start = Clock::now();
  hosts.set_link(1, false);
  job.expect_answers({"XD_ERROR_PEER_LOST", "the host has not answered for 1000 ms"});
  EXPECT_LT(ms_since(start), stretched(kSilenceMs + 4000));
}

TEST_F(NetSteps, ALinkThatComesBackInTimeCostsThemTimeAlone) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 1}, Family::ipv4, {{"XD_TEST_SILENCE_MS", "10000"}});
  job.tell("steps 100");
  sleep_ms(200);
  hosts.set_link(1, false);
  sleep_ms(600);
  hosts.set_link(1, true);
  job.expect_answers({"fine"});
}

// Whichever connection meets the hole first says so.
TEST_F(NetSteps, AHoleForLongPacketsEndsThemInTime) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "3000"}});
  hosts.drop_longer(1, 600);
  const auto start = Clock::now();
  for (const std::string& answer : job.all("steps 20")) {
    EXPECT_TRUE(has(answer, "XD_ERROR_TIMEOUT") || has(answer, "XD_ERROR_PEER_LOST") ||
                has(answer, "XD_ERROR_MISMATCH") || has(answer, "XD_ERROR_SYSTEM"))
        << answer;
  }
  EXPECT_LT(ms_since(start), stretched(12000));
}

// A network that takes its time, and what ranks do over it all the same.
struct Network {
  const char* name;
  void (*set)(NetHosts& hosts);
  std::vector<int> host_of;
  std::vector<std::string> orders;
};
void PrintTo(const Network& network, std::ostream* out) { *out << network.name; }

class NetOver : public Net, public testing::WithParamInterface<Network> {};

TEST_P(NetOver, ItAllIsRightAndCostsTimeAlone) {
  NetHosts hosts(2);
  GetParam().set(hosts);
  CommJob job(hosts, GetParam().host_of, Family::ipv4, {{"XD_TEST_SILENCE_MS", "10000"}});
  for (const std::string& order : GetParam().orders) job.all_fine(order);
}

const Network kNetworks[] = {
    {"SmallPackets",
     [](NetHosts& hosts) { hosts.set_mtu(1, 576); },
     {0, 0, 1, 1},
     {"memory", "barrier", "barrier", "steps 5"}},
    {"LargePackets",
     [](NetHosts& hosts) {
       for (int h = 0; h < 2; ++h) hosts.set_mtu(h, 9000);
     },
     {0, 0, 1, 1},
     {"steps 5"}},
    {"ASlowLink", [](NetHosts& hosts) { hosts.throttle(1, 20); }, {0, 0, 1, 1}, {"steps 3"}},
    // Messages and credits are lost on their way, also while ranks are about to go: a rank that is
    // at rest closes its engine.
    {"LostPackets",
     [](NetHosts& hosts) {
       for (int h = 0; h < 2; ++h) hosts.lose(h, 2);
     },
     {0, 0, 1},
     {"barrier", "steps 10", "slots 10", "slot_groups 3", "groups 5", "destroy"}},
    {"LostSmallPacketsOnASlowLink",
     [](NetHosts& hosts) {
       hosts.set_mtu(1, 576);
       hosts.lose(1, 1);
       hosts.throttle(1, 100);
     },
     {0, 0, 1, 1},
     {"steps 2", "channels", "swap -1 3"}},
};
INSTANTIATE_TEST_SUITE_P(Each, NetOver, testing::ValuesIn(kNetworks),
                         [](const auto& network) { return network.param.name; });

// It is in greetings, in steps, or between them; or it has not come to a group that the others
// make.
TEST_F(NetSteps, ARankKilledAtAnyMomentIsNamedByAll) {
  struct Moment {
    const char* order;
    int killed, after_ms;
    bool comes;
  };
  constexpr Moment kMoments[] = {
      {"groups 1000000", 2, 20, true},      {"groups 1000000", 2, 250, true},
      {"slot_groups 1000000", 2, 60, true}, {"slot_groups 1000000", 2, 120, true},
      {"slots 1000000", 2, 250, true},      {"steps 1000000", 0, 700, true},
      {"steps 1000000", 3, 700, true},      {"steps 1000000", 3, 200, false},
  };
  NetHosts hosts(2);
  for (const Moment& moment : kMoments) {
    SCOPED_TRACE(moment.order + (" after " + std::to_string(moment.after_ms)) + " ms");
    CommJob job(hosts, {0, 0, 1, 1});
    job.tell(moment.order, moment.comes ? -1 : moment.killed);
    sleep_ms(moment.after_ms);
    const auto start = Clock::now();
    job.rank(moment.killed).kill();
    job.expect_answers({"XD_ERROR_PEER_LOST", "rank " + std::to_string(moment.killed) + " of host"},
                       moment.killed);
    EXPECT_LT(ms_since(start), stretched(3000));
  }
}

// The processor time that a process has used.
double cpu_seconds(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat, word;
  std::getline(file, stat);
  std::istringstream words(stat.substr(stat.rfind(')') + 1));
  for (int i = 0; i < 11; ++i) words >> word;
  double user = 0, system = 0;
  words >> user >> system;
  return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

TEST_F(NetSteps, AnIdleCommunicatorCostsLessThanHalfAPercentOfACore) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1});
  job.all_fine("steps 3");
  const double before = cpu_seconds(job.rank(1).pid());
  sleep_ms(4000);
  EXPECT_LE(cpu_seconds(job.rank(1).pid()) - before, 0.02);
}

TEST_F(NetSteps, ManyGroupsLeaveNothingBehind) {
  const bool full = std::getenv("XD_TEST_FULL") != nullptr;
  NetHosts hosts(2);
  CommJob job(hosts, {0, 1, 1});
  job.all_fine("groups 2");
  job.all_fine("slot_groups 2");
  const auto before = job.all("held");
  for (int round = 0; round < (full ? 20 : 2); ++round) {
    job.all_fine("groups 10");
    job.all_fine("slot_groups 25");
  }
  EXPECT_EQ(job.all("held"), before);
}

}  // namespace
}  // namespace xd::test
