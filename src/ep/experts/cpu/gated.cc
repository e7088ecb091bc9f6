// The gated activation on the CPU, by pieces of a row: elements become float32 numbers side by
// side, so that the compiler makes vectors of the arithmetic, which is on single numbers.
#include "ep/experts/gated.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/float_modes.h"
#include "base/math.h"
#include "ep/experts/cpu/experts.h"
#include "ep/experts/gated_math.h"
#include "ep/plan/cpu/rows.h"

namespace xd::ep::cpu {
namespace {

constexpr std::size_t kPiece = 64;
using Floats = std::array<float, kPiece>;

// Each element type: its bits as they lie, and conversions to and from float32.
struct Bf16 {
  using Element = std::uint16_t;
  static float number(Element bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  static Element element(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return static_cast<Element>(value == value ? rounded : 0x7FC0);
  }
};

struct F16 {
  using Element = std::uint16_t;
  static float number(Element bits) {
    const std::uint32_t magnitude = bits & 0x7FFFu, sign = (bits & 0x8000u) << 16;
    // The exponent gets its bias by a product, which is exact for subnormal numbers as well.
    const float finite = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    const std::uint32_t word =
        magnitude < 0x7C00u ? std::bit_cast<std::uint32_t>(finite) : 0x7F800000u | magnitude << 13;
    return std::bit_cast<float>(word | sign);
  }
  static Element element(float value) {
    const std::uint32_t word = std::bit_cast<std::uint32_t>(value), sign = word >> 16 & 0x8000u;
    const std::uint32_t magnitude = word & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7E00;
    if (magnitude >= 0x477FF000u) return static_cast<Element>(0x7C00u | sign);  // 65520
    std::uint32_t half = (magnitude + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    half -= 112u << 10;
    if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 rounds to the last place
      const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
      half = std::bit_cast<std::uint32_t>(rounded) - std::bit_cast<std::uint32_t>(0.5f);
    }
    return static_cast<Element>(half | sign);
  }
};

struct F32 {
  using Element = std::uint32_t;
  static float number(Element bits) { return std::bit_cast<float>(bits); }
  static Element element(float value) {
    return value == value ? std::bit_cast<Element>(value) : 0x7FC00000u;
  }
};

// Elements [first, first + count) of a row.
struct Place {
  std::int64_t row, first;
  std::size_t count;
};

template <class Type>
typename Type::Element* element_at(const Tensor& tensor, const Place& at, std::size_t i) {
  return tensor.as<typename Type::Element>() + at.row * tensor.row_stride +
         (at.first + static_cast<std::int64_t>(i)) * tensor.col_stride;
}

template <class Type>
void load(const Tensor& tensor, const Place& at, Floats& to) {
  for (std::size_t i = 0; i < at.count; ++i) to[i] = Type::number(*element_at<Type>(tensor, at, i));
  std::fill(to.begin() + static_cast<std::ptrdiff_t>(at.count), to.end(), 0.0f);
}

template <class Type>
void store(const Tensor& tensor, const Place& at, const Floats& from) {
  for (std::size_t i = 0; i < at.count; ++i) {
    *element_at<Type>(tensor, at, i) = Type::element(from[i]);
  }
}

struct RowRange {
  std::int64_t first, end;
};

RowRange rows_of(const GatedCall& call) {
  const std::int64_t all = call.gate.rows;
  if (!call.offsets) return {0, all};
  const auto bound = [&](std::int32_t i) {
    const std::int64_t offset = call.offsets.type == DType::i64
                                    ? call.offsets.as<std::int64_t>()[i]
                                    : call.offsets.as<std::int32_t>()[i];
    return std::clamp<std::int64_t>(offset, 0, all);
  };
  return {call.first_expert > 0 ? bound(call.first_expert) : 0, bound(call.end_expert)};
}

float weight_of(const GatedCall& call, std::int64_t row) {
  return call.weights ? call.weights.as<float>()[row * call.weights.row_stride] : 1.0f;
}

// A row of results on its way to fp8.
class CodedRow {
 public:
  explicit CodedRow(const GatedCall& call)
      : call_(call),
        numbers_(call.codes ? at(call.gate.cols) : 0),
        coded_(call.codes ? call.codes.row_bytes(numbers_.size(), 0) : 0) {}

  void keep(const Place& place, const Floats& from) {
    for (std::size_t i = 0; i < place.count; ++i) {
      const float x = from[i];  // an infinity is one of the NaNs
      numbers_[at(place.first) + i] = x - x == 0.0f ? x : std::bit_cast<float>(0x7FC00000u);
    }
  }
  void store(std::int64_t row) {
    const void* const rows[] = {numbers_.data()};
    const int ends[] = {1};
    const rows::PartialForm forms[] = {rows::PartialForm::rows};
    const rows::Terms sum{
        .rows = rows, .weights = nullptr, .partial_ends = ends, .num_partials = 1};
    rows::encode_wire(rows::Type::f32, call_.codes, coded_.data(), {.sum = sum, .forms = forms},
                      numbers_.size());
    const Tensor& out = call_.out;
    for (std::size_t i = 0; i < numbers_.size(); ++i) {
      out.data[row * out.row_stride + static_cast<std::int64_t>(i) * out.col_stride] = coded_[i];
    }
    std::memcpy(call_.out_scales.as<float>() + row * call_.out_scales.row_stride,
                coded_.data() + numbers_.size(), coded_.size() - numbers_.size());
  }

 private:
  const GatedCall& call_;
  std::vector<float> numbers_;
  std::vector<std::byte> coded_;  // codes, then their scales
};

template <class Type, xd_gated_activation kActivation>
class Rows {
 public:
  explicit Rows(const GatedCall& call) : call_(call), coded_(call) {}

  void compute() {
    const RowRange rows = rows_of(call_);
    for (std::int64_t row = rows.first; row < rows.end; ++row) {
      const float weight = weight_of(call_, row);
      terms_.fill(0.0f);
      for (std::int64_t first = 0; first < call_.gate.cols; first += std::int64_t{kPiece}) {
        const auto count =
            static_cast<std::size_t>(std::min<std::int64_t>(kPiece, call_.gate.cols - first));
        const Place at{row, first, count};
        load<Type>(call_.gate, at, gate_);
        load<Type>(call_.up, at, up_);
        if (call_.backward()) {
          backward(at, weight);
        } else {
          forward(at, weight);
        }
      }
      if (call_.codes) coded_.store(row);
      if (call_.grad_weights) store_weight(row);
    }
  }

 private:
  void forward(const Place& at, float weight) {
    for (std::size_t i = 0; i < kPiece; ++i) {
      result_[i] = gated::forward<kActivation>(gate_[i], up_[i], weight);
    }
    if (call_.codes) {
      coded_.keep(at, result_);
    } else {
      store<Type>(call_.out, at, result_);
    }
  }

  void backward(const Place& at, float weight) {
    load<Type>(call_.grad_out, at, grad_);
    for (std::size_t i = 0; i < kPiece; ++i) {
      const auto g = gated::backward<kActivation>(grad_[i], gate_[i], up_[i], weight);
      result_[i] = g.gate;
      grad_[i] = g.up;
      terms_[i] += g.weight;
    }
    store<Type>(call_.grad_gate, at, result_);
    store<Type>(call_.grad_up, at, grad_);
  }

  // Adds up the sums of a piece's places, one after another.
  void store_weight(std::int64_t row) {
    float sum = 0.0f;
    for (const float term : terms_) sum += term;
    const Tensor& to = call_.grad_weights;
    to.as<float>()[row * to.row_stride] = std::bit_cast<float>(F32::element(sum));
  }

  const GatedCall& call_;
  CodedRow coded_;
  Floats gate_, up_, grad_, result_;
  Floats terms_;  // of the weight's gradient: what each place of a piece has added up
};

template <class Type>
void compute_as(const GatedCall& call) {
  gated::with_activation(call.activation,
                         [&](auto activation) { Rows<Type, activation()>(call).compute(); });
}

}  // namespace

void compute_gated(const GatedCall& call) {
  const StandardFloatModes standard;
  switch (call.gate.type) {
    case DType::bf16:
      return compute_as<Bf16>(call);
    case DType::f16:
      return compute_as<F16>(call);
    default:
      return compute_as<F32>(call);
  }
}

}  // namespace xd::ep::cpu
