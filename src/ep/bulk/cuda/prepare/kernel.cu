// prepare: counts first, then rows. See the CPU executor's prepare for the same steps.
//
//   memory                 written by                        read by
//   counts of blocks       blocks                            all blocks, after a grid barrier
//   counts[stage][src]     src's last block at barrier 1,    all blocks, as words that carry this
//                          word by word: count and epoch     epoch
//   items, lists, listed   sources (plain stores)            all blocks, after the done flags
//   kept[src]              sources, RANK_MAJOR under DROP    the last block, likewise
//   plan                   this rank's blocks                later operations
//
//   1  every warp counts its tokens' choices; the block's sums go to all blocks      grid barrier 1
//   2  the last block there: sums over blocks, to all ranks. Every block: sums of the blocks before
//      it; then it waits for the peers' records, and for the counts of all ranks, which it adds up
//   3  every block: zones, overflow, its own first rows in every zone
//   4  every warp numbers its tokens' rows, in (token, k) order, and tells every owner its items
//      (EXPERT_MAJOR with drops: after another count and grid barrier 2). Meanwhile the last block,
//      which has no tokens if there is another, writes and seals the plan's head (with drops: in 5)
//   5  done flags; every block copies what it was told into the plan, and comes to the verdict.
//      Where no rank keeps items, and nothing is dropped, the counts are all that peers store: then
//      there are no done flags, and the verdict and the end of the turn come before step 4
//
// Each step is a class, and its file says which of this memory it touches and which flags it
// trusts: Choices and Counters step 1, Exchange 2, Zones 3, Numbering 4, PlanWriter the head and 5.
#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/cuda/prepare/numbering.cuh"
#include "ep/bulk/cuda/prepare/plan_writer.cuh"
#include "ep/bulk/cuda/remote/prepare.cuh"
#include "ep/plan/cuda/launch.cuh"

namespace xd::ep::cuda {
namespace {

struct PrepareShared {
  Counters::Shared counters;
  Exchange::Shared exchange;
  Zones::Shared zones;
  PlanWriter::Shared writer;
};

// `kRemote`: some ranks are on other machines.
template <bool kRemote>
__global__ void __launch_bounds__(kMostPrepareWarps * 32, 1)
    prepare_kernel(const __grid_constant__ PrepareParams p) {
  __shared__ TurnShared shared;
  __shared__ PrepareShared state;
  extern __shared__ __align__(16) std::uint32_t columns[];
  Turn turn(p.turn, shared);
  fetch_params(p);
  const Choices choices(p);
  Counters counters(p, state.counters, columns);
  const Exchange exchange(p, turn, counters, state.exchange);
  const Zones zones(p, shared.base, counters, exchange, state.zones);
  const Numbering numbering(p, turn, shared.base, choices, counters, exchange, zones);
  const PlanWriter writer(p, turn, shared, exchange, zones, state.writer);
  auto remote = make_remote_work<kRemote, RemotePrepare>(p, turn, shared);
  bool good = turn.begin(), counted = false;
  if (good) {
    turn.enter();
    if constexpr (kRemote) remote.meet();
    writer.invalidate();
    numbering.clear();
    exchange.clear();
    counters.count(choices);
    if (turn.arrive(1)) exchange.send();
    good = counted = turn.wait_arrivals(1);
    if (good) counters.add_up_before();
    if constexpr (kRemote) {
      if (good) remote.exchange_counts();
    }
    good = good && turn.await({0, 0, 0, 0, 0});
  }
  if (good && turn.verdict() == Verdict::go) {
    good = !turn.any_failed(!exchange.receive());
    if (good) {
      zones.place();
      if constexpr (kRemote) remote.set_drops(zones.drops());
      const bool told_all = !writer.needs_sources();
      if (told_all) writer.judge();
      // Then what follows waits for nothing, and looks at nothing of the control block.
      const bool ends_ahead = told_all && !kRemote && !turn.has_operation_error();
      if (ends_ahead) turn.end_ahead();
      writer.write_early();
      good = numbering.run();
      if (good && told_all) {
        writer.finish();
        if constexpr (kRemote) static_cast<void>(remote.rest());
        return ends_ahead ? turn.written() : turn.end_without_flags();
      }
    }
    if (good) {
      turn.leave(remote);
      good = turn.wait_all_done(remote);
    }
    if (good) {
      writer.finish();
      writer.judge();
    }
  } else {
    if (counted) writer.report_unplaced();
    turn.leave(remote);
  }
  turn.end(remote);
}

}  // namespace

void launch(const PrepareParams& params, bool remote, const LaunchShape& shape,
            cudaStream_t stream) {
  launch_cooperative(remote ? prepare_kernel<true> : prepare_kernel<false>, params, shape, stream);
}

void load_prepare(std::size_t shared_bytes, bool remote) {
  load_kernel(remote ? prepare_kernel<true> : prepare_kernel<false>, shared_bytes);
}

}  // namespace xd::ep::cuda
