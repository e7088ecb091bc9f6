// Row arithmetic: every SIMD target of this machine gives the bits of the scalar definition.
#include "ep/plan/cpu/rows.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <string_view>

#include "ep/plan/wire_format.h"
#include "unit/rows_reference.h"

#if HWY_ARCH_X86
#include <xmmintrin.h>
#endif

namespace {

namespace ref = rows_reference;
using xd::rows::Store;
using xd::rows::Type;
using xd::test::kFormatBf16, xd::test::kFormatF16, xd::test::kFormatF32;

struct Payload {
  Type type;
  ref::Format format;
  const char* name;
  std::size_t bytes() const { return static_cast<std::size_t>(format.bytes); }
  int bits() const { return 8 * format.bytes; }
  std::size_t granule() const { return 16 / bytes(); }  // elements of 16 bytes
};
const Payload kPayloads[] = {{Type::bf16, kFormatBf16, "bf16"},
                             {Type::f16, kFormatF16, "f16"},
                             {Type::f32, kFormatF32, "f32"}};
constexpr Store kStores[] = {Store::cached, Store::streaming};

// A 16-byte aligned row that is not 32-byte aligned, with guards around it that must not change.
class Row {
 public:
  explicit Row(std::size_t bytes) : bytes_(bytes), memory_((bytes + 3 * kGuard) / 16, poison()) {}
  Row(const Payload& p, const std::vector<std::uint32_t>& codes) : Row(codes.size() * p.bytes()) {
    for (std::size_t i = 0; i < codes.size(); ++i) {
      std::memcpy(data() + i * p.bytes(), &codes[i], p.bytes());  // little endian
    }
  }
  unsigned char* data() {
    const auto start = reinterpret_cast<std::uintptr_t>(memory_.data());
    auto* const bytes = reinterpret_cast<unsigned char*>(memory_.data());
    return bytes + ((start + kGuard + 31) / 32 * 32 + 16 - start);
  }
  std::uint32_t code(const Payload& p, std::size_t i) {
    std::uint32_t code = 0;
    std::memcpy(&code, data() + i * p.bytes(), p.bytes());
    return code;
  }
  bool guards_intact() {
    for (const unsigned char* b = data() - kGuard / 2; b < data() + bytes_ + kGuard / 2; ++b) {
      if (b == data()) b += bytes_;
      if (*b != 0xa5) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  struct alignas(16) Chunk {
    unsigned char bytes[16];
  };
  static Chunk poison() {
    Chunk chunk;
    std::memset(chunk.bytes, 0xa5, sizeof(chunk.bytes));
    return chunk;
  }
  std::size_t bytes_;
  std::vector<Chunk> memory_;
};

class RowsOnTarget : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { choose(GetParam()); }
  void TearDown() override { choose(0); }

 private:
  static void choose(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

INSTANTIATE_TEST_SUITE_P(All, RowsOnTarget, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return hwy::TargetName(target.param); });

// Random codes of a format: half of them of moderate size, so that sums round instead of
// saturating, the others any pattern at all.
std::vector<std::uint32_t> random_codes(const Payload& p, std::size_t n, std::mt19937& random) {
  std::normal_distribution<double> moderate(0.0, 2.0);
  std::vector<std::uint32_t> codes(n);
  for (auto& code : codes) {
    const std::uint32_t any = random() >> (32 - p.bits());
    code = random() % 2 != 0 ? ref::encode(moderate(random), p.format) : any;
  }
  return codes;
}

TEST_P(RowsOnTarget, EveryValueOf16BitsWidensExactly) {
  for (const Payload& p : {kPayloads[0], kPayloads[1]}) {
    for (std::uint32_t code = 0; code < 0x10000; ++code) {
      Row value(p, std::vector<std::uint32_t>(16, 0)), one = value;
      const std::size_t at = code % 16;
      const std::uint32_t unit = ref::encode(1.0, p.format);
      std::memcpy(value.data() + at * 2, &code, 2);
      std::memcpy(one.data() + at * 2, &unit, 2);
      const double got = xd::rows::dot(p.type, value.data(), one.data(), 16);
      const double want = ref::decode(code, p.format);
      ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want)))
          << p.name << " 0x" << std::hex << code << ": got " << got << ", want " << want;
    }
  }
}

// Sets the processor's flush-to-zero modes, where it has them, for one scope.
class FlushDenormals {
 public:
#if HWY_ARCH_X86
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

void expect_one_row_is_copied(const Payload& p) {
  std::mt19937 random(1);
  std::vector<std::uint32_t> codes(0x10000);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    codes[i] = p.bits() == 16 ? static_cast<std::uint32_t>(i) : random();
    if (p.bits() == 32 && i % 4 == 0) codes[i] |= 0x7f800000u;   // infinities and NaNs
    if (p.bits() == 32 && i % 4 == 1) codes[i] &= ~0x7f800000u;  // denormals
  }
  Row in(p, codes), out(codes.size() * p.bytes());
  const void* row = in.data();
  const int end = 1;
  xd::rows::sum(p.type, out.data(), {&row, nullptr, &end, 1}, codes.size(), Store::streaming);
  xd::rows::flush();
  EXPECT_TRUE(out.guards_intact());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    ASSERT_EQ(out.code(p, i), ref::quieted(p.format, codes[i])) << p.name << " " << i;
  }
}

TEST_P(RowsOnTarget, OneUnweightedRowIsCopiedWithNaNsMadeQuiet) {
  for (const Payload& p : kPayloads) expect_one_row_is_copied(p);
}

TEST_P(RowsOnTarget, ConversionsKeepDenormalsWhereTheThreadFlushesThem) {
  const FlushDenormals flush;
  for (const Payload& p : kPayloads) expect_one_row_is_copied(p);
}

// scale(1.0, weight) rounds the weight itself: each value, the midpoint to its upper neighbour, and
// the float32 numbers on both sides of that.
TEST_P(RowsOnTarget, Float32RoundsToNearestEvenAtEveryMidpoint) {
  for (const Payload& p : {kPayloads[0], kPayloads[1]}) {
    const std::vector<std::uint32_t> ones(p.granule(), ref::encode(1.0, p.format));
    Row in(p, ones), out(16);
    const std::uint32_t infinity = ref::encode(INFINITY, p.format);
    for (std::uint32_t code = 0; code < 0x10000; ++code) {
      const std::uint32_t magnitude = code & 0x7fff;
      // Past the largest finite value, the neighbour is where the next power of two would be.
      const double low = ref::decode(code, p.format);
      const double high = magnitude + 1 == infinity ? 2 * low - ref::decode(code - 1, p.format)
                                                    : ref::decode(code + 1, p.format);
      const auto middle = static_cast<float>(magnitude < infinity ? (low + high) / 2 : low);
      for (const float x : {static_cast<float>(low), middle, std::nextafterf(middle, INFINITY),
                            std::nextafterf(middle, -INFINITY)}) {
        xd::rows::scale(p.type, out.data(), in.data(), x, p.granule(), Store::cached);
        ASSERT_EQ(out.code(p, code % p.granule()), ref::encode(x, p.format))
            << p.name << " of " << std::hexfloat << x;
      }
    }
  }
}

TEST_P(RowsOnTarget, SumsMatchTheDefinitionBitForBit) {
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    const Payload& p = kPayloads[round % 3];
    const std::size_t n = p.granule() * (1 + random() % 40);
    const bool weighted = random() % 2 != 0;
    std::vector<int> ends, host_ends;
    int rows = 0;
    const std::size_t partials = 1 + random() % 5;
    for (std::size_t i = 1; i <= partials; ++i) {
      ends.push_back(rows += 1 + static_cast<int>(random() % 4));
      if (i == partials || random() % 2 != 0) host_ends.push_back(static_cast<int>(i));
    }
    const bool by_host = random() % 2 != 0;
    std::vector<Row> inputs;
    std::vector<const void*> pointers;
    std::vector<float> weights;
    inputs.reserve(static_cast<std::size_t>(rows));
    for (int r = 0; r < rows; ++r) {
      inputs.emplace_back(p, random_codes(p, n, random));
      pointers.push_back(inputs.back().data());
      weights.push_back(static_cast<float>(random() % 2000) / 1000.0f - 1.0f);
    }
    Row out(n * p.bytes());
    xd::rows::sum(p.type, out.data(),
                  {.rows = pointers.data(),
                   .weights = weighted ? weights.data() : nullptr,
                   .partial_ends = ends.data(),
                   .num_partials = static_cast<int>(ends.size()),
                   .host_ends = by_host ? host_ends.data() : nullptr,
                   .num_hosts = by_host ? static_cast<int>(host_ends.size()) : 0},
                  n, kStores[random() % 2]);
    xd::rows::flush();
    EXPECT_TRUE(out.guards_intact());
    if (!by_host) host_ends = {static_cast<int>(ends.size())};
    for (std::size_t i = 0; i < n; ++i) {
      std::vector<std::vector<ref::Term>> hosts;  // a term each: the sum of the host
      for (std::size_t r = 0, q = 0, h = 0; h < host_ends.size(); ++h) {
        std::vector<std::vector<ref::Term>> partials_of_host;
        for (; q < static_cast<std::size_t>(host_ends[h]); ++q) {
          partials_of_host.emplace_back();
          for (; r < static_cast<std::size_t>(ends[q]); ++r) {
            partials_of_host.back().push_back({inputs[r].code(p, i), weights[r]});
          }
        }
        hosts.push_back({{ref::sum(p.format, partials_of_host, weighted), 1.0f}});
      }
      ASSERT_EQ(out.code(p, i), ref::sum(p.format, hosts, false))
          << p.name << " round " << round << " element " << i;
    }
  }
}

TEST_P(RowsOnTarget, SumOfOneNegativeZeroIsNegativeZero) {
  for (const Payload& p : kPayloads) {
    const std::uint32_t minus_zero = 1u << (p.bits() - 1);
    Row in(p, std::vector<std::uint32_t>(p.granule(), minus_zero)), out(16);
    const void* row = in.data();
    const int end = 1;
    const float one = 1.0f;
    for (const float* weight : {static_cast<const float*>(nullptr), &one}) {
      xd::rows::sum(p.type, out.data(), {&row, weight, &end, 1}, p.granule(), Store::cached);
      EXPECT_EQ(out.code(p, 0), minus_zero) << p.name;
    }
  }
}

TEST_P(RowsOnTarget, ScaleWorksInPlace) {
  std::mt19937 random(3);
  for (const Payload& p : kPayloads) {
    const auto codes = random_codes(p, p.granule() * 37, random);
    Row row(p, codes);
    xd::rows::scale(p.type, row.data(), row.data(), -0.7f, codes.size(), Store::cached);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      ASSERT_EQ(row.code(p, i), ref::sum(p.format, {{{codes[i], -0.7f}}}, true)) << p.name;
    }
    EXPECT_TRUE(row.guards_intact());
  }
}

TEST_P(RowsOnTarget, DotMatchesTheDefinitionBitForBit) {
  std::mt19937 random(4);
  std::normal_distribution<double> normal;
  for (const Payload& p : kPayloads) {
    for (std::size_t n = 0; n <= 300; n += p.granule()) {
      std::vector<std::uint32_t> a(n), b(n);
      for (auto* codes : {&a, &b}) {
        for (auto& code : *codes) code = ref::encode(normal(random), p.format);
      }
      if (n % 5 == 4) a[n / 2] = ref::encode(n % 2 == 0 ? NAN : INFINITY, p.format);
      const float got = xd::rows::dot(p.type, Row(p, a).data(), Row(p, b).data(), n);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(got),
                std::bit_cast<std::uint32_t>(ref::dot(p.format, a, b)))
          << p.name << " n = " << n;
    }
  }
}

// Random terms of a sum under a wire, with the rows that they are of.
struct WireSum {
  WireSum(const Payload& p, std::size_t n, std::mt19937& random) : payload(p), columns(n) {
    for (int count = 1 + static_cast<int>(random() % 4); count > 0; --count) {
      for (int more = 1 + static_cast<int>(random() % 3); more > 0; --more) {
        codes.push_back(random_codes(p, n, random));
        rows.emplace_back(p, codes.back());
        weights.push_back(std::normal_distribution<float>(0.0f, 1.0f)(random));
      }
      ends.push_back(static_cast<int>(codes.size()));
    }
    if (random() % 2 == 0) weights.clear();
    const int partials = static_cast<int>(ends.size());
    if (partials > 1 && random() % 2 == 0) {
      hosts = {1 + static_cast<int>(random() % static_cast<unsigned>(partials - 1)), partials};
    }
  }

  // Partial p of the definition.
  std::vector<float> partial(std::size_t p) const {
    std::vector<float> sum(columns);
    const auto first = static_cast<std::size_t>(p == 0 ? 0 : ends[p - 1]);
    for (std::size_t r = first; r < static_cast<std::size_t>(ends[p]); ++r) {
      for (std::size_t i = 0; i < columns; ++i) {
        const double x = ref::decode(codes[r][i], payload.format);
        const double term = weights.empty() ? x : ref::mul(x, weights[r]);
        sum[i] = static_cast<float>(r == first ? term : ref::add(sum[i], term));
      }
    }
    return sum;
  }
  std::vector<std::uint32_t> expected(xd_ep_wire wire) const {
    std::vector<std::uint32_t> result;
    std::vector<std::vector<float>> arrived;
    for (std::size_t p = 0; p < ends.size(); ++p) {
      arrived.push_back(xd::test::through_wire(wire, partial(p)));
    }
    const std::vector<int> of_hosts =
        hosts.empty() ? std::vector{static_cast<int>(ends.size())} : hosts;
    for (std::size_t i = 0; i < columns; ++i) {
      double total = 0;
      std::size_t p = 0;
      for (std::size_t host = 0; host < of_hosts.size(); ++host) {
        double of_host = arrived[p++][i];
        for (; p < static_cast<std::size_t>(of_hosts[host]); ++p) {
          of_host = ref::add(of_host, arrived[p][i]);
        }
        if (of_hosts.size() > 1 && wire != XD_EP_WIRE_FLOAT32) {
          of_host = ref::decode(ref::encode(of_host, payload.format), payload.format);
        }
        total = host == 0 ? of_host : ref::add(total, of_host);
      }
      result.push_back(ref::encode(total, payload.format));
    }
    return result;
  }

  const Payload& payload;
  std::size_t columns;
  std::vector<std::vector<std::uint32_t>> codes;
  std::vector<Row> rows;
  std::vector<float> weights;
  std::vector<int> ends, hosts;
};

// Each partial is given as rows, or in the wire's form as another rank would send it.
void expect_sum(WireSum& sum, xd_ep_wire wire, std::mt19937& random) {
  const xd::ep::WireFormat format = xd::ep::wire_format(wire);
  const std::size_t bytes = sum.payload.bytes();
  std::vector<const void*> rows;
  std::vector<float> weights;
  std::vector<int> ends;
  std::vector<xd::rows::PartialForm> forms;
  std::vector<Row> sent;
  sent.reserve(sum.ends.size());
  int first = 0;
  for (const int end : sum.ends) {
    std::vector<const void*> own;
    for (int r = first; r < end; ++r) own.push_back(sum.rows[static_cast<std::size_t>(r)].data());
    const bool coded = random() % 2 == 0;
    if (coded) {
      const auto of_wire =
          static_cast<std::size_t>(format.row_bytes(sum.columns, sum.columns * bytes));
      const int count = end - first;
      constexpr auto kRows = xd::rows::PartialForm::rows;
      Row& row = sent.emplace_back(of_wire);
      xd::rows::encode_wire(
          sum.payload.type, format, row.data(),
          {{own.data(), sum.weights.empty() ? nullptr : sum.weights.data() + first, &count, 1},
           &kRows},
          sum.columns);
      ASSERT_TRUE(row.guards_intact());
      own = {row.data()};
    }
    for (std::size_t i = 0; i < own.size(); ++i) {
      rows.push_back(own[i]);
      weights.push_back(
          sum.weights.empty() || coded ? 1.0f : sum.weights[static_cast<std::size_t>(first) + i]);
    }
    forms.push_back(coded ? xd::rows::PartialForm::wire : xd::rows::PartialForm::rows);
    ends.push_back(static_cast<int>(rows.size()));
    first = end;
  }
  Row out(sum.columns * bytes);
  xd::rows::sum_wire(sum.payload.type, format, out.data(),
                     {{.rows = rows.data(),
                       .weights = sum.weights.empty() ? nullptr : weights.data(),
                       .partial_ends = ends.data(),
                       .num_partials = static_cast<int>(ends.size()),
                       .host_ends = sum.hosts.empty() ? nullptr : sum.hosts.data(),
                       .num_hosts = static_cast<int>(sum.hosts.size())},
                      forms.data()},
                     sum.columns);
  EXPECT_TRUE(out.guards_intact());
  const std::vector<std::uint32_t> want = sum.expected(wire);
  for (std::size_t i = 0; i < sum.columns; ++i) {
    ASSERT_EQ(out.code(sum.payload, i), want[i])
        << sum.payload.name << ", wire " << wire << ", column " << i;
  }
}

TEST_P(RowsOnTarget, SumsUnderAWireMatchTheDefinition) {
  std::mt19937 random(8);
  for (int round = 0; round < 400; ++round) {
    const Payload& p = kPayloads[random() % 3];
    const auto wire = static_cast<xd_ep_wire>(1 + random() % 4);
    const std::size_t columns =
        wire == XD_EP_WIRE_FLOAT32 ? p.granule() * (1 + random() % 70) : 128 * (1 + random() % 3);
    WireSum sum(p, columns, random);
    expect_sum(sum, wire, random);
    if (HasFatalFailure()) return;
  }
}

// Blocks of a row, quantised and compared.
void expect_quantised(xd_ep_quantise quantise, const std::vector<std::uint32_t>& codes) {
  const xd::test::QuantisedWay way = xd::test::quantised_way(quantise);
  const auto block = static_cast<std::size_t>(way.block);
  const std::size_t scale_bytes = way.scale_type.bits / 8, blocks = codes.size() / block;
  const std::vector<std::uint16_t> narrow(codes.begin(), codes.end());
  Row in(kPayloads[0], codes), out(codes.size());
  std::vector<unsigned char> scales((blocks + 1) * scale_bytes + 1, 0xa5);
  xd::rows::quantise_e4m3(xd::ep::quantise_format(quantise), out.data(), scales.data() + 1,
                          in.data(), codes.size());
  for (std::size_t b = 0; b < blocks; ++b) {
    const auto of_block = std::span(narrow).subspan(b * block, block);
    const auto want = xd::test::quantised_block(way, of_block);
    std::uint32_t scale = 0;
    std::memcpy(&scale, scales.data() + 1 + b * scale_bytes, scale_bytes);
    ASSERT_EQ(scale, want.scale) << "way " << quantise << ", block " << b << std::hex << " of "
                                 << of_block[0];
    for (std::size_t i = 0; i < block; ++i) {
      ASSERT_EQ(out.data()[b * block + i], want.elements[i])
          << "way " << quantise << std::hex << " of 0x" << of_block[i] << " with scale 0x" << scale;
    }
  }
  EXPECT_EQ(scales[0], 0xa5);
  EXPECT_EQ(scales[1 + blocks * scale_bytes], 0xa5);
  EXPECT_TRUE(out.guards_intact());
}

TEST_P(RowsOnTarget, QuantisedBlocksMatchTheDefinition) {
  std::mt19937 random(5);
  for (int round = 0; round < 3000; ++round) {
    const xd_ep_quantise way = xd::test::kWaysToQuantise[round % 4];
    const auto block = static_cast<std::size_t>(xd::test::quantised_way(way).block);
    std::vector<std::uint32_t> codes((1 + random() % 3) * block);
    // Blocks of one magnitude, 2^-133 to 2^127; some with any pattern, some all zero.
    std::normal_distribution<double> normal(
        0.0, std::ldexp(1.0, static_cast<int>(random() % 261) - 134));
    for (auto& code : codes) {
      code = round % 7 == 0    ? random() >> 16
             : round % 11 == 0 ? (random() % 2) << 15
                               : ref::encode(normal(random), kFormatBf16);
    }
    expect_quantised(way, codes);
  }
}

// Every bf16 number in blocks whose largest is any power of two, 1.75 of it (which is what 448 is)
// and the numbers beside that; infinities and NaNs in all of them. Every 31st number here, all with
// XD_TEST_FULL=1.
TEST_P(RowsOnTarget, EveryNumberIsQuantisedRightBesideEveryLargestOne) {
  const char* full = std::getenv("XD_TEST_FULL");
  const std::uint32_t step = full != nullptr && std::string_view(full) == "1" ? 1 : 31;
  for (const xd_ep_quantise way : xd::test::kWaysToQuantise) {
    const auto block = static_cast<std::size_t>(xd::test::quantised_way(way).block);
    for (std::uint32_t largest = 0; largest < 0x7f80; largest += 0x80) {
      for (const std::uint32_t mantissa : {0x00u, 0x01u, 0x5fu, 0x60u, 0x61u, 0x7fu}) {
        if (mantissa != 0x60 && step > 1 && (largest / 0x80 + mantissa) % 5 != 0) continue;
        const std::uint32_t most = largest + mantissa;
        std::vector<std::uint32_t> codes{most};
        for (std::uint32_t code = most % step; code < 0x10000; code += step) {
          const std::uint32_t magnitude = code & 0x7fff;
          if (codes.size() % block == most % 32) {
            codes.push_back(most | (code & 0x8000));
          }
          if (magnitude <= most || magnitude >= 0x7f80) codes.push_back(code);
        }
        codes.resize((codes.size() + 127) / 128 * 128);
        expect_quantised(way, codes);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(RowsOnTarget, CopyAndZeroTakeAnySizeAndAlignment) {
  std::mt19937 random(6);
  std::vector<unsigned char> source(20000);
  for (auto& byte : source) byte = static_cast<unsigned char>(random());
  for (int round = 0; round < 2000; ++round) {
    const std::size_t bytes = random() % (round % 10 == 0 ? 19000 : 300);
    const std::size_t shift = random() % 70, from = random() % 500;
    const Store store = kStores[random() % 2];
    const int count = 1 + static_cast<int>(random() % 5);
    std::vector<std::vector<unsigned char>> outs(
        static_cast<std::size_t>(count), std::vector<unsigned char>(shift + bytes + 70, 0xa5));
    auto want = outs[0];
    std::vector<void*> starts;
    for (auto& out : outs) starts.push_back(out.data() + shift);
    xd::rows::copy_to_many(starts.data(), count, source.data() + from, bytes, store);
    xd::rows::flush();
    std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(from), bytes,
                want.begin() + static_cast<std::ptrdiff_t>(shift));
    for (const auto& out : outs) ASSERT_EQ(out, want) << bytes << " bytes at " << shift;
    xd::rows::zero(starts[0], bytes, store);
    xd::rows::flush();
    std::fill_n(want.begin() + static_cast<std::ptrdiff_t>(shift), bytes, 0);
    ASSERT_EQ(outs[0], want) << bytes << " zero bytes at " << shift;
  }
}

}  // namespace
