// prepare: counts first, then rows. See the CPU executor's prepare for the same steps.
//
//   memory                 written by                        read by
//   block_counts, base     blocks; totals by column threads  all blocks, after a grid barrier
//   counts[slot][src]      src's column threads, word by     this rank's threads, as words that
//                          word: count and epoch             carry this epoch; then everybody
//   items, lists, listed   sources (plain stores)            all blocks, after the done flags
//   kept[src]              sources, RANK_MAJOR under DROP    the last block, likewise
//   plan                   this rank's blocks                later operations
//
//   1  every warp counts its tokens' choices; the block's sums go to block_counts    grid barrier 1
//   2  column threads: sums over blocks; counts to and from all peers; their hash    grid barrier 2
//   3  every block: zones, overflow, its own first rows in every zone
//   4  every warp numbers its tokens' rows, in (token, k) order, and tells every owner its items
//      (EXPERT_MAJOR with drops: after another count and grid barrier 3). Meanwhile the last block,
//      which has no tokens if there is another, writes and seals the plan's head (with drops: in 5)
//   5  done flags; every block copies what it was told into the plan
//
// Counters of a block, per warp, in shared memory: a column for each expert, then for each rank the
// tokens that go there, then for each rank the choices.
#include "ep/cuda/kernels.h"
#include "ep/cuda/launch.cuh"
#include "ep/cuda/prepare_parts.cuh"

namespace xd::ep::cuda {
namespace {

__global__ void __launch_bounds__(kMostPrepareWarps * 32, 1)
    prepare_kernel(const __grid_constant__ PrepareParams p) {
  __shared__ TurnShared shared;
  __shared__ PrepareShared state;
  extern __shared__ __align__(16) std::uint32_t counters[];
  fetch_params(p);
  Turn turn(p.turn, shared);
  Prepare prepare(p, turn, shared, state, counters);
  bool good = turn.begin();
  if (good) {
    turn.enter();
    prepare.count_choices();
    good = turn.await({0, 0, 0, 0, 0}) && turn.barrier(1);
  }
  if (good && turn.verdict() == Verdict::go) {
    good = !turn.any_failed(!prepare.exchange_counts()) && turn.barrier(2);
    if (good) {
      prepare.place();
      if (prepare.head_can_be_early()) prepare.write_head();
      good = prepare.number_rows();
    }
    if (good && !prepare.needs_sources()) {
      prepare.finish_plan();
      return turn.leave();
    }
    if (good) {
      turn.finish();
      good = !turn.any_failed(!prepare.wait_for_sources());
    }
    if (good) prepare.finish_plan();
  } else {
    turn.finish();
  }
  turn.close();
}

}  // namespace

void launch(const PrepareParams& params, const LaunchPlan& plan, cudaStream_t stream) {
  launch_cooperative(prepare_kernel, params, plan, stream);
}

void load_prepare(std::size_t shared_bytes) { load_kernel(prepare_kernel, shared_bytes); }

}  // namespace xd::ep::cuda
