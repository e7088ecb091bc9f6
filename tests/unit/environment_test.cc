// Ranks meeting through the environment that a launcher sets.
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>

#include "meet/environment.h"
#include "meet/handshake.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

class EnvironmentTest : public testing::Test {
 protected:
  EnvironmentTest() : port_(free_ports()) {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"})
      ::unsetenv(name);
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv("MASTER_PORT", std::to_string(port_).c_str(), 1);
  }

  // Ranks are threads here, so rank and num_ranks come from the config.
  static xd_comm_config config(int rank, int num_ranks, const char* name = nullptr) {
    xd_comm_config config = XD_COMM_CONFIG_INIT;
    config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
    config.rank = rank;
    config.num_ranks = num_ranks;
    config.name = name;
    return config;
  }

  UniqueFd occupy(int port) const {
    UniqueFd fd = tcp_listen(
        resolve("127.0.0.1", "address").front().with_port(static_cast<std::uint16_t>(port)));
    EXPECT_TRUE(fd) << port;
    return fd;
  }

  int port_;
};

TEST_F(EnvironmentTest, RanksMeet) {
  for (const int n : {1, 2, 5}) {
    LogCapture log;
    expect_no_errors(on_threads(n, [&](int r) { expect_all_came(meet(config(r, n)), n); }));
    EXPECT_TRUE(log.end().empty());
  }
}

TEST_F(EnvironmentTest, OccupiedPortsArePassedBy) {
  const UniqueFd silent = occupy(port_), also_silent = occupy(port_ + 1);
  expect_no_errors(on_threads(3, [&](int r) { expect_all_came(meet(config(r, 3)), 3); }));
}

TEST_F(EnvironmentTest, TheAgentsStoreIsLeftAlone) {
  const UniqueFd store = occupy(port_);
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  expect_no_errors(on_threads(2, [&](int r) { expect_all_came(meet(config(r, 2)), 2); }));
  EXPECT_LT(::accept4(store.get(), nullptr, nullptr, SOCK_CLOEXEC), 0)
      << "somebody tried the store";
}

TEST_F(EnvironmentTest, RankZeroMayComeLate) {
  expect_no_errors(on_threads(3, [&](int r) {
    if (r == 0) std::this_thread::sleep_for(std::chrono::milliseconds(700));
    expect_all_came(meet(config(r, 3)), 3);
  }));
}

TEST_F(EnvironmentTest, ManyMeetingsOneAfterAnother) {
  LogCapture log;
  const auto errors = on_threads(3, [&](int r) {
    for (int i = 0; i < 50; ++i) expect_all_came(meet(config(r, 3)), 3);
  });
  EXPECT_TRUE(log.end().empty());
  expect_no_errors(errors);
}

TEST_F(EnvironmentTest, MeetingsOfDifferentNamesAtTheSameTime) {
  const std::vector<std::string> names{"a", "b", "c"};
  LogCapture log;
  const auto errors = on_threads(9, [&](int thread) {
    const std::string& name = names[static_cast<std::size_t>(thread % 3)];
    for (int i = 0; i < 10; ++i) expect_all_came(meet(config(thread / 3, 3, name.c_str())), 3);
  });
  EXPECT_TRUE(log.end().empty());
  expect_no_errors(errors);
}

TEST_F(EnvironmentTest, MissingRanksAreNamed) {
  const auto errors = on_threads(3, [&](int r) {
    if (r != 1) meet(config(r, 3), 1000);
  });
  for (const std::size_t r : {0U, 2U})
    expect_error(errors[r], XD_ERROR_TIMEOUT, "rank 1 of 3 did not come");
  expect_error(error_of([&] { meet(config(1, 2), 300); }), XD_ERROR_TIMEOUT, "did not find rank 0");
}

TEST_F(EnvironmentTest, AnotherWorldSizeIsAMismatchAtOnceOnBoth) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors = on_threads(2, [&](int r) { meet(config(r, 2 + r)); });
  EXPECT_LT(ms_since(start), 3000);
  for (const auto& error : errors) expect_error(error, XD_ERROR_MISMATCH, "has num_ranks = ");
}

// Strangers who greet as another version of the library would, one after another.
void speak_other_versions(int port, int count) {
  const TcpAddress door =
      numeric_address("127.0.0.1").value().with_port(static_cast<std::uint16_t>(port));
  for (; count > 0; --count) {
    UniqueFd fd;
    ASSERT_TRUE(eventually(
        [&] { return !error_of([&] { fd = tcp_connect(door, Deadline::after_ms(1000)); }); }));
    Handshake handshake(Side::client, make_random<Secret>(), 0, 255);
    EXPECT_EQ(send_all(fd.get(), handshake.take_output(), Deadline::after_ms(1000)), Io::done);
    EXPECT_EQ(wait_readable(fd.get(), Deadline::after_ms(5000)), Io::done);
  }
}

// Any process that listens on a port may say that a secret is wrong, so that is no reason to give
// up: both sides report the refusal at once, and again when their time is over. The rank comes
// again all the time, behind strangers who speak nonsense, and is told of once, before them.
TEST_F(EnvironmentTest, AWrongSecretIsNamedOnBothSides) {
  LogCapture log;
  const auto name = make_random<Tag>();
  const auto errors = on_threads(2, [&](int r) {
    Key key(make_random<Secret>(), name);
    key.variable = "XD_JOB_SECRET";
    const auto bootstrap = meet_by_environment({.rank = r,
                                                .num_ranks = 2,
                                                .master_address = "127.0.0.1",
                                                .first_port = static_cast<std::uint16_t>(port_),
                                                .last_port = static_cast<std::uint16_t>(port_ + 15),
                                                .key = key});
    if (r == 1) speak_other_versions(port_, 6);
    all_gather(*bootstrap, bytes_of("blob"), Deadline::after_ms(1500));
  });
  const std::vector<std::string> lines = log.end();
  expect_error(errors[0], XD_ERROR_TIMEOUT,
               {"rank 1 of 2 did not come in time; refused: 127.0.0.1:",
                "which failed to prove that it knows the secret: it has another XD_JOB_SECRET, or "
                "none; refused: 127.0.0.1:",
                "which speaks protocol version 255"});
  expect_error(errors[1], XD_ERROR_TIMEOUT,
               concat("what listens at 127.0.0.1:", port_,
                      " refused this rank: it knows another XD_JOB_SECRET, or none"));
  const auto lines_with = [&](const char* words) {
    return std::ranges::count_if(
        lines, [&](const std::string& line) { return line.find(words) != std::string::npos; });
  };
  EXPECT_EQ(lines_with("it failed to prove that it knows the secret: it has another"), 1);
  EXPECT_EQ(lines_with("speaks protocol version 255"), 1);
  EXPECT_EQ(lines_with("refused this rank: it knows another XD_JOB_SECRET, or none"), 1);
}

TEST_F(EnvironmentTest, RankZeroListensOnOneAddressOnly) {
  for (const char* address : {"0.0.0.0", "::", "::ffff:0.0.0.0", "224.0.0.1", "127.255.255.255"}) {
    ::setenv("MASTER_ADDR", address, 1);
    for (const int rank : {0, 1})
      expect_error(error_of([&] { meet(config(rank, 2), 500); }), XD_ERROR_INVALID_ARGUMENT,
                   concat("MASTER_ADDR = ", address, " is "));
  }
}

// A service that takes connections and never speaks delays no rank.
TEST_F(EnvironmentTest, SilentListenersCostNoTime) {
  std::vector<UniqueFd> silent;
  for (int port = port_; port < port_ + 15; ++port) silent.push_back(occupy(port));
  const auto start = std::chrono::steady_clock::now();
  expect_no_errors(on_threads(3, [&](int r) { expect_all_came(meet(config(r, 3)), 3); }));
  EXPECT_LT(ms_since(start), 2000);
}

TEST_F(EnvironmentTest, APassedDeadlineLeavesNothingBehind) {
  const std::size_t descriptors = open_descriptors(), threads = running_threads();
  expect_error(error_of([&] { meet(config(0, 2), 100); }), XD_ERROR_TIMEOUT, "rank 1 of 2");
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_EQ(running_threads(), threads);
}

TEST_F(EnvironmentTest, VariablesAreReadAndChecked) {
  ::setenv("WORLD_SIZE", "1", 1);
  ::setenv("RANK", "0", 1);
  expect_all_came(meet(config(0, 0)), 1);
  const auto expect_complaint = [&](const std::string& text) {
    expect_error(error_of([&] { make_bootstrap(config(0, 0)); }), XD_ERROR_INVALID_ARGUMENT, text);
  };
  ::setenv("RANK", "1", 1);
  expect_complaint("RANK = 1, expected a number from 0 to 0");
  ::setenv("WORLD_SIZE", "two", 1);
  expect_complaint("WORLD_SIZE = two, expected a number");
  ::setenv("WORLD_SIZE", "2", 1);
  ::setenv("MASTER_PORT", "4x", 1);
  expect_complaint("MASTER_PORT = 4x");
  ::unsetenv("MASTER_ADDR");
  expect_complaint("MASTER_ADDR is not set");
  ::unsetenv("RANK");
  expect_complaint("RANK is not set");
}

}  // namespace
}  // namespace xd::test
