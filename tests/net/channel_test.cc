// Channels between hosts that are network namespaces, over a network that does what networks do.
#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <utility>

#include "net/job.h"

namespace xd::test {
namespace {

using NetChannel = Net;

const Settings kMasking{{"XD_TEST_MASK", "1"}};

TEST_F(NetChannel, EveryRankSwapsWithAll) {
  NetHosts hosts(2);
  for (const Family family : {Family::ipv4, Family::ipv6}) {
    CommJob job(hosts, {0, 0, 1, 1}, family);
    job.all_fine("channels");
    job.all_fine("swap -1 20");
    job.all_fine("destroy");
  }
}

TEST_F(NetChannel, FourHostsSwapAsWell) {
  NetHosts hosts(4);
  CommJob job(hosts, {0, 1, 2, 3});
  job.all_fine("channels");
  job.all_fine("swap -1 20");
}

// They are connected, so the first put waits for nobody. Its flush gets on with the questions that
// the peer asks of another channel, and from then on the put needs its rank no more.
TEST_F(NetChannel, AFlushedPutNeedsItsRankNoMore) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 1});
  job.all_fine("channels");
  EXPECT_EQ(job.rank(0).ask("put 1"), "fine");
  job.rank(0).tell("flush 1");
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(job.rank(1).ask("ask 1"), "not yet");
    sleep_ms(5);
  }
  EXPECT_EQ(job.rank(0).answer(), "fine");
  job.rank(0).signal(SIGSTOP);
  EXPECT_EQ(job.rank(1).ask("hear 0"), "fine");
  EXPECT_EQ(job.rank(1).ask("ask 0"), "not yet");
  job.rank(0).signal(SIGCONT);
}

TEST_F(NetChannel, AFirewallOfDataPortsAloneIsNamedWhenOneIsMade) {
  expect_no_data_behind_a_firewall("channels");
}

// Rank 3 is near to rank 2, and far from ranks 0 and 1, which go on with rank 2 and each other over
// the engine that rank 3 had a part of.
TEST_F(NetChannel, AKilledRankIsLostToItsChannelsAloneWhereLossesAreMasked) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1}, Family::ipv4, kMasking);
  job.all_fine("channels");
  job.all_fine("swap -1 2");
  job.rank(1).tell("hear 3");
  job.rank(2).tell("hear 3");
  sleep_ms(100);
  job.rank(3).kill();
  for (const int r : {1, 2}) {
    expect_words(job.rank(r).answer(), {"XD_ERROR_PEER_LOST", "rank 3 of host 1"});
  }
  for (const int r : {0, 1, 2}) {
    job.ask_until(r, "put 3", "XD_ERROR_PEER_LOST", 2000);
    expect_words(job.rank(r).ask("ask 3"), {"XD_ERROR_PEER_LOST", "rank 3 of host 1"});
    expect_words(job.rank(r).ask("error"), {"XD_SUCCESS"});
  }
  for (const auto& [a, b] : {std::pair{0, 2}, {1, 2}, {0, 1}}) {
    for (const int r : {a, b}) job.rank(r).tell("swap " + std::to_string(a + b - r) + " 10");
    for (const int r : {a, b}) EXPECT_EQ(job.rank(r).answer(), "fine") << a << " and " << b;
  }
}

TEST_F(NetChannel, AKilledRankFinishesTheCommunicatorElsewhere) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1});
  job.all_fine("channels");
  for (const int r : {0, 1, 2}) job.rank(r).tell("hear " + std::to_string((r + 1) % 3));
  sleep_ms(100);
  const auto start = Clock::now();
  job.rank(3).kill();
  job.expect_answers({"XD_ERROR_PEER_LOST", "rank 3 of host 1"}, 3);
  EXPECT_LT(ms_since(start), stretched(3000));
}

TEST_F(NetChannel, ADeadLinkEndsWaitsOnBothHalves) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1});
  job.all_fine("channels");
  for (int r = 0; r < 4; ++r) job.rank(r).tell("hear " + std::to_string(3 - r));
  sleep_ms(100);
  const auto start = Clock::now();
  hosts.set_link(1, false);
  job.expect_answers({"XD_ERROR_PEER_LOST", "the host has not answered for 1000 ms"});
  EXPECT_LT(ms_since(start), stretched(kSilenceMs + 4000));
}

// A stopped process answers still, by its system: a wait ends in time, and goes on later.
TEST_F(NetChannel, AStoppedPeerIsLateAndNoMore) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "1500"}});
  job.all_fine("channels");
  job.rank(1).signal(SIGSTOP);
  const std::string late = job.rank(0).ask("hear 1");
  expect_words(late, {"XD_ERROR_TIMEOUT", "waited 1500 ms for rank 1"});
  job.rank(1).signal(SIGCONT);
  job.all_fine("swap -1 3");
}

// In the first round all is made that stays with the communicator.
TEST_F(NetChannel, ManyLeaveNothingBehind) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1});
  job.all_fine("channels");
  job.all_fine("swap -1 1");
  const auto before = job.all("held");
  for (int round = 0; round < 5; ++round) {
    job.all_fine("channels");
    job.all_fine("swap -1 1");
  }
  EXPECT_EQ(job.all("held"), before);
}

}  // namespace
}  // namespace xd::test
