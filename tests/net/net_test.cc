// Communicators whose ranks are on several hosts: network namespaces of this machine.
#include <gtest/gtest.h>
#include <signal.h>

#include <regex>
#include <string>
#include <vector>

#include "net/job.h"

namespace xd::test {
namespace {

class NetFamily : public Net, public testing::WithParamInterface<Family> {};
INSTANTIATE_TEST_SUITE_P(, NetFamily, testing::Values(Family::ipv4, Family::ipv6),
                         [](const auto& param) {
                           return param.param == Family::ipv4 ? "IPv4" : "IPv6";
                         });

TEST_P(NetFamily, ACommunicatorWorksAsOnOneHostButForProducts) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1}, GetParam());
  EXPECT_EQ(job.all("info"),
            (std::vector<std::string>{"host 0 of 2", "host 0 of 2", "host 1 of 2", "host 1 of 2"}));
  for (int i = 0; i < 20; ++i) job.all_fine("barrier");
  job.all_fine("memory");
  EXPECT_EQ(job.rank(0).ask("import 1"), "fine");
  EXPECT_EQ(job.rank(0).ask("import 2"),
            "XD_ERROR_UNSUPPORTED xd_mem_import: handle.rank = 2 is on another machine, whose "
            "memory has no address here [rank 0 of 4]");
  job.expect_all("context", {"XD_ERROR_UNSUPPORTED",
                             "is not there yet between machines: this communicator has ranks 0, 1 "
                             "of host 0 ("});
  job.all_fine("barrier");
  job.all_fine("destroy");
}

// Two, one and two ranks on three hosts: relays serve one rank, two or none.
TEST_P(NetFamily, StepsOfExpertParallelismAreRight) {
  NetHosts hosts(3);
  CommJob job(hosts, {0, 0, 1, 2, 2}, GetParam());
  job.all_fine("steps 15");
  job.all_fine("steps 3");  // another group, as the first one is gone
  job.all_fine("destroy");
}

TEST_P(NetFamily, StepsInSlotsAreRight) {
  NetHosts hosts(3);
  CommJob job(hosts, {0, 0, 1, 2, 2}, GetParam());
  job.all_fine("slots 20");
  job.all_fine("slot_groups 3");  // each ends right behind its only step
  job.all_fine("destroy");
}

TEST_F(Net, ARankStoppedInAStepIsATimeoutOnAll) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "3000"}});
  job.tell("steps 1000000");
  sleep_ms(700);
  job.rank(2).signal(SIGSTOP);
  for (const int r : {0, 1, 3}) {
    const std::string answer = job.rank(r).answer();
    expect_words(answer, {"XD_ERROR_TIMEOUT"});
    const std::regex itself("rank ([0-9]+)[^0-9].* for rank \\1[^0-9]");
    EXPECT_FALSE(std::regex_search(answer, itself)) << "rank " << r << ": " << answer;
  }
  job.rank(2).signal(SIGCONT);
  expect_words(job.rank(2).answer(), {"XD_ERROR_TIMEOUT"});
}

TEST_F(Net, AnAbortEndsStepsOnAllHosts) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1});
  job.tell("steps 1000000", 3);
  sleep_ms(300);
  EXPECT_EQ(job.rank(3).ask("abort"), "fine");
  job.expect_answers({"XD_ERROR_ABORTED"}, 3);
}

TEST_P(NetFamily, AKilledRankIsNamedWithItsHostByAllAtOnce) {
  NetHosts hosts(3);
  CommJob job(hosts, {0, 1, 1, 2, 2, 2}, GetParam());
  job.rank(0).tell("barrier");  // waits; the others do not
  sleep_ms(50);
  const auto start = Clock::now();
  job.rank(4).kill();
  for (const int r : {1, 2, 3, 5}) {
    EXPECT_EQ(job.ask_until(r, "lost", "4", 1000), "4");
    expect_words(job.rank(r).ask("error"), {"XD_ERROR_PEER_LOST peer 4 host 2 rank 4 of host 2 (",
                                            "was lost: the process has ended"});
  }
  expect_words(job.rank(0).answer(), {"rank 4 of host 2 ("});
  EXPECT_LT(ms_since(start), stretched(2000));
  for (const int r : {0, 1, 2, 3, 5}) EXPECT_EQ(job.rank(r).ask("destroy"), "fine");
}

TEST_P(NetFamily, ADeadLinkIsNoticedByBothHalves) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1}, GetParam());
  hosts.set_link(1, false);
  const auto start = Clock::now();
  for (int r = 0; r < 4; ++r) {
    const std::string others = r < 2 ? "2,3" : "0,1";
    EXPECT_EQ(job.ask_until(r, "lost", others, kSilenceMs + 4000), others);
    expect_words(job.rank(r).ask("error"),
                 {"XD_ERROR_PEER_LOST", "were lost: the host has not answered for 1000 ms"});
  }
  EXPECT_GT(ms_since(start), kSilenceMs / 4);
  EXPECT_LT(ms_since(start), stretched(kSilenceMs + 5000));
  for (int r = 0; r < 4; ++r) {
    const auto leaving = Clock::now();
    EXPECT_EQ(job.rank(r).ask("destroy"), "fine");
    EXPECT_LT(ms_since(leaving), stretched(1500));
  }
}

TEST_P(NetFamily, ALinkThatComesBackInTimeIsNoLoss) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 1}, GetParam(), {{"XD_TEST_SILENCE_MS", "8000"}});
  hosts.set_link(1, false);
  job.rank(0).tell("barrier");
  sleep_ms(600);
  hosts.set_link(1, true);
  EXPECT_EQ(job.rank(1).ask("barrier"), "fine");
  EXPECT_EQ(job.rank(0).answer(), "fine");
}

// No matter which message has come last, and when: nothing is under way, or a message is.
TEST_F(Net, AnInterruptionAlmostAsLongAsTheSilenceEndsNothing) {
  constexpr int kSilence = 2000;
  NetHosts hosts(2);
  CommJob job(hosts, {0, 1}, Family::ipv4, {{"XD_TEST_SILENCE_MS", std::to_string(kSilence)}});
  for (int phase = 0; phase < 4; ++phase) {
    sleep_ms(1000 + phase * 260);
    hosts.set_link(1, false);
    if (phase % 2 == 1) job.rank(0).tell("barrier");
    sleep_ms(kSilence - 100);
    hosts.set_link(1, true);
    if (phase % 2 == 0) job.rank(0).tell("barrier");
    EXPECT_EQ(job.rank(1).ask("barrier"), "fine");
    EXPECT_EQ(job.rank(0).answer(), "fine");
  }
}

// The half that is not heard may be asked until it gives up, and is silent from then on: if its own
// data were under way, its system ends the connection without a word.
TEST_F(Net, PacketsThatAreDroppedOneWayAreASilenceForBoth) {
  constexpr int kBothBounds = 2 * (kSilenceMs + 4000);
  for (const auto way : {NetHosts::Way::in, NetHosts::Way::out}) {
    NetHosts hosts(2);
    CommJob job(hosts, {0, 1});
    hosts.drop(1, way);
    for (int r = 0; r < 2; ++r) {
      job.ask_until(r, "error", "XD_ERROR_PEER_LOST", kBothBounds);
      // The half that notices first mostly resets the connection, where it can be heard.
      const std::string error = job.rank(r).ask("error");
      EXPECT_TRUE(has(error, "the host has not answered for 1000 ms") ||
                  has(error, "or its host has given this one up for silence"))
          << error;
    }
  }
}

TEST_F(Net, AStoppedProcessIsNoLoss) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1});
  job.rank(2).signal(SIGSTOP);
  job.rank(0).tell("barrier");  // so that there is something that it does not read
  sleep_ms(2 * kSilenceMs);
  EXPECT_EQ(job.rank(1).ask("lost"), "none");
  job.rank(2).signal(SIGCONT);
  EXPECT_EQ(job.rank(1).ask("lost"), "none");
  job.rank(1).tell("barrier");
  EXPECT_EQ(job.rank(2).ask("barrier"), "fine");
  EXPECT_EQ(job.rank(1).answer(), "fine");
  EXPECT_EQ(job.rank(0).answer(), "fine");
}

TEST_F(Net, ALateRankIsATimeoutThatNamesItsHostOnAllRanks) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "2000"}});
  job.rank(0).tell("barrier");
  expect_words(job.rank(0).answer(), {"XD_ERROR_TIMEOUT"});  // it comes alone
  for (const int r : {1, 2, 3}) {
    expect_words(job.ask_until(r, "error", "XD_ERROR_TIMEOUT", 1000),
                 {"rank 0 of host 0 (", "waited 2000 ms in xd_comm_barrier"});
  }
}

TEST_F(Net, AbortAndGoodbyeReachOtherHosts) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1});
  EXPECT_EQ(job.rank(0).ask("abort"), "fine");
  for (const int r : {1, 2}) {
    expect_words(job.ask_until(r, "error", "XD_ERROR_ABORTED", 1000), {"rank 0 of host 0 ("});
  }
  job.all_fine("destroy");
  job.all_fine("create");
  EXPECT_EQ(job.rank(1).ask("destroy"), "fine");
  EXPECT_EQ(job.ask_until(2, "lost", "1", 1000), "1");
  expect_words(job.rank(2).ask("error"), {"XD_SUCCESS"});
  expect_words(job.rank(2).ask("barrier"), {"rank 1 of host 0 ("});  // which has left
}

TEST_F(Net, MaskedLossesAreRememberedAndFinishNothing) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1}, Family::ipv4, {{"XD_TEST_MASK", "1"}});
  job.rank(1).kill();
  for (const int r : {0, 2, 3}) EXPECT_EQ(job.ask_until(r, "lost", "1", 1000), "1");
  // Rank 0 has heard of rank 3 through rank 1 alone. Now rank 2 tells what becomes of its host.
  job.rank(3).kill();
  for (const int r : {0, 2}) {
    EXPECT_EQ(job.ask_until(r, "lost", "1,3", 1000), "1,3");
    expect_words(job.rank(r).ask("error"), {"XD_SUCCESS"});
  }
}

// Without a bound only the end of a connection says that a rank is lost.
TEST_F(Net, WithoutABoundAHostIsNeverGivenUpAndADeathIsNoticed) {
  NetHosts hosts(3);
  CommJob job(hosts, {0, 1, 2}, Family::ipv4, {{"XD_TEST_SILENCE_MS", "-1"}});
  hosts.set_link(1, false);
  job.rank(0).tell("barrier");
  sleep_ms(2 * kSilenceMs);
  EXPECT_EQ(job.rank(1).ask("lost"), "none");
  EXPECT_EQ(job.rank(2).ask("lost"), "none");
  job.rank(2).kill();
  expect_words(job.rank(0).answer(), {"rank 2 of host 2 ("});
}

TEST_F(Net, AFirewallThatRefusesLaterIsASilence) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 1});
  hosts.refuse(1, "icmpx admin-prohibited");
  for (int r = 0; r < 2; ++r) {
    const std::string error = job.ask_until(r, "error", "XD_ERROR_PEER_LOST", kSilenceMs + 5000);
    EXPECT_TRUE(has(error, "the host has not answered for 1000 ms") ||
                has(error, "or its host has given this one up for silence"))
        << error;
  }
}

TEST_F(Net, OneNameIsOfOneHost) {
  NetHosts hosts(2);
  Job same(hosts, {0, 1}, Family::ipv4, {{"XD_TEST_HOST", "west"}});
  same.expect_all("create", {"config.host = 'west' on rank 0"});
  CommJob other(
      hosts, {0, 1, 1}, Family::ipv4,
      {{"XD_TEST_HOST", "west"}, {"rank 1", "XD_TEST_HOST=east"}, {"rank 2", "XD_TEST_HOST=east"}});
  EXPECT_EQ(other.rank(2).ask("info"), "host 1 of 2");
  other.rank(2).kill();
  expect_words(other.ask_until(0, "error", "XD_ERROR_PEER_LOST", 1000),
               {"rank 2 of host 1 (east) was lost"});
}

TEST_F(Net, FiftyCommunicatorsLeaveNothingBehind) {
  NetHosts hosts(2);
  Job job(hosts, {0, 1, 1});
  job.all_fine("cycle 2");
  sleep_ms(100);
  const auto before = job.all("open");
  job.all_fine("cycle 50");
  sleep_ms(100);
  EXPECT_EQ(job.all("open"), before);
}

}  // namespace
}  // namespace xd::test

int main(int argc, char** argv) {
  if (xd::test::run_if_rank_process()) return 0;
  ::signal(SIGPIPE, SIG_IGN);  // a rank may be gone when it is told something
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
