// A peer's process dies: all others learn it within a second, name it, and go on without it.
#include <crossdock/version.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <ostream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "conformance/said.h"
#include "faults/gemm_call.h"
#include "faults/processes.h"
#include "faults/waiting.h"

namespace xd::test {
namespace {

// A process that dies is noticed when its sockets close. The system takes down its devices first,
// which takes longer the more it had.
std::chrono::milliseconds limit_for(int devices) {
  return executor() == "cpu" || devices < 2 ? std::chrono::milliseconds(1000)
                                            : std::chrono::milliseconds(3000);
}

// A device's first use in a process takes seconds.
std::chrono::milliseconds with_set_up(int milliseconds) {
  return std::chrono::milliseconds(executor() == "cpu" ? milliseconds : milliseconds + 8000);
}

constexpr int kVictim = 1;

// Ranks that are apart reach one another over libfabric, on the loopback interface.
void require_network() {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_NETWORK, &reason) == 0) GTEST_SKIP() << reason;
}

// Low latency between machines is on the CPU.
void require_low_latency() {
  if (executor() != "cpu") GTEST_SKIP() << "there is no low latency between machines on devices";
}

// Kills the process of the victim. The memory that it shared had no name, so none of it can stay
// behind.
Clock::time_point kill_victim(Processes& ranks) {
  if (executor() == "cpu") {  // a driver has its own mappings, of devices
    EXPECT_EQ(ranks.named_shared_memory(kVictim), std::vector<std::string>());
  }
  return ranks.kill(kVictim);
}

// `peer`: that xd_comm_error names; -1 = nothing is finished.
void expect_lost(Processes& ranks, int survivor, Clock::time_point since, int peer = kVictim) {
  const Result result = ranks.expect_loss(survivor, peer, since, kLimit);
  expect_words(result.text, {"rank " + std::to_string(kVictim)});
  EXPECT_EQ(ranks.wait_for_after(survivor), "clean");
}

// Collective calls that hold their callers until all ranks have come.
struct Place {
  const char* name;
  Program program;
  std::int32_t operation;  // as in RankProgram
  xd_comm_peer_loss on_peer_loss = XD_COMM_PEER_LOSS_FATAL;
  xd_gemm_operation product = XD_GEMM_ALL_GATHER;
  bool apart = false;
  int part = 0;  // of two
};

void PrintTo(const Place& place, std::ostream* out) { *out << place.name; }

class KillIn : public testing::TestWithParam<Place> {
 protected:
  void SetUp() override {
    if (GetParam().apart) require_network();
    if (GetParam().apart && GetParam().program == Program::ll_operation) require_low_latency();
  }
  RankProgram program() const {
    RankProgram result;
    result.program = GetParam().program;
    result.operation = GetParam().operation;
    result.on_peer_loss = GetParam().on_peer_loss;
    result.product = GetParam().product;
    result.apart = GetParam().apart;
    result.parts = GetParam().part > 0 ? 2 : 1;
    result.part = GetParam().part;
    return result;
  }
  int peer() const {
    const bool is_operation = GetParam().program == Program::operation;
    return is_operation || GetParam().on_peer_loss == XD_COMM_PEER_LOSS_FATAL ? kVictim : -1;
  }
};

TEST_P(KillIn, BeforeItsCallReleasesThoseWhoWait) {
  Processes ranks(program(), {{0}, {1}, {2}});
  ranks.wait_until_all_are_ready();
  ranks.go(0);
  ranks.go(2);
  std::this_thread::sleep_for(kMoment);
  const auto since = kill_victim(ranks);
  expect_lost(ranks, 0, since, peer());
  expect_lost(ranks, 2, since, peer());
}

TEST_P(KillIn, WhileItWaitsItselfReleasesThoseWhoWaitAndThoseWhoComeLater) {
  Processes ranks(program(), {{0}, {1}, {2}});
  ranks.wait_until_all_are_ready();
  ranks.go(0);
  ranks.go(kVictim);
  std::this_thread::sleep_for(kMoment);
  const auto since = kill_victim(ranks);
  expect_lost(ranks, 0, since, peer());
  const auto later = Clock::now();
  ranks.go(2);
  expect_lost(ranks, 2, later, peer());
}

constexpr auto kNameOfPlace = [](const auto& instance) { return instance.param.name; };

INSTANTIATE_TEST_SUITE_P(
    Calls, KillIn,
    testing::Values(Place{"create_group", Program::create_group, XD_EP_PREPARE},
                    Place{"grow", Program::grow, XD_EP_PREPARE},
                    Place{"prepare", Program::operation, XD_EP_PREPARE},
                    Place{"dispatch", Program::operation, XD_EP_DISPATCH},
                    Place{"combine", Program::operation, XD_EP_COMBINE},
                    Place{"combine_bwd", Program::operation, XD_EP_COMBINE_BWD},
                    Place{"dispatch_bwd", Program::operation, XD_EP_DISPATCH_BWD},
                    Place{"ll_dispatch", Program::ll_operation, XD_LL_DISPATCH},
                    Place{"ll_combine", Program::ll_operation, XD_LL_COMBINE}),
    kNameOfPlace);

constexpr Place in_part(const char* name, int part, std::int32_t operation) {
  Place place{name, Program::operation, operation};
  place.part = part;
  return place;
}

INSTANTIATE_TEST_SUITE_P(Parts, KillIn,
                         testing::Values(in_part("first_of_dispatch", 1, XD_EP_DISPATCH),
                                         in_part("last_of_dispatch", 2, XD_EP_DISPATCH),
                                         in_part("first_of_combine", 1, XD_EP_COMBINE),
                                         in_part("last_of_combine", 2, XD_EP_COMBINE),
                                         in_part("first_of_combine_bwd", 1, XD_EP_COMBINE_BWD),
                                         in_part("last_of_combine_bwd", 2, XD_EP_COMBINE_BWD),
                                         in_part("first_of_dispatch_bwd", 1, XD_EP_DISPATCH_BWD),
                                         in_part("last_of_dispatch_bwd", 2, XD_EP_DISPATCH_BWD)),
                         kNameOfPlace);

std::vector<Place> products() {
  std::vector<Place> places{{"create_context", Program::create_context, XD_EP_PREPARE}};
  for (const xd_gemm_operation product : kGemmOperations) {
    places.push_back({name_of(product), Program::gemm_operation, XD_EP_PREPARE,
                      XD_COMM_PEER_LOSS_FATAL, product});
  }
  return places;
}

INSTANTIATE_TEST_SUITE_P(Products, KillIn, testing::ValuesIn(products()), kNameOfPlace);

// Where losses are masked a call that needs the victim says the same.
INSTANTIATE_TEST_SUITE_P(
    MaskedCalls, KillIn,
    testing::Values(Place{"create_group", Program::create_group, XD_EP_PREPARE,
                          XD_COMM_PEER_LOSS_MASK},
                    Place{"grow", Program::grow, XD_EP_PREPARE, XD_COMM_PEER_LOSS_MASK},
                    Place{"prepare", Program::operation, XD_EP_PREPARE, XD_COMM_PEER_LOSS_MASK},
                    Place{"combine", Program::operation, XD_EP_COMBINE, XD_COMM_PEER_LOSS_MASK}),
    kNameOfPlace);

constexpr Place between(const char* name, std::int32_t operation,
                        Program program = Program::operation) {
  Place place{name, program, operation};
  place.apart = true;
  return place;
}

INSTANTIATE_TEST_SUITE_P(
    BetweenMachines, KillIn,
    testing::Values(between("prepare", XD_EP_PREPARE), between("dispatch", XD_EP_DISPATCH),
                    between("combine", XD_EP_COMBINE), between("combine_bwd", XD_EP_COMBINE_BWD),
                    between("dispatch_bwd", XD_EP_DISPATCH_BWD),
                    between("ll_dispatch", XD_LL_DISPATCH, Program::ll_operation),
                    between("ll_combine", XD_LL_COMBINE, Program::ll_operation)),
    kNameOfPlace);

// Any moment of a step, in microseconds: counts, rows and flags under way.
class KillAfter : public testing::TestWithParam<std::tuple<Program, int, xd_comm_peer_loss, bool>> {
 protected:
  void SetUp() override {
    if (!std::get<bool>(GetParam())) return;
    require_network();
    if (std::get<Program>(GetParam()) == Program::ll_steps) require_low_latency();
  }
};

TEST_P(KillAfter, SomeMicrosecondsOfStepsReleasesAll) {
  const auto [steps, microseconds, on_peer_loss, apart] = GetParam();
  RankProgram program;
  program.apart = apart;
  program.program = steps;
  program.tokens = 512;
  program.parts = steps == Program::layers ? 3 : 1;
  program.on_peer_loss = on_peer_loss;
  Processes ranks(program, {{0}, {1}, {2}});
  ranks.start();
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  const auto since = kill_victim(ranks);
  expect_lost(ranks, 0, since);
  expect_lost(ranks, 2, since);
}

// With XD_TEST_FULL=1 all of these moments, otherwise every other one.
std::vector<int> moments(const std::vector<int>& all) {
  if (std::getenv("XD_TEST_FULL") != nullptr) return all;
  std::vector<int> some;
  for (std::size_t i = 0; i < all.size(); i += 2) some.push_back(all[i]);
  return some;
}

auto kills_after(const std::vector<Program>& steps, const std::vector<int>& microseconds,
                 xd_comm_peer_loss on_peer_loss = XD_COMM_PEER_LOSS_FATAL, bool apart = false) {
  return testing::Combine(testing::ValuesIn(steps), testing::ValuesIn(moments(microseconds)),
                          testing::Values(on_peer_loss), testing::Values(apart));
}
const std::vector<Program> kEpSteps{Program::steps, Program::ll_steps};

INSTANTIATE_TEST_SUITE_P(Moments, KillAfter,
                         kills_after(kEpSteps, {0, 500, 1300, 2900, 5300, 9700, 20100, 50300}));
INSTANTIATE_TEST_SUITE_P(MomentsBetweenMachines, KillAfter,
                         kills_after(kEpSteps, {0, 900, 3700, 8900, 21100, 52300},
                                     XD_COMM_PEER_LOSS_FATAL, true));
INSTANTIATE_TEST_SUITE_P(GemmMoments, KillAfter,
                         kills_after({Program::gemm_steps}, {0, 900, 3100, 8100, 24500}));
INSTANTIATE_TEST_SUITE_P(LayerMoments, KillAfter,
                         kills_after({Program::layers}, {0, 1100, 3700, 9300, 30500}));
INSTANTIATE_TEST_SUITE_P(MaskedMoments, KillAfter,
                         kills_after({Program::steps}, {0, 700, 3300, 7900, 31000},
                                     XD_COMM_PEER_LOSS_MASK));

// Before the ranks have met no rank can know which one died, so the meeting ends with its timeout.
class KillInCreate : public testing::TestWithParam<int> {};

TEST_P(KillInCreate, EndsTheMeetingForAll) {
  const auto timeout = with_set_up(1500);
  RankProgram program;
  program.program = Program::create;
  program.timeout_ms = static_cast<int>(timeout.count());
  Processes ranks(program, {{0}, {1}, {2}});
  ranks.wait_until_all_are_ready();
  const auto since = Clock::now();
  for (int rank = 0; rank < 3; ++rank) ranks.go(rank);
  std::this_thread::sleep_for(std::chrono::microseconds(GetParam()));
  kill_victim(ranks);
  for (const int survivor : {0, 2}) {
    const Result result = ranks.wait_for_result(survivor);
    EXPECT_LT(result.when - since, timeout + kLimit);
    EXPECT_TRUE(result.status == XD_SUCCESS || result.status == XD_ERROR_TIMEOUT ||
                result.status == XD_ERROR_MISMATCH || result.status == XD_ERROR_PEER_LOST)
        << result.status << result.text;
    // Where it came into being before the death, it is a communicator with a lost peer. Where it
    // did not, the text names the victim, or the other survivor if that one had given up before.
    if (result.status != XD_SUCCESS) {
      const int other = survivor == 0 ? 2 : 0;
      EXPECT_TRUE(result.text.find(std::to_string(kVictim)) != std::string::npos ||
                  result.text.find("rank " + std::to_string(other)) != std::string::npos)
          << result.text;
    }
    EXPECT_EQ(ranks.wait_for_after(survivor), "clean");
  }
}

INSTANTIATE_TEST_SUITE_P(Moments, KillInCreate,
                         testing::ValuesIn(moments({0, 300, 1000, 2000, 4000, 8000})));

TEST(Kill, AProcessWithTwoRanksIsReportedWithBothLowestFirst) {
  RankProgram program;
  program.operation = XD_EP_DISPATCH;
  Processes ranks(program, {{0}, {1, 2}, {3}});
  ranks.wait_until_all_are_ready();
  ranks.go(0);
  ranks.go(3);
  std::this_thread::sleep_for(kMoment);
  const auto since = kill_victim(ranks);
  for (const int survivor : {0, 3}) {
    expect_words(ranks.expect_loss(survivor, 1, since, limit_for(2)).text, {"1, 2"});
    EXPECT_EQ(ranks.wait_for_after(survivor), "clean");
  }
}

// A stopped process is alive: only the timeout ends the wait for it.
TEST(Kill, RanksOfAProcessThatLivesOnAreNotLost) {
  RankProgram program;
  program.operation = XD_EP_COMBINE;
  const auto timeout = with_set_up(1500);
  program.timeout_ms = static_cast<int>(timeout.count());
  Processes ranks(program, {{0}, {1, 2}});
  ranks.wait_until_all_are_ready();
  const auto since = Clock::now();
  ranks.go(0);
  const Result result = ranks.wait_for_result(0);
  EXPECT_EQ(result.status, XD_ERROR_TIMEOUT) << result.text;
  EXPECT_EQ(result.phase, XD_PHASE_ENTRY);
  EXPECT_TRUE(result.peer == 1 || result.peer == 2) << result.peer;
  EXPECT_GE(result.when - since, timeout - std::chrono::milliseconds(100));
}

}  // namespace
}  // namespace xd::test
