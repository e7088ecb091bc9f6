// A layer's passes in CUDA graphs: with the serial schedule, and with streams of the library beside
// the captured one.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>

#include "conformance/cuda/graph.h"
#include "conformance/moe/layer.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

TEST(CudaGraphOfALayer, ReplaysBothPassesWithTheirBits) {
  constexpr int kReplays = 20;
  on_every_rank([](Rank& rank) {
    const Case c = layer_case(rank.num_ranks, 3);
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare_args.parts = c.parts;
    batch.prepare(group.get());
    Layer eager(rank, c, batch, {});
    ok(eager.forward(group.get(), 0));
    ok(eager.backward(group.get(), 0));
    for (const int parts : {c.parts, 0}) {
      SCOPED_TRACE("parts " + std::to_string(parts));
      Layer captured(rank, c, batch, {});
      captured.forward_args.parts = captured.backward_args.parts = parts;
      const Graph graph(rank, [&] {
        ok(xd_moe_forward(group.get(), &captured.forward_args, rank.stream()));
        ok(xd_moe_backward(group.get(), &captured.backward_args, rank.stream()));
      });
      for (int i = 0; i < kReplays; ++i) graph.launch();
      ok(finish(rank, group.get(), XD_SUCCESS));
      captured.expect_equal(eager);
    }
  });
}

// Both passes by parts, enqueued and not waited for.
void enqueue(xd_ep_group* group, Layer& layer, cudaStream_t stream, xd_status expected) {
  layer.forward_args.parts = layer.backward_args.parts = 1;
  EXPECT_EQ(xd_moe_forward(group, &layer.forward_args, stream), expected);
  EXPECT_EQ(xd_moe_backward(group, &layer.backward_args, stream), expected);
}

// A captured pass leaves streams of the library in its capture until that ends.
TEST(CaptureOfALayer, IsNotTakenDownByPassesOnOtherStreams) {
  on_every_rank([](Rank& rank) {
    const Case c = layer_case(rank.num_ranks, 1);
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    Layer alone(rank, c, batch, {}), beside(rank, c, batch, {}), captured(rank, c, batch, {});
    Layer refused(rank, c, batch, {});
    ok(alone.forward(group.get(), 1));
    ok(alone.backward(group.get(), 1));
    cudaStream_t other = nullptr, blocking = nullptr;
    cuda_ok(cudaSetDevice(rank.memory->device().device_id), "cudaSetDevice");
    cuda_ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "another stream");
    cuda_ok(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault), "a blocking stream");
    {
      Capture capture(rank, rank.stream(), cudaStreamCaptureModeThreadLocal);
      enqueue(group.get(), captured, rank.stream(), XD_SUCCESS);
      enqueue(group.get(), beside, other, XD_SUCCESS);
      EXPECT_EQ(capture.end(), cudaSuccess);
    }
    cuda_ok(cudaStreamSynchronize(other), "cudaStreamSynchronize");
    beside.expect_equal(alone);
    {
      Capture capture(rank, blocking, cudaStreamCaptureModeThreadLocal);
      enqueue(group.get(), refused, nullptr, XD_ERROR_INVALID_ARGUMENT);  // legacy: waits for it
      EXPECT_EQ(capture.end(), cudaSuccess);
    }
    EXPECT_TRUE(refused.untouched());
    cuda_ok(cudaStreamDestroy(other), "cudaStreamDestroy");
    cuda_ok(cudaStreamDestroy(blocking), "cudaStreamDestroy");
    Layer behind(rank, c, batch, {});
    ok(behind.forward(group.get(), 1));
    ok(behind.backward(group.get(), 1));
    behind.expect_equal(alone);
  });
}

}  // namespace
}  // namespace xd::test
