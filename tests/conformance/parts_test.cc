// Operations that are called part by part: what they give, and what becomes of other orders.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "conformance/batch.h"
#include "conformance/case.h"
#include "conformance/said.h"
#include "conformance/step.h"
#include "support/gtest_main.h"
#include "support/plan_format.h"

namespace xd::test {
namespace {

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

INSTANTIATE_TEST_SUITE_P(Cases, GridInParts, testing::ValuesIn(cases_in_parts(world().num_ranks())),
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
      ok(s.call(sum, 1));  // begins anew
      ok(s.call(sum, 2));
      s.expect_refused(s.call(sum, 2), "expected part 3");  // one comes twice
      ok(s.call(s.other, sum, 1));
      ok(s.call(sum, 1));  // ends those of the other plan
      s.expect_refused(s.call(s.other, sum, 2), "expected part 2");
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

constexpr xd_ep_operation kAll[] = {XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_DISPATCH_BWD,
                                    XD_EP_COMBINE_BWD};

// Rows that cross once for several zones are in the first of their parts, so zones of a later one
// would lack them.
TEST_F(Parts, OfRowsThatMoveComeInOrder) {
  on_scenes([](Scene& s) {
    for (const xd_ep_operation move : kMoves) {
      SCOPED_TRACE("operation " + std::to_string(move));
      s.expect_refused(s.call(move, 2), "expected 1");
      EXPECT_TRUE(s.batch.untouched(move));
      ok(s.call(move, 1));
      ok(s.call(move, 0));  // the whole is an operation of its own
      ok(s.call(move, 2));
      s.expect_refused(s.call(move, 2), "part = 2 of ");  // one comes twice
      s.expect_refused(s.call(move, 3), "expected 1");    // the refusal has ended them
      ok(s.call(move, 1));
      s.expect_refused(s.call(move, 3), "expected 2");  // one is skipped
      ok(s.call(move, 1));
      ok(s.call(move, 2));
      ok(s.call(move, 1));  // begins anew
      s.expect_refused(s.call(move, 3), "expected 2");
      ok(s.call(s.other, move, 1));
      s.expect_refused(s.call(move, 2), "expected 1");
      s.expect_in_order(move);
      s.expect_refused(s.call(move, 3), "expected 1");
    }
  });
}

// A plan with bad ids is usable, and one that overflows is complete: their prepares are errors that
// end nothing. One that makes no plan ends all.
TEST_F(Parts, GoOnBehindAPrepareThatHasMadeItsPlan) {
  Case c = Scene::plain(world().num_ranks());
  c.capacity = Capacity::exact;
  on_every_rank([&](Rank& rank) {
    Scene s(rank, c);
    const std::vector<std::int64_t> good = s.other.routed().choices(rank.rank).ids;
    const auto prepare = [&](const std::vector<std::int64_t>& ids) {
      s.other.field(XD_EP_PREPARE, "topk_idx").tensor->write(ids);
      return s.other.call(s.group.get(), XD_EP_PREPARE);
    };
    std::vector<std::int64_t> bad = good, crowded = good;
    if (rank.rank == 0) bad[0] = -7;
    for (std::size_t i = 0; i < crowded.size(); ++i) crowded[i] = static_cast<std::int64_t>(i % 3);
    for (const xd_ep_operation operation : kAll) {
      SCOPED_TRACE("operation " + std::to_string(operation));
      ok(s.call(operation, 1));
      EXPECT_EQ(prepare(bad), XD_ERROR_INVALID_ARGUMENT);
      ok(s.call(operation, 2));
      // A rank that is alone has room for all.
      EXPECT_EQ(prepare(crowded), rank.num_ranks > 1 ? XD_ERROR_OVERFLOW : XD_SUCCESS);
      ok(s.call(operation, 3));
      if (rank.num_ranks == 1) continue;
      ok(s.call(operation, 1));
      s.other.prepare_args.parts = rank.rank == 0 ? 2 : 3;
      EXPECT_EQ(prepare(good), XD_ERROR_MISMATCH);
      s.other.prepare_args.parts = s.c.parts;
      s.expect_refused(s.call(operation, 2), "expected 1");
    }
  });
}

// Also where one rank alone has failed, all of them refuse what follows.
TEST_F(Parts, BehindAFailedOneAreRefusedOnAllRanks) {
  on_scenes([](Scene& s) {
    const bool wrong = s.rank.rank == 0;
    const auto expect_failed = [&](const Outcome& outcome) {
      EXPECT_EQ(outcome, wrong ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
      EXPECT_TRUE(wrong || outcome.mentions("rank 0: its call failed")) << outcome.text;
    };
    for (const xd_ep_operation operation : kAll) {
      SCOPED_TRACE("operation " + std::to_string(operation));
      expect_failed(s.call(operation, wrong ? 9 : 1));
      s.expect_refused(s.call(operation, 2), "expected 1");
      ok(s.call(operation, 1));
      if (wrong) {
        EXPECT_EQ(xd_ep_join_failed(s.group.get(), operation, "no tensor", s.rank.stream()),
                  XD_ERROR_INVALID_ARGUMENT);
      } else {
        expect_failed(s.call(operation, 2));
      }
      s.expect_refused(s.call(operation, 2), "expected 1");
      s.expect_in_order(operation);
    }
  });
}

// Tensors of a batch as a later part may not give them.
class OtherTensors {
 public:
  OtherTensors(Batch& batch, xd_ep_operation operation) : batch_(batch), operation_(operation) {}
  ~OtherTensors() {
    for (const Batch::Field& field : batch_.fields()) *field.slot = field.tensor->dl();
  }
  OtherTensors(const OtherTensors&) = delete;
  OtherTensors& operator=(const OtherTensors&) = delete;

  // Rows of float16 instead of bfloat16, of half as many bytes, or all tensors without weights.
  void retype() {
    for_each_of(kBf16, [](Other& other) { other.tensor.dtype = kF16; });
  }
  void narrow() {
    for_each_of(kBf16, [](Other& other) { other.shape[1] /= 2; });
  }
  void unweight() {
    for (const Batch::Field& field : batch_.fields()) {
      const bool beside = field.operation == XD_EP_COMBINE_BWD && field.name[0] == 'e';
      if (field.operation != operation_ || (field.tensor->type().bits != 32 && !beside)) continue;
      *field.slot = nullptr;
    }
  }

 private:
  struct Other {
    DLTensor tensor;
    std::vector<std::int64_t> shape;
  };
  template <class Change>
  void for_each_of(DLDataType type, Change&& change) {
    for (const Batch::Field& field : batch_.fields()) {
      if (field.operation != operation_ || field.tensor->type().code != type.code) continue;
      Other& other = others_.emplace_back(Other{*field.tensor->dl(), field.tensor->shape()});
      change(other);
      other.tensor.shape = other.shape.data();
      *field.slot = &other.tensor;
    }
  }

  Batch& batch_;
  xd_ep_operation operation_;
  std::deque<Other> others_;
};

// Sums of rows that have been staged lie in the group's memory from part to part.
TEST_F(Parts, WithOtherTensorsThanTheFirstAreRefused) {
  const std::pair<void (OtherTensors::*)(), const char*> changes[] = {
      {&OtherTensors::retype, "expected the tensors of part 1 (type"},
      {&OtherTensors::narrow, "expected the tensors of part 1 (row bytes"},
      {&OtherTensors::unweight, "expected the tensors of part 1 (with weights, here without"}};
  on_scenes([&](Scene& s) {
    for (const xd_ep_operation operation : kAll) {
      for (const auto& [change, text] : changes) {
        SCOPED_TRACE("operation " + std::to_string(operation) + ", " + text);
        ok(s.call(operation, 1));
        ok(s.call(operation, 2));
        {
          OtherTensors other(s.batch, operation);
          (other.*change)();
          s.expect_refused(s.call(operation, 3), text);
        }
        s.expect_refused(s.call(operation, 3), "expected 1");
        s.expect_in_order(operation);
      }
    }
  });
}

// One rank alone may know, as peers are not told where its tensors lie.
TEST_F(Parts, WithRowsInAnotherPlaceAreAMistakeOfThatRank) {
  on_scenes([](Scene& s) {
    const bool wrong = s.rank.rank == 0;
    Batch elsewhere(s.rank, s.c, 0, Place::symmetric);
    elsewhere.use_plan(s.batch.plan().data(), s.batch.plan().bytes());
    for (const xd_ep_operation operation : kAll) {
      for (Batch* const first : {&s.batch, &elsewhere}) {
        SCOPED_TRACE("operation " + std::to_string(operation));
        Batch& second = first == &elsewhere ? s.batch : elsewhere;
        ok(s.call(*first, operation, 1));
        const Outcome outcome = s.call(wrong ? second : *first, operation, 2);
        EXPECT_EQ(outcome, wrong ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
        EXPECT_TRUE(outcome.mentions(wrong ? "symmetric memory" : "rank 0: its call failed"))
            << outcome.text;
        s.expect_refused(s.call(*first, operation, 2), "expected 1");
        for (int part = 1; part <= s.c.parts; ++part) ok(s.call(*first, operation, part));
      }
    }
  });
}

// Their rows lie in the caller's memory, so that an operation between them hurts nothing.
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
      ok(s.call(move, 1));
      s.batch.poison_outputs();
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
    for (const xd_ep_operation operation : kAll) {
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

// Bytes of plans without parts are those of libraries that know none, and no later version looks
// like plans with parts.
TEST_F(Parts, LeavePlansWithoutThemAsTheyWere) {
  on_scenes([](Scene& s) {
    const auto version = [&] {
      std::uint32_t number = 0;
      std::memcpy(&number, s.batch.plan().read().data() + kPlanVersionAt, sizeof(number));
      return number;
    };
    EXPECT_EQ(version(), kPlanVersion | kPlanHasParts);
    s.batch.prepare_args.parts = 0;
    s.batch.prepare(s.group.get());
    EXPECT_EQ(version(), kPlanVersion);
  });
}

TEST_F(Parts, OfADamagedPlanAreRefused) {
  on_scenes([](Scene& s) {
    const std::vector<std::byte> whole = s.batch.plan().read();
    const auto expect_damaged = [&](std::size_t at, std::uint8_t flip, const std::string& text) {
      SCOPED_TRACE("byte " + std::to_string(at) + " ^ " + std::to_string(flip));
      std::vector<std::byte> plan = whole;
      plan[at] ^= std::byte{flip};
      s.batch.plan().write(plan);
      for (const xd_ep_operation operation : kAll) s.expect_refused(s.call(operation, 1), text);
    };
    expect_damaged(kPlanVersionAt + 2, 1, "damaged");         // with parts, but not said
    expect_damaged(kPlanVersionAt + 2, 2, "format version");  // by another flag
    expect_damaged(kPlanVersionAt, 7, "format version 4, expected 3");
    expect_damaged(kPlanPartsAt, Scene::kParts, "header is damaged");       // P = 0
    expect_damaged(kPlanPartsAt, 1, "header is damaged");                   // P = 2
    expect_damaged(kPlanPartsAt, Scene::kParts ^ 17, "header is damaged");  // too many
    expect_damaged(kPlanPartsAt + 2, 0x80, "header is damaged");            // P < 0
    s.batch.plan().write(whole);
    for (const xd_ep_operation operation : kAll) s.expect_in_order(operation);
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
