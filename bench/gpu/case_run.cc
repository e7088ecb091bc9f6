#include "case_run.h"

#include <optional>
#include <stdexcept>

#include "blocks.h"
#include "nccl.h"

namespace bench::gpu {
namespace {

void measure_step(const RankContext& at, EpRank& ep, const Case& one, Overlap* overlap,
                  StepResult& result) {
  const Operation operation = result.step.operation;
  std::vector<std::function<void()>> graphs;  // one for each combination of copies of tensors
  for (int i = 0; one.graph && i < ep.period(); ++i)
    graphs.push_back(at.stream.capture([&] { ep.enqueue(operation, i); }));
  const auto enqueue = [&](int i) {
    if (one.graph) {
      graphs[static_cast<std::size_t>(i) % graphs.size()]();
    } else {
      ep.enqueue(operation, i);
    }
  };
  flush_cache(at.stream);
  at.barrier();
  result.seconds = at.time(at.iterations(), enqueue);
  ep.check_left_by(operation, at.iterations().all() - 1);
  if (overlap == nullptr) return;
  result.overlap = overlap->measure(enqueue);
  ep.check_left_by(operation, at.iterations().all() - 1);
}

void measure_steps(const RankContext& at, const Case& one, CaseResult& result) {
  EpRank ep(at, one.staged);
  std::optional<Overlap> overlap;
  if (one.overlap) overlap.emplace(at);
  std::optional<int> open_with;
  for (const Step& step : one.steps) {
    if (open_with != step.sms) ep.open(step.sms);
    open_with = step.sms;
    if (at.rank == 0) result.group_memory = ep.group_memory();
    ep.check(step.operation);
    const int blocks = blocks_of(
        name_of(step.operation), [&] { ep.enqueue(step.operation, 0); }, at.stream);
    StepResult measured{.step = step, .blocks = blocks, .seconds = {}, .overlap = {}};
    measure_step(at, ep, one, overlap ? &*overlap : nullptr, measured);
    if (at.rank == 0) result.steps.push_back(std::move(measured));
  }
  at.settle("the end of a case");
}

bool has_baseline(const Place& place, const Case& one) {
  return one.baseline && !place.shares_devices() && one.workload.ranks > 1 &&
         nccl_state().unavailable.empty();
}

void run_rank(const Place& place, const Case& one, const RankContext& at, CaseResult& result) {
  if (at.ranks > 1) {
    const WireFloor floor(at);
    at.barrier();
    WireFloor::Result kernels = floor.measure_kernels();
    WireFloor::Result engine = floor.measure_copy_engine();
    at.settle("the end of the floor");
    if (at.rank == 0) {
      result.floor = std::move(kernels);
      result.copy_engine = std::move(engine);
    }
  }
  if (has_baseline(place, one)) {
    std::vector<double> slowest = measure_nccl(at, at.batch.bytes_per_peer());
    if (at.rank == 0) result.nccl = std::move(slowest);
  }
  measure_steps(at, one, result);
}

}  // namespace

void run_case(const Place& place, const Case& one, int number, CaseResult& result) {
  const Batch batch(one.workload);
  result.volume = volume_of(batch.rows);
  const std::string name = "bench-" + std::to_string(number);
  xd_unique_id id{};
  const bool own_threads = !is_launched();
  if (own_threads) bench::ok(xd_unique_id_create(nullptr, &id));
  const int failures = run_ranks(place.launch, [&](int rank) {
    const int device = place.device_of(rank);
    ok(cudaSetDevice(device), "cudaSetDevice");
    const std::size_t landing = WireFloor::landing_bytes(batch);
    const Means means(place.launch, rank,
                      {.name = name.c_str(),
                       .heap_bytes = EpRank::heap_bytes(batch, rank, device, one.staged) +
                                     Means::heap_bytes(landing),
                       .device = {kDLCUDA, device},
                       .unique_id = own_threads ? &id : nullptr,
                       .timeout_ms = kTimeoutMs},
                      landing);
    run_rank(place, one, RankContext(means, batch), result);
  });
  if (failures != 0) {
    throw std::runtime_error(std::to_string(failures) + " ranks failed, see above");
  }
}

}  // namespace bench::gpu
