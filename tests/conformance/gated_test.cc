// Gated activations: within the header's bounds of their formulas, with equal bits on every
// executor, up to the end of the last zone and no further.
#include <crossdock/gated.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "conformance/numeric.h"
#include "conformance/said.h"
#include "support/gtest_main.h"
#include "support/random.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

struct Type {
  const char* name;
  DLDataType dl;
  double half_ulp;     // relative
  std::uint64_t bits;  // of all results of one test, as the CPU executor gave them
};
constexpr Type kTypes[] = {{"bf16", kBf16, 0x1p-8, 4047380199098435739u},
                           {"f16", kF16, 0x1p-11, 13837252965052955815u},
                           {"f32", kF32, 0x1p-24, 15658149677613099568u}};
void PrintTo(const Type& type, std::ostream* out) { *out << type.name; }

// How gate and up lie in one tensor of 2 F columns.
enum class Lie { halves, interleaved };

struct Value {
  double a, slope, size;  // a(g), a'(g), and the sum of the magnitudes of the slope's terms
  double z = 0;           // its rounding shows in s(z)
};

Value gate_by(double g, double z, double z_slope) {
  const double s = z < -87 ? 0 : 1 / (1 + std::exp(-z));
  const double other = g * s * (1 - s) * z_slope;
  return {g * s, s + other, s + std::abs(other), z};
}

Value activate(xd_gated_activation activation, double g) {
  const double c = 1.5957691216, d = 0.0713548163;
  switch (activation) {
    case XD_GATED_SILU:
      return gate_by(g, g, 1);
    case XD_GATED_GELU_TANH:
      return gate_by(g, g * (c + d * g * g), c + 3 * d * g * g);
    case XD_GATED_RELU:
      return {std::max(g, 0.0), g > 0 ? 1.0 : 0.0, 1};
    default:
      return {std::max(g, 0.0) * std::max(g, 0.0), 2 * std::max(g, 0.0), 2 * std::abs(g)};
  }
}

class GatedCase {
 public:
  GatedCase(const Rank& rank, const Type& type, Lie lie, std::int64_t columns)
      : rank_(rank),
        type_(type),
        format_(format_of(type.dl)),
        lie_(lie),
        columns_(columns),
        inner_(rank, type.dl, {kRows, 2 * columns}),
        weights_(rank, kF32, {kRows}),
        offsets_(rank, kI32, {3}),
        out_(rank, type.dl, {kRows, columns}),
        grad_out_(rank, type.dl, {kRows, columns}),
        grad_inner_(rank, type.dl, {kRows, 2 * columns}),
        grad_weights_(rank, kF32, {kRows}) {
    fill(inner_, inner_values_, 1, 6.0);
    fill(grad_out_, grad_values_, 2, 2.0);
    for (std::int64_t r = 0; r < kRows; ++r) {
      weight_values_.push_back(static_cast<float>(draw(3, r) * 2));
    }
    weights_.write(weight_values_);
    offsets_.write(std::vector<std::int32_t>{0, kFirstEnd, kEnd});
  }

  void call_forward(xd_gated_activation activation, bool weighted) {
    xd_gated_args args = XD_GATED_ARGS_INIT;
    DLTensor gate = half(inner_, 0), up = half(inner_, 1);
    args.activation = activation;
    args.gate = &gate;
    args.up = &up;
    args.weights = weighted ? weights_.dl() : nullptr;
    args.offsets = offsets_.dl();
    args.first_expert = first_expert_;
    args.num_experts = num_experts_;
    args.out = out_.dl();
    ok(xd_gated(rank_.comm, &args, rank_.stream()));
    rank_.memory->synchronize();
  }
  void forward(xd_gated_activation activation, bool weighted) {
    call_forward(activation, weighted);
    const std::vector<double> out = numbers(out_);
    for (std::int64_t i = 0; i < kEnd * columns_; ++i) {
      const Value v = activate(activation, gate_at(i));
      const double expected = v.a * up_at(i) * weight(i, weighted);
      near("out", i, out[at(i)], expected, std::abs(expected), v.z);
    }
    expect_left("out", out_, columns_);
  }

  void call_backward(xd_gated_activation activation, bool weighted) {
    xd_gated_bwd_args args = XD_GATED_BWD_ARGS_INIT;
    DLTensor gate = half(inner_, 0), up = half(inner_, 1);
    DLTensor grad_gate = half(grad_inner_, 0), grad_up = half(grad_inner_, 1);
    args.activation = activation;
    args.grad_out = grad_out_.dl();
    args.gate = &gate;
    args.up = &up;
    args.weights = weighted ? weights_.dl() : nullptr;
    args.offsets = offsets_.dl();
    args.first_expert = first_expert_;
    args.num_experts = num_experts_;
    args.grad_gate = &grad_gate;
    args.grad_up = &grad_up;
    args.grad_weights = weighted ? grad_weights_.dl() : nullptr;
    ok(xd_gated_bwd(rank_.comm, &args, rank_.stream()));
    rank_.memory->synchronize();
  }
  void backward(xd_gated_activation activation, bool weighted) {
    call_backward(activation, weighted);
    const std::vector<double> grads = numbers(grad_inner_);
    for (std::int64_t i = 0; i < kEnd * columns_; ++i) {
      const Value v = activate(activation, gate_at(i));
      const double d = grad_values_[at(i)] * weight(i, weighted);
      near("grad_gate", i, grads[at(place(i, 0))], d * up_at(i) * v.slope,
           std::abs(d * up_at(i)) * v.size, v.z);
      near("grad_up", i, grads[at(place(i, 1))], d * v.a, std::abs(d * v.a), v.z);
    }
    expect_left("grad_inner", grad_inner_, 2 * columns_);
    if (weighted) expect_weights(activation);
  }

  // The zones that calls compute.
  void set_range(std::int32_t first, std::int32_t count) {
    first_expert_ = first;
    num_experts_ = count;
  }
  // All that both calls write.
  std::vector<std::byte> results() const {
    std::vector<std::byte> all;
    for (const Tensor* tensor : {&out_, &grad_inner_, &grad_weights_}) {
      const std::vector<std::byte> one = tensor->read();
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

  // True if no row of the first zone has been written.
  bool first_zone_untouched() const {
    for (const Tensor* tensor : {&out_, &grad_inner_, &grad_weights_}) {
      std::vector<std::byte> bytes = tensor->read();
      bytes.resize(bytes.size() / at(kRows) * at(kFirstEnd));
      if (!std::ranges::all_of(bytes, [](std::byte b) { return b == kPoison; })) return false;
    }
    return true;
  }

  // The bits of both calls' rows, in 64.
  std::uint64_t bits() const {
    std::uint64_t hash = 0;
    for (const Tensor* tensor : {&out_, &grad_inner_}) {
      for (const std::byte byte : tensor->read()) {
        hash = mix(hash, std::to_integer<std::uint64_t>(byte));
      }
    }
    return hash;
  }

 private:
  static constexpr std::int64_t kRows = 9, kFirstEnd = 3, kEnd = 7;
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  // In [-1, 1).
  static double draw(std::uint64_t what, std::int64_t i) {
    return static_cast<double>(mix(what, static_cast<std::uint64_t>(i)) >> 40) * 0x1p-23 - 1;
  }
  // Numbers up to `most`, and some that are much larger or smaller.
  void fill(Tensor& tensor, std::vector<double>& values, std::uint64_t what, double most) const {
    const std::int64_t count = tensor.shape()[0] * tensor.shape()[1];
    std::vector<std::byte> bytes;
    for (std::int64_t i = 0; i < count; ++i) {
      const double large = format_.exponent_bits == 8 ? 20 : 3;  // products have to fit
      const double wild = i % 29 == 3 ? large : i % 31 == 5 ? 0x1p-12 : i % 37 == 0 ? 0 : 1;
      const std::uint32_t code = encode(static_cast<float>(draw(what, i) * most * wild), format_);
      values.push_back(decode(code, format_));
      const auto* raw = reinterpret_cast<const std::byte*>(&code);
      bytes.insert(bytes.end(), raw, raw + format_.bytes);
    }
    tensor.write(bytes);
  }

  std::vector<double> numbers(const Tensor& tensor) const {
    const std::vector<std::byte> bytes = tensor.read();
    std::vector<double> values;
    for (std::size_t i = 0; i < bytes.size(); i += at(format_.bytes)) {
      std::uint32_t code = 0;
      std::memcpy(&code, bytes.data() + i, at(format_.bytes));
      values.push_back(decode(code, format_));
    }
    return values;
  }

  // Gate (0) or up (1), as a view of both.
  DLTensor half(Tensor& of, int which) {
    DLTensor view = *of.dl();
    const std::int64_t first = which * (lie_ == Lie::halves ? columns_ : 1);
    view.data = static_cast<std::byte*>(view.data) + first * format_.bytes;
    view.shape = view_shape_;
    view.strides = view_strides_;
    return view;
  }
  std::int64_t place(std::int64_t i, int which) const {
    const std::int64_t row = i / columns_, column = i % columns_;
    return row * 2 * columns_ +
           (lie_ == Lie::halves ? which * columns_ + column : 2 * column + which);
  }
  double gate_at(std::int64_t i) const { return inner_values_[at(place(i, 0))]; }
  double up_at(std::int64_t i) const { return inner_values_[at(place(i, 1))]; }
  double weight(std::int64_t i, bool weighted) const {
    return weighted ? static_cast<double>(weight_values_[at(i / columns_)]) : 1.0;
  }

  void near(const char* name, std::int64_t i, double got, double expected, double size,
            double z) const {
    const double subnormal = format_.exponent_bits == 8 ? 0x1p-126 : 0x1p-24;
    const double bound =
        std::abs(expected) * type_.half_ulp + size * (0x1p-20 + std::abs(z) * 0x1p-22) + subnormal;
    ASSERT_NEAR(got, expected, bound) << name << " of element " << i;
  }
  void expect_left(const char* name, const Tensor& tensor, std::int64_t columns) const {
    const std::vector<std::byte> bytes = tensor.read();
    for (std::size_t i = at(kEnd * columns * format_.bytes); i < bytes.size(); ++i) {
      ASSERT_EQ(bytes[i], kPoison) << name << " was written behind the last zone";
    }
    EXPECT_TRUE(tensor.buffer().guards_intact()) << name;
  }
  void expect_weights(xd_gated_activation activation) const {
    const auto got = grad_weights_.read_as<float>();
    for (std::int64_t r = 0; r < kEnd; ++r) {
      double sum = 0, size = 0;
      for (std::int64_t i = r * columns_; i < (r + 1) * columns_; ++i) {
        const double term = grad_values_[at(i)] * activate(activation, gate_at(i)).a * up_at(i);
        sum += term;
        size += std::abs(term);
      }
      EXPECT_NEAR(got[at(r)], sum, size * 0x1p-18 + 0x1p-126) << "grad_weights of row " << r;
    }
    std::uint32_t left = 0;
    std::memcpy(&left, &got[at(kEnd)], sizeof(left));
    EXPECT_EQ(left, 0xA5A5A5A5u) << "grad_weights was written behind the last zone";
  }

  const Rank& rank_;
  const Type type_;
  const Format format_;
  const Lie lie_;
  const std::int64_t columns_;
  Tensor inner_, weights_, offsets_, out_, grad_out_, grad_inner_, grad_weights_;
  std::vector<double> inner_values_, grad_values_;
  std::vector<float> weight_values_;
  std::int32_t first_expert_ = 0, num_experts_ = 0;
  std::int64_t view_shape_[2] = {kRows, columns_};
  std::int64_t view_strides_[2] = {2 * columns_, lie_ == Lie::halves ? 1 : 2};
};

class Gated : public testing::TestWithParam<Type> {};

// 1096 columns are several steps of a warp, of which the last is cut; 13 are no whole vectors.
TEST_P(Gated, IsNearItsFormulaUpToTheEndOfTheLastZone) {
  on_every_rank([](Rank& rank) {
    for (const Lie lie : {Lie::halves, Lie::interleaved}) {
      for (const std::int64_t columns : {1096, 8, 13, 1}) {
        for (const auto activation :
             {XD_GATED_SILU, XD_GATED_GELU_TANH, XD_GATED_RELU, XD_GATED_RELU_SQUARED}) {
          for (const bool weighted : {false, true}) {
            SCOPED_TRACE(std::to_string(columns) + " columns, activation " +
                         std::to_string(activation) + (weighted ? ", weighted" : "") +
                         (lie == Lie::halves ? "" : ", interleaved"));
            GatedCase one(rank, GetParam(), lie, columns);
            one.forward(activation, weighted);
            one.backward(activation, weighted);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  });
}

TEST_P(Gated, OfSomeZonesIsTheirRowsAlone) {
  on_every_rank([](Rank& rank) {
    for (const std::int64_t columns : {1096, 13}) {
      GatedCase whole(rank, GetParam(), Lie::halves, columns);
      whole.call_forward(XD_GATED_SILU, true);
      whole.call_backward(XD_GATED_SILU, true);
      GatedCase by_zones(rank, GetParam(), Lie::halves, columns);
      by_zones.set_range(1, columns == 13 ? 0 : 1);  // 0: to the last one
      by_zones.call_forward(XD_GATED_SILU, true);
      by_zones.call_backward(XD_GATED_SILU, true);
      EXPECT_TRUE(by_zones.first_zone_untouched());
      by_zones.set_range(0, 1);
      by_zones.call_forward(XD_GATED_SILU, true);
      by_zones.call_backward(XD_GATED_SILU, true);
      EXPECT_TRUE(by_zones.results() == whole.results());
    }
  });
}

// Every executor has these bits; only the terms of grad_weights have an order of their own.
TEST_P(Gated, HasEqualBitsOnEveryExecutor) {
  on_every_rank([](Rank& rank) {
    std::uint64_t all = 0;
    for (const std::int64_t columns : {1096, 13}) {
      for (const auto activation :
           {XD_GATED_SILU, XD_GATED_GELU_TANH, XD_GATED_RELU, XD_GATED_RELU_SQUARED}) {
        GatedCase one(rank, GetParam(), Lie::halves, columns);
        one.forward(activation, true);
        one.backward(activation, true);
        all = mix(all, one.bits());
      }
    }
    EXPECT_EQ(all, GetParam().bits);
  });
}

INSTANTIATE_TEST_SUITE_P(Types, Gated, testing::ValuesIn(kTypes),
                         [](const testing::TestParamInfo<Type>& instance) {
                           return instance.param.name;
                         });

TEST(GatedCalls, RefuseByNameWhatDoesNotFit) {
  on_every_rank([](Rank& rank) {
    Tensor rows(rank, kBf16, {4, 8}), fewer(rank, kBf16, {3, 8}), wide(rank, kF32, {4, 8});
    Tensor narrow(rank, kBf16, {4, 7}), weights(rank, kF32, {4}), none(rank, kI32, {0});
    Tensor two(rank, kI32, {3});
    xd_gated_args args = XD_GATED_ARGS_INIT;
    args.gate = args.up = args.out = rows.dl();
    const xd_gated_args good = args;
    const auto refused = [&](const char* named) {
      EXPECT_EQ(xd_gated(rank.comm, &args, rank.stream()), XD_ERROR_INVALID_ARGUMENT);
      expect_said(named);
      args = good;
    };
    for (Tensor* bad : {&fewer, &wide, &narrow}) {
      args.up = bad->dl();
      refused("up");
      args.out = bad->dl();
      refused("out");
    }
    args.gate = nullptr;
    refused("gate");
    args.weights = fewer.dl();
    refused("weights");
    args.offsets = none.dl();
    refused("offsets");
    args.activation = static_cast<xd_gated_activation>(4);
    refused("activation");
    args.first_expert = 1;
    refused("first_expert = 1, expected 0 to 0 without offsets");
    args.offsets = two.dl();
    args.first_expert = 2;
    refused("first_expert = 2, expected 0 to 1");
    args.offsets = two.dl();
    args.first_expert = 1;
    args.num_experts = 2;
    refused("num_experts = 2, expected 0 to 1 from expert 1 on");
    args.struct_size = 0;
    refused("struct_size");
    ok(xd_gated(rank.comm, &args, rank.stream()));  // in place, all rows

    xd_gated_bwd_args bwd = XD_GATED_BWD_ARGS_INIT;
    bwd.grad_out = bwd.gate = bwd.up = bwd.grad_gate = bwd.grad_up = rows.dl();
    bwd.weights = weights.dl();
    EXPECT_EQ(xd_gated_bwd(rank.comm, &bwd, rank.stream()), XD_ERROR_INVALID_ARGUMENT);
    expect_said("grad_weights");
    rank.memory->synchronize();
  });
}

}  // namespace
}  // namespace xd::test
