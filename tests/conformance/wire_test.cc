// Wires of combine: the form in which partial sums of a token cross.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "conformance/batch.h"
#include "conformance/case.h"
#include "conformance/has_wires.h"
#include "conformance/host_maps.h"
#include "conformance/image.h"
#include "conformance/quantised.h"
#include "conformance/said.h"
#include "conformance/step.h"
#include "support/gtest_main.h"
#include "support/random.h"

namespace xd::test {
namespace {

std::vector<Case> if_there(const std::vector<Case>& cases) {
  return has_wires() ? cases : std::vector<Case>();
}

// ---- The grid -----------------------------------------------------------------------------------

void run(const Rank& rank, const Case& c) {
  const Group group = make_group(rank.comm, c.config(rank.rank));
  for (int number = 0; number < Case::kSteps; ++number) {
    SCOPED_TRACE("batch " + std::to_string(number));
    Step step(rank, c, group.get(), number);
    step.prepare();
    step.combine();
  }
}

class WireGrid : public testing::TestWithParam<Case> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(WireGrid);

TEST_P(WireGrid, EveryElementIsThatOfTheDefinition) {
  on_every_rank([&](Rank& rank) {
    SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", " + GetParam().description());
    run(rank, GetParam());
  });
}

std::string number_of(const testing::TestParamInfo<Case>& instance) {
  return std::to_string(instance.index);
}
INSTANTIATE_TEST_SUITE_P(
    Whole, WireGrid, testing::ValuesIn(if_there(cases_with_wires(all_cases(world().num_ranks())))),
    number_of);
INSTANTIATE_TEST_SUITE_P(
    InParts, WireGrid,
    testing::ValuesIn(if_there(cases_with_wires(cases_in_parts(world().num_ranks())))), number_of);

TEST(Wire, SumsOfHostsAreThoseOfTheDefinitionOnEveryMap) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  on_every_rank([](Rank& rank) {
    spread_over_maps(rank, cases_with_wires(all_cases(rank.num_ranks)), 8, run);
  });
}

// ---- One batch ----------------------------------------------------------------------------------

// One expert on each rank, and tokens of each rank that choose the experts of the ranks from their
// own on, one by one: so every rank has rows of its own and of others.
class OneBatch {
 public:
  // An element of the row that the expert of `rank` returns for a token.
  using Value = std::function<float(int rank, int source, int token, std::int64_t column)>;

  OneBatch(const Rank& rank, DLDataType type, std::int64_t columns, int topk,
           xd_ep_layout layout = XD_EP_EXPERT_MAJOR)
      : rank_(rank), type_(type), columns_(columns), topk_(topk) {
    config_.num_ranks = config_.num_experts = rank.num_ranks;
    config_.max_topk = topk;
    config_.max_tokens_per_rank = kTokens;
    config_.hidden = static_cast<int>(columns);
    config_.dtype = type;
    config_.layout = layout;
    for (const xd_ep_wire wire : kWires) config_.wire_formats |= XD_EP_WIRE_BIT(wire);
  }
  static constexpr int kTokens = 3;

  bool chooses(int source, int token, int rank) const {
    const int distance = (rank - source + rank_.num_ranks) % rank_.num_ranks;
    return distance >= token % rank_.num_ranks && distance < token % rank_.num_ranks + topk_ &&
           distance < rank_.num_ranks;
  }
  void prepare(xd_ep_group* group) {
    std::vector<std::int32_t> ids;
    for (int token = 0; token < kTokens; ++token) {
      for (int k = 0; k < topk_; ++k) {
        const int distance = token % rank_.num_ranks + k;
        const int expert = (rank_.rank + distance) % rank_.num_ranks;
        ids.push_back(distance < rank_.num_ranks ? expert : -1);
      }
    }
    Tensor topk_idx(rank_, kI32, {kTokens, topk_});
    topk_idx.write(ids);
    plan_ = make_plan(rank_, config_);
    xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
    set_plan(args, plan_);
    args.topk_idx = topk_idx.dl();
    ok(finish(rank_, group, xd_ep_prepare(group, &args, rank_.stream())));
  }

  Outcome combine(xd_ep_group* group, xd_ep_wire wire, const Value& value) {
    const Format format = format_of(type_);
    std::vector<std::pair<int, int>> rows;  // source and token
    for (int source = 0; source < rank_.num_ranks; ++source) {
      for (int token = 0; token < kTokens; ++token) {
        if (chooses(source, token, rank_.rank)) rows.emplace_back(source, token);
      }
    }
    const auto count = static_cast<std::int64_t>(rows.size());
    Image image(count, columns_, type_, kPoison);
    for (std::int64_t row = 0; row < count; ++row) {
      const auto [source, token] = rows[static_cast<std::size_t>(row)];
      image.set_row(row, [&](auto, std::int64_t column) {
        return code_of(value(rank_.rank, source, token, column), format);
      });
    }
    Tensor expert_out(rank_, type_, {count, columns_});
    if (count > 0) expert_out.write(image.bytes());
    out_.emplace_back(rank_, type_, std::vector<std::int64_t>{kTokens, columns_});
    xd_ep_combine_args args = XD_EP_COMBINE_ARGS_INIT;
    set_plan(args, plan_);
    args.expert_out = expert_out.dl();
    args.out = out_.back().dl();
    args.wire = wire;
    return finish(rank_, group, xd_ep_combine(group, &args, rank_.stream()));
  }

  // The values that the expert of a rank returns, after their rounding to the type.
  std::vector<float> partial(const Value& value, int rank, int token) const {
    if (!chooses(rank_.rank, token, rank)) return {};
    std::vector<float> sum;
    for (std::int64_t column = 0; column < columns_; ++column) {
      const float x = value(rank, rank_.rank, token, column);
      sum.push_back(std::isnan(x) ? x : decode(code_of(x, format_of(type_)), format_of(type_)));
    }
    return sum;
  }
  std::vector<std::uint32_t> expected(xd_ep_wire wire, const Value& value, int token) const {
    return combined_under(wire, ranks_by_host(rank_.hosts, rank_.num_ranks), columns_,
                          format_of(type_), [&](int rank) { return partial(value, rank, token); });
  }
  void expect_out(xd_ep_wire wire, const Value& value) const {
    Image image(kTokens, columns_, type_, kPoison);
    for (int token = 0; token < kTokens; ++token) {
      const std::vector<std::uint32_t> codes = expected(wire, value, token);
      image.set_row(token, [&](auto, std::int64_t column) {
        return codes[static_cast<std::size_t>(column)];
      });
    }
    expect_image("out", out_.back(), image);
  }

  const xd_ep_config& config() const { return config_; }
  const Tensor& out() const { return out_.back(); }
  static std::uint32_t code_of(float value, Format format) {
    const std::uint32_t infinity = format.max_finite() + 1;
    return std::isnan(value) ? infinity | 1u << (format.mantissa_bits - 1) : encode(value, format);
  }

 private:
  const Rank& rank_;
  DLDataType type_;
  std::int64_t columns_;
  int topk_;
  xd_ep_config config_ = XD_EP_CONFIG_INIT;
  Buffer plan_;
  std::vector<Tensor> out_;
};

constexpr DLDataType kTypes[] = {kBf16, kF16, kF32};

// Runs `values` under every wire, type and layout, and compares with the definition.
void expect_defined(const OneBatch::Value& value) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  on_every_rank([&](Rank& rank) {
    for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
      for (const DLDataType type : kTypes) {
        OneBatch batch(rank, type, 384, 2, layout);
        const Group group = make_group(rank.comm, batch.config());
        batch.prepare(group.get());
        for (const xd_ep_wire wire : kWires) {
          SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", layout " + std::to_string(layout) +
                       ", bits " + std::to_string(type.bits) + ", wire " + std::to_string(wire));
          ok(batch.combine(group.get(), wire, value));
          batch.expect_out(wire, value);
        }
      }
    }
  });
}

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The first block has numbers that are not finite beside others, the second none but zeros, the
// third has its largest number in its last column.
TEST(Wire, NumbersThatAreNotFiniteAndZerosAreThoseOfTheDefinition) {
  expect_defined([](int rank, int, int token, std::int64_t column) {
    const bool here = rank == token % 2;
    if (column == 3 && here) return kNaN;
    if (column == 5 && here) return kInfinity;
    if (column == 7 && here) return -kInfinity;
    if (column < 128) return static_cast<float>(column - 60) * 0.37f;
    if (column < 256) return column % 2 != 0 ? -0.0f : 0.0f;
    return column == 383 ? 3000.0f : static_cast<float>(column % 11) * 1e-3f;
  });
}

// A block of infinities and NaNs alone, one that float16 has as subnormal numbers, and one whose
// numbers are subnormal even in bfloat16 and float32.
TEST(Wire, SubnormalNumbersAndBlocksWithoutFiniteOnesAreThoseOfTheDefinition) {
  expect_defined([](int, int, int, std::int64_t column) {
    if (column < 128) return column % 2 != 0 ? kInfinity : kNaN;
    if (column < 256) return static_cast<float>(column - 190) * 0x1p-24f;
    return static_cast<float>(column - 300) * 0x1p-133f;
  });
}

// Numbers that e4m3 has, times a power of two, lose nothing, from this rank and from any other.
TEST(Wire, MultiplesOfTheCodesComeBackBitForBit) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  const OneBatch::Value value = [](int, int, int, std::int64_t column) {
    if (column % 128 == 127) return 448.0f * 0x1p-3f;
    return std::ldexp(decode(static_cast<std::uint32_t>(column) % 126, kFormatE4m3), -3);
  };
  on_every_rank([&](Rank& rank) {
    for (const DLDataType type : kTypes) {
      OneBatch batch(rank, type, 256, 1);
      const Group group = make_group(rank.comm, batch.config());
      batch.prepare(group.get());
      for (const xd_ep_wire wire : kWires) {
        ok(batch.combine(group.get(), wire, value));
        Image image(OneBatch::kTokens, 256, type, kPoison);
        for (int token = 0; token < OneBatch::kTokens; ++token) {
          image.set_row(token, [&](auto, std::int64_t column) {
            return encode(value(0, 0, 0, column), format_of(type));
          });
        }
        expect_image("out", batch.out(), image);
      }
    }
  });
}

// The bound of quantise.h, per rank, and the roundings behind it.
TEST(Wire, ErrorsStayWithinTheBound) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  const OneBatch::Value value = [](int rank, int source, int token, std::int64_t column) {
    const auto place =
        static_cast<std::uint64_t>(rank) * 64 + static_cast<std::uint64_t>(source) * 8;
    Random random(mix(test_seed(), place + static_cast<std::uint64_t>(token),
                      static_cast<std::uint64_t>(column)));
    return (static_cast<float>(random.below(1 << 20)) * 0x1p-19f - 1.0f) *
           std::ldexp(1.0f, static_cast<int>(random.below(12)) - 6);
  };
  on_every_rank([&](Rank& rank) {
    OneBatch batch(rank, kBf16, 256, 4);
    const Group group = make_group(rank.comm, batch.config());
    batch.prepare(group.get());
    for (const xd_ep_wire wire : kWires) {
      if (wire == XD_EP_WIRE_FLOAT32) continue;
      ok(batch.combine(group.get(), wire, value));
      const auto out = batch.out().read_as<std::uint16_t>();
      for (int token = 0; token < OneBatch::kTokens; ++token) {
        std::vector<double> exact(256, 0.0), bound(256, 0.0);
        for (int from = 0; from < rank.num_ranks; ++from) {
          const std::vector<float> p = batch.partial(value, from, token);
          for (std::size_t c = 0; c < p.size(); ++c) {
            double amax = 0;
            for (std::size_t i = c / 128 * 128; i < c / 128 * 128 + 128; ++i)
              amax = std::max(amax, std::fabs(double{p[i]}));
            const double scale = amax / 448 * (wire == XD_EP_WIRE_FP8_BLOCK128 ? 1 : 2);
            const double size = std::fabs(double{p[c]});
            exact[c] += p[c];
            bound[c] +=
                std::max(size / 16, scale / 1024) * (1 + 0x1p-22) + rank.num_ranks * 0x1p-23 * size;
          }
        }
        for (std::size_t c = 0; c < exact.size(); ++c) {
          const double got = decode(out[static_cast<std::size_t>(token) * 256 + c], kFormatBf16);
          // Sums of hosts are rounded by themselves.
          const double rounding = 2 * 0x1p-8 * (std::fabs(exact[c]) + bound[c]);
          ASSERT_LE(std::fabs(got - exact[c]), bound[c] + rounding)
              << "wire " << wire << ", token " << token << ", column " << c;
        }
      }
    }
  });
}

// ---- Mistakes -----------------------------------------------------------------------------------

TEST(Wire, RanksThatNameDifferentOnesAllHearOfIt) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  if (world().num_ranks() < 2) GTEST_SKIP() << "needs two ranks";
  on_every_rank([](Rank& rank) {
    OneBatch batch(rank, kBf16, 128, 1);
    const Group group = make_group(rank.comm, batch.config());
    batch.prepare(group.get());
    const auto one = [](int, int, int, std::int64_t) { return 1.0f; };
    const bool first = rank.rank == 0;
    const Outcome outcome =
        batch.combine(group.get(), first ? XD_EP_WIRE_SAME : XD_EP_WIRE_FP8_BLOCK128_POW2, one);
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions(first ? "wire FP8_BLOCK128_POW2, here SAME"
                                       : "wire SAME, here FP8_BLOCK128_POW2"))
        << outcome.text;
    ok(batch.combine(group.get(), XD_EP_WIRE_FLOAT32, one));  // the group is good
    batch.expect_out(XD_EP_WIRE_FLOAT32, one);
  });
}

TEST(Wire, OneThatTheCallCannotHaveIsRefused) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  struct Bad {
    std::uint32_t formats;
    std::int64_t columns;
    int wire;
    const char* text;
  };
  constexpr Bad kBad[] = {
      {XD_EP_WIRE_BIT(XD_EP_WIRE_FLOAT32), 128, 5, "wire = 5, expected an xd_ep_wire, 0 to 4"},
      {XD_EP_WIRE_BIT(XD_EP_WIRE_FLOAT32), 128, -1, "wire = -1, expected an xd_ep_wire, 0 to 4"},
      {XD_EP_WIRE_BIT(XD_EP_WIRE_FLOAT32), 128, XD_EP_WIRE_FP8_BLOCK128,
       "wire = XD_EP_WIRE_FP8_BLOCK128, expected XD_EP_WIRE_SAME or one of config.wire_formats = "
       "2"},
      {XD_EP_WIRE_BIT(XD_EP_WIRE_FP8_BLOCK128_E8M0), 64, XD_EP_WIRE_FP8_BLOCK128_E8M0,
       "expert_out: has 64 columns, expected a multiple of 128: wire = "
       "XD_EP_WIRE_FP8_BLOCK128_E8M0"},
  };
  on_every_rank([&](Rank& rank) {
    for (const Bad& bad : kBad) {
      OneBatch batch(rank, kBf16, bad.columns, 1);
      xd_ep_config config = batch.config();
      config.wire_formats = bad.formats;
      const Group group = make_group(rank.comm, config);
      batch.prepare(group.get());
      xd_ep_wire wire;
      std::memcpy(&wire, &bad.wire, sizeof(wire));
      const Outcome outcome = batch.combine(group.get(), wire, [](auto...) { return 1.0f; });
      EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
      EXPECT_TRUE(outcome.mentions(bad.text)) << outcome.text;
    }
  });
}

// Devices say so when the group is made.
TEST(Wire, IsUnsupportedBetweenMachinesOnDevices) {
  if (has_wires()) GTEST_SKIP() << "these devices have wires";
  on_every_rank([](Rank& rank) {
    const OneBatch batch(rank, kBf16, 128, 1);
    xd_ep_group* group = nullptr;
    expect_error(xd_ep_group_create(rank.comm, &batch.config(), &group), XD_ERROR_UNSUPPORTED,
                 "config.wire_formats = 30, expected 0: between machines");
  });
}

TEST(Wire, ALaterPartHasThatOfTheFirst) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  Case c = plain_case(world().num_ranks());
  c.local_experts = 2;
  c.parts = 2;
  c.wire = XD_EP_WIRE_FP8_BLOCK128;
  c.row_units = c.least_row_units();
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare_args.parts = 2;
    batch.prepare(group.get());
    batch.combine_args.part = 1;
    batch.combine_args.wire = XD_EP_WIRE_FP8_BLOCK128;
    ok(batch.call(group.get(), XD_EP_COMBINE));
    batch.combine_args.part = 2;
    batch.combine_args.wire = XD_EP_WIRE_SAME;
    const Outcome outcome = batch.call(group.get(), XD_EP_COMBINE);
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(outcome.mentions("expected the tensors of part 1 (wire FP8_BLOCK128, here SAME)"))
        << outcome.text;
  });
}

// ---- Bytes --------------------------------------------------------------------------------------

// Tokens with one rank elsewhere get codes in the place of a row of bfloat16.
TEST(Wire, BytesBetweenMachinesHalve) {
  if (!has_wires()) GTEST_SKIP() << "no wires on these devices";
  if (std::getenv("XD_NET_TEST") == nullptr) GTEST_SKIP() << "all ranks are on one machine";
  on_every_rank([](Rank& rank) {
    constexpr std::int64_t kColumns = 4096;
    OneBatch batch(rank, kBf16, kColumns, 1);
    const Group group = make_group(rank.comm, batch.config());
    batch.prepare(group.get());
    const auto bytes_under = [&](xd_ep_wire wire) {
      ok(xd_comm_barrier(rank.comm));
      xd_stats before = XD_STATS_INIT, after = XD_STATS_INIT;
      ok(xd_ep_group_stats(group.get(), &before, nullptr));
      ok(batch.combine(group.get(), wire, [](auto...) { return 1.0f; }));
      ok(xd_ep_group_stats(group.get(), &after, nullptr));
      return static_cast<double>(after.net_bytes - before.net_bytes);
    };
    const double same = bytes_under(XD_EP_WIRE_SAME);
    const double coded = bytes_under(XD_EP_WIRE_FP8_BLOCK128);
    const double floats = bytes_under(XD_EP_WIRE_FLOAT32);
    if (same < 2 * kColumns) return;  // this rank sends no sum to another machine
    EXPECT_LT(coded, 0.56 * same);
    EXPECT_GT(coded, 0.45 * same);
    EXPECT_GT(floats, 1.8 * same);
  });
}

}  // namespace
}  // namespace xd::test
