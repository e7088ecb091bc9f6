#include "ep_rank.h"

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
      received_(context.stream, received_origins()),
      sums_(context.stream, sum_origins()),
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
  check_received(0);
  check_received(copies - 1);
  at_.barrier();
}

void EpRank::check_status() const {
  bench::check_status(at_.comm, calls_.group(), xd_ep_group_status, xd_ep_status XD_EP_STATUS_INIT);
}

// ---- Checks ------------------------------------------------------------------------------------

std::vector<Origin> EpRank::received_origins() const {
  const Placement placement = place(at_.workload(), at_.batch.routing, at_.rank);
  std::vector<Origin> origins(static_cast<std::size_t>(placement.total));  // padding: factor 0
  for (const Arrival& arrival : placement.arrivals) {
    for (int i = arrival.rows_begin; i < arrival.rows_end; ++i) {
      const auto row = static_cast<std::size_t>(placement.rows[static_cast<std::size_t>(i)]);
      origins[row] = {arrival.source, arrival.token, 1};
    }
  }
  return origins;
}

// The sum for a token whose experts return their rows unchanged: the token itself, once per row.
std::vector<Origin> EpRank::sum_origins() const {
  const Workload& w = at_.workload();
  std::vector<Origin> origins;
  for (int token = 0; token < w.tokens; ++token) {
    std::vector<bool> chosen(static_cast<std::size_t>(w.ranks));
    int factor = 0;
    for (int k = 0; k < w.topk; ++k) {
      const auto at = static_cast<std::size_t>(token) * static_cast<std::size_t>(w.topk) +
                      static_cast<std::size_t>(k);
      const auto rank = static_cast<std::size_t>(traffic_.choices[at] / w.local_experts());
      factor += w.layout == Layout::expert || !chosen[rank] ? 1 : 0;
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

void EpRank::check_received(int copy) const {
  const WrongElements wrong(at_.stream);
  const void* const rows = calls_.recv().data(copy);
  const auto* const scales = static_cast<const float*>(calls_.recv_scales().data(copy));
  if (at_.workload().element == Element::bf16_to_fp8) {
    check_quantised(payload_, rows, scales, received_.data(), received_.size(), wrong.counter(),
                    at_.stream);
  } else {
    check_rows(payload_, rows, received_.data(), received_.size(), wrong.counter(), at_.stream);
    check_rows(scale_payload_, scales, received_.data(), received_.size(), wrong.counter(),
               at_.stream);
  }
  wrong.expect_none("received rows");
}

void EpRank::check_sums() const {
  const WrongElements wrong(at_.stream);
  check_rows(payload_, calls_.out().data(), sums_.data(), sums_.size(), wrong.counter(),
             at_.stream);
  wrong.expect_none("sums per token");
}

namespace {

bool receives(Operation operation) {
  return operation == Operation::dispatch || operation == Operation::combine_bwd;
}

}  // namespace

void EpRank::check(Operation operation) {
  if (operation == Operation::prepare) return;  // open() has checked rows that it has placed
  poison(receives(operation) ? calls_.recv() : calls_.out());
  if (receives(operation)) poison(calls_.recv_scales());
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
    check_received(last_iteration);
  } else {
    check_sums();
  }
}

}  // namespace bench::gpu
