// Products of ranks that share a device: kernels that wait for a late rank leave it room.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "conformance/cuda/graph.h"
#include "conformance/gemm/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// Sums of so many elements that their kernels take as many blocks as they may have.
GemmCase large_sum(int num_ranks, xd_gemm_operation operation) {
  GemmCase c = plain_gemm_case(num_ranks, operation);
  c.tokens = TokenCounts::most;
  c.token_units = 512;
  c.n_units = 264;
  return c;
}

// The late rank's first kernel fits only on a multiprocessor that nobody waits on.
TEST(SharedDevice, HasRoomForALateRankWhileItsPeersWait) {
  for (const xd_gemm_operation operation : {XD_GEMM_REDUCE_SCATTER, XD_GEMM_ALL_REDUCE}) {
    on_every_rank([&](Rank& rank) {
      load_occupier(rank);
      const GemmCase c = large_sum(rank.num_ranks, operation);
      const GemmContext context = make_context(rank.comm, c.config());
      GemmBatch batch(rank, c, 0);
      for (const xd_gemm_algo algo : kGemmAlgos) {
        SCOPED_TRACE(std::string(name_of(operation)) + " by algorithm " + std::to_string(algo));
        batch.args.algo = algo;
        if (!batch.can_call(context.get())) continue;
        batch.reset();
        ok(xd_comm_barrier(rank.comm));
        if (rank.rank == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          occupy(rank, 1);
        }
        batch.call_and_check(context.get());
      }
    });
  }
}

}  // namespace
}  // namespace xd::test
