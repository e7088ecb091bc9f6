// Numbers at the edges of their formats, and modes of arithmetic of the caller's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "conformance/gemm/batch.h"
#include "support/float_modes.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One token of each rank is not a number: so are its row, the largest element and the column sums.
TEST(NotANumber, GoesThroughProductsAndIsTheLargest) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    GemmCase c = plain_gemm_case(rank.num_ranks, operation);
    c.tokens = TokenCounts::most;
    c.amax = true;
    c.bias_grad = BiasGrad::own;
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    Matrix a = batch.inputs().a;
    // Each rank's second token in all_gather, the second of all where rows are summed.
    if (operation == XD_GEMM_ALL_GATHER || rank.rank == rank.num_ranks - 1) {
      a.at(1, 3) = kNan;
    }
    std::vector<std::uint16_t> codes;
    for (const double value : a.values) {
      codes.push_back(std::isnan(value) ? 0x7FC0
                                        : static_cast<std::uint16_t>(round_to(value, kBf16)));
    }
    batch.field("a").tensor->write(codes);
    ok(batch.call(context.get()));
    const Tensor& d = *batch.field("d").tensor;
    const Matrix got = decoded(d.read(), d.shape()[0], c.n(), kBf16);
    const bool has_rows = operation != XD_GEMM_REDUCE_SCATTER || rank.rank == 0;
    for (std::int64_t i = 0; i < got.rows; ++i) {
      const bool lost =
          operation == XD_GEMM_ALL_GATHER ? i % c.max_tokens() == 1 : has_rows && i == 1;
      for (std::int64_t n = 0; n < c.n(); ++n) {
        // Zero times NaN is NaN as well.
        EXPECT_EQ(std::isnan(got.at(i, n)), lost) << "row " << i << ", column " << n;
      }
    }
    const float amax = batch.field("d_amax").tensor->read_as<float>()[0];
    EXPECT_EQ(std::isnan(amax), has_rows);
    for (const float sum : batch.field("bias_grad").tensor->read_as<float>()) {
      EXPECT_EQ(std::isnan(sum), has_rows);
    }
  });
}

// Rows that travel as words must not look like words that have not come.
TEST(NotANumber, OfAllOnesIsGathered) {
  on_every_rank([&](Rank& rank) {
    GemmCase c = plain_gemm_case(rank.num_ranks);
    c.gathered = Gathered::given;
    c.tokens = TokenCounts::most;
    const GemmContext context = make_context(rank.comm, c.config());
    for (int call = 0; call < 3; ++call) {  // words of either parity, and again
      GemmBatch batch(rank, c, 0);
      Tensor& a = *batch.field("a").tensor;
      a.write(std::vector<std::uint16_t>(a.buffer().bytes() / 2, 0xFFFF));
      ok(batch.call(context.get()));
      for (const char* const name : {"gathered", "d"}) {
        const Tensor& got = *batch.field(name).tensor;
        const Matrix values = decoded(got.read(), got.shape()[0], got.shape()[1], kBf16);
        EXPECT_TRUE(std::ranges::all_of(values.values, [](double x) { return std::isnan(x); }))
            << name;
      }
    }
    GemmBatch after(rank, c, 0);
    after.call_and_check(context.get());
  });
}

// As in BLAS: c may be memory that nobody has written yet.
TEST(NotANumber, InCIsNotReadWhereBetaIsZero) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    GemmCase c = plain_gemm_case(rank.num_ranks, operation);
    c.addend = Addend::unscaled;
    const GemmContext context = make_context(rank.comm, c.config());
    for (const char* const place : {"c", "d"}) {
      GemmBatch batch(rank, c, 0);
      Tensor& given = *batch.field(place).tensor;
      given.write(std::vector<std::uint16_t>(given.buffer().bytes() / 2, 0x7FC0));
      batch.args.c = given.dl();
      ok(batch.call(context.get()));
      expect_numbers("d", *batch.field("d").tensor, batch.expected().d, c, false);
    }
  });
}

// A sum of 16 bits that is rounded before c is added would be rounded twice.
TEST(SumsWithC, AreRoundedOnceHoweverFewRowsThereAre) {
  for (const Addend addend : {Addend::added, Addend::in_place}) {
    on_every_rank([&](Rank& rank) {
      for (const std::int64_t tokens : {1, 2, 5}) {
        GemmCase c = plain_gemm_case(rank.num_ranks);
        c.addend = addend;
        c.operands = tokens == 2 ? Operands::f16 : Operands::bf16;
        c.tokens = TokenCounts::most;
        c.token_units = tokens;
        const GemmContext context = make_context(rank.comm, c.config());
        for (int step = 0; step < 4; ++step) {
          GemmBatch batch(rank, c, step);
          batch.call_and_check(context.get());
        }
      }
    });
  }
}

TEST(LargeNumbers, SaturateInEightBitsAndAreInfiniteInSixteen) {
  on_every_rank([](Rank& rank) {
    for (const Output result : {Output::e4m3, Output::e5m2, Output::other_half}) {
      GemmCase c = plain_gemm_case(rank.num_ranks);
      c.result = result;
      c.amax = true;
      const GemmContext context = make_context(rank.comm, c.config());
      GemmBatch batch(rank, c, 0);
      xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
      const xd_status can = xd_gemm_explain(context.get(), c.operation, &batch.args, &info);
      if (can == XD_ERROR_UNSUPPORTED && rank.memory->device().device_type != kDLCPU) continue;
      batch.args.alpha = 65536;  // every sum but 0 is beyond the largest number
      if (c.scaled_output()) batch.field("d_scale").tensor->write(std::vector<float>{1});
      ok(batch.call(context.get()));
      const Tensor& d = *batch.field("d").tensor;
      const Matrix got = decoded(d.read(), d.shape()[0], c.n(), c.d_type());
      const double largest = result == Output::e4m3   ? 448
                             : result == Output::e5m2 ? 57344
                                                      : std::numeric_limits<double>::infinity();
      for (std::size_t i = 0; i < got.values.size(); ++i) {
        const double sum = batch.expected().d.values[i];
        const double want = sum == 0 ? 0 : std::copysign(largest, sum);
        EXPECT_EQ(got.values[i], want) << "element " << i;
      }
      // The largest element is told before it is rounded.
      EXPECT_EQ(static_cast<double>(batch.field("d_amax").tensor->read_as<float>()[0]),
                batch.expected().amax * 65536);
    }
  });
}

// Where b has a scale per row and a has none, those of a are 1.
TEST(EightBits, MayHaveScalesPerRowOfBAlone) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    GemmCase c = plain_gemm_case(rank.num_ranks, operation);
    c.operands = Operands::e4m3;
    c.scaling = Scaling::row;
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    const auto rows = static_cast<std::size_t>(batch.args.a_scale->shape[0]);
    batch.field("a_scale").tensor->write(std::vector<float>(rows, 1.0f));
    ok(batch.call(context.get()));
    const std::vector<std::byte> scaled = batch.output_bytes();
    batch.args.a_scale = nullptr;
    batch.reset();
    ok(batch.call(context.get()));
    EXPECT_EQ(batch.output_bytes(), scaled);
  });
}

// The scales of a call in tensors that begin at another element.
std::vector<std::unique_ptr<Tensor>> shift_scales(const Rank& rank, GemmBatch& batch,
                                                  std::int64_t shift) {
  std::vector<std::unique_ptr<Tensor>> shifted;
  for (const char* const name : {"a_scale", "b_scale"}) {
    GemmBatch::Field& field = batch.field(name);
    shifted.push_back(std::make_unique<Tensor>(rank, kF32, field.tensor->shape(), Place::ordinary,
                                               Spread{.shift = shift, .strides = {}}));
    shifted.back()->write(field.tensor->read_as<float>());
    *field.slot = shifted.back()->dl();
  }
  return shifted;
}

// So do those of a rank's rows among the rows of all, by algorithms that multiply these alone.
TEST(EightBits, HaveScalesThatBeginAtAnyElement) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    for (const Scaling scaling : {Scaling::tensor, Scaling::row, Scaling::block}) {
      GemmCase c = plain_gemm_case(rank.num_ranks, operation);
      c.operands = Operands::e4m3;
      c.scaling = scaling;
      c.n_units = 17;
      c.k_units = scaling == Scaling::block ? 32 : 3;  // four blocks
      c.token_units = 70;
      const GemmContext context = make_context(rank.comm, c.config());
      for (const xd_gemm_algo algo : kGemmAlgos) {
        SCOPED_TRACE(std::string(name_of(operation)) + " by algorithm " + std::to_string(algo) +
                     " of " + c.description());
        const std::int64_t shift = algo % 4;
        GemmBatch batch(rank, c, static_cast<int>(shift));
        const auto shifted = shift_scales(rank, batch, shift);
        batch.args.algo = algo;
        if (!batch.can_call(context.get())) continue;
        batch.call_and_check(context.get());
      }
    }
  });
}

TEST(EightBits, MayHaveAScaleForEachRanksRows) {
  on_every_rank([](Rank& rank) {
    for (const Operands operands : {Operands::e4m3, Operands::e4m3_e5m2}) {
      for (const std::int64_t tokens : {1, 16}) {
        GemmCase c = plain_gemm_case(rank.num_ranks);
        c.operands = operands;
        c.scaling = Scaling::tensor;
        c.gathered = Gathered::given;
        c.tokens = TokenCounts::most;
        c.token_units = tokens;
        const GemmContext context = make_context(rank.comm, c.config());
        GemmBatch batch(rank, c, 0);
        batch.call_and_check(context.get());
      }
    }
  });
}

// Without d_scale results of 8 bits are the sums themselves, rounded.
TEST(EightBits, NeedNoScale) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    for (const Output result : {Output::e4m3, Output::e5m2}) {
      GemmCase c = plain_gemm_case(rank.num_ranks, operation);
      c.result = result;
      const GemmContext context = make_context(rank.comm, c.config());
      GemmBatch batch(rank, c, 0);
      batch.args.d_scale = nullptr;
      xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
      const xd_status can = xd_gemm_explain(context.get(), c.operation, &batch.args, &info);
      if (can == XD_ERROR_UNSUPPORTED && rank.memory->device().device_type != kDLCPU) continue;
      ok(batch.call(context.get()));
      expect_numbers("d", *batch.field("d").tensor, batch.expected().d, c, false);
    }
  });
}

// Numbers below the smallest normal one of their type are no zeros.
TEST(SmallNumbers, AreKept) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    GemmCase c = plain_gemm_case(rank.num_ranks, operation);
    c.operands = Operands::f16;
    c.alpha = 0x1.0p-26f;  // sums are multiples of a quarter of the smallest number of fp16
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    batch.call_and_check(context.get());
  });
}

// The caller's thread keeps its modes, and they change no result.
TEST(FloatModes, OfTheCallerAreNeitherUsedNorChanged) {
  if (world().memory().stream() != nullptr) GTEST_SKIP() << "kernels have modes of their own";
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    GemmCase c = plain_gemm_case(rank.num_ranks, operation);
    c.values = Values::random;
    c.bias = Bias::f32;
    c.bias_grad = BiasGrad::own;
    const GemmContext context = make_context(rank.comm, c.config());
    GemmBatch batch(rank, c, 0);
    ok(batch.call(context.get()));
    const std::vector<std::byte> plain = batch.output_bytes();
    for (const FloatMode mode : {FloatMode::flushing, FloatMode::upward}) {
      batch.reset();
      xd_status status = XD_SUCCESS;
      bool untouched = false;
      {
        const InFloatMode inside(mode);
        status = batch.enqueue(context.get());
        untouched = inside.untouched();
      }
      ok(status);
      EXPECT_TRUE(untouched);
      EXPECT_EQ(batch.output_bytes(), plain);
    }
  });
}

}  // namespace
}  // namespace xd::test
