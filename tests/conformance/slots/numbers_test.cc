// Numbers that arithmetic treats specially, through low-latency operations: what is moved keeps
// every bit, what is computed is as ep.h says. And the times that operations tell.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <thread>
#include <vector>

#include "conformance/slots/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// All 65536 codes of bf16 in one batch, in every way to quantise them.
TEST(LlQuantised, GivesTheBitsOfTheDefinitionForEveryNumber) {
  LlCase c = plain_ll_case(world().num_ranks());
  c.max_tokens = 128;
  c.row_units = 64;  // 512 columns
  c.topk = 1;
  c.local_experts = 1;
  c.every_number = true;
  for (const Sent sent :
       {Sent::float_scales, Sent::powers_of_two, Sent::e8m0, Sent::packed, Sent::as_they_are}) {
    c.sent = sent;
    SCOPED_TRACE(c.description());
    on_every_rank([&](Rank& rank) {
      const LlGroup group = make_group(rank, c);
      for (int number = 0; number < 2; ++number) LlBatch(rank, c, number).dispatch(group.get());
    });
  }
}

// Codes of one type.
struct Numbers {
  const char* name;
  DLDataType type;
  std::uint32_t ones, signalling, quiet_bit, canonical, infinity, minus_zero, one, two;
};

constexpr Numbers kNumbers[] = {
    {"bf16", kBf16, 0xffff, 0xff8c, 0x40, 0x7fc0, 0x7f80, 0x8000, 0x3f80, 0x4000},
    {"f16", kF16, 0xffff, 0xfcf9, 0x200, 0x7e00, 0x7c00, 0x8000, 0x3c00, 0x4000},
    {"f32", kF32, 0xffffffff, 0xff81234f, 0x400000, 0x7fc00000, 0x7f800000, 0x80000000, 0x3f800000,
     0x40000000},
};

void PrintTo(const Numbers& numbers, std::ostream* out) { *out << numbers.name; }

// A value, and what becomes of it: alone, twice added, and less itself.
struct Value {
  std::uint32_t code, alone, weighted, twice, less_itself;
};

std::vector<Value> values_of(const Numbers& n) {
  const std::uint32_t sign = n.minus_zero;
  return {
      {n.ones, n.ones, n.canonical, n.canonical, n.canonical},
      {n.signalling, n.signalling | n.quiet_bit, n.canonical, n.canonical, n.canonical},
      {n.infinity, n.infinity, n.infinity, n.infinity, n.canonical},
      {n.infinity | sign, n.infinity | sign, n.infinity | sign, n.infinity | sign, n.canonical},
      {n.minus_zero, n.minus_zero, n.minus_zero, n.minus_zero, 0},
      {1, 1, 1, 2, 0},  // the smallest number
      {n.one, n.one, n.one, n.two, 0},
  };
}

// Tokens of one value in all columns. Each value has three: one with a single expert, one with two
// of one rank, one with two of two ranks (of one, if there are no more).
class LlNumbers : public testing::TestWithParam<Numbers> {
 protected:
  static constexpr int kTopk = 2, kHidden = 24, kWays = 3;

  LlNumbers() : values_(values_of(GetParam())) {}

  int tokens() const { return kWays * static_cast<int>(values_.size()); }
  LlCase shape(const Rank& rank) const {
    LlCase c = plain_ll_case(rank.num_ranks);
    c.dtype = GetParam().type;
    c.row_units = kHidden * static_cast<int>(element_bytes(c.dtype)) / 16;
    c.topk = kTopk;
    c.local_experts = 2;
    c.max_tokens = tokens();
    return c;
  }
  std::vector<std::int32_t> ids(const Rank& rank) const {
    const int next = 2 * ((rank.rank + 1) % rank.num_ranks), own = 2 * rank.rank;
    std::vector<std::int32_t> ids;
    for (std::size_t v = 0; v < values_.size(); ++v) {
      ids.insert(ids.end(), {next, -1, next, next + 1, own, rank.num_ranks > 1 ? next : own + 1});
    }
    return ids;
  }
  // A NaN of all ones is 8 bytes of ones, which may become another NaN on the way.
  bool any_nan(const Rank& rank, std::uint32_t expected) const {
    return rank.asynchronous() && expected == GetParam().ones;
  }
  bool is_nan(std::uint32_t code) const {
    return (code & ~GetParam().minus_zero) > GetParam().infinity;
  }

  const std::vector<Value> values_;
};

TEST_P(LlNumbers, AreMovedBitByBitAndSummedByTheRules) {
  on_every_rank([&](Rank& rank) {
    const Numbers& n = GetParam();
    const LlCase c = shape(rank);
    const LlGroup group = make_group(rank, c);
    const std::vector<std::int32_t> owners = c.owners();
    Buffer plan = make_plan(rank, c.config(owners));

    Tensor topk_idx(rank, kI32, {tokens(), kTopk});
    topk_idx.write(ids(rank));
    Strided sent(rank, n.type, {tokens(), kHidden});
    for (int t = 0; t < tokens(); ++t) {
      for (int column = 0; column < kHidden; ++column) {
        sent.set(t, column, values_[static_cast<std::size_t>(t / kWays)].code);
      }
    }
    sent.upload();
    // The experts give back what they get.
    Strided rows(rank, n.type, {2, c.num_slots(), kHidden});
    Tensor counts(rank, kI32, {2});
    xd_ll_dispatch_args dispatch = XD_LL_DISPATCH_ARGS_INIT;
    dispatch.tokens = sent.dl();
    dispatch.topk_idx = topk_idx.dl();
    set_plan(dispatch, plan);
    dispatch.recv_tokens = rows.dl();
    dispatch.counts = counts.dl();
    ok(finish(rank, group.get(), xd_ll_dispatch(group.get(), &dispatch, rank.stream())));

    enum class Weighing { none, ones, signs };
    for (const Weighing weighing : {Weighing::none, Weighing::ones, Weighing::signs}) {
      SCOPED_TRACE("weighing " + std::to_string(static_cast<int>(weighing)));
      Tensor weights(rank, kF32, {tokens(), kTopk});
      std::vector<float> factors;
      for (int t = 0; t < tokens(); ++t) {
        factors.insert(factors.end(), {1.0f, weighing == Weighing::signs ? -1.0f : 1.0f});
      }
      weights.write(factors);
      Tensor out(rank, n.type, {tokens(), kHidden});
      xd_ll_combine_args combine = XD_LL_COMBINE_ARGS_INIT;
      set_plan(combine, plan);
      combine.expert_out = rows.dl();
      combine.topk_weights = weighing == Weighing::none ? nullptr : weights.dl();
      combine.out = out.dl();
      ok(finish(rank, group.get(), xd_ll_combine(group.get(), &combine, rank.stream())));
      const std::vector<std::byte> bytes = out.read();
      const std::size_t element = element_bytes(n.type);
      for (int t = 0; t < tokens(); ++t) {
        const Value& value = values_[static_cast<std::size_t>(t / kWays)];
        const bool single = t % kWays == 0;
        const std::uint32_t expected =
            single ? (weighing == Weighing::none ? value.alone : value.weighted)
            : weighing == Weighing::signs ? value.less_itself
                                          : value.twice;
        for (int column = 0; column < kHidden; ++column) {
          std::uint32_t got = 0;
          const std::size_t at =
              static_cast<std::size_t>(t) * kHidden + static_cast<std::size_t>(column);
          std::memcpy(&got, bytes.data() + at * element, element);
          if (any_nan(rank, expected) && is_nan(got)) continue;
          ASSERT_EQ(got, expected)
              << std::hex << value.code << std::dec << ", token " << t << ", column " << column;
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Types, LlNumbers, testing::ValuesIn(kNumbers));

// A rank that comes late stands out in its peers' times. On a machine that does other things as
// well a peer may come later still, so that one of several attempts must show it.
TEST(LlWaits, NameTheRankThatWasLate) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank waits for nobody";
  const LlCase c = plain_ll_case(world().num_ranks());
  constexpr auto kLate = std::chrono::milliseconds(50);
  constexpr std::int64_t kSeen = 20'000'000;
  constexpr int kAttempts = 10;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    const int late = rank.num_ranks - 1;
    bool seen[2] = {false, false};
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      LlBatch batch(rank, c, attempt);
      for (const xd_ll_operation kind : {XD_LL_DISPATCH, XD_LL_COMBINE}) {
        ok(xd_comm_barrier(rank.comm));
        if (rank.rank == late) std::this_thread::sleep_for(kLate);
        kind == XD_LL_DISPATCH ? batch.dispatch(group.get()) : batch.combine(group.get());
        std::vector<std::int64_t> waits(static_cast<std::size_t>(rank.num_ranks));
        const std::vector<std::byte> bytes = batch.field(kind, "wait_ns").tensor->read_buffer();
        std::memcpy(waits.data(), bytes.data(), bytes.size());
        bool& shown = seen[kind == XD_LL_DISPATCH ? 0 : 1];
        const std::int64_t longest = waits[static_cast<std::size_t>(late)];
        waits.pop_back();
        shown =
            shown || (longest >= kSeen && std::ranges::all_of(waits, [&](std::int64_t of_other) {
                        return 2 * of_other < longest;
                      }));
      }
    }
    if (rank.rank != late) {
      EXPECT_TRUE(seen[0]) << "dispatch";
      EXPECT_TRUE(seen[1]) << "combine";
    }
  });
}

}  // namespace
}  // namespace xd::test
