#include "ep_run.h"

#include <utility>

#include "ep/plan/cpu/rows.h"
#include "rank.h"

namespace bench {
namespace {

using xd::rows::Store;

std::size_t floor_bytes(const Workload& w) {
  return static_cast<std::size_t>(w.tokens) * static_cast<std::size_t>(w.ranks) * w.row_bytes();
}

class EpRun {
 public:
  EpRun(const Workload& w, const Traffic& traffic, const Rank& at, bool staged)
      : w_(w),
        at_(at),
        traffic_(traffic),
        floor_(at.comm, host(), floor_bytes(w)),
        in_(w, traffic_, staged ? nullptr : at.comm, host()),
        calls_(w, traffic_, in_, at.comm, host(), staged) {
    fill_tokens(w, at.rank, in_.tokens.data());
    calls_.open();
  }

  EpResults run() {
    EpResults results;
    const auto measure = [&](const std::function<void(int)>& body) {
      results.seconds.push_back(at_.time({w_.warmup, w_.iters}, body));
    };
    for (const Operation operation : {Operation::prepare, Operation::dispatch, Operation::combine,
                                      Operation::dispatch_bwd, Operation::combine_bwd}) {
      measure([&](int) { calls_.call(operation); });
      // This comes before the backward operations, which reuse the tensors.
      if (operation == Operation::combine) add_checksums(results);
    }
    measure([&](int) { copy_floor(Store::cached); });
    measure([&](int) { copy_floor(Store::streaming); });
    return results;
  }

 private:
  void add_checksums(EpResults& results) const {
    const std::vector<std::uint64_t> mine{checksum(calls_.recv().data(), calls_.recv_bytes(), 1),
                                          checksum(calls_.out().data(), calls_.out().bytes(), 1)};
    for (const auto& of_rank : at_.gather(mine)) {
      results.recv_checksums.push_back(of_rank[0]);
      results.out_checksums.push_back(of_rank[1]);
    }
  }

  // As in a dispatch, a token's row is read once for all of its destinations.
  void copy_floor(Store store) {
    std::byte* const neighbour = floor_.of((at_.rank + 1) % w_.ranks);
    const auto* const tokens = static_cast<const std::byte*>(in_.tokens.data());
    const auto rows = static_cast<std::size_t>(traffic_.sent_rows);
    for (std::size_t row = 0; row < rows; ++row) {
      const std::size_t token = row * static_cast<std::size_t>(w_.tokens) / rows;
      xd::rows::copy(neighbour + row * w_.row_bytes(), tokens + token * w_.row_bytes(),
                     w_.row_bytes(), store);
    }
    xd::rows::flush();
  }

  const Workload& w_;
  const Rank& at_;
  const Traffic& traffic_;
  const SharedMemory floor_;
  const EpInputs in_;
  EpCalls calls_;
};

}  // namespace

EpResults run_ep(const Launch& launch, int rank, const Workload& w, bool staged) {
  const Traffic traffic = traffic_of(w, make_routing(w), rank);
  const std::size_t heap = HostStopwatch::kHeapBytes + floor_bytes(w) +
                           (staged ? 0 : EpCalls::heap_bytes(w, traffic)) + (std::size_t{1} << 20);
  const Comm comm = make_comm(
      launch, rank, {.name = staged ? "bench-staged" : "bench-zero-copy", .heap_bytes = heap});
  HostStopwatch watch(comm.get(), rank);
  const Rank at{rank, w.ranks, comm.get(), host(), watch};
  return EpRun(w, traffic, at, staged).run();
}

}  // namespace bench
