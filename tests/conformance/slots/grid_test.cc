// Low-latency dispatch and combine in every combination of circumstances, byte for byte.
#include <gtest/gtest.h>

#include <cstdio>
#include <deque>
#include <ostream>
#include <string>
#include <vector>

#include "conformance/case.h"
#include "conformance/has_wires.h"
#include "conformance/host_maps.h"
#include "conformance/slots/batch.h"
#include "support/gtest_main.h"

namespace xd::test {

// For GoogleTest's messages.
void PrintTo(const LlCase& c, std::ostream* out) { *out << c.description(); }

namespace {

constexpr xd_ll_phase kBoth = XD_LL_PHASE_BOTH, kSend = XD_LL_PHASE_SEND,
                      kReceive = XD_LL_PHASE_RECEIVE;

// The batches of one group, in the order that the case wants.
class CaseRun {
 public:
  CaseRun(const Rank& rank, const LlCase& c) : rank_(rank), case_(c), group_(make_group(rank, c)) {
    // More than are in flight, so that the place of each is used again.
    const int batches = c.order == Order::deep ? 2 * c.in_flight_of_group() : 4;
    for (int number = 0; number < batches; ++number) batches_.emplace_back(rank, c, number);
    order_ = c.order != Order::mixed ? c.order : rank.rank % 2 == 0 ? Order::pairs : Order::whole;
  }

  void run() {
    const auto step = static_cast<std::size_t>(case_.batches_together());
    for (std::size_t first = 0; first < batches_.size(); first += step) {
      if (case_.tables != Tables::none) {
        const Given table(case_.table(static_cast<int>(first)));
        ok(finish(rank_, group_.get(),
                  xd_ll_group_set_placement(group_.get(), table.get(), rank_.stream())));
      }
      if (order_ == Order::crossed) {
        cross(batches_[first], batches_[first + 1]);
        continue;
      }
      together(first, step, [&](std::size_t i, xd_ll_phase phase) {
        batches_[i].dispatch(group_.get(), phase);
      });
      // A plan serves any number of combines.
      for (int round = 0; round < 2; ++round) {
        together(first, step, [&](std::size_t i, xd_ll_phase phase) {
          batches_[i].combine(group_.get(), phase);
        });
        for (std::size_t i = first; i < first + step; ++i) batches_[i].next_combine();
      }
    }
  }

 private:
  // One operation of the batches first, .. first + count - 1.
  template <class Call>
  void together(std::size_t first, std::size_t count, const Call& call) {
    for (std::size_t i = first; i < first + count; ++i) {
      if (order_ == Order::whole) call(i, kBoth);
      if (order_ == Order::halves) {
        call(i, kSend);
        call(i, kReceive);
      }
    }
    if (order_ != Order::pairs && order_ != Order::deep) return;
    for (std::size_t i = first; i < first + count; ++i) call(i, kSend);
    for (std::size_t i = first; i < first + count; ++i) call(i, kReceive);
  }

  void cross(LlBatch& a, LlBatch& b) {
    xd_ll_group* const group = group_.get();
    a.dispatch(group, kSend);
    a.dispatch(group, kReceive);
    b.dispatch(group, kSend);
    a.combine(group, kSend);
    b.dispatch(group, kReceive);
    b.combine(group, kSend);
    a.combine(group, kReceive);
    b.combine(group, kReceive);
  }

  const Rank& rank_;
  const LlCase& case_;
  const LlGroup group_;
  Order order_;
  std::deque<LlBatch> batches_;
};

class LlGrid : public testing::TestWithParam<LlCase> {};

TEST_P(LlGrid, EveryByteOfEveryOutputIsRight) {
  const LlCase& c = GetParam();
  on_every_rank([&](Rank& rank) {
    SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", " + c.description());
    CaseRun(rank, c).run();
  });
}

// The reference has the hosts, so every byte of every sum is compared.
TEST(LlHosts, EveryByteOfEveryOutputIsRightOnEveryMap) {
  on_every_rank([](Rank& rank) {
    spread_over_maps(rank, all_ll_cases(rank.num_ranks), 12,
                     [](const Rank& there, const LlCase& c) { CaseRun(there, c).run(); });
  });
}

TEST(LlHosts, SumsUnderAWireAreRightOnEveryMap) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  on_every_rank([](Rank& rank) {
    spread_over_maps(rank, cases_with_wires(all_ll_cases(rank.num_ranks)), 6,
                     [](const Rank& there, const LlCase& c) { CaseRun(there, c).run(); });
  });
}

std::vector<LlCase> cases_of_this_launch() {
  if (world().reports()) {
    std::printf("XD_TEST_SEED=%llu\n", static_cast<unsigned long long>(test_seed()));
  }
  return all_ll_cases(world().num_ranks());
}

INSTANTIATE_TEST_SUITE_P(Cases, LlGrid, testing::ValuesIn(cases_of_this_launch()),
                         [](const testing::TestParamInfo<LlCase>& instance) {
                           return std::to_string(instance.index);
                         });

INSTANTIATE_TEST_SUITE_P(Tables, LlGrid,
                         testing::ValuesIn(cases_with_tables(all_ll_cases(world().num_ranks()))),
                         [](const testing::TestParamInfo<LlCase>& instance) {
                           return std::to_string(instance.index);
                         });

INSTANTIATE_TEST_SUITE_P(Wires, LlGrid,
                         testing::ValuesIn(has_wires()
                                               ? cases_with_wires(all_ll_cases(world().num_ranks()))
                                               : std::vector<LlCase>()),
                         [](const testing::TestParamInfo<LlCase>& instance) {
                           return std::to_string(instance.index);
                         });

}  // namespace
}  // namespace xd::test
