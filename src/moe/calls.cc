#include "moe/calls.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "base/error.h"
#include "base/options.h"
#include "moe/executors.h"

namespace xd::moe {
namespace {

constexpr std::array kTypes = {DType::bf16, DType::f16, DType::f32};
constexpr std::array kWeightTypes = {DType::f32};
constexpr std::array kOffsetTypes = {DType::i32, DType::i64};

// Reads tensors of one call, all of whose receive tensors have the rows and the type of the first.
class Reader {
 public:
  Reader(const ep::Group& group, const DLTensor* first, const char* name)
      : device_(group.comm().device()), first_(rows(first, name)) {}

  const Tensor& first() const { return first_; }
  // [R,cols].
  Tensor received(const DLTensor* tensor, const char* name, std::int64_t cols, const char* what,
                  bool optional = false) const {
    const Tensor read = rows(tensor, name, optional);
    if (!read) return read;
    require_rows(read, first_.rows, "rows of ", first_.name);
    require_same_type(read, first_);
    require_cols(read, cols, what);
    return read;
  }
  // [R,F], which tells F.
  Tensor activated(const DLTensor* tensor, const char* name) const {
    const Tensor read = rows(tensor, name);
    return received(tensor, name, read.cols, "columns of an expert");
  }
  // [R] float32, optional.
  Tensor weights(const DLTensor* tensor, const char* name) const {
    const Tensor read = read_tensor(
        tensor,
        {.name = name, .ndim = 1, .types = kWeightTypes, .device = device_, .optional = true});
    if (read) require_rows(read, first_.rows, "rows of ", first_.name);
    return read;
  }
  // [L,rows,cols]. `types` are those of weights, or of their gradients.
  ep::Matrices matrices(const DLTensor* tensor, const char* name, const ep::Matrices& like,
                        Fit fit) const {
    ep::Matrices read = ep::read_matrices(
        tensor, {.name = name, .ndim = 3, .types = kTypes, .device = device_, .fit = fit});
    const bool output = fit == Fit::output;
    XD_REQUIRE(read.type == first_.type || (output && read.type == DType::f32), name, ": is ",
               dtype_name(read.type), ", expected ", dtype_name(first_.type),
               output ? " or float32" : "", ", as ", first_.name);
    XD_REQUIRE(read.count == like.count && read.rows == like.rows && read.cols == like.cols, name,
               ": has shape [", read.count, ", ", read.rows, ", ", read.cols, "], expected [",
               like.count, ", ", like.rows, ", ", like.cols, "]");
    return read;
  }
  Tensor offsets(const DLTensor* tensor, std::int64_t experts) const {
    const Tensor read = read_tensor(
        tensor, {.name = "offsets", .ndim = 1, .types = kOffsetTypes, .device = device_});
    require_rows(read, experts + 1, "experts + 1");
    return read;
  }

 private:
  Tensor rows(const DLTensor* tensor, const char* name, bool optional = false) const {
    const Tensor read = read_tensor(tensor, {.name = name,
                                             .ndim = 2,
                                             .types = kTypes,
                                             .device = device_,
                                             .fit = Fit::rows,
                                             .optional = optional});
    if (!read) return read;
    XD_REQUIRE(read.row_bytes() > 0 && read.row_bytes() % kRowAlignment == 0, name, ": a row has ",
               read.row_bytes(), " bytes, expected a positive multiple of ", kRowAlignment);
    return read;
  }

  const DLDevice device_;
  const Tensor first_;
};

int most_parts(const ep::Group& group) {
  return std::min(group.config().most_parts(), std::max(group.config().local_experts, 1));
}

// Whether plans lie where the host may read them, and are complete when it is called.
bool reads_plans(const ep::Group& group) { return group.comm().device().device_type == kDLCPU; }

Schedule read_schedule(std::int32_t parts, std::int32_t num_sms, const ep::PlanBytes& plan,
                       const ep::Group& group) {
  const int most = most_parts(group);
  XD_REQUIRE(parts >= 0 && parts <= most, "parts = ", parts, ", expected 0 (serial) to ", most);
  XD_REQUIRE(num_sms >= 0, "num_sms = ", num_sms, ", expected 0 (as the group) or more");
  XD_REQUIRE(plan.data != nullptr, "plan = NULL, expected the bytes of a plan");
  if (parts > 0 && reads_plans(group)) {
    const int has = ep::PlanView::open(plan.data, plan.bytes).parts();
    XD_REQUIRE(parts == has, "parts = ", parts, ", expected 0 (serial) or ", has,
               ", those of the plan");
  }
  return {parts, std::min(num_sms, most_sms(group))};
}

template <class Args>
xd_gated_activation read_activation(const Args& args) {
  const std::int32_t number = raw_enum(args.activation);
  XD_REQUIRE(number >= XD_GATED_SILU && number <= XD_GATED_RELU_SQUARED, "activation = ", number,
             ", expected an xd_gated_activation");
  return args.activation;
}

// The experts, after the receive tensors are known: H of the first one, F of `activated`.
template <class Args>
Experts read_experts(const Args& args, const Reader& reader, const Tensor& activated,
                     const ep::Group& group) {
  Experts experts;
  experts.count = group.config().local_experts;
  experts.activation = read_activation(args);
  experts.near_ranks = static_cast<int>(group.comm().hosts().near().size());
  experts.offsets = reader.offsets(args.offsets, experts.count);
  if (experts.count == 0) return experts;
  const std::int64_t hidden = reader.first().cols, ffn = activated.cols;
  const auto read = [&](const DLTensor* tensor, const char* name, std::int64_t rows,
                        std::int64_t cols) {
    return reader.matrices(tensor, name, {.count = experts.count, .rows = rows, .cols = cols},
                           Fit::input);
  };
  experts.w_in = read(args.w_in, "w_in", hidden, 2 * ffn);
  experts.w_out = read(args.w_out, "w_out", ffn, hidden);
  return experts;
}

// Checks that no tensor that is written shares memory with another one.
void require_apart(std::initializer_list<Tensor> written, std::initializer_list<Tensor> read) {
  const std::span<const Tensor> all(written.begin(), written.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (const Tensor& other : all.subspan(i + 1)) xd::require_apart(all[i], other);
    for (const Tensor& other : read) xd::require_apart(all[i], other);
  }
}

Tensor memory_of(const ep::Matrices& m) { return m.data != nullptr ? m.memory() : Tensor{}; }

bool are_apart(const ep::Matrices& a, const ep::Matrices& b) {
  const Tensor::Extent one = memory_of(a).extent(), other = memory_of(b).extent();
  const auto first = [](const Tensor::Extent& e) {
    return reinterpret_cast<std::uintptr_t>(e.first);
  };
  return first(one) + one.bytes <= first(other) || first(other) + other.bytes <= first(one);
}

// The same for matrices, each of which may lie between those of the other argument, as they do in
// slices of one tensor.
void require_apart(const ep::Matrices& written, const ep::Matrices& other) {
  if (written.data == nullptr || other.data == nullptr || are_apart(written, other)) return;
  const auto step = [](const ep::Matrices& m) {
    return m.stride * static_cast<std::int64_t>(dtype_bytes(m.type));
  };
  if (step(written) != step(other)) return xd::require_apart(written.memory(), other.memory());
  const auto one = [&](ep::Matrices m, std::int64_t expert) {
    m.data += expert * step(m);
    m.count = 1;
    return m.memory();
  };
  // Pairs of one distance lie alike.
  for (std::int64_t distance = 1 - written.count; distance < written.count; ++distance) {
    const std::int64_t first = std::max<std::int64_t>(distance, 0);
    xd::require_apart(one(written, first), one(other, first - distance));
  }
}

void require_layout(const ep::Group& group) {
  XD_REQUIRE(group.config().layout.has_zones, "group: has layout ", group.config().layout.name,
             ", expected EXPERT_MAJOR");
}

}  // namespace

ForwardCall read_forward(const xd_moe_forward_args* args, const ep::Group& group) {
  require_layout(group);
  const auto a = read_struct("args", args, xd_moe_forward_args XD_MOE_FORWARD_ARGS_INIT);
  XD_REQUIRE(a.reserved == 0, "reserved = ", a.reserved, ", expected 0");
  ForwardCall call{};
  call.plan = {a.plan, a.plan_bytes};
  call.schedule = read_schedule(a.parts, a.num_sms, call.plan, group);
  call.tokens = a.tokens;
  call.topk_weights = a.topk_weights;
  call.recv_tokens = a.recv_tokens;
  call.recv_weights = a.recv_weights;
  call.expert_out = a.expert_out;
  call.out = a.out;
  const Reader reader(group, a.recv_tokens, "recv_tokens");
  const std::int64_t hidden = reader.first().cols;
  call.rows = reader.first();
  call.activated = reader.activated(a.activated, "activated");
  call.inner =
      reader.received(a.inner, "inner", 2 * call.activated.cols, "twice those of activated");
  call.results = reader.received(a.expert_out, "expert_out", hidden, "columns of recv_tokens");
  call.experts = read_experts(a, reader, call.activated, group);
  const auto dispatch = dispatch_args(call, 0);
  const ep::DispatchCall sent = ep::read_dispatch(&dispatch, group.call_context());
  if (sent.recv_weights) require_rows(sent.recv_weights, call.rows.rows, "rows of recv_tokens");
  const auto combine = combine_args(call, 0);
  const ep::CombineCall summed = ep::read_combine(&combine, group.call_context());
  require_rows(summed.out, sent.tokens.rows, "rows of tokens");
  call.sums = summed.out;
  require_apart(
      {call.rows, sent.recv_weights, call.inner, call.activated, call.results, summed.out},
      {sent.tokens, sent.topk_weights, call.experts.offsets, memory_of(call.experts.w_in),
       memory_of(call.experts.w_out)});
  return call;
}

namespace {

template <class Args>
int parts_of(const Args* args, Args init, const ep::Group& group) {
  try {
    const int parts = read_struct("args", args, init).parts;
    return parts >= 0 && parts <= most_parts(group) ? parts : 0;
  } catch (const Error&) {
    return 0;
  }
}

}  // namespace

int parts_of(const xd_moe_forward_args* args, const ep::Group& group) {
  return parts_of(args, xd_moe_forward_args XD_MOE_FORWARD_ARGS_INIT, group);
}
int parts_of(const xd_moe_backward_args* args, const ep::Group& group) {
  return parts_of(args, xd_moe_backward_args XD_MOE_BACKWARD_ARGS_INIT, group);
}

namespace {

// The optional tensors that go together in a backward pass.
void require_weights(const xd_moe_backward_args& a) {
  const bool wanted = a.grad_topk_weights != nullptr;
  const auto require = [&](const DLTensor* tensor, const char* name) {
    XD_REQUIRE(!wanted || tensor != nullptr, name,
               " = NULL, expected a tensor: grad_topk_weights is given");
  };
  require(a.recv_weights, "recv_weights");
  require(a.expert_out, "expert_out");
  require(a.grad_recv_weights, "grad_recv_weights");
  XD_REQUIRE(wanted || a.grad_recv_weights == nullptr,
             "grad_recv_weights: is given, expected NULL as grad_topk_weights is NULL");
}

// The rows that products for weights read, where there are any, and the gradients of weights.
void read_gradients(const xd_moe_backward_args& a, const Reader& reader, BackwardCall& call) {
  const std::int64_t hidden = reader.first().cols, ffn = call.grad_activated.cols;
  call.rows = reader.received(a.recv_tokens, "recv_tokens", hidden, "columns of grad_expert_out",
                              a.grad_w_in == nullptr);
  call.activated = reader.received(a.activated, "activated", ffn, "columns of grad_activated",
                                   a.grad_w_out == nullptr);
  XD_REQUIRE(a.accumulate == 0 || a.accumulate == 1, "accumulate = ", a.accumulate,
             ", expected 0 or 1");
  call.accumulate = a.accumulate != 0;
  const auto read = [&](const DLTensor* tensor, const char* name, const ep::Matrices& of) {
    if (tensor == nullptr || call.experts.count == 0) return ep::Matrices{};
    const ep::Matrices m = reader.matrices(tensor, name, of, Fit::output);
    XD_REQUIRE(!call.accumulate || m.type == DType::f32, name, ": is ", dtype_name(m.type),
               ", expected float32 where accumulate = 1");
    return m;
  };
  call.grad_w_in = read(a.grad_w_in, "grad_w_in", call.experts.w_in);
  call.grad_w_out = read(a.grad_w_out, "grad_w_out", call.experts.w_out);
}

// Checks tensors, and the call's matrices among them.
void require_apart(const BackwardCall& call, std::initializer_list<Tensor> written,
                   std::initializer_list<Tensor> read) {
  const ep::Matrices &w_in = call.experts.w_in, &w_out = call.experts.w_out;
  require_apart(written, read);
  require_apart(written, {memory_of(w_in), memory_of(w_out)});
  for (const ep::Matrices* gradient : {&call.grad_w_in, &call.grad_w_out}) {
    const Tensor memory = memory_of(*gradient);
    for (const Tensor& other : written) xd::require_apart(memory, other);
    for (const Tensor& other : read) xd::require_apart(memory, other);
    require_apart(*gradient, w_in);
    require_apart(*gradient, w_out);
  }
  require_apart(call.grad_w_in, call.grad_w_out);
}

}  // namespace

BackwardCall read_backward(const xd_moe_backward_args* args, const ep::Group& group) {
  require_layout(group);
  const auto a = read_struct("args", args, xd_moe_backward_args XD_MOE_BACKWARD_ARGS_INIT);
  BackwardCall call{};
  call.plan = {a.plan, a.plan_bytes};
  call.schedule = read_schedule(a.parts, a.num_sms, call.plan, group);
  require_weights(a);
  call.grad_out = a.grad_out;
  call.recv_weights = a.recv_weights;
  call.expert_out = a.grad_topk_weights != nullptr ? a.expert_out : nullptr;
  call.grad_expert_out = a.grad_expert_out;
  call.grad_recv_weights = a.grad_recv_weights;
  call.grad_recv_tokens = a.grad_recv_tokens;
  call.grad_tokens = a.grad_tokens;
  call.grad_topk_weights = a.grad_topk_weights;
  const Reader reader(group, a.grad_expert_out, "grad_expert_out");
  const std::int64_t hidden = reader.first().cols;
  call.grad_results = reader.first();
  call.grad_activated = reader.activated(a.grad_activated, "grad_activated");
  const std::int64_t both = 2 * call.grad_activated.cols;
  call.inner = reader.received(a.inner, "inner", both, "twice those of grad_activated");
  call.grad_inner = reader.received(a.grad_inner, "grad_inner", both, "columns of inner");
  call.grad_rows =
      reader.received(a.grad_recv_tokens, "grad_recv_tokens", hidden, "columns of grad_expert_out");
  call.experts = read_experts(a, reader, call.grad_activated, group);
  const Tensor weights = reader.weights(a.recv_weights, "recv_weights");
  const Tensor grad_weights = reader.weights(a.grad_recv_weights, "grad_recv_weights");
  read_gradients(a, reader, call);
  const auto to_rows = combine_bwd_args(call, 0);
  const ep::CombineBwdCall sent = ep::read_combine_bwd(&to_rows, group.call_context());
  if (sent.expert_out) {
    require_rows(sent.expert_out, call.grad_results.rows, "rows of grad_expert_out");
  }
  const auto to_tokens = dispatch_bwd_args(call, 0);
  const ep::DispatchBwdCall summed = ep::read_dispatch_bwd(&to_tokens, group.call_context());
  require_rows(summed.grad_tokens, sent.grad_out.rows, "rows of grad_out");
  call.sums = summed.grad_tokens;
  call.weight_sums = summed.grad_topk_weights;
  if (call.weight_sums) {
    require_rows(call.weight_sums, sent.grad_out.rows, "rows of grad_out");
    if (reads_plans(group)) {
      const ep::PlanView plan = ep::PlanView::open(call.plan.data, call.plan.bytes);
      require_cols(call.weight_sums, plan.header().topk, "choices of each token in the plan");
    }
  }
  const Tensor inner = call.inner.data != call.grad_inner.data ? call.inner : Tensor{};
  require_apart(call,
                {call.grad_results, grad_weights, call.grad_activated, call.grad_inner,
                 call.grad_rows, call.sums, call.weight_sums},
                {sent.grad_out, sent.expert_out, weights, call.rows, inner, call.activated,
                 call.experts.offsets});
  return call;
}

namespace {

// The fields that operations on a plan have in common.
template <class Args, class Call>
Args on_plan(Args args, const Call& call, int part) {
  args.plan = call.plan.data;
  args.plan_bytes = call.plan.bytes;
  args.part = part;
  return args;
}

}  // namespace

xd_ep_dispatch_args dispatch_args(const ForwardCall& call, int part) {
  auto args = on_plan(xd_ep_dispatch_args XD_EP_DISPATCH_ARGS_INIT, call, part);
  args.tokens = call.tokens;
  args.topk_weights = call.topk_weights;
  args.recv_tokens = call.recv_tokens;
  args.recv_weights = call.recv_weights;
  return args;
}

xd_ep_combine_args combine_args(const ForwardCall& call, int part) {
  auto args = on_plan(xd_ep_combine_args XD_EP_COMBINE_ARGS_INIT, call, part);
  args.expert_out = call.expert_out;
  args.weights = call.recv_weights;
  args.out = call.out;
  return args;
}

xd_ep_combine_bwd_args combine_bwd_args(const BackwardCall& call, int part) {
  auto args = on_plan(xd_ep_combine_bwd_args XD_EP_COMBINE_BWD_ARGS_INIT, call, part);
  args.grad_out = call.grad_out;
  args.expert_out = call.expert_out;
  args.weights = call.recv_weights;
  args.grad_expert_out = call.grad_expert_out;
  args.grad_weights = call.grad_recv_weights;
  return args;
}

xd_ep_dispatch_bwd_args dispatch_bwd_args(const BackwardCall& call, int part) {
  auto args = on_plan(xd_ep_dispatch_bwd_args XD_EP_DISPATCH_BWD_ARGS_INIT, call, part);
  args.grad_recv_tokens = call.grad_recv_tokens;
  args.grad_recv_weights = call.grad_recv_weights;
  args.grad_tokens = call.grad_tokens;
  args.grad_topk_weights = call.grad_topk_weights;
  return args;
}

}  // namespace xd::moe
