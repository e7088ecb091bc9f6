// The ranks of a test, on hosts that are network namespaces.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "conformance/said.h"
#include "net/net_hosts.h"
#include "net/rank/process.h"

namespace xd::test {

using Clock = std::chrono::steady_clock;
using Settings = RankProcess::Settings;

inline constexpr int kPort = 29400;
inline constexpr int kSilenceMs = 1000;  // as rank/main.cc has it

inline int ms_since(Clock::time_point start) {
  return static_cast<int>(
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count());
}

// A bound on times: three times as long, as nothing shows how busy the machine's own host is, and
// longer by as much as the machine has more to run than it has cores. The texts of answers show
// what has ended a wait; the bound says that it ended at all.
inline int stretched(int ms) {
  double average = 0, running = 0;  // in the last minute, now
  std::string skipped;
  std::ifstream("/proc/loadavg") >> average >> skipped >> skipped >> running;
  const double busy =
      std::max(average, running) / std::max(1u, std::thread::hardware_concurrency());
  return static_cast<int>(3 * ms * std::clamp(busy, 1.0, 4.0));
}

inline void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

inline bool has(const std::string& text, const std::string& part) {
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

  ~Job() {
    for (const auto& rank : ranks_) rank->dismiss();
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  RankProcess& rank(int r) { return *ranks_[static_cast<std::size_t>(r)]; }

  // Gives all ranks but `without` the order at once.
  void tell(const std::string& order, int without = -1) {
    for (int r = 0; r < size(); ++r)
      if (r != without) rank(r).tell(order);
  }
  std::vector<std::string> answers(int without = -1) {
    std::vector<std::string> result;
    for (int r = 0; r < size(); ++r) result.push_back(r != without ? rank(r).answer(40000) : "");
    return result;
  }
  // Gives every rank an order at once; returns their answers.
  std::vector<std::string> all(const std::string& order) {
    tell(order);
    return answers();
  }
  // The next answers of all ranks but `without` have these words.
  void expect_answers(const Words& words, int without = -1) {
    for (int r = 0; r < size(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      if (r != without) expect_words(rank(r).answer(40000), words);
    }
  }
  void expect_all(const std::string& order, const Words& words) {
    tell(order);
    expect_answers(words);
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

// A job whose ranks have made their communicator.
class CommJob : public Job {
 public:
  CommJob(const NetHosts& hosts, const std::vector<int>& host_of, Family family = Family::ipv4,
          const Settings& more = {})
      : Job(hosts, host_of, family, more) {
    all_fine("create");
  }
};

// Control connections of a job stand; then a firewall lets no data through to the second host. The
// step says so on all ranks, in time, and the communicator works on.
inline void expect_no_data_behind_a_firewall(const char* step) {
  NetHosts hosts(2);
  CommJob job(hosts, {0, 0, 1, 1}, Family::ipv4, {{"XD_TEST_TIMEOUT_MS", "4000"}});
  hosts.admit_ports(1, kPort, kPort + 15);
  const auto start = Clock::now();
  const auto answers = job.all(step);
  EXPECT_LT(ms_since(start), stretched(3700)) << "half of the time is for telling the others";
  for (const std::string& answer : answers) {
    expect_words(
        answer, {"control reaches rank ", ", data do not (tcp", "no greeting came within 2000 ms"});
  }
  expect_words(answers[0], {"XD_ERROR_TIMEOUT", "rank 2 of host 1 (", ", 10.97.0.2:"});
  job.all_fine("barrier");
}

// The TCP ports on which a process listens, but for one.
inline std::vector<int> listening_ports(pid_t pid, int but) {
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

class Net : public testing::Test {
 protected:
  void SetUp() override {
    static const std::string why_not = NetHosts::why_not();
    if (!why_not.empty()) GTEST_SKIP() << why_not;
  }
};

}  // namespace xd::test
