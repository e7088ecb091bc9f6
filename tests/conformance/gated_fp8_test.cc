// Gated activations whose result is fp8: the codes and scales of the float32 numbers that the same
// call gives of the same inputs in float32.
#include <crossdock/gated.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
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

// The first columns of a tensor's rows.
struct View {
  View(Tensor& of, std::int64_t columns) : dl(*of.dl()), shape{kRows, columns} {
    strides[0] = of.shape()[1];
    dl.shape = shape;
    dl.strides = strides;
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  DLTensor dl;
  std::int64_t shape[2], strides[2] = {0, 1};
};

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
    View wide(wide_out_, columns_);
    call(activation, weighted, XD_EP_QUANTISE_NONE, last_alone, wide_inner_, wide, nullptr);
    const std::int64_t blocks = columns_ / 128, pitch = columns_ + 16, scale_pitch = blocks + 3;
    Tensor out(rank_, kE4m3, {kRows, pitch}), scales(rank_, kF32, {kRows, scale_pitch});
    View codes_view(out, columns_), scales_view(scales, blocks);
    call(activation, weighted, way, last_alone, inner_, codes_view, &scales_view);
    // Behind rows and zones both are as they were.
    std::vector<std::uint8_t> codes(at(kRows * pitch), kPoisoned);
    std::vector<std::uint32_t> scale_codes(at(kRows * scale_pitch), 0xA5A5A5A5u);
    const auto numbers = wide_out_.read_as<float>();
    for (std::int64_t row = last_alone ? kFirstEnd : 0; row < kEnd; ++row) {
      for (std::int64_t b = 0; b < blocks; ++b) {
        const auto first = at(row * columns_ + b * 128);
        const QuantisedBlock block =
            coded_block(quantised_way(way), std::span(numbers).subspan(first, 128));
        scale_codes[at(row * scale_pitch + b)] = block.scale;
        std::ranges::copy(block.elements, codes.begin() + row * pitch + b * 128);
      }
    }
    EXPECT_EQ(scales.read_as<std::uint32_t>(), scale_codes);
    EXPECT_EQ(out.read_as<std::uint8_t>(), codes);
    EXPECT_TRUE(out.buffer().guards_intact());
    EXPECT_TRUE(scales.buffer().guards_intact());
  }

 private:
  void call(xd_gated_activation activation, bool weighted, xd_ep_quantise way, bool last_alone,
            Tensor& inner, const View& out, const View* scales) {
    xd_gated_args args = XD_GATED_ARGS_INIT;
    const View gate(inner, columns_);
    View up(inner, columns_);
    up.dl.byte_offset += at(columns_) * at(up.dl.dtype.bits / 8);
    args.activation = activation;
    args.gate = &gate.dl;
    args.up = &up.dl;
    args.weights = weighted ? weights_.dl() : nullptr;
    args.offsets = offsets_.dl();
    args.first_expert = last_alone ? 1 : 0;
    args.out = &out.dl;
    args.out_scales = scales == nullptr ? nullptr : &scales->dl;
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
    DLTensor inside = *out.dl();  // out in the memory of gate
    inside.data = gate.dl()->data;
    args.out = &inside, refused("out: lies at");
    EXPECT_TRUE(out.untouched());
    EXPECT_TRUE(scales.untouched());
  });
}

// Lanes store whole vectors there, which no other executor does.
TEST(GatedFp8Calls, RowsAtOddAddressesAreRefusedOnCudaAlone) {
  on_every_rank([](Rank& rank) {
    Tensor gate(rank, kBf16, {kRows, 128 + 1}), up(rank, kBf16, {kRows, 128});
    Tensor out(rank, kE4m3, {kRows, 128}), scales(rank, kF32, {kRows, 1}), offsets(rank, kI32, {2});
    offsets.write(std::vector<std::int32_t>{0, 0});
    const View odd(gate, 128);
    xd_gated_args args = XD_GATED_ARGS_INIT;
    args.gate = &odd.dl;
    args.up = up.dl();
    args.offsets = offsets.dl();
    args.out = out.dl();
    args.out_scales = scales.dl();
    args.quantise = XD_EP_QUANTISE_FP8_BLOCK128;
    const xd_status status = xd_gated(rank.comm, &args, rank.stream());
    if (!rank.asynchronous()) return ok(status);
    expect_error(status, XD_ERROR_INVALID_ARGUMENT, "expected packed elements, and rows at");
  });
}

}  // namespace
}  // namespace xd::test
