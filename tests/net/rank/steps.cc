#include "net/rank/steps.h"

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "conformance/fixed_step.h"
#include "conformance/slots/echo.h"
#include "support/memory.h"

namespace xd::test {
namespace {

// Wrong numbers of a step are printed where they are compared.
bool has_wrong_numbers() { return testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed(); }

// Does step(i) for all i; the result is as in rank/steps.h.
std::string in_order(int count, const std::function<void(int)>& step) {
  for (int i = 0; i < count; ++i) {
    step(i);
    if (has_wrong_numbers()) return "wrong numbers in step " + std::to_string(i);
  }
  return "fine";
}

std::string fixed_steps(const Rank& rank, int count) {
  const FixedShape shape{.dtype = kF32, .tokens = 200};
  const Group group = make_group(rank.comm, shape.config(rank.num_ranks));
  FixedStep step(rank, shape);
  return in_order(count, [&](int number) {
    step.load(number);
    step.enqueue_all(group.get());
    step.check();
  });
}

std::string slot_steps(const Rank& rank, int count) {
  LlCase c = echo_case(rank.num_ranks);
  c.max_tokens = 24;
  c.row_units = 128;
  const LlGroup group = make_group(rank, c);
  const std::vector<bool> nobody(static_cast<std::size_t>(rank.num_ranks));
  return in_order(count, [&](int number) {
    Echo batch(rank, c, number);
    ok(batch.dispatch(group.get(), XD_LL_PHASE_SEND));
    ok(batch.dispatch(group.get(), XD_LL_PHASE_RECEIVE));
    EXPECT_EQ(batch.rows_by_source(), batch.expected_rows(nobody));
    ok(batch.combine(group.get()));
    EXPECT_EQ(batch.wrong(nobody), "");
  });
}

using Steps = std::string (*)(const Rank&, int);

std::string make(Steps steps, xd_comm* comm, int rank, int num_ranks, int count) {
  const std::unique_ptr<Memory> memory = make_memory("cpu", rank);
  const Rank here{rank, num_ranks, false, comm, memory.get(), "", {}};
  try {
    return steps(here, count);
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

std::string make_steps(xd_comm* comm, int rank, int num_ranks, int count) {
  return make(fixed_steps, comm, rank, num_ranks, count);
}

std::string make_slot_steps(xd_comm* comm, int rank, int num_ranks, int count) {
  return make(slot_steps, comm, rank, num_ranks, count);
}

}  // namespace xd::test
