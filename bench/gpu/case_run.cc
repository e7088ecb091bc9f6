#include "case_run.h"

#include <array>
#include <optional>
#include <stdexcept>

#include "captured.h"
#include "nccl.h"

namespace bench::gpu {
namespace {

constexpr int kTimeoutMs = 20000;

void measure_step(const RankContext& at, EpRank& ep, const Case& one, Overlap* overlap,
                  StepResult& result) {
  const Operation operation = result.step.operation;
  std::optional<Captured> graphs;
  if (one.graph) graphs.emplace(ep, operation, at.stream);
  const auto enqueue = [&](int i) {
    if (graphs) {
      graphs->launch(i);
    } else {
      ep.enqueue(operation, i);
    }
  };
  flush_cache(at.stream, at.device);
  at.barrier();
  result.seconds = at.rank_results.slowest(at.watch.measure(at.iterations(), enqueue));
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

// The bytes of the batch, split equally over the peers.
std::size_t bytes_per_peer(const Batch& batch) {
  const std::size_t ranks = batch.rows.size();
  std::int64_t sent = 0;
  for (std::size_t s = 0; s < ranks; ++s) {
    for (std::size_t d = 0; d < ranks; ++d) sent += s == d ? 0 : batch.rows[s][d];
  }
  const auto pairs = ranks * (ranks - 1);
  return static_cast<std::size_t>(sent) * batch.workload.wire_row_bytes() / pairs / 16 * 16;
}

bool has_baseline(const Place& place, const Case& one) {
  return one.baseline && !place.shares_devices() && one.workload.ranks > 1 &&
         nccl_state().unavailable.empty();
}

void run_rank(const Place& place, const Case& one, const Batch& batch, const CommOptions& options,
              int rank, CaseResult& result) {
  const int device = options.device.device_id;
  const Comm comm = make_comm(place.launch, rank, options);
  const Stream stream;
  // These are made first and in this order, equal on all ranks: see SharedMemory.
  const SharedMemory slots(comm.get(), stream, Stopwatch::slots_bytes());
  const SharedMemory landing(comm.get(), stream, WireFloor::landing_bytes(batch));
  bench::ok(xd_comm_barrier(comm.get()));
  RankResults rank_results(comm.get(), rank, one.workload.ranks);
  Stopwatch watch(slots, rank, one.workload.ranks, stream);
  const RankContext at{.rank = rank,
                       .device = device,
                       .comm = comm.get(),
                       .stream = stream,
                       .batch = batch,
                       .rank_results = rank_results,
                       .watch = watch};
  if (one.workload.ranks > 1) {
    const WireFloor floor(at, landing);
    at.barrier();
    WireFloor::Result kernels = floor.measure_kernels();
    WireFloor::Result engine = floor.measure_copy_engine();
    at.settle("the end of the floor");
    if (rank == 0) {
      result.floor = std::move(kernels);
      result.copy_engine = std::move(engine);
    }
  }
  if (has_baseline(place, one)) {
    std::vector<double> slowest = measure_nccl(at, bytes_per_peer(batch));
    if (rank == 0) result.nccl = std::move(slowest);
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
    const std::size_t heap = EpRank::heap_bytes(batch, rank, device, one.staged) +
                             WireFloor::landing_bytes(batch) + Stopwatch::slots_bytes() +
                             (std::size_t{4} << 20);
    run_rank(place, one, batch,
             {.name = name.c_str(),
              .heap_bytes = heap,
              .device = {kDLCUDA, device},
              .unique_id = own_threads ? &id : nullptr,
              .timeout_ms = kTimeoutMs},
             rank, result);
  });
  if (failures != 0) {
    throw std::runtime_error(std::to_string(failures) + " ranks failed, see above");
  }
}

}  // namespace bench::gpu
