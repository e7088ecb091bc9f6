#include "ep_run.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>

#include "ep/cpu/rows.h"
#include "group_config.h"
#include "routing.h"
#include "start_line.h"
#include "tensor.h"

namespace bench {
namespace {

using xd::rows::Store;

DLDataType payload_type(Element element) {
  switch (element) {
    case Element::bf16:
      return {kDLBfloat, 16, 1};
    case Element::fp16:
      return {kDLFloat, 16, 1};
    case Element::fp32:
      return {kDLFloat, 32, 1};
    default:
      return {};  // refused with the options
  }
}

class EpRun {
 public:
  EpRun(const Workload& w, int rank, xd_comm* comm, bool staged)
      : w_(w),
        rank_(rank),
        comm_(comm),
        traffic_(traffic_of(w, make_routing(w), rank)),
        start_(comm, sizeof(std::int64_t)),
        board_(comm, board_bytes(w)),
        floor_(comm, floor_bytes(w)),
        topk_idx_(nullptr, {kDLInt, 32, 1}, {w.tokens, w.topk}),
        tokens_(staged ? nullptr : comm, payload_type(w.element), {w.tokens, w.hidden}),
        out_(staged ? nullptr : comm, payload_type(w.element), {w.tokens, w.hidden}),
        recv_(staged ? nullptr : comm, payload_type(w.element),
              {traffic_.recv_capacity, w.hidden}) {
    std::copy(traffic_.choices.begin(), traffic_.choices.end(),
              static_cast<std::int32_t*>(topk_idx_.data()));
    fill_tokens(w, rank, tokens_.data());
    const xd_ep_config config = group_config(w, traffic_, payload_type(w.element), staged);
    xd_ep_group* group = nullptr;
    ok(xd_ep_group_create(comm_, &config, &group));
    group_.reset(group);
    std::size_t plan_bytes = 0;
    ok(xd_ep_plan_size(&config, &plan_bytes));
    plan_.resize((plan_bytes + sizeof(PlanUnit) - 1) / sizeof(PlanUnit));
  }

  // The bytes that the heap must hold, with some room for rounding.
  static std::size_t heap_bytes(const Workload& w, int rank, bool staged) {
    const auto rows =
        staged ? 0
               : static_cast<std::size_t>(std::int64_t{2} * w.tokens +
                                          traffic_of(w, make_routing(w), rank).recv_capacity);
    return board_bytes(w) + floor_bytes(w) + rows * w.row_bytes() + (std::size_t{1} << 20);
  }

  EpResults run() {
    measure(0, [&] { prepare(); });
    measure(1, [&] { dispatch(); });
    measure(2, [&] { combine(); });
    // This comes before the backward operations, which reuse the tensors.
    const auto used = static_cast<std::size_t>(traffic_.recv_rows) * w_.row_bytes();
    sums()[0] = checksum(recv_.data(), used, 1);
    sums()[1] = checksum(out_.data(), static_cast<std::size_t>(w_.tokens) * w_.row_bytes(), 1);
    measure(3, [&] { dispatch_bwd(); });
    measure(4, [&] { combine_bwd(); });
    measure(kOperations, [&] { copy_floor(Store::cached); });
    measure(kOperations + 1, [&] { copy_floor(Store::streaming); });
    ok(xd_comm_barrier(comm_));
    EpResults results = rank_ == 0 ? collect() : EpResults{};
    ok(xd_comm_barrier(comm_));  // rank 0 has read the boards
    return results;
  }

 private:
  struct alignas(64) PlanUnit {
    std::byte bytes[64];
  };

  // A board holds the seconds of every step and iteration, then two checksums.
  static std::size_t board_bytes(const Workload& w) {
    return (kSteps.size() * static_cast<std::size_t>(w.iters) + 2) * 8;
  }
  static std::size_t floor_bytes(const Workload& w) {
    return static_cast<std::size_t>(w.tokens) * static_cast<std::size_t>(w.ranks) * w.row_bytes();
  }
  double* seconds(int rank, std::size_t step) const {
    return static_cast<double*>(board_.of(rank)) + step * static_cast<std::size_t>(w_.iters);
  }
  std::uint64_t* sums(int rank) const {
    return reinterpret_cast<std::uint64_t*>(seconds(rank, kSteps.size()));
  }
  std::uint64_t* sums() const { return sums(rank_); }

  void measure(std::size_t step, const std::function<void()>& body) {
    double* const seconds_of_step = seconds(rank_, step);
    for (int i = -w_.warmup; i < w_.iters; ++i) {
      const std::int64_t start = agree_on_start();
      wait_for_start(start);
      body();
      if (i >= 0) seconds_of_step[i] = seconds_since(start);
    }
  }

  std::int64_t agree_on_start() {
    ok(xd_comm_barrier(comm_));
    const std::atomic_ref<std::int64_t> named(*static_cast<std::int64_t*>(start_.of(0)));
    if (rank_ == 0) named.store(choose_start(), std::memory_order_relaxed);
    // The barrier has ended the last round, so a value that differs from the one at its start
    // belongs to this round.
    const std::int64_t give_up = nanoseconds_now() + 60'000'000'000;
    std::int64_t start = named.load(std::memory_order_relaxed);
    while (start == last_start_) {
      if (nanoseconds_now() > give_up) throw std::runtime_error("rank 0 named no start in 60 s");
      ::sched_yield();
      start = named.load(std::memory_order_relaxed);
    }
    return last_start_ = start;
  }

  EpResults collect() const {
    EpResults results;
    for (std::size_t step = 0; step < kSteps.size(); ++step) {
      for (int i = 0; i < w_.iters; ++i) {
        double slowest = 0;
        for (int rank = 0; rank < w_.ranks; ++rank) {
          slowest = std::max(slowest, seconds(rank, step)[i]);
        }
        results.seconds[step].push_back(slowest);
      }
    }
    for (int rank = 0; rank < w_.ranks; ++rank) {
      results.recv_checksums.push_back(sums(rank)[0]);
      results.out_checksums.push_back(sums(rank)[1]);
    }
    return results;
  }

  // Fills in what all args structs have in common.
  template <class Args>
  Args with_plan(Args args) {
    args.plan = plan_.data();
    args.plan_bytes = plan_.size() * sizeof(PlanUnit);
    return args;
  }

  void prepare() {
    xd_ep_prepare_args args = with_plan(xd_ep_prepare_args XD_EP_PREPARE_ARGS_INIT);
    args.topk_idx = topk_idx_.dl();
    ok(xd_ep_prepare(group_.get(), &args, nullptr));
  }
  void dispatch() {
    auto args = with_plan(xd_ep_dispatch_args XD_EP_DISPATCH_ARGS_INIT);
    args.tokens = tokens_.dl();
    args.recv_tokens = recv_.dl();
    ok(xd_ep_dispatch(group_.get(), &args, nullptr));
  }
  // The experts return their rows unchanged.
  void combine() {
    auto args = with_plan(xd_ep_combine_args XD_EP_COMBINE_ARGS_INIT);
    args.expert_out = recv_.dl();
    args.out = out_.dl();
    ok(xd_ep_combine(group_.get(), &args, nullptr));
  }
  void dispatch_bwd() {
    auto args = with_plan(xd_ep_dispatch_bwd_args XD_EP_DISPATCH_BWD_ARGS_INIT);
    args.grad_recv_tokens = recv_.dl();
    args.grad_tokens = out_.dl();
    ok(xd_ep_dispatch_bwd(group_.get(), &args, nullptr));
  }
  void combine_bwd() {
    auto args = with_plan(xd_ep_combine_bwd_args XD_EP_COMBINE_BWD_ARGS_INIT);
    args.grad_out = tokens_.dl();
    args.grad_expert_out = recv_.dl();
    ok(xd_ep_combine_bwd(group_.get(), &args, nullptr));
  }

  // As in a dispatch, a token's row is read once for all of its destinations.
  void copy_floor(Store store) {
    auto* const neighbour = static_cast<std::byte*>(floor_.of((rank_ + 1) % w_.ranks));
    const auto* const tokens = static_cast<const std::byte*>(tokens_.data());
    const auto rows = static_cast<std::size_t>(traffic_.sent_rows);
    for (std::size_t row = 0; row < rows; ++row) {
      const std::size_t token = row * static_cast<std::size_t>(w_.tokens) / rows;
      xd::rows::copy(neighbour + row * w_.row_bytes(), tokens + token * w_.row_bytes(),
                     w_.row_bytes(), store);
    }
    xd::rows::flush();
  }

  const Workload& w_;
  const int rank_;
  xd_comm* const comm_;
  const Traffic traffic_;
  const SharedBlock start_, board_, floor_;  // first: see SharedBlock
  std::int64_t last_start_ = 0;
  Matrix topk_idx_, tokens_, out_, recv_;
  Group group_;
  std::vector<PlanUnit> plan_;
};

}  // namespace

EpResults run_ep(const Launch& launch, int rank, const Workload& workload, bool staged) {
  const Comm comm = make_comm(launch, rank,
                              {.name = staged ? "bench-staged" : "bench-zero-copy",
                               .heap_bytes = EpRun::heap_bytes(workload, rank, staged)});
  return EpRun(workload, rank, comm.get(), staged).run();
}

}  // namespace bench
