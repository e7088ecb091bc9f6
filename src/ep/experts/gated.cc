#include "ep/experts/gated.h"

#include <array>

#include "base/error.h"
#include "base/options.h"

namespace xd::ep {
namespace {

constexpr std::array kTypes = {DType::bf16, DType::f16, DType::f32};
constexpr std::array kWeightTypes = {DType::f32};
constexpr std::array kOffsetTypes = {DType::i32, DType::i64};

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

// The inputs that both calls have.
template <class Args>
GatedCall read_inputs(const Args& args, Reader& reader) {
  GatedCall call{};
  call.activation = activation_of(args);
  call.gate = reader.rows(args.gate, "gate", Fit::input);
  call.up = reader.rows(args.up, "up", Fit::input);
  call.weights = reader.weights(args.weights, "weights", Fit::input);
  call.offsets = reader.offsets(args.offsets);
  return call;
}

}  // namespace

GatedCall read_gated(const xd_gated_args* args, DLDevice device) {
  const auto a = read_struct("args", args, xd_gated_args XD_GATED_ARGS_INIT);
  Reader reader(device);
  GatedCall call = read_inputs(a, reader);
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
