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
