// A bad argument of a product on one rank: INVALID_ARGUMENT there, naming it; MISMATCH naming that
// rank on all others, at once; and the context goes on.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "conformance/damaged_tensor.h"
#include "conformance/gemm_batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

using Clock = std::chrono::steady_clock;
using Words = std::vector<std::string>;

int guilty_rank(const Rank& rank) { return rank.num_ranks - 1; }
bool is_guilty(const Rank& rank) { return rank.rank == guilty_rank(rank); }

// What calls on all ranks must give when the guilty one's fails for a reason of its own. `any`: of
// these words its text must have one; `all`: and all of these.
void expect_refused(const Rank& rank, const GemmOutcome& outcome, const Words& any,
                    const Words& all = {}, xd_status status = XD_ERROR_INVALID_ARGUMENT) {
  EXPECT_EQ(outcome.met.status, outcome.status) << outcome.met.text;
  if (!is_guilty(rank)) {
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions("rank " + std::to_string(guilty_rank(rank)))) << outcome.text;
    EXPECT_EQ(outcome.met.rank, guilty_rank(rank));
    return;
  }
  EXPECT_EQ(outcome, status);
  bool found = any.empty();
  for (const std::string& word : any) found = found || outcome.mentions(word);
  EXPECT_TRUE(found) << "expected one of " << testing::PrintToString(any)
                     << " in: " << outcome.text;
  for (const std::string& word : all) {
    EXPECT_TRUE(outcome.mentions(word)) << "expected '" << word << "' in: " << outcome.text;
  }
}

GemmOutcome call_at_once(const GemmBatch& batch, xd_gemm_context* context) {
  const auto start = Clock::now();
  const GemmOutcome outcome = batch.call(context);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10)) << "waited for the timeout";
  EXPECT_TRUE(batch.guards_intact());
  return outcome;
}

const std::vector<Damage>& all_damages() {
  static const std::vector<Damage> all = damages({
      {"Integers",
       [](DamagedTensor& d) {
         d.tensor.dtype = DLDataType{kDLInt, 32, 1};
       }},
      {"TooManyExtents",
       [](DamagedTensor& d) {
         d.tensor.ndim = 3;
         d.shape[1] = d.shape[2] = 1;
       }},
      {"TooLong", [](DamagedTensor& d) { d.shape[0] += 16; }, true},
      {"TooWide", [](DamagedTensor& d) { *d.last() += 16; }, true},
      {"NotContiguous", spread_out},
  });
  return all;
}

// Cases that together have every tensor.
std::vector<GemmCase> full_cases() {
  std::vector<GemmCase> cases;
  for (const xd_gemm_operation operation : kGemmProducts) {
    GemmCase c = plain_gemm_case(world().num_ranks(), operation);
    c.tokens = TokenCounts::most;
    c.addend = Addend::added;
    c.bias = Bias::f32;
    c.epilogue = XD_GEMM_EPILOGUE_RELU;
    c.pre_activation = true;
    c.bias_grad = BiasGrad::own;
    c.amax = true;
    c.gathered = Gathered::given;
    cases.push_back(c);
  }
  GemmCase c = cases.front();
  c.operands = Operands::e4m3;
  // CUDA devices take such blocks of some sizes alone.
  const bool cpu = world().memory().device().device_type == kDLCPU;
  c.scaling = cpu ? Scaling::block : Scaling::row;
  cases.push_back(c);
  c.result = Output::e4m3;
  c.bias_grad = BiasGrad::none;
  c.epilogue = XD_GEMM_EPILOGUE_DRELU;
  cases.push_back(c);
  return cases;
}

void damage_every_field(const Rank& rank, const GemmCase& c) {
  const GemmContext context = make_context(rank.comm, c.config());
  GemmBatch batch(rank, c, 0);
  std::size_t turn = 0;
  for (GemmBatch::Field& field : batch.fields()) {
    ++turn;
    for (std::size_t number = 0; number < all_damages().size(); ++number) {
      // Every field with every damage on two ranks; on others each field with two of them.
      if (rank.num_ranks != 2 && number % 7 != turn % 7) continue;
      const Damage& damage = all_damages()[number];
      SCOPED_TRACE(std::string(damage.name) + " " + field.name);
      const DLTensor* const original = *field.slot;
      DamagedTensor damaged(*original);
      damage.apply(damaged);
      if (is_guilty(rank)) *field.slot = &damaged.tensor;
      Words names{field.name};
      if (damage.of_sizes)
        names.insert(names.end(), {"a: ", "b: ", "d: ", "tokens_per_rank", "max_"});
      expect_refused(rank, call_at_once(batch, context.get()), names);
      *field.slot = original;
    }
  }
  batch.reset();
  ok(batch.call(context.get()));
  batch.check(context.get());
}

TEST(BadTensor, OfAProductIsRefusedByNameAndNamesTheRankToPeers) {
  for (const GemmCase& c : full_cases()) {
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE(c.description());
      damage_every_field(rank, c);
    });
  }
}

// Puts each output into the memory of every other tensor; it may be large enough to meet more.
void share_every_memory(const Rank& rank, const GemmCase& c) {
  const GemmContext context = make_context(rank.comm, c.config());
  GemmBatch batch(rank, c, 0);
  for (const GemmBatch::Field& output : batch.fields()) {
    if (!output.output) continue;
    for (const GemmBatch::Field& other : batch.fields()) {
      if (&other == &output) continue;
      SCOPED_TRACE(std::string(output.name) + " in the memory of " + other.name);
      const DLTensor* const original = *output.slot;
      DLTensor moved = *original;
      moved.data = static_cast<std::byte*>((*other.slot)->data) + (*other.slot)->byte_offset;
      moved.byte_offset = 0;
      // c may be d, and nothing else that shares memory with it.
      if (std::string(other.name) == "c") moved.byte_offset = 16;
      if (is_guilty(rank)) *output.slot = &moved;
      expect_refused(rank, call_at_once(batch, context.get()), {},
                     {output.name, "shares with", "memory of its own"});
      *output.slot = original;
    }
  }
  batch.reset();
  ok(batch.call(context.get()));
  batch.check(context.get());
}

TEST(BadTensor, ThatIsWrittenAndSharesMemoryIsRefusedByName) {
  for (const GemmCase& c : full_cases()) {
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE(c.description());
      share_every_memory(rank, c);
    });
  }
}

template <class Enum>
void force(Enum& field, int value) {
  std::memcpy(&field, &value, sizeof(value));
}

// A mistake beside the tensors, or in their relations. `words`: all that the text must have.
struct Mistake {
  const char* name;
  Words words;
  std::function<void(GemmBatch&, std::vector<std::unique_ptr<Tensor>>&, const Rank&)> make;
};

using Spare = std::vector<std::unique_ptr<Tensor>>;

const DLTensor* spare(Spare& tensors, const Rank& rank, DLDataType type,
                      std::vector<std::int64_t> shape) {
  tensors.push_back(std::make_unique<Tensor>(rank, type, std::move(shape)));
  return tensors.back()->dl();
}

void expect_mistakes(const GemmCase& c, const std::vector<Mistake>& mistakes,
                     xd_status status = XD_ERROR_INVALID_ARGUMENT) {
  on_every_rank([&](Rank& rank) {
    SCOPED_TRACE(c.description());
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    const xd_gemm_args good = batch.args;
    for (const Mistake& mistake : mistakes) {
      SCOPED_TRACE(mistake.name);
      Spare tensors;
      if (is_guilty(rank)) mistake.make(batch, tensors, rank);
      expect_refused(rank, call_at_once(batch, context.get()), {}, mistake.words, status);
      batch.args = good;
    }
    batch.reset();
    ok(batch.call(context.get()));
    batch.check(context.get());
  });
}

GemmCase full_case(xd_gemm_operation operation = XD_GEMM_ALL_GATHER) {
  GemmCase c = plain_gemm_case(world().num_ranks(), operation);
  c.tokens = TokenCounts::most;
  return c;
}

TEST(BadArguments, OfEveryProductAreRefusedWithWhatWasExpectedAndGot) {
  const std::vector<Mistake> mistakes = {
      {"size", {"struct_size", "0"}, [](auto& b, auto&, auto&) { b.args.struct_size = 0; }},
      {"no a", {"a", "NULL"}, [](auto& b, auto&, auto&) { b.args.a = nullptr; }},
      {"no b", {"b", "NULL"}, [](auto& b, auto&, auto&) { b.args.b = nullptr; }},
      {"no d", {"d", "NULL"}, [](auto& b, auto&, auto&) { b.args.d = nullptr; }},
      {"transpose_a", {"transpose_a", "2"}, [](auto& b, auto&, auto&) { b.args.transpose_a = 2; }},
      {"transpose_b",
       {"transpose_b", "-1"},
       [](auto& b, auto&, auto&) { b.args.transpose_b = -1; }},
      {"both transposed",
       {"transpose_a", "transpose_b"},
       [](auto& b, auto&, auto&) { b.args.transpose_a = b.args.transpose_b = 1; }},
      {"epilogue", {"epilogue", "5"}, [](auto& b, auto&, auto&) { force(b.args.epilogue, 5); }},
      {"algo", {"algo", "6"}, [](auto& b, auto&, auto&) { force(b.args.algo, 6); }},
      {"negative algo", {"algo", "-1"}, [](auto& b, auto&, auto&) { force(b.args.algo, -1); }},
      {"dgelu alone",
       {"pre_activation", "NULL"},
       [](auto& b, auto&, auto&) { b.args.epilogue = XD_GEMM_EPILOGUE_DGELU; }},
      {"pre_activation of nothing",
       {"pre_activation", "EPILOGUE_NONE"},
       [](auto& b, auto& t, auto& r) {
         b.args.pre_activation = spare(t, r, kBf16, {b.args.d->shape[0], b.args.d->shape[1]});
       }},
      {"reduce nothing",
       {"reduce_bias_grad", "bias_grad"},
       [](auto& b, auto&, auto&) { b.args.reduce_bias_grad = 1; }},
      {"reduce_bias_grad",
       {"reduce_bias_grad", "2"},
       [](auto& b, auto&, auto&) { b.args.reduce_bias_grad = 2; }},
      {"a_scale of bf16",
       {"a_scale", "bfloat16"},
       [](auto& b, auto& t, auto& r) { b.args.a_scale = spare(t, r, kF32, {1}); }},
      {"d_scale of bf16",
       {"d_scale", "bfloat16"},
       [](auto& b, auto& t, auto& r) { b.args.d_scale = spare(t, r, kF32, {1}); }},
      {"gathered_scale of bf16",
       {"gathered_scale"},
       [](auto& b, auto& t, auto& r) { b.args.gathered_scale = spare(t, r, kF32, {1}); }},
      {"mixed types",
       {"b: is float16", "bfloat16"},
       [](auto& b, auto& t, auto& r) {
         b.args.b = spare(t, r, kF16, {b.args.b->shape[0], b.args.b->shape[1]});
       }},
      {"fast_accumulate",
       {"fast_accumulate", "3"},
       [](auto& b, auto&, auto&) { b.args.fast_accumulate = 3; }},
      {"allow_tf32", {"allow_tf32", "3"}, [](auto& b, auto&, auto&) { b.args.allow_tf32 = 3; }},
  };
  for (const xd_gemm_operation operation : kGemmProducts) {
    expect_mistakes(full_case(operation), mistakes);
  }
}

// A row of 12 numbers of bf16 has 24 bytes.
TEST(BadArguments, AsRowsThatAreNoMultiplesOf16BytesAreRefused) {
  const std::vector<Mistake> mistakes = {
      {"K",
       {"24 bytes", "multiple of 16"},
       [](auto& b, auto& t, auto& r) {
         b.args.a = spare(t, r, kBf16, {b.args.a->shape[0], 12});
         b.args.b = spare(t, r, kBf16, {b.args.b->shape[0], 12});
       }},
      {"N",
       {"24 bytes", "multiple of 16"},
       [](auto& b, auto& t, auto& r) {
         b.args.d = spare(t, r, kBf16, {b.args.d->shape[0], 12});
         b.args.b = spare(t, r, kBf16, {12, b.args.b->shape[1]});
       }},
  };
  for (const xd_gemm_operation operation : kGemmProducts) {
    expect_mistakes(full_case(operation), mistakes);
  }
}

TEST(BadArguments, BeyondTheContextsBoundsAreRefusedWithTheBound) {
  const GemmCase gather = full_case();
  const std::string tokens = std::to_string(gather.max_tokens() + 1);
  expect_mistakes(
      gather, {
                  {"tokens",
                   {"max_tokens", tokens, std::to_string(gather.max_tokens())},
                   [](auto& b, auto& t, auto& r) {
                     static thread_local std::vector<std::int64_t> counts;
                     counts = b.inputs().tokens;
                     const std::int64_t own = ++counts.back();
                     b.args.tokens_per_rank = counts.data();
                     b.args.a = spare(t, r, kBf16, {own, b.args.a->shape[1]});
                     b.args.d = spare(t, r, kBf16, {b.args.d->shape[0] + 1, b.args.d->shape[1]});
                   }},
                  {"K",
                   {"max_k", "64", std::to_string(gather.k())},
                   [](auto& b, auto& t, auto& r) {
                     b.args.a = spare(t, r, kBf16, {b.args.a->shape[0], 64});
                     b.args.b = spare(t, r, kBf16, {b.args.b->shape[0], 64});
                   }},
                  {"N",
                   {"max_n", "64", std::to_string(gather.n())},
                   [](auto& b, auto& t, auto& r) {
                     b.args.d = spare(t, r, kBf16, {b.args.d->shape[0], 64});
                     b.args.b = spare(t, r, kBf16, {64, b.args.b->shape[1]});
                   }},
              });
  const GemmCase reduce = full_case(XD_GEMM_ALL_REDUCE);
  const std::int64_t bound = reduce.max_tokens() * reduce.num_ranks;
  expect_mistakes(
      reduce,
      {{"tokens", {"max_tokens", std::to_string(bound + 1)}, [bound](auto& b, auto& t, auto& r) {
          b.args.a = spare(t, r, kBf16, {bound + 1, b.args.a->shape[1]});
          b.args.d = spare(t, r, kBf16, {bound + 1, b.args.d->shape[1]});
        }}});
}

TEST(BadArguments, AsNumbersOfTokensThatDoNotFitAreRefused) {
  const auto with = [](const std::function<void(std::vector<std::int64_t>&)>& change) {
    return [change](GemmBatch& b, Spare&, const Rank&) {
      static thread_local std::vector<std::int64_t> counts;  // read when the call is made
      counts = b.inputs().tokens;
      change(counts);
      b.args.tokens_per_rank = counts.data();
    };
  };
  const std::vector<Mistake> mistakes = {
      {"negative", {"tokens_per_rank", "-1"}, with([](auto& c) { c.front() = -1; })},
      {"too many", {"tokens_per_rank", "max_tokens"}, with([](auto& c) { c.front() += 1000; })},
      {"not those of a and d", {"tokens_per_rank"}, with([](auto& c) { c.back() -= 1; })},
  };
  expect_mistakes(full_case(XD_GEMM_ALL_GATHER), mistakes);
  expect_mistakes(full_case(XD_GEMM_REDUCE_SCATTER), mistakes);
}

TEST(BadArguments, ThatAllGatherAloneHasAreRefusedElsewhere) {
  const std::vector<Mistake> mistakes = {
      {"gathered", {"gathered", "all_gather"}, [](auto& b, auto& t, auto& r) {
         b.args.gathered = spare(t, r, kBf16, {b.args.a->shape[0], b.args.a->shape[1]});
       }}};
  expect_mistakes(full_case(XD_GEMM_REDUCE_SCATTER), mistakes);
  expect_mistakes(full_case(XD_GEMM_ALL_REDUCE), mistakes);
}

TEST(BadArguments, OfEightBitsAreRefused) {
  GemmCase c = full_case();
  c.operands = Operands::e4m3;
  c.scaling = Scaling::row;
  const std::vector<Mistake> mistakes = {
      {"both e5m2",
       {"float8_e5m2"},
       [](auto& b, auto& t, auto& r) {
         b.args.a = spare(t, r, kE5m2, {b.args.a->shape[0], b.args.a->shape[1]});
         b.args.b = spare(t, r, kE5m2, {b.args.b->shape[0], b.args.b->shape[1]});
       }},
      {"b alone is bf16",
       {"b: is bfloat16", "float8"},
       [](auto& b, auto& t, auto& r) {
         b.args.b = spare(t, r, kBf16, {b.args.b->shape[0], b.args.b->shape[1]});
       }},
      {"scales of two ways",
       {"b_scale"},
       [](auto& b, auto& t, auto& r) { b.args.b_scale = spare(t, r, kF32, {1}); }},
      {"a_scale is short",
       {"a_scale", std::to_string(c.max_tokens())},
       [&c](auto& b, auto& t, auto& r) {
         b.args.a_scale = spare(t, r, kF32, {c.max_tokens() - 1});
       }},
      {"a_scale of rows alone",
       {"a_scale: has " + std::to_string(c.max_tokens()) + " rows", "b_scale"},
       [](auto& b, auto&, auto&) { b.args.b_scale = nullptr; }},
      {"b_scale is bf16",
       {"b_scale: is bfloat16", "float32"},
       [](auto& b, auto& t, auto& r) {
         b.args.b_scale = spare(t, r, kBf16, {b.args.b->shape[0]});
       }},
  };
  expect_mistakes(c, mistakes);
}

// They are good arguments, of something that is not there: each rank says so of its own call.
TEST(Unsupported, ArgumentsSayWhy) {
  expect_mistakes(full_case(XD_GEMM_ALL_REDUCE),
                  {{"reduced bias_grad",
                    {"reduce_bias_grad", "all_reduce"},
                    [](auto& b, auto& t, auto& r) {
                      b.args.bias_grad = spare(t, r, kF32, {b.args.d->shape[1]});
                      b.args.reduce_bias_grad = 1;
                    }}},
                  XD_ERROR_UNSUPPORTED);
  expect_mistakes(
      full_case(),
      {{"fused", {"FUSED"}, [](auto& b, auto&, auto&) { b.args.algo = XD_GEMM_ALGO_FUSED; }},
       {"direct", {"DIRECT"}, [](auto& b, auto&, auto&) { b.args.algo = XD_GEMM_ALGO_DIRECT; }}},
      XD_ERROR_UNSUPPORTED);
}

// The context took memory for other operations.
TEST(Unsupported, OperationsOfAContextSayWhichItHas) {
  for (const xd_gemm_operation made_for : kGemmProducts) {
    on_every_rank([&](Rank& rank) {
      const GemmCase c = full_case(made_for);
      const GemmContext context = make_context(rank.comm, c.config());
      for (const xd_gemm_operation other : kGemmProducts) {
        if (other == made_for) continue;
        SCOPED_TRACE(std::string(name_of(other)) + " in a context of " + name_of(made_for));
        GemmBatch batch(rank, full_case(other), 0);
        const GemmOutcome outcome = batch.call(context.get());
        EXPECT_EQ(outcome, XD_ERROR_UNSUPPORTED);
        EXPECT_TRUE(outcome.mentions("operations")) << outcome.text;
      }
      GemmBatch batch(rank, c, 0);
      ok(batch.call(context.get()));
      batch.check(context.get());
    });
  }
}

// No turn is taken without a context or arguments.
TEST(BadArguments, ThatAreNullAreRefusedAtOnce) {
  on_every_rank([](Rank& rank) {
    const GemmCase c = full_case();
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    EXPECT_EQ(xd_gemm_all_gather(nullptr, &batch.args, rank.stream()), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_gemm_wait(nullptr, rank.stream()), XD_ERROR_INVALID_ARGUMENT);
    xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
    EXPECT_EQ(xd_gemm_explain(context.get(), XD_GEMM_ALL_GATHER, nullptr, &info),
              XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_gemm_explain(context.get(), XD_GEMM_ALL_GATHER, &batch.args, nullptr),
              XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_gemm_context_status(context.get(), nullptr), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_gemm_context_watch(context.get(), nullptr), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_gemm_context_destroy(nullptr), XD_SUCCESS);
    ok(batch.call(context.get()));
    batch.check(context.get());
  });
}

// What the call would return, without a turn.
TEST(Explain, ReturnsTheErrorsOfTheCallHere) {
  on_every_rank([](Rank& rank) {
    const GemmCase c = full_case();
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    const xd_gemm_args good = batch.args;
    xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
    force(batch.args.epilogue, 9);
    EXPECT_EQ(xd_gemm_explain(context.get(), XD_GEMM_ALL_GATHER, &batch.args, &info),
              XD_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(xd_last_error()).find("epilogue"), std::string::npos) << xd_last_error();
    batch.args = good;
    EXPECT_EQ(xd_gemm_explain(context.get(), XD_GEMM_ALL_REDUCE, &batch.args, &info),
              XD_ERROR_UNSUPPORTED);
    EXPECT_EQ(xd_gemm_explain(context.get(), XD_GEMM_START_ALL_GATHER, &batch.args, &info),
              XD_ERROR_INVALID_ARGUMENT);
    ok(batch.call(context.get()));
    batch.check(context.get());
  });
}

}  // namespace
}  // namespace xd::test
