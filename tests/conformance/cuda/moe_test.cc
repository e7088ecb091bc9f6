// A layer's passes in CUDA graphs: with the serial schedule, and with streams of the library beside
// the captured one.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>

#include "conformance/cuda/graph.h"
#include "conformance/moe/layer.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr int kReplays = 100;
constexpr int kRoutings = 4;

// A batch of a layer in parts, with the layer's tensors.
struct Passes {
  Passes(const Rank& of, const Case& of_case, int number)
      : rank(of), c(of_case), batch(of, of_case, number), layer(of, of_case, batch, {}) {
    batch.prepare_args.parts = c.parts;
  }

  void prepare(xd_ep_group* group) { ok(batch.enqueue(group, XD_EP_PREPARE)); }
  void forward(xd_ep_group* group, int parts) {
    layer.forward_args.parts = parts;
    ok(xd_moe_forward(group, &layer.forward_args, rank.stream()));
  }
  void backward(xd_ep_group* group, int parts) {
    layer.backward_args.parts = parts;
    ok(xd_moe_backward(group, &layer.backward_args, rank.stream()));
  }

  const Rank& rank;
  const Case c;
  Batch batch;
  Layer layer;
};

// The serial layer's outputs by each routing.
std::deque<Layer> serial_layers(Passes& passes, xd_ep_group* group) {
  std::deque<Layer> layers;
  for (int routing = 0; routing < kRoutings; ++routing) {
    turn_routing(passes.rank, passes.c, passes.batch, routing);
    passes.batch.prepare(group);
    Layer& layer = layers.emplace_back(passes.rank, passes.c, passes.batch, Layer::Options{});
    ok(layer.forward(group, 0));
    ok(layer.backward(group, 0));
  }
  return layers;
}

// In each round another rank makes the calls itself.
TEST(CudaGraphOfALayer, ReplaysBothPassesWithOtherRoutingBesideAnEagerRank) {
  on_every_rank([](Rank& rank) {
    const Case c = layer_case(rank.num_ranks, 3);
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Passes passes(rank, c, 0);
    const std::deque<Layer> expected = serial_layers(passes, group.get());
    for (const int parts : {c.parts, 0}) {
      SCOPED_TRACE("parts " + std::to_string(parts));
      const auto enqueue = [&] {
        passes.prepare(group.get());
        passes.forward(group.get(), parts);
        passes.backward(group.get(), parts);
      };
      const Graph graph(rank, enqueue);
      for (int i = 0; i < kReplays; ++i) {
        const int routing = i % kRoutings;
        turn_routing(rank, c, passes.batch, routing);
        if (i / kRoutings % rank.num_ranks == rank.rank && rank.num_ranks > 1) {
          enqueue();
        } else {
          graph.launch();
        }
        ok(finish(rank, group.get(), XD_SUCCESS));
        passes.layer.expect_equal(expected[static_cast<std::size_t>(routing)]);
      }
    }
  });
}

TEST(CudaGraphOfALayer, ReplaysTwoLayersOfAGroup) {
  on_every_rank([](Rank& rank) {
    const Case c = layer_case(rank.num_ranks, 3);
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Passes first(rank, c, 0), second(rank, c, 1);
    const std::deque<Layer> expected_of_first = serial_layers(first, group.get());
    const std::deque<Layer> expected_of_second = serial_layers(second, group.get());
    const Graph graph(rank, [&] {
      for (Passes* layer : {&first, &second}) {
        layer->prepare(group.get());
        layer->forward(group.get(), c.parts);
      }
      for (Passes* layer : {&second, &first}) layer->backward(group.get(), c.parts);
    });
    for (int i = 0; i < kReplays; ++i) graph.launch();  // no rank waits between them
    ok(finish(rank, group.get(), XD_SUCCESS));
    first.layer.expect_equal(expected_of_first.back());
    second.layer.expect_equal(expected_of_second.back());
  });
}

// Kernels that hold all multiprocessors come before, between and behind those of a layer.
TEST(BusyDevice, DelaysALayersPartsAndNothingElse) {
  constexpr int kFloods = 8, kFloodMs = 5;
  on_every_rank([](Rank& rank) {
    const std::unique_ptr<Memory> memory = rank.memory->another_stream();
    const Rank beside = rank.on(*memory);
    const bool floods = rank.rank < device_count("cuda");  // one rank of each device
    if (floods) load_occupier(beside);
    const Case c = layer_case(rank.num_ranks, 3);
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Passes passes(rank, c, 0);
    const std::deque<Layer> expected = serial_layers(passes, group.get());
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; floods && i < kFloods; ++i) occupy(beside, kFloodMs);
      passes.forward(group.get(), c.parts);
      for (int i = 0; floods && i < kFloods; ++i) occupy(beside, kFloodMs);
      passes.backward(group.get(), c.parts);
      ok(finish(rank, group.get(), XD_SUCCESS));
      passes.layer.expect_equal(expected.back());
      memory->synchronize();
    }
  });
}

// A device that is busy for longer than the timeout is one that never comes.
TEST(BusyDevice, ForGoodIsATimeoutOfALayersPeers) {
  if (device_count("cuda") < 2 || world().num_ranks() < 2) GTEST_SKIP() << "one device is busy";
  constexpr int kTimeoutMs = 1000;
  on_every_rank([](Rank& rank) {
    const Comm comm = rank.another_comm("busy", std::size_t{2} << 20, kTimeoutMs);
    Rank here = rank;
    here.comm = comm.get();
    const std::unique_ptr<Memory> memory = rank.memory->another_stream();
    const Rank beside = here.on(*memory);
    if (rank.rank == 0) load_occupier(beside);
    const Case c = layer_case(rank.num_ranks, 3);
    const Group group = make_group(comm.get(), c.config(rank.rank));
    Passes passes(here, c, 0);
    passes.batch.prepare(group.get());
    ok(passes.layer.forward(group.get(), c.parts));
    ok(passes.layer.backward(group.get(), c.parts));
    ok(xd_comm_barrier(comm.get()));
    if (rank.rank == 0) occupy(beside, 4 * kTimeoutMs);
    ok(xd_comm_barrier(comm.get()));
    EXPECT_EQ(passes.layer.forward(group.get(), c.parts), XD_ERROR_TIMEOUT);
    memory->synchronize();
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
