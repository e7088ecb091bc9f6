// A product by cuBLASMp to which a rank does not come, though it has agreed: its stream is held.
#include <crossdock/gemm.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "conformance/cuda_graph.h"
#include "conformance/gemm_batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr int kTimeoutMs = 2000;
constexpr auto kLongest = std::chrono::seconds(30);

// Work on the host that keeps a stream from going on.
struct Hold {
  std::atomic<bool> ends{false};

  void put(cudaStream_t stream) {
    cuda_ok(
        cudaLaunchHostFunc(
            stream,
            [](void* data) {
              const auto until = std::chrono::steady_clock::now() + kLongest;
              while (!static_cast<Hold*>(data)->ends && std::chrono::steady_clock::now() < until) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
              }
            },
            this),
        "cudaLaunchHostFunc");
  }
};

bool is_there(const Rank& rank, const xd_gemm_config& config) {
  xd_gemm_context* made = nullptr;
  const xd_status status = xd_gemm_context_create(rank.comm, &config, &made);
  xd_gemm_context_destroy(made);
  return status == XD_SUCCESS;
}

// The ranks agree without waiting for their streams, since a call by cuBLASMp came before.
TEST(CublasMpWait, EndsByTheTimeoutThoughNoRankMakesAnotherCall) {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_CUBLASMP, &reason) == 0) GTEST_SKIP() << reason;
  on_every_rank([](Rank& base) {
    GemmCase c = plain_gemm_case(base.num_ranks, XD_GEMM_REDUCE_SCATTER);
    c.tokens = TokenCounts::equal;
    xd_gemm_config config = c.config();
    config.algo = XD_GEMM_ALGO_CUBLASMP;
    if (base.num_ranks == 1 || !is_there(base, config)) return;
    const Comm comm = base.another_comm("held", World::kHeapBytes, kTimeoutMs);
    Rank rank = base;
    rank.comm = comm.get();
    Hold& hold = *new Hold;  // the stream may still read it when the test has failed
    {
      const GemmContext context = make_context(comm.get(), config);
      GemmBatch batch(rank, c, 0);
      ok(batch.call(context.get()));
      if (rank.rank == 0) hold.put(rank.stream());
      ASSERT_EQ(batch.enqueue(context.get()), XD_SUCCESS) << xd_last_error();

      const auto start = std::chrono::steady_clock::now();
      xd_error_info info = XD_ERROR_INFO_INIT;
      while (xd_comm_error(comm.get(), &info) == XD_SUCCESS && info.status == XD_SUCCESS &&
             std::chrono::steady_clock::now() - start < kLongest) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      EXPECT_EQ(info.status, XD_ERROR_TIMEOUT);
      EXPECT_EQ(info.phase, XD_PHASE_ROWS);
      EXPECT_EQ(info.peer, -1);
      EXPECT_LT(std::chrono::steady_clock::now() - start,
                4 * std::chrono::milliseconds(kTimeoutMs));
      hold.ends = true;
      rank.memory->synchronize();  // the product has been ended
      EXPECT_EQ(batch.enqueue(context.get()), XD_ERROR_TIMEOUT);
    }
  });
}

}  // namespace
}  // namespace xd::test
