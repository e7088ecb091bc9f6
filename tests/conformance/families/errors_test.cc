// Errors that cost nothing but the call: disagreement between ranks, calls that a rank gives up for
// a reason of its own, and the memory of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "conformance/families/mistakes.h"

namespace xd::test {
namespace {

template <class F>
class Disagreement : public testing::Test {
 protected:
  void SetUp() override {
    if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  }
};
TYPED_TEST_SUITE(Disagreement, Families, FamilyName);

// The way in which rank 0 differs from all others: arguments of another case, or other arguments,
// good in themselves.
template <class F>
struct Difference {
  const char* name;
  typename F::Operation operation;
  void (*change)(typename F::Case&);
  void (*alter)(Scene<F>&) = [](Scene<F>&) {};
  std::string here{}, there{};  // rank 0's text and the others' have these
};

template <class F>
std::vector<Difference<F>> differences();

// Rows of `columns` elements in the place of two tensors.
void replace(Scene<Bulk>& s, const DLTensor*& from, const DLTensor*& to, DLDataType type,
             std::int64_t columns) {
  from = s.tensor(type, {from->shape[0], columns});
  to = s.tensor(type, {to->shape[0], columns});
}

template <>
std::vector<Difference<Bulk>> differences<Bulk>() {
  using S = Scene<Bulk>;
  const auto same = [](Case&) {};
  return {
      {"hidden", XD_EP_DISPATCH, same,
       [](S& s) {
         replace(s, s.batch.dispatch_args.tokens, s.batch.dispatch_args.recv_tokens, kBf16, 16);
       }},
      {"dtype", XD_EP_COMBINE, same,
       [](S& s) {
         replace(s, s.batch.combine_args.expert_out, s.batch.combine_args.out, kF16, 32);
       }},
      {"weights of dispatch", XD_EP_DISPATCH, same,
       [](S& s) {
         s.batch.dispatch_args.topk_weights = s.batch.dispatch_args.recv_weights = nullptr;
       }},
      {"scales", XD_EP_DISPATCH, same,
       [](S& s) {
         xd_ep_dispatch_args& args = s.batch.dispatch_args;
         args.scales = s.tensor(kF32, {args.tokens->shape[0], 1});
         args.recv_scales = s.tensor(kF32, {args.recv_tokens->shape[0], 1});
       }},
      {"weights of combine_bwd", XD_EP_COMBINE_BWD, same,
       [](S& s) {
         xd_ep_combine_bwd_args& args = s.batch.combine_bwd_args;
         args.weights = args.expert_out = args.grad_weights = nullptr;
       }},
      {"weights of dispatch_bwd", XD_EP_DISPATCH_BWD, same,
       [](S& s) {
         xd_ep_dispatch_bwd_args& args = s.batch.dispatch_bwd_args;
         args.grad_recv_weights = args.grad_topk_weights = nullptr;
       }},
      {"number of choices", XD_EP_PREPARE, same,
       [](S& s) {
         s.batch.prepare_args.topk_idx = s.tensor(kI64, {0, 1});
       }},
  };
}

template <>
std::vector<Difference<LowLatency>> differences<LowLatency>() {
  constexpr auto kDispatch = XD_LL_DISPATCH, kCombine = XD_LL_COMBINE;
  return {
      {"dtype of dispatch", kDispatch, [](LlCase& c) { c.dtype = kF16; }},
      {"hidden of dispatch", kDispatch, [](LlCase& c) { c.row_units = 8; }},
      {"number of choices", kDispatch, [](LlCase& c) { c.topk = 2; }},
      {"quantise or not", kDispatch, [](LlCase& c) { c.sent = Sent::float_scales; }},
      {"weights of dispatch", kDispatch, [](LlCase& c) { c.weights = Weights::none; }},
      {"dtype of combine", kCombine, [](LlCase& c) { c.combine_dtype = kF32; }},
      {"hidden of combine", kCombine, [](LlCase& c) { c.row_units = 8; }},
      {"weights of combine", kCombine, [](LlCase& c) { c.weights = Weights::at_combine; }},
  };
}

template <>
std::vector<Difference<Products>> differences<Products>() {
  std::vector<Difference<Products>> all;
  for (const xd_gemm_operation operation : kGemmProducts) {
    const GemmCase c = Products::plain(operation);
    const auto add = [&](const char* name, void (*change)(GemmCase&), const std::string& here,
                         const std::string& there) {
      all.push_back({name, operation, change, [](Scene<Products>&) {}, here, there});
    };
    add(
        "K", [](GemmCase& o) { o.k_units = 2; }, "16", std::to_string(c.k()));
    add(
        "N", [](GemmCase& o) { o.n_units = 2; }, "16", std::to_string(c.n()));
    add(
        "type of a and b",
        [](GemmCase& o) {
          o.operands = Operands::f16;
          // bf16, as before, where the executor has such sums.
          const bool cpu = world().memory().device().device_type == kDLCPU;
          if (cpu || o.operation == XD_GEMM_ALL_GATHER) o.result = Output::other_half;
        },
        "float16", "bfloat16");
    add(
        "type of d", [](GemmCase& o) { o.result = Output::f32; }, "float32", "bfloat16");
    add(
        "transpose_b", [](GemmCase& o) { o.stored = Stored::nn; }, "transpose", "transpose");
    add(
        "epilogue", [](GemmCase& o) { o.epilogue = XD_GEMM_EPILOGUE_RELU; }, "epilogue",
        "epilogue");
  }
  return all;
}

// The batch of which all ranks have a plan, whichever case their own arguments are of.
template <class F>
struct Agreed {
  Agreed(const Rank&, typename F::Raw*, const typename F::Case&, Scene<F>&) {}
  void end() {}
};
template <>
struct Agreed<LowLatency> {
  Agreed(const Rank& rank, xd_ll_group* to, const LlCase& c, Scene<LowLatency>& scene)
      : group(to), batch(rank, c, 0) {
    batch.dispatch(group);
    scene.batch.use_plan(batch.plan());
    scene.has_plan();
  }
  void end() { batch.combine(group); }

  xd_ll_group* const group;
  LlBatch batch;
};

// The case of make_roomy().
template <class F>
typename F::Case common_case(typename F::Operation operation) {
  return F::plain(operation);
}
template <>
LlCase common_case<LowLatency>(xd_ll_operation) {
  LlCase c = LowLatency::plain();
  c.row_units = 16;
  return c;
}

TYPED_TEST(Disagreement, IsAMismatchOnEveryRankAtOnceAndMovesNothing) {
  using F = TypeParam;
  on_every_rank([&](Rank& rank) {
    const auto handle = F::make_roomy(rank);
    for (const Difference<F>& kind : differences<F>()) {
      const auto c = common_case<F>(kind.operation);
      for (const Way way : F::kWays) {
        SCOPED_TRACE(std::string(kind.name) + (way == Way::halves ? " in halves" : ""));
        auto own = c;
        if (rank.rank == 0) kind.change(own);
        Scene<F> scene(rank, handle.get(), own);
        Agreed<F> agreed(rank, handle.get(), c, scene);
        scene.prepare_for(kind.operation);
        if (rank.rank == 0) kind.alter(scene);
        const auto outcome = scene.call(kind.operation, way);
        expect_disagreement(rank, outcome);
        EXPECT_EQ(outcome.met.operation, kind.operation);
        expect_words(outcome.text, {kind.here, kind.there});
        F::expect_nothing_written(scene.batch, kind.operation);
        agreed.end();
      }
    }
    F::expect_works(rank, common_case<F>(F::kFirst), handle.get());
  });
}

// Operations that count in one sequence.
template <class F>
class SequenceDisagreement : public Disagreement<F> {};
using FamiliesOfOneSequence = testing::Types<Bulk, Products>;
TYPED_TEST_SUITE(SequenceDisagreement, FamiliesOfOneSequence, FamilyName);

TYPED_TEST(SequenceDisagreement, OnTheOperationIsAMismatchThatNamesBoth) {
  using F = TypeParam;
  on_every_rank([&](Rank& rank) {
    const auto handle = F::make_roomy(rank);
    for (const auto mine : F::kOperations) {
      for (const auto theirs : F::kOperations) {
        if (mine == theirs) continue;
        SCOPED_TRACE(std::string(F::name(mine)) + " against " + F::name(theirs));
        const auto operation = rank.rank == 0 ? mine : theirs;
        Scene<F> scene(rank, handle.get(), F::plain(operation));
        F::make_plan(scene.batch, handle.get());
        scene.has_plan();
        const auto outcome = scene.call(operation);
        expect_disagreement(rank, outcome);
        expect_words(outcome.text, {F::name(mine), F::name(theirs)});
        F::expect_nothing_written(scene.batch, operation);
      }
    }
    F::expect_works(rank, common_case<F>(F::kFirst), handle.get());
  });
}

// ---- Calls that a rank gives up -----------------------------------------------------------------

template <class F>
class JoinFailed : public testing::Test {};
TYPED_TEST_SUITE(JoinFailed, Families, FamilyName);

TYPED_TEST(JoinFailed, TellsThePeersAtOnceAndCostsNothingElse) {
  using F = TypeParam;
  on_every_rank([&](Rank& rank) {
    const auto handle = F::make_roomy(rank);
    std::optional<Scene<F>> scene;
    std::uint64_t calls[2] = {};
    int turn = 0;
    for (const auto operation : F::kOperations) {
      for (const Way way : F::kWays) {
        SCOPED_TRACE("operation " + std::to_string(operation));
        const int guilty = turn++ % rank.num_ranks;
        scene.emplace(rank, handle.get(), F::plain(operation));
        scene->prepare_for(operation);
        const auto outcome = rank.rank == guilty
                                 ? scene->join_failed(operation, "gate must be float32, got int8")
                                 : scene->call(operation, way);
        expect_blamed(rank, outcome, {guilty, {"gate must be float32, got int8"}});
        EXPECT_EQ(outcome.met.operation, operation);
        EXPECT_EQ(outcome.met.rank, guilty);
        F::expect_nothing_written(scene->batch, operation);
        for (const std::size_t i : {0, 1}) calls[i] += scene->calls_in(i);
        if (F::counts_operations(rank)) {
          EXPECT_EQ(outcome.met.epoch, calls[F::sequence_of(operation)]);
        }
      }
    }
    F::expect_works(rank, F::plain(), handle.get());
  });
}

TYPED_TEST(JoinFailed, CutsLongTextsAndTakesNone) {
  using F = TypeParam;
  on_every_rank([](Rank& rank) {
    const auto handle = F::make_roomy(rank);
    const std::string text(1000, 'q');
    EXPECT_EQ(F::join_failed(handle.get(), F::kFirst, text.c_str(), rank.stream()),
              XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(std::ranges::count(std::string(xd_last_error()), 'q'), 255) << xd_last_error();
    EXPECT_EQ(F::last_error().text, std::string(255, 'q'));
    EXPECT_EQ(F::join_failed(handle.get(), F::kFirst, nullptr, rank.stream()),
              XD_ERROR_INVALID_ARGUMENT);
    EXPECT_STREQ(F::last_error().text, "");
    F::expect_works(rank, F::plain(), handle.get());
  });
}

// ---- Status -------------------------------------------------------------------------------------

template <class F>
class HandleStatus : public testing::Test {};
TYPED_TEST_SUITE(HandleStatus, Families, FamilyName);

TYPED_TEST(HandleStatus, IsEmptyAtFirst) {
  on_every_rank([](Rank& rank) {
    const auto handle = TypeParam::make_roomy(rank);
    const auto status = TypeParam::status(handle.get());
    EXPECT_EQ(status.status, XD_SUCCESS);
    EXPECT_EQ(status.rank, -1);
    EXPECT_STREQ(status.text, "");
  });
}

// An error that a call has returned, on any executor, is told with its numbers by the function for
// the last error, and not a second time by the handle.
TYPED_TEST(HandleStatus, DoesNotRepeatWhatACallHasReturned) {
  using F = TypeParam;
  on_every_rank([](Rank& rank) {
    const auto handle = F::make_roomy(rank);
    F::expect_works(rank, F::plain(), handle.get());
    ASSERT_EQ(F::join_failed(handle.get(), F::kFirst, "first", rank.stream()),
              XD_ERROR_INVALID_ARGUMENT);
    const auto returned = F::last_error();
    EXPECT_EQ(returned.status, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(returned.operation, F::kFirst);
    if (F::counts_operations(rank)) {
      EXPECT_EQ(returned.epoch, F::kOperationsOfWorks + 1);
    }
    EXPECT_EQ(returned.rank, rank.rank);
    EXPECT_STREQ(returned.text, "first");
    rank.memory->synchronize();
    EXPECT_EQ(F::status(handle.get()).status, XD_SUCCESS);
    typename F::Batch batch(rank, F::plain(), 1);
    ASSERT_EQ(F::enqueue(batch, handle.get(), F::kFirst), XD_SUCCESS) << xd_last_error();
    EXPECT_EQ(F::last_error().status, XD_SUCCESS) << "the last operation met none";
    rank.memory->synchronize();
    EXPECT_EQ(F::status(handle.get()).status, XD_SUCCESS);
  });
}

// The word that a host may watch.
TYPED_TEST(HandleStatus, CountsEveryOperationThatEndsWithANonFatalErrorInTheWatchedWord) {
  using F = TypeParam;
  on_every_rank([](Rank& rank) {
    const auto handle = F::make_roomy(rank);
    const volatile std::uint64_t* const word = F::watch(handle.get());
    const auto count = [&] {
      rank.memory->synchronize();
      return __atomic_load_n(word, __ATOMIC_ACQUIRE);
    };
    F::expect_works(rank, F::plain(), handle.get());
    EXPECT_EQ(count(), 0u);
    for (std::uint64_t n = 1; n < 4; ++n) {
      typename F::Batch batch(rank, F::plain(), 0);
      if (rank.rank == 0) std::get<0>(F::args(batch)).struct_size = 0;
      static_cast<void>(F::enqueue(batch, handle.get(), F::kFirst));
      EXPECT_EQ(count(), n);
    }
    static_cast<void>(F::join_failed(handle.get(), F::kFirst, "mine", rank.stream()));
    EXPECT_EQ(count(), 4u);
    static_cast<void>(F::status(handle.get()));
    EXPECT_EQ(count(), 4u) << "reading the status takes nothing back";
    F::expect_works(rank, F::plain(), handle.get());
    EXPECT_EQ(count(), 4u);
  });
}

}  // namespace
}  // namespace xd::test
