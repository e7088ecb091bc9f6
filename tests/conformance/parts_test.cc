// Operations that are called part by part: what they give, and what becomes of other orders.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "conformance/batch.h"
#include "conformance/case.h"
#include "conformance/said.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

bool on_devices() { return world().memory().device().device_type == kDLCUDA; }

class GridInParts : public testing::TestWithParam<Case> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GridInParts);

// The reference knows no parts. After each of them the zones up to it are complete, and zones that
// come later are NaN until their turn.
TEST_P(GridInParts, EveryElementIsThatOfTheWhole) {
  const Case& c = GetParam();
  on_every_rank([&](Rank& rank) {
    SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", " + c.description());
    const Group group = make_group(rank.comm, c.config(rank.rank));
    for (int number = 0; number < Case::kSteps; ++number) {
      SCOPED_TRACE("batch " + std::to_string(number));
      Step(rank, c, group.get(), number).run_all();
    }
  });
}

std::vector<Case> cases_of_this_launch() {
  return on_devices() ? std::vector<Case>() : cases_in_parts(world().num_ranks());
}

INSTANTIATE_TEST_SUITE_P(Cases, GridInParts, testing::ValuesIn(cases_of_this_launch()),
                         [](const testing::TestParamInfo<Case>& instance) {
                           return std::to_string(instance.index);
                         });

// A batch whose plan has parts, and a group for it.
struct Scene {
  static constexpr int kParts = 3;

  static Case plain(int num_ranks) {
    Case c = plain_case(num_ranks);
    c.local_experts = 4;
    c.parts = kParts;
    return c;
  }
  Scene(const Rank& of, const Case& of_case)
      : rank(of),
        c(of_case),
        group(make_group(of.comm, c.config(of.rank))),
        batch(of, c),
        other(of, c, 1) {
    batch.prepare_args.parts = other.prepare_args.parts = c.parts;
    batch.prepare(group.get());
    other.prepare(group.get());
  }

  Outcome call(Batch& of, xd_ep_operation operation, int part = 0) {
    of.dispatch_args.part = of.combine_args.part = part;
    of.dispatch_bwd_args.part = of.combine_bwd_args.part = part;
    return of.call(group.get(), operation);
  }
  Outcome call(xd_ep_operation operation, int part = 0) { return call(batch, operation, part); }
  void expect_in_order(xd_ep_operation operation) {
    for (int part = 1; part <= c.parts; ++part) ok(call(operation, part));
  }
  // On all ranks alike.
  void expect_refused(const Outcome& outcome, const std::string& text) {
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(outcome.mentions(text)) << outcome.text;
  }

  const Rank& rank;
  const Case c;
  Group group;
  Batch batch, other;
};

class Parts : public testing::Test {
 protected:
  void SetUp() override {
    if (on_devices()) GTEST_SKIP() << "plans on devices have one part";
  }
  // Runs the body on every rank, with a scene of its own.
  static void on_scenes(const std::function<void(Scene&)>& body) {
    const Case c = Scene::plain(world().num_ranks());
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", " + c.description());
      Scene scene(rank, c);
      body(scene);
    });
  }
};

constexpr xd_ep_operation kSums[] = {XD_EP_COMBINE, XD_EP_DISPATCH_BWD};
constexpr xd_ep_operation kMoves[] = {XD_EP_DISPATCH, XD_EP_COMBINE_BWD};

TEST_F(Parts, OfSumsComeInOrderWithNothingButPrepareBetween) {
  on_scenes([](Scene& s) {
    for (const xd_ep_operation sum : kSums) {
      SCOPED_TRACE("operation " + std::to_string(sum));
      s.expect_refused(s.call(sum, 2), "expected 1");
      s.expect_refused(s.call(sum, 3), "expected 1");
      ok(s.call(sum, 1));
      s.expect_refused(s.call(sum, 3), "expected part 2");  // one is skipped
      s.expect_refused(s.call(sum, 2), "expected 1");       // the refusal has ended the sums
      ok(s.call(sum, 1));
      s.expect_refused(s.call(sum, 1), "expected part 2");  // one comes twice
      ok(s.call(sum, 1));
      s.expect_refused(s.call(sum, 0), "expected part 2");  // the whole between parts
      ok(s.call(sum, 1));
      s.expect_refused(s.call(s.other, sum, 2), "expected part 2");  // another plan
      ok(s.call(sum, 1));
      s.expect_refused(s.call(XD_EP_DISPATCH), "expected part 2");  // another operation
      s.expect_refused(s.call(sum, 2), "expected 1");
      ok(s.call(sum, 1));
      s.other.prepare(s.group.get());
      ok(s.call(sum, 2));
      s.other.prepare(s.group.get());
      ok(s.call(sum, 3));
      s.expect_in_order(sum);
    }
  });
}

// A plan with bad ids is usable, and its prepare is an error that ends nothing.
TEST_F(Parts, GoOnBehindAPrepareWithBadIds) {
  on_scenes([](Scene& s) {
    std::vector<std::int64_t> ids = s.other.routed().choices(s.rank.rank).ids;
    if (s.rank.rank == 0) ids[0] = -7;
    s.other.field(XD_EP_PREPARE, "topk_idx").tensor->write(ids);
    for (const xd_ep_operation sum : kSums) {
      ok(s.call(sum, 1));
      EXPECT_EQ(s.other.call(s.group.get(), XD_EP_PREPARE), XD_ERROR_INVALID_ARGUMENT);
      ok(s.call(sum, 2));
      ok(s.call(sum, 3));
    }
  });
}

// Also where one rank alone has failed, all of them refuse what follows.
TEST_F(Parts, BehindAFailedOneAreRefusedOnAllRanks) {
  on_scenes([](Scene& s) {
    for (const xd_ep_operation sum : kSums) {
      ok(s.call(sum, 1));
      if (s.rank.rank == 0) {
        EXPECT_EQ(xd_ep_join_failed(s.group.get(), sum, "no tensor", s.rank.stream()),
                  XD_ERROR_INVALID_ARGUMENT);
      } else {
        const Outcome outcome = s.call(sum, 2);
        EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
        EXPECT_TRUE(outcome.mentions("rank 0: its call failed")) << outcome.text;
      }
      s.expect_refused(s.call(sum, 2), "expected 1");
      s.expect_in_order(sum);
    }
  });
}

// Parts of other operations leave nothing behind that an operation between them could hurt.
TEST_F(Parts, OfRowsThatMoveMayHaveOthersBetween) {
  on_scenes([](Scene& s) {
    for (const xd_ep_operation move : kMoves) {
      SCOPED_TRACE("operation " + std::to_string(move));
      std::vector<std::vector<std::byte>> whole;
      ok(s.call(move));
      for (const Batch::Field& field : s.batch.fields()) {
        if (field.operation == move && field.output) whole.push_back(field.tensor->read());
      }
      s.batch.poison_outputs();
      for (int part = 1; part <= s.c.parts; ++part) {
        ok(s.call(move, part));
        ok(s.call(s.other, XD_EP_DISPATCH, part));
        ok(s.call(s.other, XD_EP_COMBINE));
      }
      for (const Batch::Field& field : s.batch.fields()) {
        if (field.operation != move || !field.output) continue;
        EXPECT_EQ(field.tensor->read(), whole.front()) << field.name;
        whole.erase(whole.begin());
      }
    }
  });
}

TEST_F(Parts, ThatDifferBetweenRanksAreAMismatch) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  on_scenes([](Scene& s) {
    for (const xd_ep_operation move : kMoves) {
      const Outcome outcome = s.call(move, s.rank.rank == 0 ? 2 : 1);
      EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
      EXPECT_TRUE(outcome.mentions(s.rank.rank == 0 ? "part 1, here 2" : "part 2, here 1"))
          << outcome.text;
      EXPECT_TRUE(s.batch.untouched(move));
    }
    s.batch.prepare_args.parts = s.rank.rank == 0 ? 2 : 1;
    const Outcome outcome = s.batch.call(s.group.get(), XD_EP_PREPARE);
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions(s.rank.rank == 0 ? "parts 1, here 2" : "parts 2, here 1"))
        << outcome.text;
  });
}

TEST_F(Parts, ThatThePlanDoesNotHaveAreRefused) {
  on_scenes([](Scene& s) {
    for (const xd_ep_operation operation :
         {XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_DISPATCH_BWD, XD_EP_COMBINE_BWD}) {
      s.expect_refused(s.call(operation, 4), "part = 4, expected at most 3");
      s.expect_refused(s.call(operation, -1), "part = -1, expected 0");
      s.expect_refused(s.call(operation, 17), "part = 17, expected 0");
    }
    // A plan of one part has the whole as its first.
    s.batch.prepare_args.parts = 1;
    s.batch.prepare(s.group.get());
    ok(s.call(XD_EP_COMBINE, 1));
    ok(s.call(XD_EP_DISPATCH));
    s.expect_refused(s.call(XD_EP_COMBINE, 2), "part = 2, expected at most 1");
    for (const int parts : {-1, 5}) {
      s.batch.prepare_args.parts = parts;
      s.expect_refused(s.batch.call(s.group.get(), XD_EP_PREPARE),
                       "parts = " + std::to_string(parts) + ", expected 0 to 4");
    }
  });
}

// Bytes of plans without parts are those of libraries that know none.
TEST_F(Parts, LeavePlansWithoutThemAsTheyWere) {
  on_scenes([](Scene& s) {
    const auto version = [&] {
      return reinterpret_cast<const std::int32_t*>(s.batch.plan().read().data() + 8)[0];
    };
    EXPECT_EQ(version(), 4);
    s.batch.prepare_args.parts = 0;
    s.batch.prepare(s.group.get());
    EXPECT_EQ(version(), 3);
  });
}

TEST(NoParts, AreInRankMajor) {
  Case c = plain_case(world().num_ranks());
  c.layout = XD_EP_RANK_MAJOR;
  on_every_rank([&](Rank& rank) {
    Scene s(rank, c);
    s.expect_refused(s.call(XD_EP_DISPATCH, 1), "part = 1: given in RANK_MAJOR, expected 0");
    s.batch.prepare_args.parts = 2;
    s.expect_refused(s.batch.call(s.group.get(), XD_EP_PREPARE), "parts = 2, expected 0 to 1");
  });
}

// The struct of such callers ends with padding, in which anything may stand.
TEST(NoParts, AreReadFromAStructThatHasNone) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    Scene s(rank, c);
    s.batch.dispatch_args.struct_size = offsetof(xd_ep_dispatch_args, num_sms);
    ok(s.call(XD_EP_DISPATCH, 99));
  });
}

TEST(NoParts, AreOnDevicesSoFar) {
  if (!on_devices()) GTEST_SKIP() << "plans on the CPU have parts";
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    Scene s(rank, c);
    const auto expect_unsupported = [](const Outcome& outcome, const std::string& text) {
      EXPECT_EQ(outcome, XD_ERROR_UNSUPPORTED);
      EXPECT_TRUE(outcome.mentions(text)) << outcome.text;
    };
    s.batch.prepare_args.parts = 2;
    expect_unsupported(s.batch.call(s.group.get(), XD_EP_PREPARE), "parts = 2, expected 0 or 1");
    expect_unsupported(s.call(XD_EP_DISPATCH, 2), "part = 2, expected 0 or 1");
    ok(s.call(XD_EP_DISPATCH, 1));
  });
}

TEST(NumSms, OfACallAreAtMostTheGroups) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    xd_ep_config config = c.config(rank.rank);
    config.num_sms = 4;
    const Group group = make_group(rank.comm, config);
    Batch batch(rank, c);
    batch.prepare(group.get());
    for (const auto& [num_sms, text] : {std::pair{-1, "num_sms = -1, expected 0"},
                                        std::pair{5, "num_sms = 5, expected at most"}}) {
      batch.combine_args.num_sms = num_sms;
      const Outcome outcome = batch.call(group.get(), XD_EP_COMBINE);
      EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
      EXPECT_TRUE(outcome.mentions(text)) << outcome.text;
    }
    batch.combine_args.num_sms = 4 - rank.rank % 4;
    ok(batch.call(group.get(), XD_EP_COMBINE));
  });
}

}  // namespace
}  // namespace xd::test
