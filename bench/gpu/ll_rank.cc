#include "ll_rank.h"

#include <stdexcept>

namespace bench::gpu {
namespace {

constexpr DLDataType kBf16{kDLBfloat, 16, 1}, kE4m3{10, 8, 1}, kF32{kDLFloat, 32, 1};
constexpr DLDataType kI32{kDLInt, 32, 1};

xd_ll_config config_of(const Workload& w) {
  xd_ll_config config = XD_LL_CONFIG_INIT;
  config.num_ranks = w.ranks;
  config.num_experts = w.experts;
  config.max_topk = w.topk;
  config.max_tokens_per_rank = w.tokens;
  config.hidden = w.hidden;
  config.dtype = kBf16;
  config.device_type = kDLCUDA;
  return config;
}

std::size_t plan_bytes(const xd_ll_config& config) {
  std::size_t bytes = 0;
  bench::ok(xd_ll_plan_size(&config, &bytes));
  return bytes;
}

}  // namespace

LlRank::SlotTensor::SlotTensor(const RankContext& at, DLDataType type, std::int64_t columns)
    : memory(nullptr, at.stream,
             static_cast<std::size_t>(at.workload().local_experts() * std::int64_t{at.ranks()} *
                                      at.workload().tokens * columns) *
                 type.bits / 8),
      shape{at.workload().local_experts(), std::int64_t{at.ranks()} * at.workload().tokens,
            columns},
      dl{memory.data(), {kDLCUDA, at.device}, 3, type, shape, nullptr, 0} {}

LlRank::LlRank(const RankContext& context)
    : at_(context),
      traffic_(traffic_of(context.workload(), context.batch.routing, context.rank)),
      payload_{Cell::bf16, context.workload().hidden, context.workload().seed},
      choices_(context.stream, traffic_.choices),
      counts_(context.stream, std::vector<std::int32_t>(
                                  static_cast<std::size_t>(context.workload().local_experts()))),
      choices_shape_{context.workload().tokens, context.workload().topk},
      counts_shape_{context.workload().local_experts()},
      tokens_(nullptr, context.stream, kBf16,
              {context.workload().tokens, context.workload().hidden}),
      out_(nullptr, context.stream, kBf16, {context.workload().tokens, context.workload().hidden}),
      recv_(context, kBf16, context.workload().hidden),
      recv_fp8_(context, kE4m3, context.workload().hidden),
      scales_(context, kF32, context.workload().hidden / 128),
      config_(config_of(context.workload())),
      plan_memory_(nullptr, context.stream, plan_bytes(config_)) {
  const DLDevice device{kDLCUDA, at_.device};
  topk_idx_ = {choices_.data(), device, 2, kI32, choices_shape_, nullptr, 0};
  counts_tensor_ = {counts_.data(), device, 1, kI32, counts_shape_, nullptr, 0};
  fill_rows(payload_, at_.rank, tokens_.data(), tokens_.rows(), at_.stream);
  at_.stream.wait("filling the tokens");
  xd_ll_group* group = nullptr;
  bench::ok(xd_ll_group_create(at_.comm, &config_, &group));
  group_.reset(group);
  dispatch_.tokens = tokens_.dl();
  dispatch_.topk_idx = &topk_idx_;
  dispatch_.counts = &counts_tensor_;
  dispatch_.plan = plan_memory_.data();
  dispatch_.plan_bytes = plan_memory_.bytes();
  combine_.plan = plan_memory_.data();
  combine_.plan_bytes = plan_memory_.bytes();
  combine_.expert_out = &recv_.dl;
  combine_.out = out_.dl();
}

void LlRank::dispatch(xd_ll_phase phase) {
  xd_ll_dispatch_args args = dispatch_;
  args.phase = phase;
  args.recv_tokens = &recv_.dl;
  bench::ok(xd_ll_dispatch(group_.get(), &args, at_.stream));
}

void LlRank::dispatch_fp8(xd_ll_phase phase) {
  xd_ll_dispatch_args args = dispatch_;
  args.phase = phase;
  args.quantise = XD_EP_QUANTISE_FP8_BLOCK128;
  args.recv_tokens = &recv_fp8_.dl;
  args.recv_scales = &scales_.dl;
  bench::ok(xd_ll_dispatch(group_.get(), &args, at_.stream));
}

void LlRank::combine(xd_ll_phase phase) {
  combine_.phase = phase;
  bench::ok(xd_ll_combine(group_.get(), &combine_, at_.stream));
}

void LlRank::check() {
  const auto poison = [&](void* data, std::size_t bytes) {
    ok(cudaMemsetAsync(data, 0xff, bytes, at_.stream), "poison");
  };
  poison(recv_.memory.data(), recv_.memory.bytes());
  poison(out_.data(), static_cast<std::size_t>(at_.workload().tokens) * at_.workload().row_bytes());
  dispatch();
  combine();
  at_.settle("a checked step");
  check_status();
  std::vector<Origin> origins;
  for (int token = 0; token < at_.workload().tokens; ++token) {
    origins.push_back({at_.rank, token, at_.workload().topk});
  }
  const DeviceArray<Origin> expected(at_.stream, origins);
  const DeviceArray<unsigned long long> wrong(at_.stream, {0});
  check_rows(payload_, out_.data(), expected.data(), expected.size(), wrong.data(), at_.stream);
  unsigned long long count = 0;
  ok(cudaMemcpyAsync(&count, wrong.data(), sizeof(count), cudaMemcpyDeviceToHost, at_.stream),
     "checking sums");
  at_.stream.wait("checking sums");
  if (count != 0) {
    throw std::runtime_error("WRONG RESULT: " + std::to_string(count) + " elements of sums");
  }
}

void LlRank::check_status() const {
  xd_error_info error = XD_ERROR_INFO_INIT;
  bench::ok(xd_comm_error(at_.comm, &error));
  xd_ll_status status = XD_LL_STATUS_INIT;
  if (error.status == XD_SUCCESS) bench::ok(xd_ll_group_status(group_.get(), &status));
  const bool fatal = error.status != XD_SUCCESS;
  const xd_status met = fatal ? error.status : status.status;
  if (met == XD_SUCCESS) return;
  throw std::runtime_error(std::string(xd_status_name(met)) + ": " +
                           (fatal ? error.text : status.text));
}

xd_ll_memory LlRank::memory() const {
  xd_ll_memory memory XD_LL_MEMORY_INIT;
  bench::ok(xd_ll_group_memory(&config_, &memory));
  return memory;
}

}  // namespace bench::gpu
