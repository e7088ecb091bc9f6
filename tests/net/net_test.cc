// Communicators whose ranks are on several hosts: network namespaces of this machine.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <fcntl.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/tcp.h"
#include "net/net_hosts.h"
#include "net/rank_process.h"

namespace xd::test {
namespace {

using Clock = std::chrono::steady_clock;
using Settings = RankProcess::Settings;

constexpr int kPort = 29400;
constexpr int kSilenceMs = 2000;  // as rank_main.cc has it

int ms_since(Clock::time_point start) {
  return static_cast<int>(
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count());
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The ranks of a job, each a process on its host.
class Job {
 public:
  // Rank r is on host host_of[r]; the ranks meet at rank 0's host unless the settings say
  // otherwise.
  Job(const NetHosts& hosts, const std::vector<int>& host_of, Family family = Family::ipv4,
      const Settings& more = {}) {
    for (std::size_t r = 0; r < host_of.size(); ++r) {
      Settings settings{{"RANK", std::to_string(r)},
                        {"WORLD_SIZE", std::to_string(host_of.size())},
                        {"MASTER_ADDR", hosts.address(host_of[0], family)},
                        {"MASTER_PORT", std::to_string(kPort)},
                        {"XD_JOB_SECRET", "a secret of the test"}};
      for (const auto& [name, value] : more) settings[name] = value;
      const auto of_rank = more.find("rank " + std::to_string(r));
      if (of_rank != more.end()) {
        const auto sign = of_rank->second.find('=');
        settings[of_rank->second.substr(0, sign)] = of_rank->second.substr(sign + 1);
      }
      ranks_.push_back(std::make_unique<RankProcess>(hosts, host_of[r], settings));
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  RankProcess& rank(int r) { return *ranks_[static_cast<std::size_t>(r)]; }

  // What every rank answers to an order that all get at once, but for `without`.
  std::vector<std::string> all(const std::string& order, int without = -1) {
    for (int r = 0; r < size(); ++r)
      if (r != without) rank(r).tell(order);
    std::vector<std::string> answers;
    for (int r = 0; r < size(); ++r) answers.push_back(r != without ? rank(r).answer(40000) : "");
    return answers;
  }
  void all_fine(const std::string& order) {
    const std::vector<std::string> answers = all(order);
    for (int r = 0; r < size(); ++r)
      EXPECT_EQ(answers[static_cast<std::size_t>(r)], "fine") << order << " of rank " << r;
  }
  // Asks until the answer has `part`; fails after `within_ms`.
  std::string ask_until(int r, const std::string& order, const std::string& part, int within_ms) {
    const auto start = Clock::now();
    std::string answer;
    do {
      answer = rank(r).ask(order);
      if (has(answer, part)) return answer;
      sleep_ms(5);
    } while (ms_since(start) < within_ms);
    ADD_FAILURE() << "rank " << r << " says within " << within_ms << " ms to " << order << ": "
                  << answer << "\nexpected: " << part;
    return answer;
  }

 private:
  std::vector<std::unique_ptr<RankProcess>> ranks_;
};

class Net : public testing::Test {
 protected:
  void SetUp() override {
    static const std::string why_not = NetHosts::why_not();
    if (!why_not.empty()) GTEST_SKIP() << why_not;
  }
};

class NetFamily : public Net, public testing::WithParamInterface<Family> {};
INSTANTIATE_TEST_SUITE_P(, NetFamily, testing::Values(Family::ipv4, Family::ipv6),
                         [](const auto& param) {
                           return param.param == Family::ipv4 ? "IPv4" : "IPv6";
                         });

TEST_P(NetFamily, ACommunicatorWorksAsOnOneHostButForSlotsAndProducts) {
  NetHosts hosts(2);
  Job job(hosts, {0, 0, 1, 1}, GetParam());
  job.all_fine("create");
  EXPECT_EQ(job.all("info"),
            (std::vector<std::string>{"host 0 of 2", "host 0 of 2", "host 1 of 2", "host 1 of 2"}));
  for (int i = 0; i < 20; ++i) job.all_fine("barrier");
  job.all_fine("memory");
  EXPECT_EQ(job.rank(0).ask("import 1"), "fine");
  EXPECT_EQ(job.rank(0).ask("import 2"),
            "XD_ERROR_UNSUPPORTED xd_mem_import: handle.rank = 2 is on another machine, whose "
            "memory has no address here [rank 0 of 4]");
  for (const std::string order : {"group", "context"}) {
    for (const std::string& answer : job.all(order)) {
      EXPECT_TRUE(has(answer, "XD_ERROR_UNSUPPORTED")) << answer;
      EXPECT_TRUE(has(answer,
                      "is not there yet between machines: this communicator has ranks 0, 1 "
                      "of host 0 ("))
          << answer;
    }
  }
  job.all_fine("barrier");
  job.all_fine("destroy");
}

TEST_P(NetFamily, AKilledRankIsNamedWithItsHostByAllAtOnce) {
  NetHosts hosts(3);
  Job job(hosts, {0, 1, 1, 2, 2, 2}, GetParam());
  job.all_fine("create");
  job.rank(0).tell("barrier");  // waits; the others do not
  sleep_ms(50);
  const auto start = Clock::now();
  job.rank(4).kill();
  for (const int r : {1, 2, 3, 5}) {
    EXPECT_EQ(job.ask_until(r, "lost", "4", 1000), "4");
    const std::string error = job.rank(r).ask("error");
    EXPECT_TRUE(has(error, "XD_ERROR_PEER_LOST peer 4 host 2 rank 4 of host 2 (")) << error;
    EXPECT_TRUE(has(error, "was lost: the process has ended")) << error;
  }
  EXPECT_TRUE(has(job.rank(0).answer(), "rank 4 of host 2 ("));
  EXPECT_LT(ms_since(start), 2000);
  for (const int r : {0, 1, 2, 3, 5}) EXPECT_EQ(job.rank(r).ask("destroy"), "fine");
}

TEST_P(NetFamily, ADeadLinkIsNoticedByBothHalves) {
  NetHosts hosts(2);
  Job job(hosts, {0, 0, 1, 1}, GetParam());
  job.all_fine("create");
  hosts.set_link(1, false);
  const auto start = Clock::now();
  for (int r = 0; r < 4; ++r) {
    const std::string others = r < 2 ? "2,3" : "0,1";
    EXPECT_EQ(job.ask_until(r, "lost", others, 2 * kSilenceMs), others);
    const std::string error = job.rank(r).ask("error");
    EXPECT_TRUE(has(error, "XD_ERROR_PEER_LOST")) << error;
    EXPECT_TRUE(has(error, "were lost: the host has not answered for 2000 ms")) << error;
  }
  EXPECT_GT(ms_since(start), kSilenceMs / 4);
  EXPECT_LT(ms_since(start), 3 * kSilenceMs);
  for (int r = 0; r < 4; ++r) {
    const auto leaving = Clock::now();
    EXPECT_EQ(job.rank(r).ask("destroy"), "fine");
    EXPECT_LT(ms_since(leaving), 1500);
  }
}

TEST_P(NetFamily, ALinkThatComesBackInTimeIsNoLoss) {
  NetHosts hosts(2);
  Job job(hosts, {0, 1}, GetParam(), {{"XD_TEST_SILENCE_MS", "8000"}});
  job.all_fine("create");
  hosts.set_link(1, false);
  job.rank(0).tell("barrier");
  sleep_ms(600);
  hosts.set_link(1, true);
  EXPECT_EQ(job.rank(1).ask("barrier"), "fine");
  EXPECT_EQ(job.rank(0).answer(), "fine");
}

TEST_F(Net, PacketsThatAreDroppedOneWayAreASilenceForBoth) {
  for (const auto way : {NetHosts::Way::in, NetHosts::Way::out}) {
    NetHosts hosts(2);
    Job job(hosts, {0, 1});
    job.all_fine("create");
    hosts.drop(1, way);
    for (int r = 0; r < 2; ++r) {
      job.ask_until(r, "error", "XD_ERROR_PEER_LOST", 2 * kSilenceMs);
      // The half that notices first resets the connection, where it can be heard.
      const std::string error = job.rank(r).ask("error");
      EXPECT_TRUE(has(error, "the host has not answered for 2000 ms") ||
                  has(error, "or its host hears nothing from this one"))
          << error;
    }
  }
}

TEST_F(Net, AStoppedProcessIsNoLoss) {
  NetHosts hosts(2);
  Job job(hosts, {0, 0, 1});
  job.all_fine("create");
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
  Job job(hosts, {0, 0, 1, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "5000"}});
  job.all_fine("create");
  job.rank(0).tell("barrier");
  EXPECT_TRUE(has(job.rank(0).answer(), "XD_ERROR_TIMEOUT")) << "it comes alone";
  for (const int r : {1, 2, 3}) {
    const std::string error = job.ask_until(r, "error", "XD_ERROR_TIMEOUT", 1000);
    EXPECT_TRUE(has(error, "rank 0 of host 0 (")) << error;
    EXPECT_TRUE(has(error, "waited 5000 ms in a collective host call")) << error;
  }
}

TEST_F(Net, AbortAndGoodbyeReachOtherHosts) {
  NetHosts hosts(2);
  Job job(hosts, {0, 0, 1});
  job.all_fine("create");
  EXPECT_EQ(job.rank(0).ask("abort"), "fine");
  for (const int r : {1, 2}) {
    const std::string error = job.ask_until(r, "error", "XD_ERROR_ABORTED", 1000);
    EXPECT_TRUE(has(error, "rank 0 of host 0 (")) << error;
  }
  job.all_fine("destroy");
  job.all_fine("create");
  EXPECT_EQ(job.rank(1).ask("destroy"), "fine");
  EXPECT_EQ(job.ask_until(2, "lost", "1", 1000), "1");
  EXPECT_TRUE(has(job.rank(2).ask("error"), "XD_SUCCESS"));
  EXPECT_TRUE(has(job.rank(2).ask("barrier"), "rank 1 of host 0 (")) << "has left";
}

TEST_F(Net, MaskedLossesAreRememberedAndFinishNothing) {
  NetHosts hosts(2);
  Job job(hosts, {0, 0, 1, 1}, Family::ipv4, {{"XD_TEST_MASK", "1"}});
  job.all_fine("create");
  job.rank(1).kill();
  for (const int r : {0, 2, 3}) EXPECT_EQ(job.ask_until(r, "lost", "1", 1000), "1");
  // Rank 0 has heard of rank 3 through rank 1 alone. Now rank 2 tells what becomes of its host.
  job.rank(3).kill();
  for (const int r : {0, 2}) {
    EXPECT_EQ(job.ask_until(r, "lost", "1,3", 1000), "1,3");
    EXPECT_TRUE(has(job.rank(r).ask("error"), "XD_SUCCESS"));
  }
}

TEST_F(Net, TheJobsSecretIsNeededAndTheSameOnAllRanks) {
  NetHosts hosts(2);
  Job none(hosts, {0, 1}, Family::ipv4, {{"XD_JOB_SECRET", ""}});
  for (const std::string& answer : none.all("create")) {
    EXPECT_TRUE(has(answer, "XD_JOB_SECRET is not set")) << answer;
  }
  Job first(hosts, {0});
  Settings other{{"XD_TEST_TIMEOUT_MS", "5000"}, {"rank 1", "XD_JOB_SECRET=another"}};
  Job by_environment(hosts, {0, 1}, Family::ipv4, other);
  const auto refused = by_environment.all("create");
  EXPECT_TRUE(has(refused[0], "XD_ERROR_TIMEOUT")) << refused[0];
  EXPECT_TRUE(has(refused[1], "refused this rank: it knows another secret")) << refused[1];
  other["XD_TEST_ID"] = first.rank(0).ask("id");
  Job by_id(hosts, {0, 1}, Family::ipv4, other);
  for (const std::string& answer : by_id.all("create")) {
    EXPECT_TRUE(has(answer, "XD_ERROR_MISMATCH")) << answer;
    EXPECT_TRUE(has(answer, "has another XD_JOB_SECRET than")) << answer;
  }
}

TEST_F(Net, RanksMeetByAUniqueIdAndByTheCallersAllGather) {
  NetHosts hosts(2);
  Job first(hosts, {0});
  Job by_id(hosts, {0, 1, 1}, Family::ipv4, {{"XD_TEST_ID", first.rank(0).ask("id")}});
  by_id.all_fine("create");
  by_id.all_fine("barrier");
  const auto folder = std::filesystem::temp_directory_path() / ("xd-" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  Job by_files(hosts, {0, 1, 1}, Family::ipv4, {{"XD_TEST_FOLDER", folder}});
  by_files.all_fine("create");
  by_files.all_fine("barrier");
  std::filesystem::remove_all(folder);
}

TEST_F(Net, OfSeveralInterfacesTheCallerNamesOneWhereNoMeetingPointShowsIt) {
  NetHosts hosts(2);
  hosts.add_dead_interface(1);
  const auto folder = std::filesystem::temp_directory_path() / ("xd-" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  Job meets(hosts, {0, 1});
  meets.all_fine("create");
  {
    Job job(hosts, {0, 1}, Family::ipv4, {{"XD_TEST_FOLDER", folder}});
    const auto answers = job.all("create");
    for (const std::string& answer : answers)
      EXPECT_TRUE(has(answer, "(eth0 10.97.0.2, eth1 10.98.0.2")) << answer;
    EXPECT_TRUE(has(answers[0], "XD_ERROR_MISMATCH")) << answers[0];
    EXPECT_TRUE(has(answers[1], "XD_ERROR_INVALID_ARGUMENT")) << answers[1];
  }
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  {
    Job job(hosts, {0, 1}, Family::ipv4, {{"XD_TEST_FOLDER", folder}, {"XD_NET_IFACE", "eth0"}});
    job.all_fine("create");
    job.all_fine("barrier");
  }
  std::filesystem::remove_all(folder);
  // The dead one: no packet comes through, and the error names both ends.
  Job dead(hosts, {0, 1}, Family::ipv4,
           {{"XD_TEST_TIMEOUT_MS", "6000"}, {"rank 1", "XD_NET_IFACE=eth1"}});
  const auto answers = dead.all("create");
  EXPECT_TRUE(has(answers[1], "cannot reach rank 0 of host 0 (")) << answers[1];
  EXPECT_TRUE(has(answers[1], "at 10.97.0.1:")) << answers[1];
  EXPECT_TRUE(has(answers[1], "from 10.98.0.2 within 2000 ms")) << answers[1];
}

TEST_F(Net, ARankThatIsKilledAtTheMeetingIsNamedInTime) {
  NetHosts hosts(2);
  Job job(hosts, {0, 0, 1, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "5000"}});
  for (const int r : {0, 1, 3}) job.rank(r).tell("create");
  sleep_ms(300);
  job.rank(3).kill();
  job.rank(2).tell("create");
  for (const int r : {0, 1, 2}) {
    const std::string answer = job.rank(r).answer();
    EXPECT_TRUE(has(answer, "XD_ERROR_TIMEOUT")) << answer;
    EXPECT_TRUE(has(answer, "rank 3 of 4 did not come in time")) << answer;
  }
}

TEST_F(Net, AFirewallOfTheControlPortIsNamedInTime) {
  NetHosts hosts(2);
  hosts.admit_ports(0, kPort, kPort + 15);
  Job job(hosts, {0, 0, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "6000"}});
  const auto start = Clock::now();
  const auto answers = job.all("create");
  EXPECT_TRUE(has(answers[2], "XD_ERROR_TIMEOUT")) << answers[2];
  EXPECT_TRUE(has(answers[2], "cannot reach rank 0 of host 0 (")) << answers[2];
  for (const int r : {0, 1}) EXPECT_TRUE(has(answers[static_cast<std::size_t>(r)], "rank 2"));
  EXPECT_LT(ms_since(start), 9000);
}

TEST_F(Net, AMeetingPointOnLoopbackIsNotFoundFromAnotherHost) {
  NetHosts hosts(2);
  Job job(hosts, {0, 1}, Family::ipv4,
          {{"MASTER_ADDR", "127.0.0.1"}, {"XD_TEST_TIMEOUT_MS", "1000"}});
  const auto answers = job.all("create");
  EXPECT_TRUE(has(answers[0], "XD_ERROR_TIMEOUT")) << answers[0];
  EXPECT_TRUE(has(answers[1], "rank 0 did not come, is on another host")) << answers[1];
}

TEST_F(Net, OneNameIsOfOneHost) {
  NetHosts hosts(2);
  Job same(hosts, {0, 1}, Family::ipv4, {{"XD_TEST_HOST", "west"}});
  for (const std::string& answer : same.all("create"))
    EXPECT_TRUE(has(answer, "config.host = 'west' on rank 0")) << answer;
  Job other(
      hosts, {0, 1, 1}, Family::ipv4,
      {{"XD_TEST_HOST", "west"}, {"rank 1", "XD_TEST_HOST=east"}, {"rank 2", "XD_TEST_HOST=east"}});
  other.all_fine("create");
  EXPECT_EQ(other.rank(2).ask("info"), "host 1 of 2");
  other.rank(2).kill();
  EXPECT_TRUE(has(other.ask_until(0, "error", "XD_ERROR_PEER_LOST", 1000),
                  "rank 2 of host 1 (east) was lost"));
}

TEST_F(Net, LostPacketsCostTimeAlone) {
  NetHosts hosts(2);
  hosts.lose(1, 5);
  Job job(hosts, {0, 0, 1, 1}, Family::ipv4, {{"XD_TEST_SILENCE_MS", "10000"}});
  job.all_fine("create");
  for (int i = 0; i < 5; ++i) job.all_fine("barrier");
  job.all_fine("destroy");
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

// ---- Strangers ----

// The TCP ports on which a process listens, but for one.
std::vector<int> listening_ports(pid_t pid, int but) {
  std::ifstream table("/proc/" + std::to_string(pid) + "/net/tcp");
  std::vector<int> ports;
  std::string line;
  std::getline(table, line);
  while (std::getline(table, line)) {
    std::istringstream words(line);
    std::string number, local, remote, state;
    words >> number >> local >> remote >> state;
    const int port = std::stoi(local.substr(local.find(':') + 1), nullptr, 16);
    if (state == "0A" && port != but) ports.push_back(port);
  }
  return ports;
}

TEST_F(Net, StrangersAtTheControlPortsKeepNobodyOut) {
  constexpr int kStrangers = 100;
  NetHosts hosts(2);
  Job job(hosts, {0, 0, 1});
  job.rank(0).tell("create");
  job.rank(1).tell("create");
  std::vector<int> ports;  // ranks listen before they meet
  for (int tries = 0; ports.size() < 2 && tries < 2000; ++tries) {
    sleep_ms(10);
    ports = listening_ports(job.rank(0).pid(), kPort);
  }
  ASSERT_EQ(ports.size(), 2U);
  std::vector<UniqueFd> strangers;
  std::thread([&] {  // a thread may be on another host than its process
    const UniqueFd there(::open(("/run/netns/" + hosts.name(1)).c_str(), O_RDONLY | O_CLOEXEC));
    ASSERT_EQ(::setns(there.get(), CLONE_NEWNET), 0);
    const TcpAddress rank_0 = numeric_address(hosts.address(0, Family::ipv4)).value();
    for (const int port : ports) {
      for (int i = 0; i < kStrangers; ++i) {
        UniqueFd fd = tcp_connect(rank_0.with_port(static_cast<std::uint16_t>(port)),
                                  Deadline::after_ms(5000));
        if (i % 2 == 0) {
          std::size_t sent = 0;
          send_some(fd.get(), std::as_bytes(std::span("GET / HTTP/1.1\r\n\r\n")), sent);
        }
        strangers.push_back(std::move(fd));
      }
    }
  })
      .join();
  EXPECT_EQ(job.rank(2).ask("create"), "fine");
  for (const int r : {0, 1}) EXPECT_EQ(job.rank(r).answer(), "fine");
  job.all_fine("barrier");
  EXPECT_TRUE(listening_ports(job.rank(0).pid(), 0).empty()) << "when all are connected";
}

}  // namespace
}  // namespace xd::test

int main(int argc, char** argv) {
  if (xd::test::run_if_rank_process()) return 0;
  ::signal(SIGPIPE, SIG_IGN);  // a rank may be gone when it is told something
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
