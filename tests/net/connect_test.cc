// How ranks on several hosts meet and connect, and what may keep them from it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/tcp.h"
#include "net/job.h"

namespace xd::test {
namespace {

using NetConnect = Net;

// A folder for ranks that meet over files.
class Folder {
 public:
  Folder() : path_(std::filesystem::temp_directory_path() / ("xd-" + std::to_string(::getpid()))) {
    std::filesystem::create_directory(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string path() const { return path_; }

 private:
  std::filesystem::path path_;
};

TEST_F(NetConnect, TheJobsSecretIsNeededAndTheSameOnAllRanks) {
  NetHosts hosts(2);
  Job none(hosts, {0, 1}, Family::ipv4, {{"XD_JOB_SECRET", ""}});
  none.expect_all("create", {"XD_JOB_SECRET is not set"});
  Job first(hosts, {0});
  Settings other{{"XD_TEST_TIMEOUT_MS", "2500"}, {"rank 1", "XD_JOB_SECRET=another"}};
  Job by_environment(hosts, {0, 1}, Family::ipv4, other);
  const auto refused = by_environment.all("create");
  expect_words(refused[0], {"XD_ERROR_TIMEOUT", "another XD_JOB_SECRET, or none"});
  expect_words(refused[1], {"refused this rank: it knows another XD_JOB_SECRET, or none"});
  other["XD_TEST_ID"] = first.rank(0).ask("id");
  Job by_id(hosts, {0, 1}, Family::ipv4, other);
  by_id.expect_all("create", {"XD_ERROR_MISMATCH", "has another XD_JOB_SECRET than"});
}

TEST_F(NetConnect, RanksMeetByAUniqueIdAndByTheCallersAllGather) {
  NetHosts hosts(2);
  Job first(hosts, {0});
  CommJob by_id(hosts, {0, 1, 1}, Family::ipv4, {{"XD_TEST_ID", first.rank(0).ask("id")}});
  by_id.all_fine("barrier");
  const Folder folder;
  CommJob by_files(hosts, {0, 1, 1}, Family::ipv4, {{"XD_TEST_FOLDER", folder.path()}});
  by_files.all_fine("barrier");
}

TEST_F(NetConnect, OfSeveralInterfacesTheCallerNamesOneWhereNoMeetingPointShowsIt) {
  NetHosts hosts(2);
  hosts.add_dead_interface(1);
  CommJob meets(hosts, {0, 1});
  {
    const Folder folder;
    Job job(hosts, {0, 1}, Family::ipv4, {{"XD_TEST_FOLDER", folder.path()}});
    const auto answers = job.all("create");
    for (const std::string& answer : answers)
      expect_words(answer, {"(eth0 10.97.0.2, eth1 10.98.0.2"});
    expect_words(answers[0], {"XD_ERROR_MISMATCH"});
    expect_words(answers[1], {"XD_ERROR_INVALID_ARGUMENT"});
  }
  {
    const Folder folder;
    CommJob job(hosts, {0, 1}, Family::ipv4,
                {{"XD_TEST_FOLDER", folder.path()}, {"XD_NET_IFACE", "eth0"}});
    job.all_fine("barrier");
  }
  // The dead one: no packet comes through, and the error names both ends.
  Job dead(hosts, {0, 1}, Family::ipv4,
           {{"XD_TEST_TIMEOUT_MS", "6000"}, {"rank 1", "XD_NET_IFACE=eth1"}});
  const auto answers = dead.all("create");
  expect_words(answers[1], {"cannot reach rank 0 of host 0 (",
                            "at 10.97.0.1:", "from 10.98.0.2 within 3000 ms"});
}

TEST_F(NetConnect, RowsGoByTheAdapterThatIsNamedAndControlAsBefore) {
  NetHosts hosts(2);
  hosts.add_dead_interface(1);
  {
    CommJob job(hosts, {0, 1}, Family::ipv4,
                {{"XD_NET_DEVICE", "eth0"}, {"rank 1", "XD_NET_IFACE=eth0"}});
    job.all_fine("steps 1");
  }
  {
    CommJob job(hosts, {0, 1}, Family::ipv4,
                {{"XD_TEST_TIMEOUT_MS", "4000"}, {"rank 1", "XD_NET_DEVICE=eth1"}});
    const auto answers = job.all("steps 1");
    expect_words(answers[0],
                 {"control reaches rank 1 of host 1 (", "data do not (tcp", ", 10.98.0.2:"});
    job.all_fine("barrier");
  }
  CommJob job(hosts, {0, 1}, Family::ipv4, {{"rank 1", "XD_NET_DEVICE=mlx5_9"}});
  const auto answers = job.all("steps 1");
  expect_words(answers[0], {"XD_ERROR_MISMATCH"});
  expect_words(answers[1], {"XD_ERROR_INVALID_ARGUMENT",
                            "XD_NET_DEVICE = mlx5_9, expected an adapter that libfabric can use "
                            "here: ",
                            "eth0 (tcp"});
  job.all_fine("barrier");
}

TEST_F(NetConnect, ARankThatIsKilledAtTheMeetingIsNamedInTime) {
  NetHosts hosts(2);
  Job job(hosts, {0, 0, 1, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "2500"}});
  for (const int r : {0, 1, 3}) job.rank(r).tell("create");
  sleep_ms(300);
  job.rank(3).kill();
  job.rank(2).tell("create");
  job.expect_answers({"XD_ERROR_TIMEOUT", "rank 3 of 4 did not come in time"}, 3);
}

TEST_F(NetConnect, AFirewallOfTheControlPortIsNamedInTime) {
  NetHosts hosts(2);
  hosts.admit_ports(0, kPort, kPort + 15);
  Job job(hosts, {0, 0, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "6000"}});
  const auto start = Clock::now();
  const auto answers = job.all("create");
  expect_words(answers[2], {"XD_ERROR_TIMEOUT", "cannot reach rank 0 of host 0 ("});
  // The others can reach it, and hear from it.
  for (const int r : {0, 1}) {
    expect_words(answers[static_cast<std::size_t>(r)],
                 {"XD_ERROR_MISMATCH", "cannot reach rank 0 of host 0 ("});
  }
  EXPECT_LT(ms_since(start), stretched(5500));
}

// Control connections stand already.
TEST_F(NetConnect, AFirewallOfDataPortsAloneIsNamedWhenAGroupIsMade) {
  expect_no_data_behind_a_firewall("steps 1");
}

// Some providers keep the refusal to themselves and try again.
TEST_F(NetConnect, AFirewallThatRefusesDataPortsIsNamedAtOnceOrInTime) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "4000"}});
  hosts.admit_ports(1, kPort, kPort + 15, "reject with tcp reset");
  const auto start = Clock::now();
  const auto answers = job.all("steps 1");
  EXPECT_LT(ms_since(start), stretched(3700));
  for (const std::string& answer : answers) {
    expect_words(answer, {"control reaches rank ", ", data do not (tcp"});
  }
  EXPECT_TRUE(has(answers[0], "XD_ERROR_SYSTEM") || has(answers[0], "XD_ERROR_TIMEOUT"))
      << answers[0];
  job.all_fine("barrier");
}

// Data are connected from lower ranks to higher ones, and over these connections both ways.
TEST_F(NetConnect, AFirewallOfTheLowerRanksDataPortsIsNoHindrance) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1});
  hosts.admit_ports(0, kPort, kPort + 15);
  job.all_fine("steps 2");
}

TEST_F(NetConnect, AMeetingPointOnLoopbackIsNotFoundFromAnotherHost) {
  NetHosts hosts(2);
  Job job(hosts, {0, 1}, Family::ipv4,
          {{"MASTER_ADDR", "127.0.0.1"}, {"XD_TEST_TIMEOUT_MS", "1000"}});
  const auto answers = job.all("create");
  expect_words(answers[0], {"XD_ERROR_TIMEOUT"});
  expect_words(answers[1], {"rank 0 did not come, is on another host"});
}

TEST_F(NetConnect, AFirewallThatRefusesIsNamedAtOnceOrInTime) {
  NetHosts hosts(2);
  // The system's reaction depends on the firewall's words.
  hosts.admit_ports(0, kPort, kPort + 15, "reject with icmpx port-unreachable");
  {
    Job job(hosts, {0, 1});
    const auto start = Clock::now();
    job.expect_all(
        "create", {"XD_ERROR_PEER_LOST", "rank 0 of host 0 (", "or a firewall refuses 10.97.0.1:"});
    EXPECT_LT(ms_since(start), stretched(4000));
  }
  hosts.admit_ports(0, kPort, kPort + 15, "reject with icmpx admin-prohibited");
  Job job(hosts, {0, 1});
  const auto answers = job.all("create");
  expect_words(answers[1], {"XD_ERROR_TIMEOUT"});
  for (const std::string& answer : answers)
    expect_words(answer, {"cannot reach rank 0 of host 0 ("});
}

TEST_F(NetConnect, AddressesThatAreTranslatedAreRefused) {
  NetHosts hosts(2);
  hosts.translate(1, kPort, kPort + 15);
  Job job(hosts, {0, 1});
  job.expect_all("create",
                 {"XD_ERROR_MISMATCH", "has the address 10.97.0.2 and reaches rank 0 of host 0 (",
                  "addresses must not be translated between hosts (NAT)"});
}

// A rank, the only or the last one of host 1, ends between the meeting and its calls.
void expect_named_by_all_at_once(const std::vector<int>& host_of) {
  NetHosts hosts(2);
  const Folder folder;
  const int dead = static_cast<int>(host_of.size()) - 1;
  const std::string name = "rank " + std::to_string(dead);
  Job job(hosts, host_of, Family::ipv4,
          {{"XD_TEST_FOLDER", folder.path()}, {name, "XD_TEST_WHEN_MET=die"}});
  const auto start = Clock::now();
  job.tell("create");
  job.expect_answers({"XD_ERROR_PEER_LOST", name + " of host 1 ("}, dead);
  EXPECT_LT(ms_since(start), stretched(5000));
  job.rank(dead).kill();
}

TEST_F(NetConnect, ARankThatIsKilledBetweenMeetingAndCallingIsNamedByAllAtOnce) {
  expect_named_by_all_at_once({0, 0, 1, 1});
}

// No other rank of its host is there to notice it.
TEST_F(NetConnect, ALoneRankThatIsKilledBetweenMeetingAndCallingIsNamedAtOnce) {
  expect_named_by_all_at_once({0, 1});
}

// Rank 2 comes when rank 3 is gone already, and all others wait for rank 2.
TEST_F(NetConnect, ARankThatFindsAnotherGoneTellsOtherHosts) {
  NetHosts hosts(2);
  const Folder folder;
  const Settings dies{{"XD_TEST_FOLDER", folder.path()},
                      {"rank 2", "XD_TEST_WHEN_MET=wait"},
                      {"rank 3", "XD_TEST_WHEN_MET=die"}};
  Job job(hosts, {0, 0, 1, 1}, Family::ipv4, dies);
  job.tell("create");
  job.expect_answers({"XD_ERROR_PEER_LOST", "rank 3 of host 1 ("}, 3);
  job.rank(3).kill();
}

// ---- Strangers ----

TEST_F(NetConnect, StrangersAtTheControlPortsKeepNobodyOut) {
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
