// Groups side by side on several streams, and streams that have a part of a device.
#include <gtest/gtest.h>

#include <cudaTypedefs.h>

#include <chrono>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "conformance/cuda/graph.h"
#include "conformance/cuda/stream.h"
#include "conformance/fixed_step.h"
#include "conformance/gemm/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

class TwoGroups : public testing::TestWithParam<FixedShape> {};

// Each operation waits for its peers with all its blocks; every rank begins with another group's
// than its neighbour, and neither group has been told how many multiprocessors to use.
TEST_P(TwoGroups, BegunInOppositeOrdersFitTogether) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank has no peers to wait for";
  if (world().num_ranks() > 2 * device_count("cuda")) {
    GTEST_SKIP() << "more ranks and groups than a device has hardware queues apart";
  }
  on_every_rank([](Rank& rank) {
    FixedShape shape = GetParam();
    shape.tokens = 512;  // the number for which the library uses most blocks
    const std::unique_ptr<Memory> memory = rank.memory->another_stream();
    const Rank there = rank.on(*memory);
    Stage here(rank, shape), beside(there, shape);
    for (int number = 0; number < 3; ++number) {
      here.step.load(number);
      beside.step.load(number + 1);
      for (const xd_ep_operation operation : kStepOperations) {
        const bool swapped = (number + rank.rank) % 2 == 1;
        Stage& first = swapped ? beside : here;
        Stage& second = swapped ? here : beside;
        ok(xd_comm_barrier(rank.comm));
        ok(first.step.enqueue(first.group.get(), operation));
        std::this_thread::sleep_for(std::chrono::milliseconds(3));  // its kernel has begun
        ok(second.step.enqueue(second.group.get(), operation));
        rank.memory->synchronize();
        memory->synchronize();
      }
      here.expect_end();
      beside.expect_end();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, TwoGroups, testing::ValuesIn(kFixedShapes));

// ---- Green contexts ----------------------------------------------------------------------------

template <class Function>
Function driver(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result);
  cudaGetLastError();
  return reinterpret_cast<Function>(function);
}

void driver_ok(CUresult error, const char* call) {
  if (error != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(call) + ": error " + std::to_string(error));
  }
}

#define XD_TEST_DRIVER(name, version) \
  const auto name = driver<PFN_##name##_v##version>(#name, version)

bool has_green_contexts() {
  XD_TEST_DRIVER(cuGreenCtxStreamCreate, 12050);
  return cuGreenCtxStreamCreate != nullptr;
}

// A stream whose kernels run on few of the device's multiprocessors. It goes with the process.
cudaStream_t stream_of_part(int device, unsigned number, unsigned& multiprocessors) {
  XD_TEST_DRIVER(cuDeviceGetDevResource, 12040);
  XD_TEST_DRIVER(cuDevSmResourceSplitByCount, 12040);
  XD_TEST_DRIVER(cuDevResourceGenerateDesc, 12040);
  XD_TEST_DRIVER(cuGreenCtxCreate, 12040);
  XD_TEST_DRIVER(cuGreenCtxStreamCreate, 12050);
  CUdevResource all{}, rest{};
  driver_ok(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM),
            "cuDeviceGetDevResource");
  std::vector<CUdevResource> parts(number + 1);
  unsigned count = number + 1;
  driver_ok(cuDevSmResourceSplitByCount(parts.data(), &count, &all, &rest, 0, 8),
            "cuDevSmResourceSplitByCount");
  if (count != number + 1) throw std::runtime_error("the device has too few parts");
  multiprocessors = parts[number].sm.smCount;
  CUdevResourceDesc description{};
  driver_ok(cuDevResourceGenerateDesc(&description, &parts[number], 1),
            "cuDevResourceGenerateDesc");
  CUgreenCtx context = nullptr;
  driver_ok(cuGreenCtxCreate(&context, description, device, CU_GREEN_CTX_DEFAULT_STREAM),
            "cuGreenCtxCreate");
  CUstream stream = nullptr;
  driver_ok(cuGreenCtxStreamCreate(&stream, context, CU_STREAM_NON_BLOCKING, 0),
            "cuGreenCtxStreamCreate");
  return stream;
}

class GreenContext : public testing::TestWithParam<int> {};

TEST_P(GreenContext, HasAsManyBlocksAsItsPartOfTheDevice) {
  if (!has_green_contexts()) GTEST_SKIP() << "this driver has no green contexts";
  on_every_rank([](Rank& rank) {
    cuda_ok(cudaSetDevice(rank.memory->device().device_id), "cudaSetDevice");
    unsigned multiprocessors = 0;
    const cudaStream_t stream =
        stream_of_part(rank.memory->device().device_id,
                       static_cast<unsigned>(rank.rank / device_count("cuda")), multiprocessors);
    EXPECT_LE(multiprocessors, 16u);
    OnStream memory(*rank.memory, stream);
    const Rank there = rank.on(memory);
    FixedShape shape;
    shape.num_sms = GetParam();
    shape.tokens = 512;
    Stage whole(rank, shape), part(there, shape);
    for (int number = 0; number < 3; ++number) {
      part.step.load(number);
      part.step.enqueue_all(part.group.get());
      part.expect_end();
      // And the same group on a stream with all of them.
      whole.step.load(number);
      whole.step.enqueue_all(part.group.get());
      rank.memory->synchronize();
      ok(finish(rank, part.group.get(), XD_SUCCESS));
      whole.step.check();
    }
    const Graph graph(there, [&] { part.step.enqueue_all(part.group.get()); });
    part.step.load(4);
    graph.launch();
    part.expect_end();
  });
}

// cuBLASMp takes streams of the context that its handle was made in alone.
TEST(GreenContextOfProducts, IsRefusedForCublasMp) {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_CUBLASMP, &reason) == 0) GTEST_SKIP() << reason;
  if (!has_green_contexts()) GTEST_SKIP() << "this driver has no green contexts";
  on_every_rank([](Rank& rank) {
    GemmCase c = plain_gemm_case(rank.num_ranks);
    c.tokens = TokenCounts::equal;
    xd_gemm_config config = c.config();
    config.algo = XD_GEMM_ALGO_CUBLASMP;
    xd_gemm_context* made = nullptr;
    if (xd_gemm_context_create(rank.comm, &config, &made) == XD_ERROR_UNSUPPORTED) return;
    ASSERT_NE(made, nullptr) << xd_last_error();
    const GemmContext context(made);
    GemmBatch whole(rank, c, 0);
    cuda_ok(cudaSetDevice(rank.memory->device().device_id), "cudaSetDevice");
    unsigned multiprocessors = 0;
    const cudaStream_t stream =
        stream_of_part(rank.memory->device().device_id,
                       static_cast<unsigned>(rank.rank / device_count("cuda")), multiprocessors);
    OnStream memory(*rank.memory, stream);
    const Rank there = rank.on(memory);
    const GemmBatch part(there, c, 0);
    const GemmOutcome outcome = part.call(context.get());
    EXPECT_EQ(outcome, XD_ERROR_UNSUPPORTED);
    EXPECT_TRUE(outcome.mentions("green context")) << outcome.text;
    whole.call_and_check(context.get());
  });
}

// Kernels of products that wait with all their blocks have no more than find room there: rows of
// several hundred tokens have more than that.
TEST(GreenContextOfProducts, HasAsManyBlocksAsItsPartOfTheDevice) {
  if (!has_green_contexts()) GTEST_SKIP() << "this driver has no green contexts";
  on_every_rank([](Rank& rank) {
    cuda_ok(cudaSetDevice(rank.memory->device().device_id), "cudaSetDevice");
    unsigned multiprocessors = 0;
    const cudaStream_t stream =
        stream_of_part(rank.memory->device().device_id,
                       static_cast<unsigned>(rank.rank / device_count("cuda")), multiprocessors);
    OnStream memory(*rank.memory, stream);
    const Rank there = rank.on(memory);
    for (const xd_gemm_operation operation : kGemmProducts) {
      GemmCase c = plain_gemm_case(rank.num_ranks, operation);
      c.tokens = TokenCounts::most;
      c.token_units = 512;
      c.n_units = operation == XD_GEMM_ALL_GATHER ? 1 : 32;
      c.k_units = operation == XD_GEMM_ALL_GATHER ? 32 : 1;
      const GemmContext context = make_context(rank.comm, c.config());
      GemmBatch batch(there, c, 0), whole(rank, c, 0);
      for (const xd_gemm_algo algo : kGemmAlgos) {
        SCOPED_TRACE(std::string(name_of(operation)) + " by algorithm " + std::to_string(algo));
        batch.args.algo = whole.args.algo = algo;
        if (!batch.can_call(context.get())) continue;
        for (int i = 0; i < 2; ++i) {
          for (GemmBatch* each : {&batch, &whole}) {
            each->reset();
            each->call_and_check(context.get());
          }
        }
        const Graph graph(there, [&] { ok(batch.enqueue(context.get())); });
        batch.reset();
        graph.launch();
        ok(finish(there, context.get(), XD_SUCCESS));
        batch.check(context.get());
      }
    }
  });
}

// Chosen by the library, and more than the part has.
INSTANTIATE_TEST_SUITE_P(NumSms, GreenContext, testing::Values(0, 16));

}  // namespace
}  // namespace xd::test
