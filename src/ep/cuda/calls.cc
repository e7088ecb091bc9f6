#include "ep/cuda/calls.h"

#include "base/error.h"
#include "base/math.h"
#include "ep/records.h"

namespace xd::ep::cuda {
namespace {

// A receive tensor where peers reach it: in symmetric memory, or through staging.
struct Reached {
  ReceiveRows rows{};
  TensorPlace place;
  bool staged() const { return rows.staged != nullptr; }
};

class Reader {
 public:
  template <class Call>
  Reader(const GroupView& view, const Call& call) : view_(view) {
    const PlanBytes& plan = call.plan;
    XD_REQUIRE(reinterpret_cast<std::uintptr_t>(plan.data) % 16 == 0,
               "plan is not 16-byte aligned");
    XD_REQUIRE(plan.bytes >= sizeof(PlanHeader), "plan_bytes = ", plan.bytes,
               ", expected at least ", sizeof(PlanHeader), ": the plan is cut short");
    turning_.record = describe(call);
    turning_.plan = plan;
  }

  const Config& config() const { return view_.group->config(); }
  const GroupMap map() const { return GroupMap::make(config()); }

  // Rows of tokens: staged where the group has the memory for it.
  Reached receive_rows(const Tensor& tensor) {
    const Reached reached = receive_beside(tensor, map().rows);
    XD_REQUIRE(!reached.staged() || config().staging, tensor.name, kOutsideSymmetricMemory);
    return reached;
  }

  // What lies beside rows: there is always memory to stage it.
  Reached receive_beside(const Tensor& tensor, std::uint64_t staging_offset) {
    Reached reached;
    if (!tensor) return reached;
    check(Check::recv_rows, tensor.name, tensor.rows);
    reached.rows = {.data = tensor.data,
                    .staged = nullptr,
                    .rows = tensor.rows,
                    .row_bytes = tensor.row_bytes()};
    reached.place = TensorPlace(TensorPlace::kGroup, staging_offset);
    // No peer touches a tensor without rows, wherever it lies.
    if (tensor.bytes() == 0) return reached;
    if (tensor.packed()) {
      if (const auto place = view_.group->comm().heap().find(tensor.data, tensor.bytes())) {
        reached.place = TensorPlace(TensorPlace::kHeap + place->segment, place->offset);
        return reached;
      }
    }
    reached.rows.staged = view_.memory + staging_offset;
    return reached;
  }

  void tokens_of_plan(const Tensor& tensor) {
    if (tensor) check(Check::tokens, tensor.name, tensor.rows);
  }
  void topk_of_plan(const Tensor& tensor) {
    if (tensor) check(Check::topk, tensor.name, tensor.cols);
  }
  Turning& turning() { return turning_; }

 private:
  void check(Check::Kind kind, const char* name, std::int64_t got) {
    turning_.checks[at(turning_.num_checks++)] = {kind, name, got};
  }

  const GroupView& view_;
  Turning turning_;
};

PrepareParams::Output output(const Tensor& tensor) {
  return {tensor ? tensor.data : nullptr, tensor.type == DType::i64};
}

template <class T>
T* given(const Tensor& tensor) {
  return tensor ? tensor.as<T>() : nullptr;
}

// Rows that bulk copies can load and store.
bool in_bulk(const ReceiveRows& rows) {
  return (reinterpret_cast<std::uintptr_t>(rows.data) | rows.row_bytes) % kRowAlignment == 0;
}

StridedRows strided(const Tensor& tensor) {
  StridedRows rows{};
  if (!tensor) return rows;
  rows.data = tensor.data;
  rows.row_bytes = tensor.row_bytes();
  rows.element = static_cast<std::uint32_t>(dtype_bytes(tensor.type));
  const std::int64_t element = rows.element;
  rows.row_stride = tensor.row_stride * element;
  rows.col_stride = tensor.col_stride * element;
  rows.bulk = tensor.packed() && rows.row_bytes % kRowAlignment == 0 &&
              reinterpret_cast<std::uintptr_t>(tensor.data) % kRowAlignment == 0;
  // Packed rows go in words where these are aligned. Not those that no stage can hold: they go
  // straight to a peer's tensor, which may lie at any element.
  if (tensor.packed() && rows.row_bytes <= MoverPlan::kMostPieceBytes &&
      rows.row_bytes % sizeof(std::uint32_t) == 0 &&
      reinterpret_cast<std::uintptr_t>(tensor.data) % sizeof(std::uint32_t) == 0) {
    rows.element = sizeof(std::uint32_t);
    rows.col_stride = rows.element;
  }
  return rows;
}

// A staged tensor that comes together in staging memory first: for the kernel, that is its place.
void come_late(DispatchParams& p, const Tensor& tensor, Reached& reached, LateCopy::Tail tail) {
  if (!reached.staged()) return;
  const auto element = static_cast<std::int64_t>(dtype_bytes(tensor.type));
  p.late[p.num_late++] = {.from = reached.rows.staged,
                          .to = tensor.data,
                          .rows = tensor.rows,
                          .row_bytes = tensor.row_bytes(),
                          .row_stride = tensor.row_stride * element,
                          .col_stride = tensor.col_stride * element,
                          .element = static_cast<std::uint32_t>(element),
                          .tail = tail};
  // No rows of it are past the last one: those are the tensor's.
  reached.rows = {.data = reached.rows.staged,
                  .staged = nullptr,
                  .rows = 0,
                  .row_bytes = reached.rows.row_bytes};
}

// Sums of `rows` into `out`, if they are given: how the owner's rows get to the tokens' ranks.
CombineStart sums_of(Reader& reader, const Tensor& rows, const Reached& reached,
                     const Tensor& out) {
  CombineStart start;
  if (!out) return start;
  start.type = out.type;
  CombineParams& p = start.params;
  p.sums = true;
  p.pushes = reader.config().expert_major() || reached.staged();
  p.rows = rows.data;
  p.out = out.data;
  p.row_bytes = out.row_bytes();
  p.partial_bytes = GroupMap::slots_of(reader.config()) * p.row_bytes;
  Record& record = reader.turning().record;
  if (!p.pushes) record.rows_in = reached.place;
  if (reader.config().keeps_partials()) {
    record.extra_in = TensorPlace(TensorPlace::kGroup, reader.map().partials);
  }
  return start;
}

}  // namespace

PrepareParams prepare_params(const PrepareCall& call, const GroupView&) {
  PrepareParams params{};
  params.topk_idx = call.topk_idx.data;
  params.wide_ids = call.topk_idx.type == DType::i64;
  params.tokens = static_cast<int>(call.topk_idx.rows);
  params.topk = static_cast<int>(call.topk_idx.cols);
  params.alignment = call.alignment;
  params.plan = call.plan;
  params.counts = output(call.counts);
  params.padded_counts = output(call.padded_counts);
  params.offsets = output(call.offsets);
  params.total = output(call.total);
  params.rank_rows = output(call.rank_rows);
  return params;
}

DispatchStart dispatch_params(const DispatchCall& call, const GroupView& view) {
  Reader reader(view, call);
  const GroupMap map = reader.map();
  reader.tokens_of_plan(call.tokens);
  reader.topk_of_plan(call.topk_weights);
  if (!reader.config().expert_major()) {
    reader.topk_of_plan(call.recv_weights);
    reader.topk_of_plan(call.recv_topk_idx);
  }
  const Reached tokens = reader.receive_rows(call.recv_tokens);
  Reached scales = reader.receive_beside(call.recv_scales, map.scales);
  Reached weights = reader.receive_beside(call.recv_weights, map.weights);
  Reached indices = reader.receive_beside(call.recv_topk_idx, map.indices);

  DispatchStart start;
  start.tokens = call.tokens;
  DispatchParams& p = start.params;
  const Config& config = reader.config();
  p.receives = config.expert_major() || tokens.staged();
  const auto tail = config.zero_tail ? LateCopy::zero : LateCopy::left;
  if (!p.receives || !call.recv_scales.packed()) come_late(p, call.recv_scales, scales, tail);
  if (!p.receives) {
    come_late(p, call.recv_weights, weights, LateCopy::zero);
    come_late(p, call.recv_topk_idx, indices, LateCopy::ones);
  }
  p.send = MoverPlan::make(call.tokens.row_bytes(), quantise_format(call.quantise),
                           call.scales.row_bytes());
  p.fan_out = MoverPlan::make(call.recv_tokens.row_bytes(), {},
                              in_bulk(scales.rows) ? scales.rows.row_bytes : 0);
  p.own_rows_direct = true;
  p.tokens = call.tokens.data;
  p.indices = static_cast<bool>(call.recv_topk_idx);
  p.scales = strided(call.scales);
  p.scale_alignment = static_cast<unsigned>(dtype_bytes(call.recv_scales.type));
  p.topk_weights = given<float>(call.topk_weights);
  p.recv_tokens = tokens.rows;
  p.recv_scales = scales.rows;
  p.recv_weights = weights.rows;
  p.recv_topk_idx = indices.rows;

  Record& record = reader.turning().record;
  record.rows_in = tokens.place;
  record.scales_in = scales.place;
  record.weights_in = weights.place;
  record.extra_in = indices.place;
  start.turning = reader.turning();
  return start;
}

DispatchStart dispatch_params(const CombineBwdCall& call, const GroupView& view) {
  Reader reader(view, call);
  const GroupMap map = reader.map();
  reader.tokens_of_plan(call.grad_out);
  const Reached grads = reader.receive_rows(call.grad_expert_out);
  Reached scales = reader.receive_beside(call.grad_expert_out_scales, map.scales);
  // This rank's own affair, but no memory is reachable in one executor and not in another.
  reader.receive_rows(call.expert_out);
  reader.receive_beside(call.weights, map.weights);
  reader.receive_beside(call.grad_weights, map.weights);

  DispatchStart start;
  start.tokens = call.grad_out;
  DispatchParams& p = start.params;
  const Config& config = reader.config();
  p.receives = config.expert_major() || grads.staged();
  if (!p.receives || !call.grad_expert_out_scales.packed()) {
    come_late(p, call.grad_expert_out_scales, scales,
              config.zero_tail ? LateCopy::zero : LateCopy::left);
  }
  p.send = MoverPlan::make(call.grad_out.row_bytes(), {}, call.grad_out_scales.row_bytes());
  p.fan_out = MoverPlan::make(call.grad_out.row_bytes(), {},
                              in_bulk(scales.rows) ? scales.rows.row_bytes : 0);
  p.own_rows_direct = !call.weights;
  p.tokens = call.grad_out.data;
  p.scales = strided(call.grad_out_scales);
  p.scale_alignment = static_cast<unsigned>(dtype_bytes(call.grad_expert_out_scales.type));
  p.recv_tokens = grads.rows;
  p.recv_scales = scales.rows;
  p.expert_out = call.grad_weights ? given<std::byte>(call.expert_out) : nullptr;
  p.weights = given<float>(call.weights);
  p.grad_weights = given<float>(call.grad_weights);
  p.grad_weights_rows = call.grad_weights.rows;

  Record& record = reader.turning().record;
  record.rows_in = grads.place;
  record.scales_in = scales.place;
  start.turning = reader.turning();
  return start;
}

CombineStart combine_params(const CombineCall& call, const GroupView& view) {
  Reader reader(view, call);
  reader.tokens_of_plan(call.out);
  const Reached rows = reader.receive_rows(call.expert_out);
  reader.receive_beside(call.weights, reader.map().weights);
  CombineStart start = sums_of(reader, call.expert_out, rows, call.out);
  start.tokens = static_cast<int>(call.out.rows);
  start.params.weights = given<float>(call.weights);
  start.turning = reader.turning();
  return start;
}

CombineStart combine_params(const DispatchBwdCall& call, const GroupView& view) {
  Reader reader(view, call);
  reader.tokens_of_plan(call.grad_tokens);
  reader.tokens_of_plan(call.grad_topk_weights);
  reader.topk_of_plan(call.grad_topk_weights);
  if (!reader.config().expert_major()) reader.topk_of_plan(call.grad_recv_weights);
  const Reached rows = reader.receive_rows(call.grad_recv_tokens);
  const Reached weights = reader.receive_beside(call.grad_recv_weights, reader.map().weights);
  CombineStart start = sums_of(reader, call.grad_recv_tokens, rows, call.grad_tokens);
  const Tensor& tokens = call.grad_tokens ? call.grad_tokens : call.grad_topk_weights;
  start.tokens = static_cast<int>(tokens.rows);
  start.params.grad_recv_weights = weights.rows;
  start.params.grad_topk_weights = given<float>(call.grad_topk_weights);
  reader.turning().record.weights_in = weights.place;
  start.turning = reader.turning();
  return start;
}

}  // namespace xd::ep::cuda
