#include "ep/bulk/cuda/kernel_params.h"

#include "base/error.h"
#include "base/math.h"
#include "ep/bulk/records.h"

namespace xd::ep::cuda {
namespace {

// Reads the tensors of one call, and fills in its turn: the record, the plan, and the device's
// checks.
class TurnFiller {
 public:
  template <class Call>
  TurnFiller(const GroupView& view, const Call& call, TurnParams& turn) : view_(view), turn_(turn) {
    const PlanBytes& plan = call.plan;
    require_plan_bytes(plan.data, plan.bytes);
    turn_.group = view.device;
    turn_.record = record_of(call);
    turn_.plan = static_cast<const std::byte*>(plan.data);
    turn_.plan_bytes = plan.bytes;
    turn_.part = call.portion.part;
  }

  const Config& config() const { return view_.group.config(); }
  const GroupMap map() const { return GroupMap::make(config()); }
  Record& record() const { return turn_.record; }

  // Rows of tokens, which are staged where the group has the memory for it. `place` is the name by
  // which peers reach them.
  ReceiveRows receive_rows(const Tensor& tensor, turn::PeerAddress& place) const {
    const ReceiveRows rows = receive(tensor, {map().rows, false}, place);
    turn_.staged.rows = rows.staged != nullptr;
    return rows;
  }

  // A tensor beside rows, for which there is always staging memory.
  ReceiveRows receive_beside(const Tensor& tensor, std::uint64_t staging_offset,
                             turn::PeerAddress& place) const {
    return receive(tensor, {staging_offset, true}, place);
  }

  // Tells the order of parts where scales beside such rows lie.
  void note_scales(const ReceiveRows& scales) const {
    turn_.staged.scales = scales.staged != nullptr;
  }

  // Rows that peers never touch, which may lie anywhere.
  void own_rows(const Tensor& tensor) const {
    if (tensor) check(Check::recv_rows, tensor.name, tensor.rows);
  }
  // Such rows of sums, for which parts ask where they lie all the same.
  void own_summed_rows(const Tensor& tensor) const {
    own_rows(tensor);
    turn_.staged.rows = tensor.bytes() > 0 && !view_.group.place_in_heap(tensor);
  }
  void own_weights(const Tensor& tensor) const {
    turn::PeerAddress nobodys;
    receive_beside(tensor, map().weights, nobodys);
  }

  void tokens_of_plan(const Tensor& tensor) const {
    if (tensor) check(Check::tokens, tensor.name, tensor.rows);
  }
  void topk_of_plan(const Tensor& tensor) const {
    if (tensor) check(Check::topk, tensor.name, tensor.cols);
  }

 private:
  ReceiveRows receive(const Tensor& tensor, const Staging& staging,
                      turn::PeerAddress& place) const {
    place = {};
    if (!tensor) return {};
    check(Check::recv_rows, tensor.name, tensor.rows);
    const Reach reach = view_.group.reach(tensor, staging);
    place = reach.address;
    return {.data = tensor.data,
            .staged = reach.staged ? view_.memory + staging.offset : nullptr,
            .rows = tensor.rows,
            .row_bytes = tensor.row_bytes()};
  }
  void check(Check::Kind kind, const char* name, std::int64_t got) const {
    turn_.checks[turn_.num_checks++] = {kind, name, got};
  }

  const GroupView& view_;
  TurnParams& turn_;
};

PrepareParams::Output output(const Tensor& tensor) {
  return {tensor ? tensor.data : nullptr, tensor.type == DType::i64};
}

template <class T>
T* given(const Tensor& tensor) {
  return tensor ? tensor.as<T>() : nullptr;
}

// True if bulk copies can load and store the rows.
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
  // Packed rows go in words where the words are aligned, except rows that no stage can hold: those
  // go straight to a peer's tensor, which may begin at any element.
  if (tensor.packed() && rows.row_bytes <= RowPieces::kMostPieceBytes &&
      rows.row_bytes % sizeof(std::uint32_t) == 0 &&
      reinterpret_cast<std::uintptr_t>(tensor.data) % sizeof(std::uint32_t) == 0) {
    rows.element = sizeof(std::uint32_t);
    rows.col_stride = rows.element;
  }
  return rows;
}

LateCopy::Tail tail_of(const Config& config) {
  return config.zero_tail ? LateCopy::zero : LateCopy::left;
}

// Lets a staged tensor come together in staging memory first, which is its place for the kernel.
void come_late(DispatchParams& p, const Tensor& tensor, ReceiveRows& rows, LateCopy::Tail tail) {
  if (rows.staged == nullptr) return;
  const auto element = static_cast<std::int64_t>(dtype_bytes(tensor.type));
  p.late[p.num_late++] = {.from = rows.staged,
                          .to = tensor.data,
                          .rows = tensor.rows,
                          .row_bytes = tensor.row_bytes(),
                          .row_stride = tensor.row_stride * element,
                          .col_stride = tensor.col_stride * element,
                          .element = static_cast<std::uint32_t>(element),
                          .tail = tail};
  // Staging memory has no rows past the last one; only the tensor has.
  rows = {.data = rows.staged, .staged = nullptr, .rows = 0, .row_bytes = rows.row_bytes};
}

// Rows with their scales, which may be absent, and the tensors in which they arrive.
struct MovedRows {
  const Tensor &rows, &scales;
  const Tensor &recv_rows, &recv_scales;
  xd_ep_quantise quantise = XD_EP_QUANTISE_NONE;
  bool scaled = false;
};

// Fills in how rows and scales are sent and received, and the places in the record by which peers
// reach the receive tensors.
void move_rows(const TurnFiller& fill, const MovedRows& moved, DispatchParams& p) {
  p.recv_tokens = fill.receive_rows(moved.recv_rows, fill.record().rows_in);
  p.recv_scales =
      fill.receive_beside(moved.recv_scales, fill.map().scales, fill.record().scales_in);
  fill.note_scales(p.recv_scales);
  p.receives = fill.config().layout.row_per_expert || p.recv_tokens.staged != nullptr;
  if (!p.receives || !moved.recv_scales.packed()) {
    come_late(p, moved.recv_scales, p.recv_scales, tail_of(fill.config()));
  }
  p.send = RowPieces::make(moved.rows.row_bytes(), quantise_format(moved.quantise),
                           moved.scales.row_bytes(), moved.scaled);
  p.fan_out = RowPieces::make(moved.recv_rows.row_bytes(), {},
                              in_bulk(p.recv_scales) ? p.recv_scales.row_bytes : 0, moved.scaled);
  p.tokens = moved.rows.data;
  p.scales = strided(moved.scales);
  p.scale_alignment = static_cast<unsigned>(dtype_bytes(moved.recv_scales.type));
}

// Sources cannot read rows that cross as codes: they are pushed.
CellForm cell_form(const WireFormat& wire, const Layout& layout) {
  if (wire.codes) return CellForm::codes;
  return wire.is_float() && layout.row_per_expert ? CellForm::floats : CellForm::payload;
}

std::uint64_t cell_bytes(CellForm form, const Tensor& out) {
  const auto columns = static_cast<std::uint64_t>(out.cols);
  if (form == CellForm::payload) return out.row_bytes();
  if (form == CellForm::floats) return columns * sizeof(float);
  return round_up(
      columns + columns / XD_EP_QUANTISE_BLOCK(XD_EP_QUANTISE_FP8_BLOCK128) * sizeof(float),
      kRowAlignment);
}

// Fills in the sums of a receive tensor's rows into `out`, if they are given, and their way to the
// tokens' ranks.
void sum_rows(const TurnFiller& fill, const Tensor& tensor, const Tensor& out,
              const WireFormat& wire, CombineStart& start) {
  // In EXPERT_MAJOR this rank reads its own rows alone, and pushes sums of them.
  const bool own = fill.config().layout.row_per_expert;
  turn::PeerAddress place;
  ReceiveRows rows{};
  if (own) {
    fill.own_summed_rows(tensor);
  } else {
    rows = fill.receive_rows(tensor, place);
  }
  if (!out) return;
  start.type = out.type;
  start.wire = static_cast<bool>(wire);
  WireCombineParams& p = start.params;
  p.form = cell_form(wire, fill.config().layout);
  p.codes = wire.codes;
  p.cell_bytes = cell_bytes(p.form, out);
  p.sums = true;
  p.pushes = own || rows.staged != nullptr || p.form == CellForm::codes;
  p.rows = tensor.data;
  p.out = out.data;
  p.row_bytes = out.row_bytes();
  p.partial_bytes = GroupMap::cells_of(fill.config()) * p.cell_bytes;
  if (!p.pushes) fill.record().rows_in = place;
  if (fill.config().keeps.partials) {
    fill.record().extra_in = turn::PeerAddress::shared(fill.map().partials());
  }
}

}  // namespace

BareParams bare_params(const Record& record, const GroupView& view) {
  BareParams params{};
  params.turn.group = view.device;
  params.turn.record = record;
  return params;
}

PrepareParams prepare_params(const PrepareCall& call, const GroupView& view) {
  PrepareParams params{};
  params.turn.group = view.device;
  params.turn.record = record_of(call);
  params.ids = BatchIds::of(view.group.config(), call.topk_idx, call.replica_hint);
  params.tokens = static_cast<int>(call.topk_idx.rows);
  params.topk = static_cast<int>(call.topk_idx.cols);
  params.alignment = call.alignment;
  params.parts = call.parts;
  params.plan = call.plan;
  const GroupDevice& group = view.device;
  params.map = PlanMap::make({.local_experts = group.local_experts,
                              .tokens = params.tokens,
                              .topk = params.topk,
                              .list_rows = group.layout.row_per_expert ? group.capacity : 0,
                              .items = group.keeps_items ? group.capacity : 0,
                              .ranks = group.ranks(),
                              .parts = params.parts});
  params.counts = output(call.counts);
  params.padded_counts = output(call.padded_counts);
  params.offsets = output(call.offsets);
  params.total = output(call.total);
  params.rank_rows = output(call.rank_rows);
  return params;
}

DispatchStart dispatch_params(const DispatchCall& call, const GroupView& view) {
  DispatchStart start{.params = {}, .tokens = call.tokens};
  DispatchParams& p = start.params;
  const TurnFiller fill(view, call, p.turn);
  const Config& config = fill.config();
  const GroupMap map = fill.map();
  fill.tokens_of_plan(call.tokens);
  fill.topk_of_plan(call.topk_weights);
  if (config.layout.choices_beside_rows) {
    fill.topk_of_plan(call.recv_weights);
    fill.topk_of_plan(call.recv_topk_idx);
  }
  move_rows(fill,
            {.rows = call.tokens,
             .scales = call.scales,
             .recv_rows = call.recv_tokens,
             .recv_scales = call.recv_scales,
             .quantise = call.quantise},
            p);
  p.recv_weights = fill.receive_beside(call.recv_weights, map.weights, fill.record().weights_in);
  p.recv_topk_idx = fill.receive_beside(call.recv_topk_idx, map.indices, fill.record().extra_in);
  if (!p.receives) {
    come_late(p, call.recv_weights, p.recv_weights, LateCopy::zero);
    come_late(p, call.recv_topk_idx, p.recv_topk_idx, LateCopy::ones);
  }
  p.own_rows_direct = true;
  p.indices = static_cast<bool>(call.recv_topk_idx);
  p.weighs = static_cast<bool>(call.topk_weights);
  p.topk_weights = given<float>(call.topk_weights);
  return start;
}

DispatchStart dispatch_params(const CombineBwdCall& call, const GroupView& view) {
  DispatchStart start{.params = {}, .tokens = call.grad_out};
  DispatchParams& p = start.params;
  const TurnFiller fill(view, call, p.turn);
  fill.tokens_of_plan(call.grad_out);
  move_rows(fill,
            {.rows = call.grad_out,
             .scales = call.grad_out_scales,
             .recv_rows = call.grad_expert_out,
             .recv_scales = call.grad_expert_out_scales,
             .scaled = static_cast<bool>(call.weights)},
            p);
  fill.own_rows(call.expert_out);
  fill.own_weights(call.weights);
  fill.own_weights(call.grad_weights);
  p.own_rows_direct = !call.weights;
  p.expert_out = call.grad_weights ? given<std::byte>(call.expert_out) : nullptr;
  p.weights = given<float>(call.weights);
  p.grad_weights = given<float>(call.grad_weights);
  p.grad_weights_rows = call.grad_weights.rows;
  return start;
}

CombineStart combine_params(const CombineCall& call, const GroupView& view) {
  CombineStart start;
  const TurnFiller fill(view, call, start.params.turn);
  fill.tokens_of_plan(call.out);
  sum_rows(fill, call.expert_out, call.out, call.wire, start);
  fill.own_weights(call.weights);
  start.tokens = static_cast<int>(call.out.rows);
  start.params.weights = given<float>(call.weights);
  return start;
}

CombineStart combine_params(const DispatchBwdCall& call, const GroupView& view) {
  CombineStart start;
  const TurnFiller fill(view, call, start.params.turn);
  fill.tokens_of_plan(call.grad_tokens);
  fill.tokens_of_plan(call.grad_topk_weights);
  fill.topk_of_plan(call.grad_topk_weights);
  if (fill.config().layout.choices_beside_rows) fill.topk_of_plan(call.grad_recv_weights);
  sum_rows(fill, call.grad_recv_tokens, call.grad_tokens, {}, start);
  start.params.grad_recv_weights =
      fill.receive_beside(call.grad_recv_weights, fill.map().weights, fill.record().weights_in);
  const Tensor& tokens = call.grad_tokens ? call.grad_tokens : call.grad_topk_weights;
  start.tokens = static_cast<int>(tokens.rows);
  start.params.gradients = static_cast<bool>(call.grad_topk_weights);
  start.params.grad_topk_weights = given<float>(call.grad_topk_weights);
  return start;
}

}  // namespace xd::ep::cuda
