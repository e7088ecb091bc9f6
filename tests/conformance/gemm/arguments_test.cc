// Bad arguments of products beside those that all families refuse alike.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "conformance/families/mistakes.h"

namespace xd::test {
namespace {

using S = Scene<Products>;

GemmCase full_case(xd_gemm_operation operation = XD_GEMM_ALL_GATHER) {
  GemmCase c = Products::plain(operation);
  c.tokens = TokenCounts::most;
  return c;
}

void expect_mistakes(const GemmCase& c, const std::vector<Mistake<Products>>& mistakes,
                     xd_status status = XD_ERROR_INVALID_ARGUMENT) {
  expect_mistakes<Products>(c, c.operation, mistakes, status);
}

// Puts each output into the memory of every other tensor; it may be large enough to meet more.
TEST(ProductsTensor, ThatIsWrittenAndSharesMemoryIsRefusedByName) {
  for (const GemmCase& c : Products::full_cases()) {
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE(c.description());
      const GemmContext context = Products::make(rank, c);
      S scene(rank, context.get(), c);
      for (const GemmBatch::Field& output : scene.batch.fields()) {
        for (const GemmBatch::Field& other : scene.batch.fields()) {
          if (!output.output || &other == &output) continue;
          SCOPED_TRACE(std::string(output.name) + " in the memory of " + other.name);
          scene.expect_refused(
              c.operation, {output.name, "shares with", "memory of its own"}, [&](S& s) {
                DLTensor& moved = s.damage(*output.slot).tensor;
                moved.data =
                    static_cast<std::byte*>((*other.slot)->data) + (*other.slot)->byte_offset;
                // c may be d, and nothing else that shares memory with it.
                moved.byte_offset = std::string(other.name) == "c" ? 16 : 0;
              });
        }
      }
      Products::expect_works(rank, c, context.get());
    });
  }
}

const std::vector<Mistake<Products>>& mistakes_of_every_product() {
  static const std::vector<Mistake<Products>> all = {
      {{"struct_size", "0"}, [](S& s) { s.batch.args.struct_size = 0; }},
      {{"transpose_a", "2"}, [](S& s) { s.batch.args.transpose_a = 2; }},
      {{"transpose_b", "-1"}, [](S& s) { s.batch.args.transpose_b = -1; }},
      {{"transpose_a", "transpose_b"},
       [](S& s) { s.batch.args.transpose_a = s.batch.args.transpose_b = 1; }},
      {{"epilogue", "5"}, [](S& s) { force(s.batch.args.epilogue, 5); }},
      {{"algo", "6"}, [](S& s) { force(s.batch.args.algo, 6); }},
      {{"algo", "-1"}, [](S& s) { force(s.batch.args.algo, -1); }},
      {{"pre_activation", "NULL"}, [](S& s) { s.batch.args.epilogue = XD_GEMM_EPILOGUE_DGELU; }},
      {{"pre_activation", "EPILOGUE_NONE"},
       [](S& s) { s.batch.args.pre_activation = s.like(s.batch.args.d, kBf16); }},
      {{"reduce_bias_grad", "bias_grad"}, [](S& s) { s.batch.args.reduce_bias_grad = 1; }},
      {{"reduce_bias_grad", "2"}, [](S& s) { s.batch.args.reduce_bias_grad = 2; }},
      {{"a_scale", "bfloat16"}, [](S& s) { s.batch.args.a_scale = s.tensor(kF32, {1}); }},
      {{"d_scale", "bfloat16"}, [](S& s) { s.batch.args.d_scale = s.tensor(kF32, {1}); }},
      {{"gathered_scale"}, [](S& s) { s.batch.args.gathered_scale = s.tensor(kF32, {1}); }},
      {{"b: is float16", "bfloat16"}, [](S& s) { s.batch.args.b = s.like(s.batch.args.b, kF16); }},
      {{"fast_accumulate", "3"}, [](S& s) { s.batch.args.fast_accumulate = 3; }},
      {{"allow_tf32", "3"}, [](S& s) { s.batch.args.allow_tf32 = 3; }},
  };
  return all;
}

// A row of 12 numbers of bf16 has 24 bytes.
const std::vector<Mistake<Products>>& rows_of_24_bytes() {
  static const std::vector<Mistake<Products>> all = {
      {{"24 bytes", "multiple of 16"},
       [](S& s) {
         s.batch.args.a = s.tensor(kBf16, {s.batch.args.a->shape[0], 12});
         s.batch.args.b = s.tensor(kBf16, {s.batch.args.b->shape[0], 12});
       }},
      {{"24 bytes", "multiple of 16"},
       [](S& s) {
         s.batch.args.d = s.tensor(kBf16, {s.batch.args.d->shape[0], 12});
         s.batch.args.b = s.tensor(kBf16, {12, s.batch.args.b->shape[1]});
       }},
  };
  return all;
}

TEST(ProductsArguments, OfEveryProductAreRefusedWithWhatWasExpectedAndGot) {
  for (const xd_gemm_operation operation : kGemmProducts) {
    expect_mistakes(full_case(operation), mistakes_of_every_product());
  }
}

TEST(ProductsArguments, AsRowsThatAreNoMultiplesOf16BytesAreRefused) {
  for (const xd_gemm_operation operation : kGemmProducts) {
    expect_mistakes(full_case(operation), rows_of_24_bytes());
  }
}

// The guilty rank comes with other numbers of tokens of all ranks.
template <class Change>
void change_tokens(S& s, Change&& change) {
  std::vector<std::int64_t> counts = s.batch.inputs().tokens;
  change(counts);
  s.batch.args.tokens_per_rank = s.numbers(std::move(counts));
}

TEST(ProductsArguments, BeyondTheContextsBoundsAreRefusedWithTheBound) {
  const GemmCase gather = full_case();
  const auto text = [](std::int64_t number) { return std::to_string(number); };
  expect_mistakes(gather,
                  {{{"max_tokens", text(gather.max_tokens() + 1), text(gather.max_tokens())},
                    [](S& s) {
                      change_tokens(s, [](auto& counts) { ++counts.back(); });
                      const DLTensor &a = *s.batch.args.a, &d = *s.batch.args.d;
                      s.batch.args.a = s.tensor(kBf16, {a.shape[0] + 1, a.shape[1]});
                      s.batch.args.d = s.tensor(kBf16, {d.shape[0] + 1, d.shape[1]});
                    }},
                   {{"max_k", "64", text(gather.k())},
                    [](S& s) {
                      s.batch.args.a = s.tensor(kBf16, {s.batch.args.a->shape[0], 64});
                      s.batch.args.b = s.tensor(kBf16, {s.batch.args.b->shape[0], 64});
                    }},
                   {{"max_n", "64", text(gather.n())}, [](S& s) {
                      s.batch.args.d = s.tensor(kBf16, {s.batch.args.d->shape[0], 64});
                      s.batch.args.b = s.tensor(kBf16, {64, s.batch.args.b->shape[1]});
                    }}});
  const GemmCase reduce = full_case(XD_GEMM_ALL_REDUCE);
  const std::int64_t bound = reduce.max_tokens() * reduce.num_ranks;
  expect_mistakes(reduce, {{{"max_tokens", text(bound + 1)}, [](S& s) {
                              const std::int64_t rows = s.c.max_tokens() * s.c.num_ranks + 1;
                              const DLTensor &a = *s.batch.args.a, &d = *s.batch.args.d;
                              s.batch.args.a = s.tensor(kBf16, {rows, a.shape[1]});
                              s.batch.args.d = s.tensor(kBf16, {rows, d.shape[1]});
                            }}});
}

TEST(ProductsArguments, AsNumbersOfTokensThatDoNotFitAreRefused) {
  const std::vector<Mistake<Products>> mistakes = {
      {{"tokens_per_rank", "-1"},
       [](S& s) { change_tokens(s, [](auto& counts) { counts.front() = -1; }); }},
      {{"tokens_per_rank", "max_tokens"},
       [](S& s) { change_tokens(s, [](auto& counts) { counts.front() += 1000; }); }},
      // Not those of a and d.
      {{"tokens_per_rank"}, [](S& s) { change_tokens(s, [](auto& counts) { --counts.back(); }); }},
  };
  expect_mistakes(full_case(XD_GEMM_ALL_GATHER), mistakes);
  expect_mistakes(full_case(XD_GEMM_REDUCE_SCATTER), mistakes);
}

TEST(ProductsArguments, ThatAllGatherAloneHasAreRefusedElsewhere) {
  for (const xd_gemm_operation operation : {XD_GEMM_REDUCE_SCATTER, XD_GEMM_ALL_REDUCE}) {
    expect_mistakes(full_case(operation), {{{"gathered", "all_gather"}, [](S& s) {
                                              s.batch.args.gathered = s.like(s.batch.args.a, kBf16);
                                            }}});
  }
}

TEST(ProductsArguments, OfEightBitsAreRefused) {
  GemmCase c = full_case();
  c.operands = Operands::e4m3;
  c.scaling = Scaling::row;
  const std::string rows = std::to_string(c.max_tokens());
  expect_mistakes(
      c,
      {{{"float8_e5m2"},
        [](S& s) {
          s.batch.args.a = s.like(s.batch.args.a, kE5m2);
          s.batch.args.b = s.like(s.batch.args.b, kE5m2);
        }},
       {{"b: is bfloat16", "float8"}, [](S& s) { s.batch.args.b = s.like(s.batch.args.b, kBf16); }},
       // Scales of two ways, too few of them, and those of one operand alone.
       {{"b_scale"}, [](S& s) { s.batch.args.b_scale = s.tensor(kF32, {1}); }},
       {{"a_scale", rows},
        [](S& s) { s.batch.args.a_scale = s.tensor(kF32, {s.c.max_tokens() - 1}); }},
       {{"a_scale: has " + rows + " rows", "b_scale"},
        [](S& s) { s.batch.args.b_scale = nullptr; }},
       {{"b_scale: is bfloat16", "float32"},
        [](S& s) { s.batch.args.b_scale = s.tensor(kBf16, {s.batch.args.b->shape[0]}); }}});
}

// They are good arguments, of something that is not there: each rank says so of its own call.
TEST(Unsupported, ArgumentsSayWhy) {
  expect_mistakes(full_case(XD_GEMM_ALL_REDUCE),
                  {{{"reduce_bias_grad", "all_reduce"},
                    [](S& s) {
                      s.batch.args.bias_grad = s.tensor(kF32, {s.batch.args.d->shape[1]});
                      s.batch.args.reduce_bias_grad = 1;
                    }}},
                  XD_ERROR_UNSUPPORTED);
  expect_mistakes(full_case(),
                  {{{"DIRECT"}, [](S& s) { s.batch.args.algo = XD_GEMM_ALGO_DIRECT; }}},
                  XD_ERROR_UNSUPPORTED);
}

// The context took memory for other operations.
TEST(Unsupported, OperationsOfAContextSayWhichItHas) {
  for (const xd_gemm_operation made_for : kGemmProducts) {
    on_every_rank([&](Rank& rank) {
      const GemmCase c = full_case(made_for);
      const GemmContext context = Products::make(rank, c);
      for (const xd_gemm_operation other : kGemmProducts) {
        if (other == made_for) continue;
        SCOPED_TRACE(std::string(name_of(other)) + " in a context of " + name_of(made_for));
        const GemmOutcome outcome = GemmBatch(rank, full_case(other), 0).call(context.get());
        EXPECT_EQ(outcome, XD_ERROR_UNSUPPORTED);
        expect_words(outcome.text, {"operations"});
      }
      Products::expect_works(rank, c, context.get());
    });
  }
}

// No turn is taken without a context or arguments.
TEST(ProductsArguments, ThatAreNullAreRefusedAtOnce) {
  on_every_rank([](Rank& rank) {
    const GemmCase c = full_case();
    const GemmContext context = Products::make(rank, c);
    GemmBatch batch(rank, c, 0);
    xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
    for (const xd_status status :
         {xd_gemm_all_gather(nullptr, &batch.args, rank.stream()),
          xd_gemm_wait(nullptr, rank.stream()),
          xd_gemm_explain(context.get(), XD_GEMM_ALL_GATHER, nullptr, &info),
          xd_gemm_explain(context.get(), XD_GEMM_ALL_GATHER, &batch.args, nullptr),
          xd_gemm_context_status(context.get(), nullptr),
          xd_gemm_context_watch(context.get(), nullptr)}) {
      EXPECT_EQ(status, XD_ERROR_INVALID_ARGUMENT);
    }
    EXPECT_EQ(xd_gemm_context_destroy(nullptr), XD_SUCCESS);
    Products::expect_works(rank, c, context.get());
  });
}

// Explain returns what the call would, without a turn.
TEST(Explain, ReturnsTheErrorsOfTheCallHere) {
  on_every_rank([](Rank& rank) {
    const GemmCase c = full_case();
    const GemmContext context = Products::make(rank, c);
    GemmBatch batch(rank, c, 0);
    const xd_gemm_args good = batch.args;
    xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
    force(batch.args.epilogue, 9);
    EXPECT_EQ(xd_gemm_explain(context.get(), XD_GEMM_ALL_GATHER, &batch.args, &info),
              XD_ERROR_INVALID_ARGUMENT);
    expect_said("epilogue");
    batch.args = good;
    EXPECT_EQ(xd_gemm_explain(context.get(), XD_GEMM_ALL_REDUCE, &batch.args, &info),
              XD_ERROR_UNSUPPORTED);
    EXPECT_EQ(xd_gemm_explain(context.get(), XD_GEMM_START_ALL_GATHER, &batch.args, &info),
              XD_ERROR_INVALID_ARGUMENT);
    Products::expect_works(rank, c, context.get());
  });
}

}  // namespace
}  // namespace xd::test
