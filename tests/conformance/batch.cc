#include "conformance/batch.h"

#include <algorithm>
#include <stdexcept>

#include "conformance/image.h"
#include "support/random.h"

namespace xd::test {

Case plain_case(int num_ranks) {
  Case c;
  c.seed = test_seed();
  c.num_ranks = num_ranks;
  c.dtype = kBf16;
  c.alignment = 4;
  c.index_type = kI32;
  c.output_type = kI64;
  c.max_tokens = 12;
  c.topk = 3;
  c.local_experts = 3;
  c.row_units = 4;
  c.weights = true;
  return c;
}

Batch::Batch(const Rank& rank, const Case& c, int number, Place place)
    : rank_(rank),
      place_(place),
      seed_(mix(c.seed, 0xBA7C4, static_cast<std::uint64_t>(number))),
      topk_(c.topk_of(number)),
      routed_(c.placement(number), c.choices(number)) {
  const xd_ep_config config = c.config(rank.rank);
  plan_ = make_plan(rank, config);
  plan_.fill(kPoison);
  set_plan(prepare_args, plan_);
  use_plan(plan_.data(), plan_.bytes());
  add_prepare(c);
  add_dispatch(c);
  add_backward(c);
}

void Batch::use_plan(const void* plan, std::size_t bytes) {
  dispatch_args.plan = combine_args.plan = dispatch_bwd_args.plan = combine_bwd_args.plan = plan;
  dispatch_args.plan_bytes = combine_args.plan_bytes = bytes;
  dispatch_bwd_args.plan_bytes = combine_bwd_args.plan_bytes = bytes;
}

// Every input gets finite numbers of its type.
void Batch::add(const Spec& spec) {
  const bool receive = spec.role == Role::receive_input || spec.role == Role::receive_output;
  Tensor& tensor =
      tensors_.emplace_back(rank_, spec.type, spec.shape, receive ? place_ : Place::ordinary);
  if (spec.role == Role::token_input || spec.role == Role::receive_input) {
    Image image(1, static_cast<std::int64_t>(tensor.buffer().bytes() / element_bytes(spec.type)),
                spec.type, std::byte{0});
    const std::uint64_t salt = fields_.size();
    image.set_row(0, [&](std::int64_t, std::int64_t column) -> std::uint64_t {
      const Element at{seed_ ^ salt, Content::tokens, rank_.rank, 0, column};
      return spec.type.bits == 8 ? any_code(at) : float_code(at, format_of(spec.type));
    });
    tensor.write(image.bytes());
  }
  *spec.slot = tensor.dl();
  const bool output = spec.role == Role::token_output || spec.role == Role::receive_output;
  fields_.push_back({spec.operation, spec.name, spec.slot, spec.role, &tensor, output});
}

void Batch::add_prepare(const Case& c) {
  const Choices& mine = routed_.choices(rank_.rank);
  const std::int64_t ranks = c.num_ranks;
  const std::int64_t experts = c.local_experts_of(rank_.rank);
  Tensor& topk_idx =
      tensors_.emplace_back(rank_, kI64, std::vector<std::int64_t>{mine.tokens, topk_});
  topk_idx.write(mine.ids);
  prepare_args.topk_idx = topk_idx.dl();
  if (c.alignments == PerPlan::own) prepare_args.alignment = routed_.placement().alignment;
  fields_.push_back(
      {XD_EP_PREPARE, "topk_idx", &prepare_args.topk_idx, Role::token_input, &topk_idx, false});
  const auto output = [&](const char* name, const DLTensor** slot,
                          std::vector<std::int64_t> shape) {
    add({XD_EP_PREPARE, name, slot, Role::token_output, c.output_type, std::move(shape)});
  };
  output("counts", &prepare_args.counts, {experts});
  output("padded_counts", &prepare_args.padded_counts, {experts});
  output("offsets", &prepare_args.offsets, {experts + 1});
  output("total", &prepare_args.total, {1});
  output("rank_rows", &prepare_args.rank_rows, {ranks, ranks});
}

void Batch::add_dispatch(const Case& c) {
  const bool expert_major = c.layout == XD_EP_EXPERT_MAJOR;
  const bool scaled = c.cargo == Cargo::e4m3_with_floats;
  const std::int64_t t = routed_.choices(rank_.rank).tokens;
  const std::int64_t k = topk_;
  const std::int64_t rows = static_cast<std::int64_t>(routed_.received(rank_.rank).rows.size());
  const DLDataType type = scaled ? kE4m3 : c.dtype;
  const std::int64_t h =
      std::int64_t{16} * c.row_units / static_cast<std::int64_t>(element_bytes(type));
  const std::vector<std::int64_t> weight_shape =
      expert_major ? std::vector{rows} : std::vector{rows, k};
  xd_ep_dispatch_args& args = dispatch_args;
  add({XD_EP_DISPATCH, "tokens", &args.tokens, Role::token_input, type, {t, h}});
  add({XD_EP_DISPATCH, "recv_tokens", &args.recv_tokens, Role::receive_output, type, {rows, h}});
  if (scaled) {
    add({XD_EP_DISPATCH, "scales", &args.scales, Role::token_input, kF32, {t, 2}});
    add({XD_EP_DISPATCH, "recv_scales", &args.recv_scales, Role::receive_output, kF32, {rows, 2}});
  }
  add({XD_EP_DISPATCH, "topk_weights", &args.topk_weights, Role::token_input, kF32, {t, k}});
  add({XD_EP_DISPATCH, "recv_weights", &args.recv_weights, Role::receive_output, kF32,
       weight_shape});
  if (!expert_major) {
    add({XD_EP_DISPATCH,
         "recv_topk_idx",
         &args.recv_topk_idx,
         Role::receive_output,
         kI32,
         {rows, k}});
  }
}

void Batch::add_backward(const Case& c) {
  const bool expert_major = c.layout == XD_EP_EXPERT_MAJOR;
  const std::int64_t t = routed_.choices(rank_.rank).tokens;
  const std::int64_t k = topk_;
  const std::int64_t rows = static_cast<std::int64_t>(routed_.received(rank_.rank).rows.size());
  const std::int64_t h =
      std::int64_t{16} * c.row_units / static_cast<std::int64_t>(element_bytes(c.dtype));
  const std::vector<std::int64_t> weight_shape =
      expert_major ? std::vector{rows} : std::vector{rows, k};
  const auto input = Role::receive_input;
  const auto output = Role::receive_output;
  add({XD_EP_COMBINE, "expert_out", &combine_args.expert_out, input, c.dtype, {rows, h}});
  if (expert_major) add({XD_EP_COMBINE, "weights", &combine_args.weights, input, kF32, {rows}});
  add({XD_EP_COMBINE, "out", &combine_args.out, Role::token_output, c.dtype, {t, h}});

  xd_ep_combine_bwd_args& bwd = combine_bwd_args;
  add({XD_EP_COMBINE_BWD, "grad_out", &bwd.grad_out, Role::token_input, c.dtype, {t, h}});
  add({XD_EP_COMBINE_BWD, "grad_expert_out", &bwd.grad_expert_out, output, c.dtype, {rows, h}});
  if (expert_major) {
    add({XD_EP_COMBINE_BWD, "expert_out", &bwd.expert_out, input, c.dtype, {rows, h}});
    add({XD_EP_COMBINE_BWD, "weights", &bwd.weights, input, kF32, {rows}});
    add({XD_EP_COMBINE_BWD, "grad_weights", &bwd.grad_weights, output, kF32, {rows}});
  }
  xd_ep_dispatch_bwd_args& dis = dispatch_bwd_args;
  add({XD_EP_DISPATCH_BWD, "grad_recv_tokens", &dis.grad_recv_tokens, input, c.dtype, {rows, h}});
  add({XD_EP_DISPATCH_BWD, "grad_recv_weights", &dis.grad_recv_weights, input, kF32, weight_shape});
  add({XD_EP_DISPATCH_BWD, "grad_tokens", &dis.grad_tokens, Role::token_output, c.dtype, {t, h}});
  add({XD_EP_DISPATCH_BWD,
       "grad_topk_weights",
       &dis.grad_topk_weights,
       Role::token_output,
       kF32,
       {t, k}});
}

Outcome Batch::call(xd_ep_group* group, xd_ep_operation operation) {
  return finish(rank_, group, enqueue(group, operation));
}

xd_status Batch::enqueue(xd_ep_group* group, xd_ep_operation operation) {
  switch (operation) {
    case XD_EP_PREPARE:
      return xd_ep_prepare(group, &prepare_args, rank_.stream());
    case XD_EP_DISPATCH:
      return xd_ep_dispatch(group, &dispatch_args, rank_.stream());
    case XD_EP_COMBINE:
      return xd_ep_combine(group, &combine_args, rank_.stream());
    case XD_EP_DISPATCH_BWD:
      return xd_ep_dispatch_bwd(group, &dispatch_bwd_args, rank_.stream());
    case XD_EP_COMBINE_BWD:
      return xd_ep_combine_bwd(group, &combine_bwd_args, rank_.stream());
    default:  // see slots/batch.h
      break;
  }
  throw std::logic_error("no such operation");
}

Batch::Field& Batch::field(xd_ep_operation operation, const std::string& name) {
  for (Field& field : fields_) {
    if (field.operation == operation && field.name == name) return field;
  }
  throw std::logic_error("no tensor argument " + name);
}

bool Batch::untouched(xd_ep_operation operation) const {
  return std::ranges::all_of(fields_, [&](const Field& field) {
    return field.operation != operation || !field.output || field.tensor->untouched();
  });
}

bool Batch::guards_intact() const {
  return plan_.guards_intact() && std::ranges::all_of(tensors_, [](const Tensor& tensor) {
           return tensor.buffer().guards_intact();
         });
}

void Batch::poison_outputs() {
  for (Field& field : fields_) {
    if (field.output) field.tensor->buffer().fill(kPoison);
  }
}

}  // namespace xd::test
