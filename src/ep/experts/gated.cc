#include "ep/experts/gated.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/options.h"

namespace xd::ep {
namespace {

constexpr std::array kTypes = {DType::bf16, DType::f16, DType::f32};
constexpr std::array kWeightTypes = {DType::f32};
constexpr std::array kOffsetTypes = {DType::i32, DType::i64};
constexpr std::array kCodeTypes = {DType::e4m3};

// Rounds as a wire of that name does: from float32, with infinities as NaN.
WireFormat codes_of(const xd_gated_args& args) {
  const std::int32_t way = raw_enum(args.quantise);
  XD_REQUIRE(way == XD_EP_QUANTISE_NONE || way == XD_EP_QUANTISE_FP8_BLOCK128 ||
                 way == XD_EP_QUANTISE_FP8_BLOCK128_POW2,
             "quantise = ", way, ", expected ", int{XD_EP_QUANTISE_NONE}, " (NONE), ",
             int{XD_EP_QUANTISE_FP8_BLOCK128}, " (FP8_BLOCK128) or ",
             int{XD_EP_QUANTISE_FP8_BLOCK128_POW2}, " (FP8_BLOCK128_POW2)");
  return wire_format(way == XD_EP_QUANTISE_NONE           ? XD_EP_WIRE_SAME
                     : way == XD_EP_QUANTISE_FP8_BLOCK128 ? XD_EP_WIRE_FP8_BLOCK128
                                                          : XD_EP_WIRE_FP8_BLOCK128_POW2);
}

class Reader {
 public:
  explicit Reader(DLDevice device) : device_(device) {}

  // An [R,F] tensor like the gate, which is read first.
  Tensor rows(const DLTensor* tensor, const char* name, Fit fit) {
    const Tensor read = read_tensor(
        tensor, {.name = name, .ndim = 2, .types = kTypes, .device = device_, .fit = fit});
    if (!gate_) {
      gate_ = read;
      return read;
    }
    require_rows(read, gate_.rows, "rows of ", gate_.name);
    require_cols(read, gate_.cols, "columns of ", gate_.name);
    require_same_type(read, gate_);
    return read;
  }
  Tensor weights(const DLTensor* tensor, const char* name, Fit fit) const {
    const Tensor read = read_tensor(tensor, {.name = name,
                                             .ndim = 1,
                                             .types = kWeightTypes,
                                             .device = device_,
                                             .fit = fit,
                                             .optional = true});
    if (read) require_rows(read, gate_.rows, "rows of ", gate_.name);
    return read;
  }
  // The result of xd_gated as fp8.
  void codes(const xd_gated_args& args, GatedCall& call) const {
    const std::int64_t block = call.codes.codes.block;
    XD_REQUIRE(gate_.cols % block == 0, "gate: has ", gate_.cols,
               " columns, expected a multiple of ", block, " where out is fp8");
    call.out = read_tensor(
        args.out,
        {.name = "out", .ndim = 2, .types = kCodeTypes, .device = device_, .fit = Fit::output});
    require_rows(call.out, gate_.rows, "rows of gate");
    require_cols(call.out, gate_.cols, "columns of gate");
    call.out_scales = read_tensor(args.out_scales, {.name = "out_scales",
                                                    .ndim = 2,
                                                    .types = kWeightTypes,
                                                    .device = device_,
                                                    .fit = Fit::output});
    require_rows(call.out_scales, gate_.rows, "rows of gate");
    require_cols(call.out_scales, gate_.cols / block, "F / 128");
    XD_REQUIRE(call.out_scales.cols <= 1 || call.out_scales.col_stride == 1,
               "out_scales: has stride ", call.out_scales.col_stride,
               " along dimension 1, expected 1");
    for (const Tensor& other : {call.gate, call.up, call.weights, call.out}) {
      require_apart(call.out_scales, other);
    }
    require_apart(call.out, call.gate);
    require_apart(call.out, call.up);
  }
  Tensor offsets(const DLTensor* tensor) const {
    const Tensor read = read_tensor(
        tensor,
        {.name = "offsets", .ndim = 1, .types = kOffsetTypes, .device = device_, .optional = true});
    XD_REQUIRE(!read || read.rows >= 1, "offsets: has no elements, expected L + 1");
    return read;
  }

 private:
  const DLDevice device_;
  Tensor gate_;
};

template <class Args>
xd_gated_activation activation_of(const Args& args) {
  const std::int32_t number = raw_enum(args.activation);
  XD_REQUIRE(number >= XD_GATED_SILU && number <= XD_GATED_RELU_SQUARED, "activation = ", number,
             ", expected an xd_gated_activation");
  return args.activation;
}

// The zones that both calls compute.
template <class Args>
void read_range(const Args& args, GatedCall& call) {
  const std::int64_t experts = call.offsets ? call.offsets.rows - 1 : 0;
  const std::int64_t last = std::max<std::int64_t>(experts - 1, 0);
  XD_REQUIRE(args.first_expert >= 0 && args.first_expert <= last,
             "first_expert = ", args.first_expert, ", expected 0 to ", last,
             call.offsets ? "" : " without offsets");
  const std::int64_t most = experts - args.first_expert;
  XD_REQUIRE(args.num_experts >= 0 && args.num_experts <= most, "num_experts = ", args.num_experts,
             ", expected 0 to ", most, " from expert ", args.first_expert, " on");
  call.first_expert = args.first_expert;
  call.end_expert = args.first_expert +
                    (args.num_experts != 0 ? args.num_experts : static_cast<std::int32_t>(most));
}

// The inputs that both calls have.
template <class Args>
GatedCall read_inputs(const Args& args, Reader& reader) {
  GatedCall call{};
  call.activation = activation_of(args);
  call.gate = reader.rows(args.gate, "gate", Fit::input);
  call.up = reader.rows(args.up, "up", Fit::input);
  call.weights = reader.weights(args.weights, "weights", Fit::input);
  call.offsets = reader.offsets(args.offsets);
  read_range(args, call);
  return call;
}

}  // namespace

GatedCall read_gated(const xd_gated_args* args, DLDevice device) {
  const auto a = read_struct("args", args, xd_gated_args XD_GATED_ARGS_INIT);
  Reader reader(device);
  GatedCall call = read_inputs(a, reader);
  call.codes = codes_of(a);
  if (call.codes) {
    reader.codes(a, call);
    return call;
  }
  XD_REQUIRE(a.out_scales == nullptr,
             "out_scales: is given, expected NULL where quantise = ", int{XD_EP_QUANTISE_NONE});
  call.out = reader.rows(a.out, "out", Fit::output);
  return call;
}

GatedCall read_gated(const xd_gated_bwd_args* args, DLDevice device) {
  const auto a = read_struct("args", args, xd_gated_bwd_args XD_GATED_BWD_ARGS_INIT);
  Reader reader(device);
  GatedCall call = read_inputs(a, reader);
  call.grad_out = reader.rows(a.grad_out, "grad_out", Fit::input);
  call.grad_gate = reader.rows(a.grad_gate, "grad_gate", Fit::output);
  call.grad_up = reader.rows(a.grad_up, "grad_up", Fit::output);
  call.grad_weights = reader.weights(a.grad_weights, "grad_weights", Fit::output);
  require_together(call.weights, call.grad_weights);
  return call;
}

}  // namespace xd::ep
