// Ranks that know the secret get into their meeting while strangers crowd at the door.
#include "unit/flood.h"

#include <sys/resource.h>

#include <cstdlib>

#include "meet/unique_id.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

constexpr int kMeetWithinMs = 2000;  // time from the last rank's arrival

struct Attack {
  const char* name;
  FloodPlan plan;
  bool wait_until_open;
};

class Flooded : public testing::TestWithParam<Attack> {};
INSTANTIATE_TEST_SUITE_P(
    By, Flooded,
    testing::Values(
        Attack{"FiveThousandSilent", {.processes = 5, .connections = 1000}, true},
        Attack{"FiveThousandWhoGreet",
               {.processes = 5, .connections = 1000, .says = "CROSDOCK"},
               true},
        Attack{"AThousandASecond",
               {.processes = 5, .connections = 1000, .every = std::chrono::milliseconds(5)},
               false}),
    [](const auto& attack) { return attack.param.name; });

// Rank 0 waits, strangers come and stay, then the other ranks come.
TEST_P(Flooded, RanksByEnvironmentMeetInTime) {
  const int port = free_ports();
  ::unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  LogCapture log;
  const auto errors = on_threads(3, [&](int rank) {
    xd_comm_config config = XD_COMM_CONFIG_INIT;
    config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
    config.rank = rank;
    config.num_ranks = 3;
    if (rank == 0) return expect_all_came(meet(config, 15000), 3);
    if (rank == 2) return static_cast<void>(meet(config, 15000));
    const TcpAddress door =
        resolve("127.0.0.1", "address").front().with_port(static_cast<std::uint16_t>(port));
    ASSERT_TRUE(eventually(
        [&] { return !error_of([&] { tcp_connect(door, Deadline::after_ms(1000)); }); }));
    FloodPlan plan = GetParam().plan;
    plan.port = port;
    Flood flood(plan);
    if (GetParam().wait_until_open) {
      ASSERT_TRUE(flood.wait_until_open(20000));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
    }
    const auto start = std::chrono::steady_clock::now();
    expect_all_came(meet(config, 15000), 3);
    EXPECT_LT(ms_since(start), kMeetWithinMs);
  });
  const auto lines = log.end();
  expect_no_errors(errors);
  EXPECT_LT(lines.size(), 30U) << lines[0];
}

TEST_P(Flooded, RanksOfAUniqueIdMeetInTime) {
  const xd_unique_id id = new_id();
  FloodPlan plan = GetParam().plan;
  plan.port = decode_unique_id(id).port;
  LogCapture log;
  Flood flood(plan);
  if (GetParam().wait_until_open) {
    ASSERT_TRUE(flood.wait_until_open(20000));
  }
  const auto start = std::chrono::steady_clock::now();
  const auto errors =
      on_threads(4, [&](int rank) { expect_all_came(meet(id_config(id, rank, 4), 15000), 4); });
  EXPECT_LT(ms_since(start), kMeetWithinMs);
  const auto lines = log.end();
  expect_no_errors(errors);
  EXPECT_LT(lines.size(), 30U) << lines[0];
}

// The meeting lives in a process of the application, whose descriptors strangers must not use up.
TEST(FewDescriptors, StrangersLeaveRoomForRanks) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(open_descriptors()) + 40;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  LogCapture log;
  const xd_unique_id id = new_id();
  Flood flood({.port = decode_unique_id(id).port, .processes = 1, .connections = 300});
  EXPECT_TRUE(flood.wait_until_open(20000));
  const auto start = std::chrono::steady_clock::now();
  const auto errors =
      on_threads(4, [&](int rank) { expect_all_came(meet(id_config(id, rank, 4), 15000), 4); });
  const int waited = ms_since(start);
  ::setrlimit(RLIMIT_NOFILE, &before);
  log.end();
  expect_no_errors(errors);
  EXPECT_LT(waited, kMeetWithinMs);
}

}  // namespace
}  // namespace xd::test
