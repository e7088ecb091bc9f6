// Steps of expert parallelism over a network that does what networks do.
#include <gtest/gtest.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "net/job.h"

namespace xd::test {
namespace {

using NetSteps = Net;

// All steps but those of a rank that is gone end with these words.
void expect_all(Job& job, const std::string& status, const std::string& part, int without = -1) {
  for (int r = 0; r < job.size(); ++r) {
    if (r == without) continue;
    const std::string answer = job.rank(r).answer();
    EXPECT_TRUE(has(answer, status) && has(answer, part)) << "rank " << r << ": " << answer;
  }
}

void begin_steps(Job& job, int without = -1) {
  for (int r = 0; r < job.size(); ++r)
    if (r != without) job.rank(r).tell("steps 1000000");
}

TEST_F(NetSteps, ThreeRanksWithOnePartnerAreServed) {
  NetHosts hosts(2);
  Job job(hosts, {0, 0, 0, 1});
  job.all_fine("create");
  job.all_fine("steps 15");
}

TEST_F(NetSteps, ADeadLinkEndsThemOnBothHalves) {
  NetHosts hosts(2);
  Job job(hosts, {0, 0, 1, 1});
  job.all_fine("create");
  begin_steps(job);
  sleep_ms(500);
  const auto start = Clock::now();
  hosts.set_link(1, false);
  expect_all(job, "XD_ERROR_PEER_LOST", "the host has not answered for 2000 ms");
  EXPECT_LT(ms_since(start), kSilenceMs + 2000);
}

TEST_F(NetSteps, ALinkThatComesBackInTimeCostsThemTimeAlone) {
  NetHosts hosts(2);
  Job job(hosts, {0, 1}, Family::ipv4, {{"XD_TEST_SILENCE_MS", "10000"}});
  job.all_fine("create");
  for (int r = 0; r < 2; ++r) job.rank(r).tell("steps 100");
  sleep_ms(200);
  hosts.set_link(1, false);
  sleep_ms(600);
  hosts.set_link(1, true);
  for (int r = 0; r < 2; ++r) EXPECT_EQ(job.rank(r).answer(), "fine");
}

TEST_F(NetSteps, SmallPacketsAreEnough) {
  NetHosts hosts(2);
  hosts.set_mtu(1, 576);
  Job job(hosts, {0, 0, 1, 1});
  job.all_fine("create");
  job.all_fine("steps 5");
}

TEST_F(NetSteps, LargePacketsAreUsed) {
  NetHosts hosts(2);
  for (int h = 0; h < 2; ++h) hosts.set_mtu(h, 9000);
  Job job(hosts, {0, 0, 1, 1});
  job.all_fine("create");
  job.all_fine("steps 5");
}

// Whichever connection meets the hole first says so.
TEST_F(NetSteps, AHoleForLongPacketsEndsThemInTime) {
  NetHosts hosts(2);
  Job job(hosts, {0, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "5000"}});
  job.all_fine("create");
  hosts.drop_longer(1, 600);
  const auto start = Clock::now();
  for (const std::string& answer : job.all("steps 20")) {
    EXPECT_TRUE(has(answer, "XD_ERROR_TIMEOUT") || has(answer, "XD_ERROR_PEER_LOST") ||
                has(answer, "XD_ERROR_MISMATCH") || has(answer, "XD_ERROR_SYSTEM"))
        << answer;
  }
  EXPECT_LT(ms_since(start), 12000);
}

TEST_F(NetSteps, ASlowLinkCostsThemTimeAlone) {
  NetHosts hosts(2);
  hosts.throttle(1, 20);
  Job job(hosts, {0, 0, 1, 1}, Family::ipv4, {{"XD_TEST_SILENCE_MS", "10000"}});
  job.all_fine("create");
  job.all_fine("steps 3");
}

TEST_F(NetSteps, ARankKilledWhileAGroupIsMadeIsNamedByAll) {
  NetHosts hosts(2);
  Job job(hosts, {0, 0, 1, 1});
  job.all_fine("create");
  begin_steps(job, 3);
  sleep_ms(200);
  const auto start = Clock::now();
  job.rank(3).kill();
  expect_all(job, "XD_ERROR_PEER_LOST", "rank 3 of host", 3);
  EXPECT_LT(ms_since(start), 3000);
}

// It is in greetings, in steps, or between them.
TEST_F(NetSteps, ARankKilledAtAnyMomentIsNamedByAll) {
  NetHosts hosts(2);
  for (const std::string order : {"groups", "slot_groups", "slots"}) {
    for (const int after_ms : {20, 60, 120, 250}) {
      Job job(hosts, {0, 0, 1, 1});
      job.all_fine("create");
      for (int r = 0; r < 4; ++r) job.rank(r).tell(order + " 1000000");
      sleep_ms(after_ms);
      job.rank(2).kill();
      expect_all(job, "XD_ERROR_PEER_LOST", "rank 2 of host", 2);
    }
  }
}

// Messages and credits are lost on their way while ranks are about to go.
TEST_F(NetSteps, SlotsOverALinkThatLosesPacketsCostTimeAlone) {
  NetHosts hosts(2);
  for (int h = 0; h < 2; ++h) hosts.lose(h, 2);
  Job job(hosts, {0, 0, 1}, Family::ipv4, {{"XD_TEST_SILENCE_MS", "10000"}});
  job.all_fine("create");
  job.all_fine("slots 10");
  job.all_fine("slot_groups 3");
}

// A rank that is at rest closes its engine while packets of its last credits are lost.
TEST_F(NetSteps, GroupsThatEndRightBehindTheirLastStepLoseNothing) {
  NetHosts hosts(2);
  for (int h = 0; h < 2; ++h) hosts.lose(h, 3);
  Job job(hosts, {0, 0, 1}, Family::ipv4, {{"XD_TEST_SILENCE_MS", "10000"}});
  job.all_fine("create");
  job.all_fine("groups 5");
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
  Job job(hosts, {0, 0, 1, 1});
  job.all_fine("create");
  job.all_fine("steps 3");
  const double before = cpu_seconds(job.rank(1).pid());
  sleep_ms(4000);
  EXPECT_LE(cpu_seconds(job.rank(1).pid()) - before, 0.02);
}

TEST_F(NetSteps, ManyGroupsLeaveNothingBehind) {
  const bool full = std::getenv("XD_TEST_FULL") != nullptr;
  NetHosts hosts(2);
  Job job(hosts, {0, 1, 1});
  job.all_fine("create");
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
