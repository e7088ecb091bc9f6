// Links through an engine that does whatever it may, and proof that these tests would notice: each
// mutant of net/engines/mutant.h is caught.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>

#include "unit/errors.h"
#include "unit/link_support.h"

namespace xd::test {
namespace {

using net::Mutant;

TEST(LinkChaos, EverythingArrivesOnceWithAnySeed) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed)
    ASSERT_EQ(run_chaos(seed).complaint, "") << "seed " << seed;
}

TEST(LinkChaos, ASeedRepeatsItsRun) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    const int steps = run_chaos(seed).steps;
    EXPECT_EQ(run_chaos(seed).steps, steps) << "seed " << seed;
    EXPECT_GT(steps, 0);
  }
}

struct Named {
  Mutant mutant;
  const char* name;
};

class LinkMutants : public testing::TestWithParam<Named> {};
INSTANTIATE_TEST_SUITE_P(All, LinkMutants,
                         testing::Values(Named{Mutant::arrival_before_data, "arrival_before_data"},
                                         Named{Mutant::swapped_arrivals, "swapped_arrivals"},
                                         Named{Mutant::repeated_arrival, "repeated_arrival"},
                                         Named{Mutant::repeated_sent, "repeated_sent"},
                                         Named{Mutant::lost_arrival, "lost_arrival"},
                                         Named{Mutant::lost_wakeup, "lost_wakeup"},
                                         Named{Mutant::dropped_error, "dropped_error"},
                                         Named{Mutant::sent_needs_target, "sent_needs_target"},
                                         Named{Mutant::closing_takes_back, "closing_takes_back"},
                                         Named{Mutant::refill_without_credit,
                                               "refill_without_credit"},
                                         Named{Mutant::refill_before_sent, "refill_before_sent"},
                                         Named{Mutant::credit_before_read, "credit_before_read"},
                                         Named{Mutant::count_for_frame, "count_for_frame"},
                                         Named{Mutant::stale_generation, "stale_generation"}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(LinkMutants, AreCaughtWithin50Seeds) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    const std::string complaint = run_chaos(seed, GetParam().mutant).complaint;
    if (complaint.empty()) continue;
    std::printf("%s: seed %d: %s\n", GetParam().name, static_cast<int>(seed), complaint.c_str());
    return;
  }
  FAIL() << GetParam().name << " passes with seeds 1 to 50";
}

TEST(Chaos, ASourceThatChangesBeforeItWasSentIsNoticed) {
  Engines engines = chaos_engines(2, 5);
  std::array<std::byte, 64> here{}, there{};
  const auto from = engines[0]->expose(here), to = engines[1]->expose(there);
  engines[0]->connect(1, engines[1]->address());
  const net::Put put{.peer = 1, .from = from.get(), .to = to->remote(), .bytes = here.size()};
  bool taken = false;
  for (int i = 0; i < 1000 && !taken; ++i) taken = engines[0]->put(put);
  ASSERT_TRUE(taken);
  here[9] = std::byte{1};
  net::Events events;
  expect_error(error_of([&] {
                 for (int i = 0; i < 1000; ++i) engines[0]->poll(events);
               }),
               XD_ERROR_INTERNAL, "the source of a put changed before it was sent");
}

}  // namespace
}  // namespace xd::test
