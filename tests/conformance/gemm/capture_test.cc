// Contexts of products, captures that come to nothing, and default streams.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "conformance/cuda/graph.h"
#include "conformance/gemm/batch.h"
#include "conformance/gemm/gather.h"
#include "conformance/said.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// Runs everything that the stream of the context's own takes part in, on this rank's stream.
void expect_all_works(const Rank& rank, xd_gemm_context* context) {
  Gather gather(rank);
  for (const xd_gemm_operation operation : kGemmProducts) {
    SCOPED_TRACE(name_of(operation));
    ok(gather.start(context));
    ok(finish(rank, context, xd_gemm_wait(context, rank.stream())));
    gather.check();
    for (const xd_gemm_algo algo : {XD_GEMM_ALGO_AUTO, XD_GEMM_ALGO_SPLIT}) {
      GemmBatch batch(rank, plain_gemm_case(rank.num_ranks, operation), 0);
      batch.args.algo = algo;
      if (!batch.can_call(context)) continue;
      batch.call_and_check(context);
    }
  }
  EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS) << comm_error(rank.comm).text;
}

void expect_invalid_because_of_capture(xd_status status) {
  EXPECT_EQ(status, XD_ERROR_INVALID_ARGUMENT);
  expect_said("capture");
}

void invalidate_capture(const Rank& rank) {
  EXPECT_NE(cudaStreamSynchronize(rank.stream()), cudaSuccess) << "a forbidden wait";
  cudaGetLastError();
}

// An invalidated capture keeps its streams until it is ended. The context goes on all the same.
TEST(InvalidatedCapture, HoldsNoContextOfProducts) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, gathering_config());
    const std::unique_ptr<Memory> beside = rank.memory->another_stream();
    const Rank there = rank.on(*beside);
    Gather gather(rank);
    GemmBatch batch(rank, plain_gemm_case(rank.num_ranks), 0);
    batch.args.algo = XD_GEMM_ALGO_SPLIT;
    for (const int guilty : {0, rank.num_ranks - 1, rank.rank}) {  // the last time all are
      ok(gather.start(context.get()));
      ok(xd_gemm_wait(context.get(), there.stream()));
      if (rank.rank == guilty) {
        Capture capture(rank, rank.stream(), cudaStreamCaptureModeRelaxed);
        ok(batch.enqueue(context.get()));
        ok(gather.start(context.get()));
        invalidate_capture(rank);
        expect_invalid_because_of_capture(xd_gemm_wait(context.get(), rank.stream()));
        expect_all_works(there, context.get());
        EXPECT_EQ(capture.end(), cudaErrorStreamCaptureInvalidated);
      } else {
        expect_all_works(there, context.get());
      }
      gather.check();
      expect_all_works(rank, context.get());
    }
  });
}

TEST(CaptureThatEndsWithAnError, HoldsNoContextOfProducts) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, gathering_config());
    Gather gather(rank);
    for (int i = 0; i < 3; ++i) {
      Capture capture(rank, rank.stream(), cudaStreamCaptureModeRelaxed);
      ok(gather.start(context.get()));
      EXPECT_EQ(capture.end(), cudaErrorStreamCaptureUnjoined) << "nobody has waited";
      expect_all_works(rank, context.get());
    }
  });
}

// ---- Default streams ---------------------------------------------------------------------------

TEST(DefaultStream, MayWaitForAGather) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, gathering_config());
    Gather gather(rank);
    cudaEvent_t waited = nullptr;
    cuda_ok(cudaSetDevice(rank.memory->device().device_id), "cudaSetDevice");
    cuda_ok(cudaEventCreateWithFlags(&waited, cudaEventDisableTiming), "cudaEventCreate");
    for (const cudaStream_t stream :
         {cudaStream_t{nullptr}, cudaStreamLegacy, cudaStreamPerThread}) {
      ok(xd_comm_barrier(rank.comm));
      if (rank.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ok(gather.start(context.get()));
      ok(xd_gemm_wait(context.get(), stream));
      // Ranks may be threads that share these streams: none of them waits there on the host.
      cuda_ok(cudaEventRecord(waited, stream), "cudaEventRecord");
      cuda_ok(cudaStreamWaitEvent(rank.stream(), waited, 0), "cudaStreamWaitEvent");
      gather.check();
      expect_all_works(rank, context.get());
    }
    cudaEventDestroy(waited);
  });
}

// It takes no work then: nothing may be enqueued there, since that would take the capture down.
TEST(LegacyDefaultStream, IsRefusedWhileABlockingStreamIsCaptured) {
  on_every_rank([](Rank& rank) {
    const GemmContext context = make_context(rank.comm, gathering_config());
    Gather gather(rank);
    GemmBatch batch(rank, plain_gemm_case(rank.num_ranks), 0);
    ok(gather.start(context.get()));
    cudaStream_t blocking = nullptr;
    cuda_ok(cudaSetDevice(rank.memory->device().device_id), "cudaSetDevice");
    cuda_ok(cudaStreamCreate(&blocking), "cudaStreamCreate");
    {
      Capture capture(rank, blocking, cudaStreamCaptureModeRelaxed);
      for (const cudaStream_t stream : {cudaStream_t{nullptr}, cudaStreamLegacy}) {
        expect_invalid_because_of_capture(xd_gemm_wait(context.get(), stream));
        expect_invalid_because_of_capture(
            call_product(context.get(), XD_GEMM_ALL_GATHER, batch.args, stream));
      }
      EXPECT_EQ(capture.end(), cudaSuccess);
    }
    cudaStreamDestroy(blocking);
    ok(finish(rank, context.get(), xd_gemm_wait(context.get(), rank.stream())));
    gather.check();
    expect_all_works(rank, context.get());
  });
}

}  // namespace
}  // namespace xd::test
