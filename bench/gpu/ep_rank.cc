#include "ep_rank.h"

#include <stdexcept>

#include "../group_config.h"

namespace bench::gpu {
namespace {

constexpr DLDataType kFloat{kDLFloat, 32, 1};
constexpr DLDataType kE4m3{10, 8, 1};  // kDLFloat8_e4m3fn, which old DLPack headers do not name
constexpr std::int64_t kScaleColumns = 128;

DLDataType token_type(Element element) {
  switch (element) {
    case Element::bf16:
    case Element::bf16_to_fp8:
      return {kDLBfloat, 16, 1};
    case Element::fp16:
      return {kDLFloat, 16, 1};
    case Element::fp32:
      return kFloat;
    case Element::fp8:
      return kE4m3;
  }
  return {};
}

DLDataType recv_type(const Workload& w) { return w.is_fp8() ? kE4m3 : token_type(w.element); }

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

std::int64_t scale_columns(const Workload& w) { return w.is_fp8() ? w.hidden / kScaleColumns : 0; }

Tensor::Shape token_shape(const Workload& w) { return {w.tokens, w.hidden}; }
Tensor::Shape scale_shape(const Workload& w) {
  return {w.element == Element::fp8 ? w.tokens : 0, scale_columns(w)};
}
Tensor::Shape recv_shape(const Workload& w, const Traffic& traffic) {
  return {traffic.recv_capacity, w.hidden};
}
Tensor::Shape recv_scale_shape(const Workload& w, const Traffic& traffic) {
  return {traffic.recv_capacity, scale_columns(w)};
}

int token_copies(const Workload& w, int device) {
  return copies_against_cache(w, Tensor::bytes(token_type(w.element), token_shape(w), 1), device);
}
// The number is equal on all ranks, which go round their copies together. It is computed as if each
// rank received its own tokens, which is the least that it receives.
int recv_copies(const Workload& w, int device) {
  return copies_against_cache(w, Tensor::bytes(recv_type(w), token_shape(w), 1), device);
}

}  // namespace

std::size_t EpRank::heap_bytes(const Batch& batch, int rank, int device, bool staged) {
  if (staged) return 0;
  const Workload& w = batch.workload;
  const Traffic traffic = traffic_of(w, batch.routing, rank);
  const int tokens = token_copies(w, device), recv = recv_copies(w, device);
  return Tensor::bytes(token_type(w.element), token_shape(w), tokens + 1) +
         Tensor::bytes(kFloat, scale_shape(w), tokens) +
         Tensor::bytes(recv_type(w), recv_shape(w, traffic), recv) +
         Tensor::bytes(kFloat, recv_scale_shape(w, traffic), recv) + (std::size_t{8} << 20);
}

EpRank::EpRank(const RankContext& context, bool staged)
    : at_(context),
      staged_(staged),
      traffic_(traffic_of(context.workload(), context.batch.routing, context.rank)),
      payload_{cell_of(context.workload().element), context.workload().hidden,
               context.workload().seed},
      scale_payload_{Cell::fp32, scale_columns(context.workload()), context.workload().seed + 1},
      received_(context.stream, received_origins()),
      sums_(context.stream, sum_origins()),
      choices_(context.stream, traffic_.choices),
      choices_shape_{context.workload().tokens, context.workload().topk},
      tokens_(staged ? nullptr : context.comm, context.stream,
              token_type(context.workload().element), token_shape(context.workload()),
              token_copies(context.workload(), context.device)),
      scales_(staged ? nullptr : context.comm, context.stream, kFloat,
              scale_shape(context.workload()), tokens_.copies()),
      recv_(staged ? nullptr : context.comm, context.stream, recv_type(context.workload()),
            recv_shape(context.workload(), traffic_),
            recv_copies(context.workload(), context.device)),
      recv_scales_(staged ? nullptr : context.comm, context.stream, kFloat,
                   recv_scale_shape(context.workload(), traffic_), recv_.copies()),
      out_(staged ? nullptr : context.comm, context.stream, token_type(context.workload().element),
           token_shape(context.workload())) {
  topk_idx_ = {
      choices_.data(), {kDLCUDA, at_.device}, 2, {kDLInt, 32, 1}, choices_shape_, nullptr, 0};
  for (int copy = 0; copy < tokens_.copies(); ++copy) {
    fill_rows(payload_, at_.rank, tokens_.data(copy), tokens_.rows(), at_.stream);
    fill_rows(scale_payload_, at_.rank, scales_.data(copy), scales_.rows(), at_.stream);
  }
  at_.stream.wait("filling the tokens");
}

xd_ep_config EpRank::group_config(int num_sms) const {
  const Workload& w = at_.workload();
  xd_ep_config config = bench::group_config(w, traffic_, token_type(w.element), staged_);
  config.max_scale_bytes = static_cast<std::int32_t>(scale_columns(w) * kFloat.bits / 8);
  config.num_sms = num_sms;
  config.device_type = kDLCUDA;
  return config;
}

void EpRank::open(int num_sms) {
  group_.reset();  // frees its budget before the next group asks for one
  at_.barrier();
  config_ = group_config(num_sms);
  xd_ep_group* group = nullptr;
  bench::ok(xd_ep_group_create(at_.comm, &config_, &group));
  group_.reset(group);
  std::size_t plan_bytes = 0;
  bench::ok(xd_ep_plan_size(&config_, &plan_bytes));
  plan_.emplace(nullptr, at_.stream, plan_bytes);
  poison(recv_);
  poison(recv_scales_);
  at_.settle("poisoning");
  prepare();
  for (int copy = 0; copy < recv_.copies(); ++copy) dispatch(copy);
  at_.stream.wait("the first operations of a group");
  check_status();
  check_received(0);
  check_received(recv_.copies() - 1);
  at_.barrier();
}

xd_ep_memory EpRank::group_memory() const {
  xd_ep_memory memory = XD_EP_MEMORY_INIT;
  bench::ok(xd_ep_group_memory(&config_, &memory));
  return memory;
}

void EpRank::enqueue(Operation operation, int iteration) {
  switch (operation) {
    case Operation::prepare:
      return prepare();
    case Operation::dispatch:
      return dispatch(iteration);
    case Operation::combine:
      return combine(iteration);
    case Operation::dispatch_bwd:
      return dispatch_bwd(iteration);
    case Operation::combine_bwd:
      return combine_bwd(iteration);
  }
}

// Fills in what all args structs have in common.
template <class Args>
Args EpRank::with_plan(Args args) const {
  args.plan = plan_->data();
  args.plan_bytes = plan_->bytes();
  return args;
}

void EpRank::prepare() {
  auto args = with_plan(xd_ep_prepare_args XD_EP_PREPARE_ARGS_INIT);
  args.topk_idx = &topk_idx_;
  bench::ok(xd_ep_prepare(group_.get(), &args, at_.stream));
}

void EpRank::dispatch(int copy) {
  auto args = with_plan(xd_ep_dispatch_args XD_EP_DISPATCH_ARGS_INIT);
  args.tokens = tokens_.dl(copy);
  args.recv_tokens = recv_.dl(copy);
  if (at_.workload().element == Element::fp8) args.scales = scales_.dl(copy);
  if (at_.workload().is_fp8()) args.recv_scales = recv_scales_.dl(copy);
  if (at_.workload().element == Element::bf16_to_fp8) args.quantise = XD_EP_QUANTISE_FP8_BLOCK128;
  bench::ok(xd_ep_dispatch(group_.get(), &args, at_.stream));
}

// The experts return their rows unchanged.
void EpRank::combine(int copy) {
  auto args = with_plan(xd_ep_combine_args XD_EP_COMBINE_ARGS_INIT);
  args.expert_out = recv_.dl(copy);
  args.out = out_.dl();
  bench::ok(xd_ep_combine(group_.get(), &args, at_.stream));
}

void EpRank::dispatch_bwd(int copy) {
  auto args = with_plan(xd_ep_dispatch_bwd_args XD_EP_DISPATCH_BWD_ARGS_INIT);
  args.grad_recv_tokens = recv_.dl(copy);
  args.grad_tokens = out_.dl();
  bench::ok(xd_ep_dispatch_bwd(group_.get(), &args, at_.stream));
}

void EpRank::combine_bwd(int copy) {
  auto args = with_plan(xd_ep_combine_bwd_args XD_EP_COMBINE_BWD_ARGS_INIT);
  args.grad_out = tokens_.dl(copy);
  args.grad_expert_out = recv_.dl(copy);
  bench::ok(xd_ep_combine_bwd(group_.get(), &args, at_.stream));
}

void EpRank::check_status() const {
  xd_ep_status status = XD_EP_STATUS_INIT;
  bench::ok(xd_ep_group_status(group_.get(), &status));
  if (status.status != XD_SUCCESS) {
    throw std::runtime_error(std::string(xd_status_name(status.status)) + ": " + status.text);
  }
  xd_error_info error = XD_ERROR_INFO_INIT;
  bench::ok(xd_comm_error(at_.comm, &error));
  if (error.status != XD_SUCCESS) {
    throw std::runtime_error(std::string(xd_status_name(error.status)) + ": " + error.text);
  }
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
  for (int copy = 0; copy < tensor.copies(); ++copy) {
    const DLTensor& dl = *tensor.dl(copy);
    const auto bytes = static_cast<std::size_t>(dl.shape[0] * dl.shape[1]) * dl.dtype.bits / 8;
    if (bytes != 0) ok(cudaMemsetAsync(dl.data, 0xff, bytes, at_.stream), "poison");
  }
}

void EpRank::expect_none_wrong(const DeviceArray<unsigned long long>& wrong,
                               const char* what) const {
  unsigned long long count = 0;
  ok(cudaMemcpyAsync(&count, wrong.data(), sizeof(count), cudaMemcpyDeviceToHost, at_.stream),
     what);
  at_.stream.wait(what);
  if (count == 0) return;
  throw std::runtime_error("WRONG RESULT: " + std::to_string(count) + " elements of " + what);
}

void EpRank::check_received(int copy) const {
  const DeviceArray<unsigned long long> wrong(at_.stream, {0});
  const void* const rows = recv_.data(copy);
  const auto* const scales = static_cast<const float*>(recv_scales_.data(copy));
  if (at_.workload().element == Element::bf16_to_fp8) {
    check_quantised(payload_, rows, scales, received_.data(), received_.size(), wrong.data(),
                    at_.stream);
  } else {
    check_rows(payload_, rows, received_.data(), received_.size(), wrong.data(), at_.stream);
    check_rows(scale_payload_, scales, received_.data(), received_.size(), wrong.data(),
               at_.stream);
  }
  expect_none_wrong(wrong, "received rows");
}

void EpRank::check_sums() const {
  const DeviceArray<unsigned long long> wrong(at_.stream, {0});
  check_rows(payload_, out_.data(), sums_.data(), sums_.size(), wrong.data(), at_.stream);
  expect_none_wrong(wrong, "sums per token");
}

namespace {

bool receives(Operation operation) {
  return operation == Operation::dispatch || operation == Operation::combine_bwd;
}

}  // namespace

void EpRank::check(Operation operation) {
  if (operation == Operation::prepare) return;  // open() has checked rows that it has placed
  poison(receives(operation) ? recv_ : out_);
  if (receives(operation)) poison(recv_scales_);
  at_.settle("poisoning");
  // It runs on all copies, so that later operations find their inputs.
  const int runs = receives(operation) ? recv_.copies() : 1;
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
