// Gated activations whose result is fp8: the codes and scales of the float32 numbers that the same
// call gives of the same inputs in float32.
#include <crossdock/gated.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "conformance/numeric.h"
#include "conformance/quantised.h"
#include "conformance/said.h"
#include "support/gtest_main.h"
#include "support/random.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

struct Type {
  const char* name;
  DLDataType dl;
};
constexpr Type kTypes[] = {{"bf16", kBf16}, {"f16", kF16}, {"f32", kF32}};
void PrintTo(const Type& type, std::ostream* out) { *out << type.name; }

constexpr std::int64_t kRows = 9, kFirstEnd = 3, kEnd = 7;
constexpr std::uint8_t kPoisoned = std::to_integer<std::uint8_t>(kPoison);

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// [gate, up] of 2 F columns: numbers of all sizes, blocks of zeros, and numbers that are not finite
// or whose product is not.
std::vector<float> inner_numbers(std::int64_t columns, const Format& format) {
  const float large = decode(format.max_finite(), format),
              nan = std::numeric_limits<float>::quiet_NaN();
  const float special[] = {nan, std::numeric_limits<float>::infinity(), large, -large, -0.0f};
  std::vector<float> numbers;
  for (std::int64_t i = 0; i < kRows * 2 * columns; ++i) {
    const std::uint64_t random = mix(5, static_cast<std::uint64_t>(i));
    const std::int64_t row = i / columns / 2, column = i % columns;
    float x = static_cast<float>(static_cast<double>(random >> 40) * 0x1p-21 - 4);
    if (row == 1 && column < 128) x = 0;  // one block
    if (row % 2 == 0 && random % 61 == 0) x = special[random / 61 % 5];
    if (row == 2) x *= 0x1p-12f;
    numbers.push_back(decode(encode(x, format), format));
  }
  return numbers;
}

std::vector<std::byte> as_bytes(const std::vector<float>& numbers, const Format& format) {
  std::vector<std::byte> bytes;
  for (const float x : numbers) {
    const std::uint32_t code = encode(x, format);
    const auto* raw = reinterpret_cast<const std::byte*>(&code);
    bytes.insert(bytes.end(), raw, raw + format.bytes);
  }
  return bytes;
}

class CodedCase {
 public:
  CodedCase(const Rank& rank, const Type& type, std::int64_t columns)
      : rank_(rank),
        columns_(columns),
        inner_(rank, type.dl, {kRows, 2 * columns}),
        wide_inner_(rank, kF32, {kRows, 2 * columns}),
        weights_(rank, kF32, {kRows}),
        offsets_(rank, kI32, {3}),
        wide_out_(rank, kF32, {kRows, columns}) {
    const std::vector<float> numbers = inner_numbers(columns, format_of(type.dl));
    inner_.write(as_bytes(numbers, format_of(type.dl)));
    wide_inner_.write(numbers);
    weights_.write(std::vector<float>{0.5f, -1.7f, 1, 3, 1e-30f, 1, 2, 9, 9});
    offsets_.write(std::vector<std::int32_t>{0, kFirstEnd, kEnd});
  }

  void check(xd_gated_activation activation, bool weighted, xd_ep_quantise way, bool last_alone) {
    call(activation, weighted, XD_EP_QUANTISE_NONE, last_alone, wide_inner_, wide_out_, nullptr);
    Tensor out(rank_, kE4m3, {kRows, columns_}), scales(rank_, kF32, {kRows, columns_ / 128});
    call(activation, weighted, way, last_alone, inner_, out, &scales);
    const auto codes = out.read_as<std::uint8_t>();
    const auto scale_codes = scales.read_as<std::uint32_t>();
    const auto numbers = wide_out_.read_as<float>();
    for (std::int64_t b = 0; b < kRows * columns_ / 128; ++b) {
      const std::int64_t row = b * 128 / columns_;
      const std::span block = std::span(numbers).subspan(at(b * 128), 128);
      const bool counts = row >= (last_alone ? kFirstEnd : 0) && row < kEnd;
      QuantisedBlock expected{std::vector<std::uint8_t>(128, kPoisoned), 0xA5A5A5A5u};
      if (counts) expected = coded_block(quantised_way(way), block);
      ASSERT_EQ(scale_codes[at(b)], expected.scale) << "block " << b;
      for (std::int64_t i = 0; i < 128; ++i) {
        ASSERT_EQ(codes[at(b * 128 + i)], expected.elements[at(i)]) << "block " << b << ", " << i;
      }
    }
    EXPECT_TRUE(out.buffer().guards_intact());
    EXPECT_TRUE(scales.buffer().guards_intact());
  }

 private:
  void call(xd_gated_activation activation, bool weighted, xd_ep_quantise way, bool last_alone,
            Tensor& inner, Tensor& out, Tensor* scales) {
    xd_gated_args args = XD_GATED_ARGS_INIT;
    std::int64_t shape[] = {kRows, columns_}, strides[] = {2 * columns_, 1};
    DLTensor gate = *inner.dl();
    gate.shape = shape;
    gate.strides = strides;
    DLTensor up = gate;
    up.byte_offset += at(columns_) * at(gate.dtype.bits / 8);
    args.activation = activation;
    args.gate = &gate;
    args.up = &up;
    args.weights = weighted ? weights_.dl() : nullptr;
    args.offsets = offsets_.dl();
    args.first_expert = last_alone ? 1 : 0;
    args.out = out.dl();
    args.out_scales = scales == nullptr ? nullptr : scales->dl();
    args.quantise = way;
    ok(xd_gated(rank_.comm, &args, rank_.stream()));
    rank_.memory->synchronize();
  }

  const Rank& rank_;
  const std::int64_t columns_;
  Tensor inner_, wide_inner_, weights_, offsets_, wide_out_;
};

class GatedFp8 : public testing::TestWithParam<Type> {};

// 1152 columns are several steps of a warp, of which the last is cut.
TEST_P(GatedFp8, HasTheCodesAndScalesOfItsFloat32Numbers) {
  on_every_rank([](Rank& rank) {
    for (const std::int64_t columns : {128, 1152}) {
      for (const auto activation : {XD_GATED_SILU, XD_GATED_GELU_TANH, XD_GATED_RELU_SQUARED}) {
        for (const bool weighted : {false, true}) {
          for (const auto way : {XD_EP_QUANTISE_FP8_BLOCK128, XD_EP_QUANTISE_FP8_BLOCK128_POW2}) {
            SCOPED_TRACE(std::to_string(columns) + " columns, activation " +
                         std::to_string(activation) + ", way " + std::to_string(way) +
                         (weighted ? ", weighted" : ""));
            CodedCase one(rank, GetParam(), columns);
            one.check(activation, weighted, way, weighted && columns == 128);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Types, GatedFp8, testing::ValuesIn(kTypes),
                         [](const testing::TestParamInfo<Type>& instance) {
                           return instance.param.name;
                         });

TEST(GatedFp8Calls, RefuseByNameWhatDoesNotFit) {
  on_every_rank([](Rank& rank) {
    Tensor gate(rank, kBf16, {4, 256}), out(rank, kE4m3, {4, 256}), scales(rank, kF32, {4, 2});
    Tensor narrow(rank, kBf16, {4, 192}), more(rank, kF32, {4, 3}), fewer(rank, kE4m3, {3, 256});
    xd_gated_args args = XD_GATED_ARGS_INIT;
    args.gate = args.up = gate.dl();
    args.out = out.dl();
    args.out_scales = scales.dl();
    args.quantise = XD_EP_QUANTISE_FP8_BLOCK128;
    const xd_gated_args good = args;
    const auto refused = [&](const char* named) {
      expect_error(xd_gated(rank.comm, &args, rank.stream()), XD_ERROR_INVALID_ARGUMENT, named);
      args = good;
    };
    args.quantise = XD_EP_QUANTISE_MXFP8, refused("quantise = 4, expected 0 (NONE), 1 (FP8_BLOCK1");
    args.gate = args.up = narrow.dl(), refused("gate: has 192 columns, expected a multiple of 128");
    args.out = gate.dl(), refused("out: is bfloat16, expected float8_e4m3fn");
    args.out = fewer.dl(), refused("out: has 3 rows, expected 4");
    args.out_scales = nullptr, refused("out_scales = NULL");
    args.out_scales = more.dl(), refused("out_scales: has 3 columns, expected 2 (F / 128)");
    args.quantise = XD_EP_QUANTISE_NONE, refused("out_scales: is given, expected NULL");
    EXPECT_TRUE(out.untouched());
    EXPECT_TRUE(scales.untouched());
  });
}

}  // namespace
}  // namespace xd::test
