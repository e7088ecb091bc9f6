// TransformerEngine's products with transfers against the library's own calls, bit by bit.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "compat/te/errors.h"
#include "compat/te/product.h"
#include "conformance/gemm/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

using crossdock::te::as_nccl;
using transformer_engine::DType;
using transformer_engine::TensorWrapper;

// The arguments of a call there, from those of a call here.
struct TeCall {
  std::int64_t m = 0, n = 0, k = 0;
  TensorWrapper a, b, d, bias, pre_act;
  bool transa = false, transb = false, grad = false, accumulate = false;
  NVTECommGemmAlgoType algo = kNVTECommGemmAlgoDefault;

  TeCall(const Rank& rank, const GemmCase& c, GemmBatch& batch)
      : a(te_tensor(batch.args.b)),
        b(te_tensor(batch.args.a)),
        d(te_tensor(batch.args.d)),
        bias(te_tensor(batch.args.bias != nullptr ? batch.args.bias : batch.args.bias_grad)),
        pre_act(te_tensor(batch.args.pre_activation)) {
    const std::int64_t ranks = rank.num_ranks;
    m = c.gathers() ? c.n() * ranks : c.n();
    k = c.gathers() ? c.k() : c.k() * ranks;
    n = batch.inputs().tokens[0] * ranks;
    transa = batch.args.transpose_b != 0;
    transb = batch.args.transpose_a != 0;
    grad = c.reads_pre_activation();
    accumulate = batch.args.c != nullptr;
    const std::vector<size_t> one{1};
    const auto set = [&](const DLTensor* number, auto setter) {
      if (number != nullptr) setter(number->data);
    };
    set(batch.args.a_scale, [&](void* at) { b.set_rowwise_scale_inv(at, DType::kFloat32, one); });
    set(batch.args.b_scale, [&](void* at) { a.set_rowwise_scale_inv(at, DType::kFloat32, one); });
    set(batch.args.d_scale, [&](void* at) { d.set_scale(at, DType::kFloat32, one); });
    set(batch.args.d_amax, [&](void* at) { d.set_amax(at, DType::kFloat32, one); });
  }

  void make(NVTECommGemmCtx* ctx, xd_gemm_operation operation, const Rank& rank) const {
    te_function(operation)(ctx, m, n, k, a.data(), b.data(), d.data(), bias.data(), pre_act.data(),
                           transa, transb, grad, accumulate, 0, rank.stream(), algo);
    rank.memory->synchronize();
  }
};

// The options that a product may have beside its operands.
struct Variant {
  const char* name;
  std::function<void(GemmCase&)> set;
};

void with_pre_activation(GemmCase& c, xd_gemm_epilogue epilogue) {
  c.epilogue = epilogue;
  c.pre_activation = true;
}

const Variant kVariants[] = {
    {"Plain", [](GemmCase&) {}},
    {"Float32", [](GemmCase& c) { c.operands = Operands::f32; }},
    {"Float16", [](GemmCase& c) { c.operands = Operands::f16; }},
    {"ToFloat32", [](GemmCase& c) { c.result = Output::f32; }},
    {"Accumulated", [](GemmCase& c) { c.addend = Addend::in_place; }},
    {"Bias", [](GemmCase& c) { c.bias = Bias::like_d; }},
    {"Gelu", [](GemmCase& c) { with_pre_activation(c, XD_GEMM_EPILOGUE_GELU); }},
    {"GeluBias",
     [](GemmCase& c) {
       with_pre_activation(c, XD_GEMM_EPILOGUE_GELU);
       c.bias = Bias::f32;
     }},
    {"Dgelu", [](GemmCase& c) { c.epilogue = XD_GEMM_EPILOGUE_DGELU; }},
    {"DgeluBiasGrad",
     [](GemmCase& c) {
       c.epilogue = XD_GEMM_EPILOGUE_DGELU;
       c.bias_grad = BiasGrad::own;
     }},
    {"Fp8",
     [](GemmCase& c) {
       c.operands = Operands::e4m3_e5m2;
       c.scaling = Scaling::tensor;
     }},
    {"Fp8ToFp8",
     [](GemmCase& c) {
       c.operands = Operands::e4m3;
       c.scaling = Scaling::tensor;
       c.result = Output::e4m3;
       c.amax = true;
     }},
};

GemmCase te_case(xd_gemm_operation operation, Stored stored, const Variant& variant) {
  GemmCase c = plain_gemm_case(world().num_ranks(), operation);
  c.tokens = TokenCounts::equal;
  c.stored = stored;
  variant.set(c);
  if (c.fp8()) {  // multiples of 16 everywhere, as tensor cores like them
    c.tokens = TokenCounts::most;
    c.token_units = 16;
    c.n_units = c.k_units = 4;
  }
  return c;
}

// Runs a case by both interfaces.
void compare(Rank& rank, const GemmCase& c, NVTECommGemmCtx* ctx, NVTECommGemmAlgoType algo) {
  SCOPED_TRACE(c.description());
  GemmBatch direct(rank, c, 0), batch(rank, c, 0);
  const GemmContext context = make_context(rank.comm, c.config());
  ok(direct.call(context.get()));
  TeCall call(rank, c, batch);
  call.algo = algo;
  call.make(ctx, c.operation, rank);
  batch.check(context.get());
  EXPECT_EQ(batch.output_bytes(), direct.output_bytes());
}

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

class TeGemm : public testing::TestWithParam<Variant> {};

TEST_P(TeGemm, EveryFunctionAndOrderGivesTheBitsOfTheLibrarysOwnCall) {
  on_every_rank([&](Rank& rank) {
    const TeContext ctx = make_te_context(rank, as_nccl(rank.comm));
    for (const xd_gemm_operation operation : kGemmProducts) {
      for (const Stored stored : {Stored::nt, Stored::nn, Stored::tn}) {
        const GemmCase c = te_case(operation, stored, GetParam());
        // Hopper multiplies fp8 in one order.
        if (rank.asynchronous() && c.fp8() && stored != Stored::nt) continue;
        compare(rank, c, ctx.get(), kNVTECommGemmAlgoDefault);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, TeGemm, testing::ValuesIn(kVariants),
                         testing::PrintToStringParamName());

TEST(TeGemmAlgo, AnyOfThemComputesTheSame) {
  on_every_rank([&](Rank& rank) {
    const TeContext ctx = make_te_context(rank, as_nccl(rank.comm));
    for (const xd_gemm_operation operation : kGemmProducts) {
      for (int algo = kNVTECommGemmAlgoDefault; algo <= kNVTECommGemmAlgoAtomicMulticast; ++algo) {
        compare(rank, te_case(operation, Stored::nt, kVariants[0]), ctx.get(),
                static_cast<NVTECommGemmAlgoType>(algo));
      }
    }
  });
}

// Sizes that grow and shrink, and other types, in one context.
TEST(TeGemmContext, ServesSizesAndTypesThatChange) {
  on_every_rank([&](Rank& rank) {
    const TeContext ctx = make_te_context(rank, as_nccl(rank.comm));
    for (const int units : {1, 3, 2, 7, 8, 5}) {
      for (const Operands operands : {Operands::bf16, Operands::f32}) {
        for (const xd_gemm_operation operation : kGemmProducts) {
          GemmCase c = te_case(operation, Stored::nt, kVariants[0]);
          c.operands = operands;
          c.n_units = c.k_units = units;
          c.token_units = std::int64_t{2} * units;
          c.seed += static_cast<std::uint64_t>(units);
          compare(rank, c, ctx.get(), kNVTECommGemmAlgoDefault);
        }
      }
    }
    EXPECT_LE(ctx->engines.size(), 3u * 8);
  });
}

// n is dealt out in equal blocks, the last ones smaller or empty, as cuBLASMp does it. A is all
// ones, so that D has sums over the rows of B.
TEST(TeGemmShares, OfNThatRanksDoNotDivide) {
  on_every_rank([&](Rank& rank) {
    const TeContext ctx = make_te_context(rank, as_nccl(rank.comm));
    const std::int64_t ranks = rank.num_ranks, m = 8, k = 4;
    for (const std::int64_t n : {std::int64_t{1}, 2 * ranks + 1, 5 * ranks - 1}) {
      const std::int64_t block = (n + ranks - 1) / ranks;
      const std::int64_t first = std::min(n, block * rank.rank);
      const std::int64_t own = std::min(block, n - first);
      EXPECT_EQ(nvte_comm_gemm_numroc(ctx.get(), n), own);
      Tensor a(rank, kF32, {m, k}), b(rank, kF32, {own, k}), d(rank, kF32, {n, m});
      a.write(std::vector<float>(static_cast<std::size_t>(m * k), 1.0f));
      b.write(equal_columns(first, own, k, 1));
      multiply(rank, ctx.get(), XD_GEMM_ALL_GATHER, {m * ranks, n, k}, a, b, d);
      EXPECT_EQ(d.read_as<float>(), equal_columns(0, n, m, k));
      EXPECT_TRUE(d.buffer().guards_intact());
    }
  });
}

// ---- Errors ------------------------------------------------------------------------------------

TEST(TeGemmContext, OfAnotherRankThanTheCommunicatorsIsRefused) {
  on_every_rank([&](Rank& rank) {
    expect_error(thrown_by([&] {
                   nvte_comm_gemm_ctx_create(as_nccl(rank.comm), rank.num_ranks + 1, rank.rank);
                 }),
                 XD_ERROR_INVALID_ARGUMENT, "nvte_comm_gemm_ctx_create: rank ");
    expect_error(thrown_by([&] { nvte_comm_gemm_ctx_create(nullptr, 1, 0); }),
                 XD_ERROR_INVALID_ARGUMENT, "comm = NULL");
    nvte_comm_gemm_ctx_destroy(nullptr);
  });
}

// A mistake that all ranks make alike, before anything is sent.
struct Mistake {
  const char* name;
  const char* text;
  std::function<void(TeCall&, const Rank&)> make;
};

const Mistake kMistakes[] = {
    {"NoTokens", "expected positive numbers", [](TeCall& call, const Rank&) { call.n = 0; }},
    {"OtherK", "b: is [", [](TeCall& call, const Rank&) { call.k += 8; }},
    {"OtherN", "b: is [",
     [](TeCall& call, const Rank& rank) { call.n += std::int64_t{4} * rank.num_ranks; }},
    {"OtherM", "a: is [",
     [](TeCall& call, const Rank& rank) { call.m += std::int64_t{8} * rank.num_ranks; }},
    {"BothTransposed", "transa, transb = true, true",
     [](TeCall& call, const Rank&) { call.transb = true; }},
    {"OtherAlgo", "algo = 7",
     [](TeCall& call, const Rank&) { call.algo = static_cast<NVTECommGemmAlgoType>(7); }},
    {"BlockScaling", "a: NVTEScalingMode 1",
     [](TeCall& call, const Rank&) {
       TensorWrapper scaled(NVTE_MXFP8_1D_SCALING);
       scaled.set_rowwise_data(call.a.dptr(), call.a.dtype(), call.a.shape());
       call.a = std::move(scaled);
     }},
    {"BiasGradAlone", "grad = true with bias and without pre_act_out",
     [](TeCall& call, const Rank&) {
       call.grad = true;
       call.bias.set_rowwise_data(call.a.dptr(), DType::kFloat32, std::vector<size_t>{8});
     }},
};

void PrintTo(const Mistake& mistake, std::ostream* out) { *out << mistake.name; }

class TeGemmMistake : public testing::TestWithParam<Mistake> {};

TEST_P(TeGemmMistake, IsThrownOnEveryRankAndTheContextLives) {
  const GemmCase c = te_case(XD_GEMM_ALL_GATHER, Stored::nt, kVariants[0]);
  on_every_rank([&](Rank& rank) {
    const TeContext ctx = make_te_context(rank, as_nccl(rank.comm));
    GemmBatch batch(rank, c, 0);
    TeCall call(rank, c, batch);
    GetParam().make(call, rank);
    const Thrown thrown = thrown_by([&] { call.make(ctx.get(), c.operation, rank); });
    expect_error(thrown, XD_ERROR_INVALID_ARGUMENT, GetParam().text);
    EXPECT_EQ(thrown.text.find("nvte_all_gather_gemm: "), 0u) << thrown.text;
    compare(rank, c, ctx.get(), kNVTECommGemmAlgoDefault);
  });
}

INSTANTIATE_TEST_SUITE_P(All, TeGemmMistake, testing::ValuesIn(kMistakes),
                         testing::PrintToStringParamName());

TEST(TeGemmErrors, OfOneRankAreToldThePeers) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "there are no peers";
  const GemmCase c = te_case(XD_GEMM_REDUCE_SCATTER, Stored::nt, kVariants[0]);
  on_every_rank([&](Rank& rank) {
    const TeContext ctx = make_te_context(rank, as_nccl(rank.comm));
    compare(rank, c, ctx.get(), kNVTECommGemmAlgoDefault);
    GemmBatch batch(rank, c, 0);
    TeCall call(rank, c, batch);
    const bool guilty = rank.rank == 0;
    if (guilty) call.transb = true;
    // On a device the peers hear of it by their next call.
    const Thrown thrown = thrown_by([&] {
      call.make(ctx.get(), c.operation, rank);
      call.make(ctx.get(), c.operation, rank);
    });
    expect_error(thrown, guilty ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH,
                 guilty ? "transa, transb" : "rank 0");
    if (guilty && rank.asynchronous()) {
      call.transb = false;
      call.make(ctx.get(), c.operation, rank);
    }
    compare(rank, c, ctx.get(), kNVTECommGemmAlgoDefault);
  });
}

TEST(TeGemmShares, OfMOrKThatRanksDoNotDivideAreRefused) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank divides everything";
  on_every_rank([&](Rank& rank) {
    const TeContext ctx = make_te_context(rank, as_nccl(rank.comm));
    const std::string ranks = ", expected a multiple of " + std::to_string(rank.num_ranks);
    for (const xd_gemm_operation operation : kGemmProducts) {
      const GemmCase c = te_case(operation, Stored::nt, kVariants[0]);
      GemmBatch batch(rank, c, 0);
      TeCall call(rank, c, batch);
      ++(c.gathers() ? call.m : call.k);
      expect_error(thrown_by([&] { call.make(ctx.get(), operation, rank); }),
                   XD_ERROR_INVALID_ARGUMENT, ranks);
    }
  });
}

}  // namespace
}  // namespace xd::test
