#include "ep_rank.h"

#include <stdexcept>

namespace bench::gpu {
namespace {

Cell cell_of(Element element) {
  switch (element) {
    case Element::fp16:
      return Cell::fp16;
    case Element::fp32:
      return Cell::fp32;
    case Element::fp8:
      return Cell::byte;
    default:
      return Cell::bf16;
  }
}

// The number is equal on all ranks, which go round their copies together. For what is received it
// is computed as if each rank received its own tokens, which is the least that it receives.
int copies_of(const Workload& w, DLDataType type, int device) {
  const Tensor::Shape shape{w.tokens, w.hidden};
  return copies_against_cache(w, Tensor::bytes(type, shape, 1), device);
}
int token_copies(const Workload& w, int device) {
  return copies_of(w, payload_type(w.element), device);
}
int recv_copies(const Workload& w, int device) {
  return copies_of(w, w.is_fp8() ? kE4m3 : payload_type(w.element), device);
}

}  // namespace

std::size_t EpRank::heap_bytes(const Batch& batch, int rank, int device, bool staged) {
  if (staged) return 0;
  const Workload& w = batch.workload;
  const Traffic traffic = traffic_of(w, batch.routing, rank);
  return EpCalls::heap_bytes(w, traffic, token_copies(w, device), recv_copies(w, device)) +
         (std::size_t{8} << 20);
}

EpRank::EpRank(const RankContext& context, bool staged)
    : at_(context),
      traffic_(traffic_of(context.workload(), context.batch.routing, context.rank)),
      payload_{cell_of(context.workload().element), context.workload().hidden,
               context.workload().seed},
      scale_payload_{Cell::fp32,
                     context.workload().is_fp8() ? context.workload().hidden / kScaleColumns : 0,
                     context.workload().seed + 1},
      received_(context.stream, received_origins(false)),
      sums_(context.stream, sum_origins(false)),
      scaled_(context.stream, received_origins(context.workload().is_scaled())),
      scaled_sums_(context.stream, sum_origins(context.workload().is_scaled())),
      in_(context.workload(), traffic_, staged ? nullptr : context.comm, context.stream,
          token_copies(context.workload(), context.device.dl().device_id)),
      calls_(context.workload(), traffic_, in_, context.comm, context.stream, staged,
             recv_copies(context.workload(), context.device.dl().device_id)) {
  for (int copy = 0; copy < in_.tokens.copies(); ++copy) {
    fill_rows(payload_, at_.rank, in_.tokens.data(copy), in_.tokens.rows(), at_.stream);
    fill_rows(scale_payload_, at_.rank, in_.scales.data(copy), in_.scales.rows(), at_.stream);
  }
  at_.stream.wait("filling the tokens");
}

void EpRank::open(int num_sms) {
  calls_.open(num_sms);
  poison(calls_.recv());
  poison(calls_.recv_scales());
  at_.settle("poisoning");
  enqueue(Operation::prepare, 0);
  const int copies = calls_.recv().copies();
  for (int copy = 0; copy < copies; ++copy) enqueue(Operation::dispatch, copy);
  at_.stream.wait("the first operations of a group");
  check_status();
  check_received(Operation::dispatch, 0);
  check_received(Operation::dispatch, copies - 1);
  at_.barrier();
}

void EpRank::check_status() const {
  bench::check_status(at_.comm, calls_.group(), xd_ep_group_status, xd_ep_status XD_EP_STATUS_INIT);
}

// ---- Checks ------------------------------------------------------------------------------------

// `scaled`: rows are those of a token times the weights of their choices.
std::vector<Origin> EpRank::received_origins(bool scaled) const {
  const Workload& w = at_.workload();
  const Placement placement = place(w, at_.batch.routing, at_.rank);
  std::vector<Origin> origins(static_cast<std::size_t>(placement.total));  // padding: factor 0
  for (const Arrival& arrival : placement.arrivals) {
    const Choices& choices = at_.batch.routing[static_cast<std::size_t>(arrival.source)];
    int k = -1;  // a rank's rows of a token are ordered by the choices that name it
    const auto is_here = [&] {
      const auto first = static_cast<std::size_t>(arrival.token) * static_cast<std::size_t>(w.topk);
      return choices[first + static_cast<std::size_t>(k)] / w.local_experts() == at_.rank;
    };
    for (int i = arrival.rows_begin; i < arrival.rows_end; ++i) {
      do ++k;
      while (!is_here());
      const auto row = static_cast<std::size_t>(placement.rows[static_cast<std::size_t>(i)]);
      origins[row] = {arrival.source, arrival.token, scaled ? Workload::weight_of(k) : 1};
    }
  }
  return origins;
}

// The sum for a token whose experts return their rows unchanged: the token itself, once per row, or
// as often as the weights say.
std::vector<Origin> EpRank::sum_origins(bool scaled) const {
  const Workload& w = at_.workload();
  std::vector<Origin> origins;
  for (int token = 0; token < w.tokens; ++token) {
    std::vector<bool> chosen(static_cast<std::size_t>(w.ranks));
    int factor = 0;
    for (int k = 0; k < w.topk; ++k) {
      const auto at = static_cast<std::size_t>(token) * static_cast<std::size_t>(w.topk) +
                      static_cast<std::size_t>(k);
      const auto rank = static_cast<std::size_t>(traffic_.choices[at] / w.local_experts());
      const bool has_row = w.layout == Layout::expert || !chosen[rank];
      factor += !has_row ? 0 : scaled ? Workload::weight_of(k) : 1;
      chosen[rank] = true;
    }
    origins.push_back({at_.rank, token, factor});
  }
  return origins;
}

void EpRank::poison(const Tensor& tensor) const {
  for (int copy = 0; copy < tensor.copies(); ++copy)
    at_.stream.fill(tensor.data(copy), 0xff, tensor.bytes());
}

void EpRank::check_received(Operation operation, int copy) const {
  const WrongElements wrong(at_.stream);
  const void* const rows = calls_.received_by(operation).data(copy);
  const auto& origins = operation == Operation::combine_bwd ? scaled_ : received_;
  const auto* const scales = static_cast<const float*>(calls_.recv_scales().data(copy));
  if (at_.workload().element == Element::bf16_to_fp8) {
    check_quantised(payload_, rows, scales, origins.data(), origins.size(), wrong.counter(),
                    at_.stream);
  } else {
    check_rows(payload_, rows, origins.data(), origins.size(), wrong.counter(), at_.stream);
    check_rows(scale_payload_, scales, origins.data(), origins.size(), wrong.counter(), at_.stream);
  }
  wrong.expect_none("received rows");
}

// Sums under a wire are rounded as it says, and the conformance suite compares them.
void EpRank::check_sums(Operation operation) const {
  if (operation == Operation::combine && at_.workload().combine_wire != XD_EP_WIRE_SAME) return;
  const WrongElements wrong(at_.stream);
  const auto& origins = operation == Operation::combine ? scaled_sums_ : sums_;
  check_rows(payload_, calls_.out().data(), origins.data(), origins.size(), wrong.counter(),
             at_.stream);
  wrong.expect_none("sums per token");
}

// The weights that dispatch_bwd brings home are those that dispatch has sent; the gradient of a
// weight is the product of a row with itself.
void EpRank::check_weights(Operation operation) const {
  if (operation == Operation::dispatch_bwd) {
    const auto floats = [&](const Tensor& tensor) {
      std::vector<float> values(tensor.bytes() / sizeof(float));
      at_.stream.copy(values.data(), tensor.data(), tensor.bytes());
      return values;
    };
    if (floats(calls_.grad_topk_weights()) == floats(in_.topk_weights)) return;
    throw std::runtime_error("WRONG RESULT: gradients of weights");
  }
  if (operation != Operation::combine_bwd || !at_.workload().is_scaled()) return;
  const WrongElements wrong(at_.stream);
  check_norms(payload_, static_cast<const float*>(calls_.grad_weights().data()), received_.data(),
              received_.size(), wrong.counter(), at_.stream);
  wrong.expect_none("gradients of weights");
}

namespace {

bool receives(Operation operation) {
  return operation == Operation::dispatch || operation == Operation::combine_bwd;
}

}  // namespace

void EpRank::check(Operation operation) {
  if (operation == Operation::prepare) return;  // open() has checked rows that it has placed
  poison(receives(operation) ? calls_.received_by(operation) : calls_.out());
  if (receives(operation)) poison(calls_.recv_scales());
  if (operation == Operation::combine_bwd) poison(calls_.grad_weights());
  if (operation == Operation::dispatch_bwd) poison(calls_.grad_topk_weights());
  at_.settle("poisoning");
  // It runs on all copies, so that later operations find their inputs.
  const int runs = receives(operation) ? calls_.recv().copies() : 1;
  for (int copy = 0; copy < runs; ++copy) enqueue(operation, copy);
  check_left_by(operation, runs - 1);
  at_.barrier();
}

void EpRank::check_left_by(Operation operation, int last_iteration) const {
  at_.settle(name_of(operation));
  check_status();
  if (operation == Operation::prepare) return;
  if (receives(operation)) {
    check_received(operation, last_iteration);
  } else {
    check_sums(operation);
  }
  if (at_.workload().weighted) check_weights(operation);
}

}  // namespace bench::gpu
