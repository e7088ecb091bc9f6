#include "ep_run.h"

#include <functional>

#include "ep/plan/cpu/rows.h"
#include "ep_calls.h"
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
        calls_(w, traffic_, rank, comm, staged) {}

  // The bytes that the heap must hold, with some room for rounding.
  static std::size_t heap_bytes(const Workload& w, int rank, bool staged) {
    return Timing::kHeapBytes + floor_bytes(w) +
           EpCalls::heap_bytes(w, traffic_of(w, make_routing(w), rank), staged) +
           (std::size_t{1} << 20);
  }

  EpResults run() {
    measure(0, [&] { calls_.prepare(); });
    measure(1, [&] { calls_.dispatch(); });
    measure(2, [&] { calls_.combine(); });
    // This comes before the backward operations, which reuse the tensors.
    sums()[0] = calls_.recv_checksum();
    sums()[1] = calls_.out_checksum();
    measure(3, [&] { calls_.dispatch_bwd(); });
    measure(4, [&] { calls_.combine_bwd(); });
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
  static Timing::Size timing_size(const Workload& w) { return {kSteps.size(), w.iters, w.warmup}; }
  static std::size_t floor_bytes(const Workload& w) {
    return static_cast<std::size_t>(w.tokens) * static_cast<std::size_t>(w.ranks) * w.row_bytes();
  }
  std::uint64_t* sums(int rank) const { return static_cast<std::uint64_t*>(sums_.of(rank)); }
  std::uint64_t* sums() const { return sums(rank_); }
  void measure(std::size_t step, const std::function<void()>& body) { timing_.measure(step, body); }

  // As in a dispatch, a token's row is read once for all of its destinations.
  void copy_floor(Store store) {
    auto* const neighbour = static_cast<std::byte*>(floor_.of((rank_ + 1) % w_.ranks));
    const auto* const tokens = static_cast<const std::byte*>(calls_.tokens());
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
  EpCalls calls_;
};

}  // namespace

EpResults run_ep(const Launch& launch, int rank, const Workload& workload, bool staged) {
  const Comm comm = make_comm(launch, rank,
                              {.name = staged ? "bench-staged" : "bench-zero-copy",
                               .heap_bytes = EpRun::heap_bytes(workload, rank, staged)});
  return EpRun(workload, rank, comm.get(), staged).run();
}

}  // namespace bench
