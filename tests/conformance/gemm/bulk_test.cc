// Gathers and sums of a tensor beside a product that is this rank's alone, and gathers that go on
// beside whatever comes next.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "conformance/case.h"
#include "conformance/gemm/batch.h"
#include "conformance/said.h"
#include "support/gtest_main.h"
#include "support/random.h"

namespace xd::test {
namespace {

// A tensor that is gathered or summed.
struct Moved {
  xd_gemm_operation collective = XD_GEMM_ALL_GATHER;
  DLDataType type = kBf16;
  std::int64_t columns = 24;
  TokenCounts tokens = TokenCounts::uneven;
  Spots spots = Spots::ordinary;

  std::string description() const {
    return std::string(name_of(collective)) + " of type " + std::to_string(type.code) + "/" +
           std::to_string(type.bits) + ", " + std::to_string(columns) + " columns, tokens " +
           std::to_string(static_cast<int>(tokens)) + ", memory " +
           std::to_string(static_cast<int>(spots));
  }
};

constexpr std::int64_t kMaxTokens = 6;

// One rank's `in` and `out`, in one call.
class MovedTensors {
 public:
  MovedTensors(const Rank& rank, const Moved& moved, int step) : moved_(moved) {
    GemmCase c = plain_gemm_case(rank.num_ranks);
    c.tokens = moved.tokens;
    c.token_units = kMaxTokens;
    c.spots = moved.spots;
    counts_ = c.tokens_of(step);
    equal_ = moved.tokens == TokenCounts::equal;
    const std::int64_t own = counts_[static_cast<std::size_t>(rank.rank)], all = sum_of(counts_);
    const bool gather = moved.collective == XD_GEMM_ALL_GATHER;
    in_ = std::make_unique<Tensor>(rank, moved.type, std::vector{gather ? own : all, moved.columns},
                                   c.place(0, rank.rank));
    out_ = std::make_unique<Tensor>(
        rank, moved.type, std::vector{gather ? all : own, moved.columns}, c.place(1, rank.rank));
    in_->write(codes(rank.rank, step));
    expect(rank, step);
  }

  const DLTensor* in() const { return in_->dl(); }
  const DLTensor* out() const { return out_->dl(); }
  Tensor& in_tensor() { return *in_; }
  Tensor& out_tensor() { return *out_; }
  const std::int64_t* tokens() const { return equal_ ? nullptr : counts_.data(); }
  void reset() { out_->buffer().fill(kPoison); }
  void check() const {
    EXPECT_TRUE(out_->buffer().guards_intact() && in_->buffer().guards_intact());
    EXPECT_EQ(out_->read(), expected_) << moved_.description();
  }

 private:
  // The numbers that a rank gives. Sums of such numbers over ranks are exact, whatever their type.
  std::vector<std::byte> codes(int rank, int step) const {
    const bool gather = moved_.collective == XD_GEMM_ALL_GATHER;
    const std::int64_t rows = gather ? counts_[static_cast<std::size_t>(rank)] : sum_of(counts_);
    Random random(mix(0xB17, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(rank)));
    if (!gather) {
      Matrix numbers(rows, moved_.columns);
      for (double& value : numbers.values) value = static_cast<double>(random.below(511)) - 255;
      return codes_of(numbers, moved_.type);
    }
    std::vector<std::byte> bytes(static_cast<std::size_t>(rows * moved_.columns) *
                                 element_bytes(moved_.type));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.below(256));
    return bytes;
  }

  void expect(const Rank& rank, int step) {
    if (moved_.collective == XD_GEMM_ALL_GATHER) {
      for (int r = 0; r < rank.num_ranks; ++r) {
        const std::vector<std::byte> bytes = codes(r, step);
        expected_.insert(expected_.end(), bytes.begin(), bytes.end());
      }
      return;
    }
    Matrix sums(counts_[static_cast<std::size_t>(rank.rank)], moved_.columns);
    for (int r = 0; r < rank.num_ranks; ++r) {
      const Matrix all = decoded(codes(r, step), sum_of(counts_), moved_.columns, moved_.type);
      const Matrix rows = rows_of(all, sum_before(counts_, rank.rank), sums.rows);
      for (std::size_t i = 0; i < sums.values.size(); ++i) sums.values[i] += rows.values[i];
    }
    // 0 - 0 has no sign to agree on: numbers that cancel are +0 here and in float32.
    expected_ = codes_of(sums, moved_.type);
  }

  Moved moved_;
  bool equal_ = false;
  std::vector<std::int64_t> counts_;
  std::unique_ptr<Tensor> in_, out_;
  std::vector<std::byte> expected_;
};

// A product of this rank alone, with sizes of its own.
GemmCase lone_case(const Rank& rank, int number) {
  GemmCase c = plain_gemm_case(1);
  c.seed = mix(c.seed, static_cast<std::uint64_t>(rank.rank), static_cast<std::uint64_t>(number));
  c.operands = number % 3 == 2 ? Operands::f32 : Operands::bf16;
  c.stored = static_cast<Stored>(number % 3);
  c.n_units = 1 + (rank.rank + number) % 4;
  c.k_units = 1 + (rank.rank + 2 * number) % 3;
  c.epilogue = number % 2 == 0 ? XD_GEMM_EPILOGUE_NONE : XD_GEMM_EPILOGUE_RELU;
  c.addend = number % 4 == 1 ? Addend::in_place : Addend::none;
  c.bias = number % 2 == 0 ? Bias::none : Bias::like_d;
  c.tokens = number % 5 == 4 ? TokenCounts::none : TokenCounts::uneven;
  return c;
}

// A rank by itself, on this rank's device.
Rank alone(const Rank& rank) {
  Rank result = rank;
  result.rank = 0;
  result.num_ranks = 1;
  return result;
}

xd_gemm_config bulk_config() {
  xd_gemm_config config = XD_GEMM_CONFIG_INIT;
  config.operations = XD_GEMM_BIT(XD_GEMM_BULK) | XD_GEMM_BIT(XD_GEMM_START_ALL_GATHER) |
                      XD_GEMM_BIT(XD_GEMM_ALL_GATHER) | XD_GEMM_BIT(XD_GEMM_REDUCE_SCATTER);
  config.max_tokens = kMaxTokens;
  config.max_k = config.max_n = 640;
  config.dtype = kF32;
  return config;
}

xd_gemm_bulk_args bulk_args(const Moved& moved, const MovedTensors& tensors) {
  xd_gemm_bulk_args args = XD_GEMM_BULK_ARGS_INIT;
  args.collective = moved.collective;
  args.in = tensors.in();
  args.out = tensors.out();
  args.tokens_per_rank = tensors.tokens();
  return args;
}

xd_gemm_gather_args gather_args(const MovedTensors& tensors) {
  xd_gemm_gather_args args = XD_GEMM_GATHER_ARGS_INIT;
  args.in = tensors.in();
  args.out = tensors.out();
  args.tokens_per_rank = tensors.tokens();
  return args;
}

std::vector<Moved> all_moved() {
  std::vector<Moved> all;
  const TokenCounts kCounts[] = {TokenCounts::equal, TokenCounts::uneven, TokenCounts::holes,
                                 TokenCounts::few,   TokenCounts::one,    TokenCounts::none,
                                 TokenCounts::most};
  int number = 0;
  for (const TokenCounts tokens : kCounts) {
    const DLDataType carried[] = {kBf16, kU8, kE5m2, kI32}, summed[] = {kBf16, kF16, kF32};
    const auto spots = static_cast<Spots>(number % 3);
    all.push_back(
        {XD_GEMM_ALL_GATHER, carried[number % 4], number % 2 == 0 ? 16 : 592, tokens, spots});
    all.push_back(
        {XD_GEMM_REDUCE_SCATTER, summed[number % 3], number % 2 == 0 ? 8 : 520, tokens, spots});
    ++number;
  }
  return all;
}

TEST(Bulk, MovesATensorWhileItComputesAProductOfThisRankAlone) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, bulk_config());
    int number = 0;
    for (const Moved& moved : all_moved()) {
      for (int step = 0; step < 2; ++step) {
        SCOPED_TRACE(moved.description() + ", call " + std::to_string(step));
        MovedTensors tensors(rank, moved, step);
        GemmBatch product(alone(rank), lone_case(rank, number), step);
        // Ranks need not all have a product.
        const bool with_product = (number + rank.rank) % 3 != 0;
        xd_gemm_bulk_args args = bulk_args(moved, tensors);
        if (with_product) args.product = &product.args;
        ok(finish(rank, context.get(), xd_gemm_bulk(context.get(), &args, rank.stream())));
        tensors.check();
        if (with_product) product.check(context.get());
        ++number;
      }
    }
  });
}

// dgrad and wgrad: the product reads what the last operation wrote, while the next sum is on its
// way.
TEST(Bulk, MayReadWhatTheLastOperationGathered) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, bulk_config());
    Moved gathered, summed;
    gathered.tokens = TokenCounts::most;
    summed.collective = XD_GEMM_REDUCE_SCATTER;
    for (int step = 0; step < 3; ++step) {
      MovedTensors first(rank, gathered, step), second(rank, summed, step);
      xd_gemm_bulk_args args = bulk_args(gathered, first);
      ok(finish(rank, context.get(), xd_gemm_bulk(context.get(), &args, rank.stream())));
      // d = out^T * out: rows of d are columns of what was gathered. Its codes may be anything, so
      // small numbers take their place.
      const std::int64_t rows = kMaxTokens * rank.num_ranks, columns = gathered.columns;
      Matrix numbers(rows, columns);
      for (std::size_t i = 0; i < numbers.values.size(); ++i) {
        numbers.values[i] = static_cast<double>(i % 7) - 3;
      }
      first.out_tensor().write(codes_of(numbers, kBf16));
      Tensor d(rank, kF32, {columns, columns});
      xd_gemm_args product = XD_GEMM_ARGS_INIT;
      product.a = product.b = first.out();
      product.transpose_a = 1;
      product.transpose_b = 0;
      product.d = d.dl();
      args = bulk_args(summed, second);
      args.product = &product;
      ok(finish(rank, context.get(), xd_gemm_bulk(context.get(), &args, rank.stream())));
      second.check();
      Matrix expected(columns, columns);
      multiply_add(expected, transposed(numbers), numbers);
      expect_numbers("d", d, expected, plain_gemm_case(1), false);
    }
  });
}

// The context's bounds are those of what is transferred.
TEST(Bulk, HasProductsOfAnySize) {
  on_every_rank([](Rank& rank) {
    xd_gemm_config config = bulk_config();
    config.operations = XD_GEMM_BIT(XD_GEMM_BULK);
    config.max_k = config.max_n = 24;
    const GemmContext context = make_context(rank.comm, config);
    GemmCase c = plain_gemm_case(1);
    c.token_units = 3 * kMaxTokens * rank.num_ranks;
    c.tokens = TokenCounts::most;
    c.n_units = 7;
    c.k_units = 9;
    c.bias = Bias::f32;
    c.bias_grad = BiasGrad::own;
    MovedTensors tensors(rank, Moved{}, 0);
    GemmBatch product(alone(rank), c, 0);
    xd_gemm_bulk_args args = bulk_args(Moved{}, tensors);
    args.product = &product.args;
    ok(finish(rank, context.get(), xd_gemm_bulk(context.get(), &args, rank.stream())));
    tensors.check();
    product.check(context.get());
  });
}

TEST(StartedGather, IsCompleteAfterWait) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, bulk_config());
    ok(xd_gemm_wait(context.get(), rank.stream()));  // nothing was begun
    for (const Moved& moved : all_moved()) {
      if (moved.collective != XD_GEMM_ALL_GATHER) continue;
      SCOPED_TRACE(moved.description());
      MovedTensors tensors(rank, moved, 0);
      const xd_gemm_gather_args args = gather_args(tensors);
      ok(finish(rank, context.get(),
                xd_gemm_start_all_gather(context.get(), &args, rank.stream())));
      ok(finish(rank, context.get(), xd_gemm_wait(context.get(), rank.stream())));
      tensors.check();
      ok(xd_gemm_wait(context.get(), rank.stream()));
    }
  });
}

// No rank's start waits for that of another: rank 0 begins when all others have.
TEST(StartedGather, DoesNotWaitForPeers) {
  on_every_rank([](Rank& rank) {
    const Comm other = rank.another_comm("meeting", 4096);
    const GemmContext context = make_context(rank.comm, bulk_config());
    for (int step = 0; step < 5; ++step) {
      MovedTensors tensors(rank, Moved{}, step);
      const xd_gemm_gather_args args = gather_args(tensors);
      if (rank.rank == 0) ok(xd_comm_barrier(other.get()));
      ok(xd_gemm_start_all_gather(context.get(), &args, rank.stream()));
      if (rank.rank != 0) ok(xd_comm_barrier(other.get()));
      ok(finish(rank, context.get(), xd_gemm_wait(context.get(), rank.stream())));
      tensors.check();
    }
    ok(xd_comm_barrier(other.get()));
  });
}

TEST(StartedGather, IsJoinedByTheNextOperation) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, bulk_config());
    for (int step = 0; step < 6; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      MovedTensors tensors(rank, Moved{}, step);
      const xd_gemm_gather_args args = gather_args(tensors);
      ok(finish(rank, context.get(),
                xd_gemm_start_all_gather(context.get(), &args, rank.stream())));
      const GemmCase c = plain_gemm_case(rank.num_ranks, kGemmProducts[step % 2]);
      GemmBatch batch(rank, c, step);
      ok(batch.call(context.get()));
      tensors.check();
      batch.check(context.get());
    }
  });
}

// The wait may be on a stream of its consumer's: the next operation comes behind the gather all the
// same. A rank that is late keeps the gather of the others under way meanwhile.
TEST(StartedGather, MayBeWaitedForOnAnotherStreamThanThatOfTheNextOperation) {
  on_every_rank([](Rank& rank) {
    xd_gemm_config config = bulk_config();
    config.operations |= XD_GEMM_BIT(XD_GEMM_ALL_REDUCE);
    config.keep_gathered = 1;
    const GemmContext context = make_context(rank.comm, config);
    const std::unique_ptr<Memory> consumer = rank.memory->another_stream();
    Moved moved;
    moved.tokens = TokenCounts::most;
    int step = 0;
    for (const xd_gemm_operation operation : kGemmProducts) {
      for (const xd_gemm_algo algo : kGemmAlgos) {
        SCOPED_TRACE(std::string(name_of(operation)) + " by algorithm " + std::to_string(algo));
        GemmBatch batch(rank, plain_gemm_case(rank.num_ranks, operation), ++step);
        batch.args.algo = algo;
        if (!batch.can_call(context.get())) continue;
        MovedTensors tensors(rank, moved, step), again(rank, moved, step + 1);
        if (rank.rank == step % rank.num_ranks) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        for (MovedTensors* each : {&tensors, &again}) {
          const xd_gemm_gather_args args = gather_args(*each);
          ok(xd_gemm_start_all_gather(context.get(), &args, rank.stream()));
          ok(xd_gemm_wait(context.get(), consumer->stream()));
        }
        ok(batch.call(context.get()));
        consumer->synchronize();
        batch.check(context.get());
        tensors.check();
        again.check();
      }
    }
  });
}

TEST(StartedGather, IsBusyForASecondOneWhichTakesNoTurn) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, bulk_config());
    for (int step = 0; step < 3; ++step) {
      MovedTensors first(rank, Moved{}, step), second(rank, Moved{}, step + 10);
      const xd_gemm_gather_args one = gather_args(first), two = gather_args(second);
      ok(finish(rank, context.get(), xd_gemm_start_all_gather(context.get(), &one, rank.stream())));
      // Only some ranks try: the others would be out of step if it took a turn.
      if (rank.rank % 2 == 0) {
        EXPECT_EQ(xd_gemm_start_all_gather(context.get(), &two, rank.stream()), XD_ERROR_BUSY);
        expect_said("under way");
      }
      ok(finish(rank, context.get(), xd_gemm_wait(context.get(), rank.stream())));
      first.check();
      EXPECT_TRUE(second.out_tensor().untouched());
      ok(finish(rank, context.get(), xd_gemm_start_all_gather(context.get(), &two, rank.stream())));
      ok(finish(rank, context.get(), xd_gemm_wait(context.get(), rank.stream())));
      second.check();
    }
    EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS);
  });
}

// ---- Bad arguments -----------------------------------------------------------------------------

struct Mistake {
  const char* name;
  std::vector<std::string> words;
  std::function<void(xd_gemm_bulk_args&)> make;
};

// Tensors that fit nothing, and a product, for the time of a call.
struct Misfits {
  explicit Misfits(const Rank& rank)
      : narrow(rank, kBf16, {kMaxTokens, 8}),
        odd(rank, kBf16, {kMaxTokens, 12}),
        integers(rank, kI32, {kMaxTokens * rank.num_ranks, 24}),
        other(rank, kF32, {kMaxTokens * rank.num_ranks, 24}),
        flat(rank, kBf16, {kMaxTokens}),
        square(rank, kF32, {24, 24}) {
    // A good one: d = a^T * b.
    product.a = product.b = other.dl();
    product.d = square.dl();
    product.transpose_a = 1;
    product.transpose_b = 0;
  }
  // A tensor in the memory of another one.
  const DLTensor* at_place_of(const DLTensor* place, const DLTensor* tensor) {
    moved = *tensor;
    moved.data = place->data;
    moved.byte_offset = place->byte_offset;
    return &moved;
  }

  Tensor narrow, odd, integers, other, flat, square;
  xd_gemm_args product = XD_GEMM_ARGS_INIT;
  DLTensor moved{};
};

void expect_mistakes(const Moved& moved,
                     const std::function<std::vector<Mistake>(Misfits&)>& mistakes_with) {
  on_every_rank([&](Rank& rank) {
    const int guilty = rank.num_ranks - 1;
    const GemmContext context = make_context(rank.comm, bulk_config());
    Misfits misfits(rank);
    const xd_gemm_args good = misfits.product;
    for (const Mistake& mistake : mistakes_with(misfits)) {
      SCOPED_TRACE(mistake.name);
      misfits.product = good;
      MovedTensors tensors(rank, moved, 0);
      xd_gemm_bulk_args args = bulk_args(moved, tensors);
      if (rank.rank == guilty) mistake.make(args);
      const GemmOutcome outcome =
          finish(rank, context.get(), xd_gemm_bulk(context.get(), &args, rank.stream()));
      EXPECT_EQ(outcome, rank.rank == guilty ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
      if (rank.rank != guilty) {
        EXPECT_TRUE(outcome.mentions("rank " + std::to_string(guilty))) << outcome.text;
        continue;
      }
      for (const std::string& word : mistake.words) {
        EXPECT_TRUE(outcome.mentions(word)) << "expected '" << word << "' in: " << outcome.text;
      }
    }
    MovedTensors tensors(rank, moved, 1);
    const xd_gemm_bulk_args args = bulk_args(moved, tensors);
    ok(finish(rank, context.get(), xd_gemm_bulk(context.get(), &args, rank.stream())));
    tensors.check();
  });
}

TEST(BulkBadArguments, AreRefusedWithWhatWasExpectedAndGot) {
  Moved moved;
  moved.tokens = TokenCounts::most;
  const auto common = [](Misfits& m) {
    return std::vector<Mistake>{
        {"size", {"struct_size"}, [](auto& a) { a.struct_size = 0; }},
        {"product's size",
         {"product.struct_size"},
         [&](auto& a) {
           m.product.struct_size = 3;
           a.product = &m.product;
         }},
        {"collective", {"collective"}, [](auto& a) { a.collective = XD_GEMM_ALL_REDUCE; }},
        {"no in", {"in", "NULL"}, [](auto& a) { a.in = nullptr; }},
        {"no out", {"out", "NULL"}, [](auto& a) { a.out = nullptr; }},
        {"in of one extent", {"in: "}, [&](auto& a) { a.in = m.flat.dl(); }},
        {"other columns", {"8", "24"}, [&](auto& a) { a.in = m.narrow.dl(); }},
        {"odd rows", {"in: ", "24 bytes", "multiple of 16"}, [&](auto& a) { a.in = m.odd.dl(); }},
        {"other type of out",
         {"out: ", "float32", "bfloat16"},
         [&](auto& a) { a.out = m.other.dl(); }},
        {"product without a",
         {"a = NULL"},
         [&](auto& a) {
           m.product.a = nullptr;
           a.product = &m.product;
         }},
        {"product without d",
         {"d = NULL"},
         [&](auto& a) {
           m.product.d = nullptr;
           a.product = &m.product;
         }},
        {"product's epilogue",
         {"epilogue"},
         [&](auto& a) {
           const int wrong = 77;
           std::memcpy(&m.product.epilogue, &wrong, sizeof(wrong));
           a.product = &m.product;
         }},
        {"out lies in in",
         {"out: ", "shares with in", "memory of its own"},
         [&](auto& a) { a.out = m.at_place_of(a.in, a.out); }},
        {"product writes in",
         {"d: ", "shares with"},
         [&](auto& a) {
           m.product.d = m.at_place_of(a.in, m.square.dl());
           a.product = &m.product;
         }},
        {"product reads out",
         {"out: ", "shares with a"},
         [&](auto& a) {
           m.product.a = m.product.b = a.out;
           a.product = &m.product;
         }},
    };
  };
  expect_mistakes(moved, common);
  moved.collective = XD_GEMM_REDUCE_SCATTER;
  expect_mistakes(moved, [&](Misfits& m) {
    std::vector<Mistake> all{
        {"integers are not added", {"in: ", "int32"}, [&](auto& a) { a.in = m.integers.dl(); }}};
    return all;
  });
}

TEST(StartedGather, WithABadArgumentIsRefusedHereAndAMismatchThere) {
  on_every_rank([](Rank& rank) {
    const int guilty = rank.num_ranks - 1;
    const GemmContext context = make_context(rank.comm, bulk_config());
    Misfits misfits(rank);
    for (const char* which : {"in = NULL", "out = NULL", "out: "}) {
      Moved moved;
      moved.tokens = TokenCounts::most;
      MovedTensors tensors(rank, moved, 0);
      xd_gemm_gather_args args = gather_args(tensors);
      if (rank.rank == guilty) {
        const DLTensor* const shared = misfits.at_place_of(args.in, args.out);
        (which[0] == 'i' ? args.in : args.out) = which[3] == ':' ? shared : nullptr;
      }
      GemmOutcome outcome = finish(rank, context.get(),
                                   xd_gemm_start_all_gather(context.get(), &args, rank.stream()));
      // Another rank learns of it when it waits, or before, where the gather has already ended.
      if (outcome == XD_SUCCESS) {
        outcome = finish(rank, context.get(), xd_gemm_wait(context.get(), rank.stream()));
      } else {
        ok(xd_gemm_wait(context.get(), rank.stream()));
      }
      EXPECT_EQ(outcome, rank.rank == guilty ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
      EXPECT_TRUE(outcome.mentions(rank.rank == guilty ? std::string(which)
                                                       : "rank " + std::to_string(guilty)))
          << outcome.text;
    }
    MovedTensors tensors(rank, Moved{}, 1);
    const xd_gemm_gather_args args = gather_args(tensors);
    ok(finish(rank, context.get(), xd_gemm_start_all_gather(context.get(), &args, rank.stream())));
    ok(finish(rank, context.get(), xd_gemm_wait(context.get(), rank.stream())));
    tensors.check();
  });
}

// The operation that joins it goes on; what became of the gather is kept.
TEST(StartedGather, ThatFailedAndWasJoinedIsToldByTheContextsStatus) {
  on_every_rank([](Rank& rank) {
    const int guilty = rank.num_ranks - 1;
    const GemmContext context = make_context(rank.comm, bulk_config());
    MovedTensors tensors(rank, Moved{}, 0);
    xd_gemm_gather_args args = gather_args(tensors);
    if (rank.rank == guilty) args.out = nullptr;
    EXPECT_EQ(xd_gemm_start_all_gather(context.get(), &args, rank.stream()),
              rank.rank == guilty ? XD_ERROR_INVALID_ARGUMENT : XD_SUCCESS);
    GemmBatch batch(rank, plain_gemm_case(rank.num_ranks), 0);
    ok(batch.enqueue(context.get()));
    rank.memory->synchronize();
    batch.check(context.get());
    xd_gemm_status status = XD_GEMM_STATUS_INIT;
    ok(xd_gemm_context_status(context.get(), &status));
    if (rank.rank == guilty) {
      EXPECT_EQ(status.status, XD_SUCCESS) << "its call has told it";
    } else {
      EXPECT_EQ(status.status, XD_ERROR_MISMATCH);
      EXPECT_EQ(status.operation, XD_GEMM_START_ALL_GATHER);
      EXPECT_EQ(status.epoch, 1u);
      EXPECT_EQ(status.rank, guilty);
      EXPECT_NE(std::string(status.text).find("rank " + std::to_string(guilty)), std::string::npos)
          << status.text;
    }
    ok(xd_gemm_context_status(context.get(), &status));
    EXPECT_EQ(status.status, XD_SUCCESS) << "it was told once";
  });
}

}  // namespace
}  // namespace xd::test
