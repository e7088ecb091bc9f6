// Products by cuBLASMp on streams that are held, or captured.
#include <crossdock/gemm.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "conformance/cuda/graph.h"
#include "conformance/gemm/batch.h"
#include "conformance/said.h"
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

// nullptr where a context for cuBLASMp cannot be made.
GemmContext context_for_cublasmp(xd_comm* comm, xd_gemm_config config) {
  config.algo = XD_GEMM_ALGO_CUBLASMP;
  xd_gemm_context* made = nullptr;
  const xd_status status = xd_gemm_context_create(comm, &config, &made);
  if (status != XD_SUCCESS && status != XD_ERROR_UNSUPPORTED) {
    throw CallFailed(status, xd_last_error());
  }
  return GemmContext(made);
}

// A rank does not come to a product though it has agreed: its stream is held. The ranks agree
// without waiting for their streams, since a call by cuBLASMp came before.
TEST(CublasMpWait, EndsByTheTimeoutThoughNoRankMakesAnotherCall) {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_CUBLASMP, &reason) == 0) GTEST_SKIP() << reason;
  on_every_rank([](Rank& base) {
    GemmCase c = plain_gemm_case(base.num_ranks, XD_GEMM_REDUCE_SCATTER);
    c.tokens = TokenCounts::equal;
    if (base.num_ranks == 1 || !context_for_cublasmp(base.comm, c.config())) return;
    const Comm comm = base.another_comm("held", World::kHeapBytes, kTimeoutMs);
    Rank rank = base;
    rank.comm = comm.get();
    Hold& hold = *new Hold;  // the stream may still read it when the test has failed
    {
      const GemmContext context = context_for_cublasmp(comm.get(), c.config());
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

TEST(CublasMpCapture, IsRefusedOrTakesAnotherAlgorithm) {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_CUBLASMP, &reason) == 0) GTEST_SKIP() << reason;
  on_every_rank([](Rank& rank) {
    GemmCase c = plain_gemm_case(rank.num_ranks, XD_GEMM_REDUCE_SCATTER);
    c.tokens = TokenCounts::equal;
    GemmBatch batch(rank, c, 0);
    xd_gemm_config config = c.config();
    if (const GemmContext strict = context_for_cublasmp(rank.comm, config)) {
      const Graph graph(rank, [&] {
        EXPECT_EQ(batch.enqueue(strict.get()), XD_ERROR_UNSUPPORTED);
        expect_said("cannot be captured");
      });
    }
    config.allow_fallback = 1;
    const GemmContext context = context_for_cublasmp(rank.comm, config);
    const Graph graph(rank, [&] { ok(batch.enqueue(context.get())); });
    for (int i = 0; i < 3; ++i) {
      batch.reset();
      graph.launch();
      ok(finish(rank, context.get(), XD_SUCCESS));
      batch.check(context.get());
    }
  });
}

}  // namespace
}  // namespace xd::test
