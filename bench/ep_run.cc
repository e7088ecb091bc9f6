#include "ep_run.h"

#include <algorithm>
#include <functional>

#include "ep/cpu/rows.h"
#include "group_config.h"
#include "routing.h"
#include "tensor.h"
#include "timing.h"

namespace bench {
namespace {

using xd::rows::Store;

class EpRun {
 public:
  EpRun(const Workload& w, int rank, xd_comm* comm, bool staged)
      : w_(w),
        rank_(rank),
        comm_(comm),
        traffic_(traffic_of(w, make_routing(w), rank)),
        timing_(comm, rank, w.ranks, timing_size(w)),
        sums_(comm, 2 * sizeof(std::uint64_t)),
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
    return Timing::heap_bytes(timing_size(w)) + floor_bytes(w) + rows * w.row_bytes() +
           (std::size_t{1} << 20);
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
    EpResults results;
    ok(xd_comm_barrier(comm_));
    for (int rank = 0; rank_ == 0 && rank < w_.ranks; ++rank) {
      results.recv_checksums.push_back(sums(rank)[0]);
      results.out_checksums.push_back(sums(rank)[1]);
    }
    results.seconds = timing_.collect();
    return results;
  }

 private:
  struct alignas(64) PlanUnit {
    std::byte bytes[64];
  };

  static Timing::Size timing_size(const Workload& w) { return {kSteps.size(), w.iters, w.warmup}; }
  static std::size_t floor_bytes(const Workload& w) {
    return static_cast<std::size_t>(w.tokens) * static_cast<std::size_t>(w.ranks) * w.row_bytes();
  }
  std::uint64_t* sums(int rank) const { return static_cast<std::uint64_t*>(sums_.of(rank)); }
  std::uint64_t* sums() const { return sums(rank_); }
  void measure(std::size_t step, const std::function<void()>& body) { timing_.measure(step, body); }

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
  Timing timing_;  // these three first: see SharedBlock
  const SharedBlock sums_, floor_;
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
