// The library's use of CUDA below the executor. Without a device there is only one test: that every
// call says so. Ranks are threads that share device 0.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "comm/cuda/segment.h"
#include "comm/feature.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/error.h"
#include "cuda/known_memory.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "unit/comms.h"

namespace xd::test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    const Feature cuda = feature(XD_FEATURE_CUDA);
    if (!cuda.available) GTEST_SKIP() << cuda.reason;
  }
};

// Copies without waiting for other streams.
std::vector<unsigned char> read_back(const void* from, std::size_t bytes) {
  const cuda::DeviceGuard guard(0);
  const cuda::Stream stream(0);
  std::vector<unsigned char> to(bytes);
  XD_CUDA_CHECK(cudaMemcpyAsync(to.data(), from, bytes, cudaMemcpyDefault, stream.get()));
  stream.synchronize();
  return to;
}

TEST(CudaAbsent, EveryWayInSaysWhatIsMissing) {
  const Feature cuda = feature(XD_FEATURE_CUDA);
  if (cuda.available) GTEST_SKIP() << "a device is there";
  EXPECT_EQ(refusal_of([] { cuda::require_device(0); }, XD_ERROR_UNSUPPORTED), cuda.reason);
  const auto unsupported = [](auto&& body) {
    expect_error(error_of(body), XD_ERROR_UNSUPPORTED, "");
  };
  unsupported([] { cuda::DeviceGuard guard(0); });
  unsupported([] { resolve_device({kDLCUDA, 0}); });
  unsupported([] { CudaSegmentMaker(0).create(1, "test"); });
}

TEST_F(CudaTest, DevicesAreNumbered) {
  EXPECT_GT(cuda::require_device(0).multiprocessors, 0);
  EXPECT_EQ(error_of([] { cuda::require_device(4096); })->status(), XD_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(cuda::find_device(cuda::require_device(0).uuid), 0);
  EXPECT_EQ(cuda::find_device(cuda::Uuid{}), -1);
}

TEST_F(CudaTest, AGuardGivesBackWhatWasCurrent) {
  std::thread([] {  // a thread without a current device
    { const cuda::DeviceGuard guard(0); }
    CUcontext popped = nullptr;
    cuda::driver().cuCtxPopCurrent(&popped);
    EXPECT_EQ(popped, nullptr) << "a context was left behind";
  })
      .join();
}

TEST_F(CudaTest, AGuardIsRelaxedAboutCapturesAndGivesTheModeBack) {
  std::thread([] {
    const auto exchange = [](CUstreamCaptureMode mode) {
      XD_CUDA_CHECK(cuda::driver().cuThreadExchangeStreamCaptureMode(&mode));
      return mode;
    };
    exchange(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    {
      const cuda::DeviceGuard guard(0);
      EXPECT_EQ(exchange(CU_STREAM_CAPTURE_MODE_RELAXED), CU_STREAM_CAPTURE_MODE_RELAXED);
    }
    EXPECT_EQ(exchange(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    EXPECT_TRUE(error_of([] { cuda::DeviceBuffer(0, std::size_t{1} << 50, "test"); }));
    EXPECT_EQ(exchange(CU_STREAM_CAPTURE_MODE_GLOBAL), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        << "also after an error";
  }).join();
}

TEST_F(CudaTest, MemoryIsKnownByWhereItLies) {
  const cuda::DeviceGuard guard(0);
  cuda::KnownMemory& known = cuda::KnownMemory::of(0);
  const auto refused = [&](const void* data, std::size_t bytes, bool pinned) {
    const auto error = error_of([&] { known.require({{"it", data, bytes, pinned}}); });
    return error && error->status() == XD_ERROR_INVALID_ARGUMENT;
  };
  const cuda::DeviceBuffer pooled(0, kMiB, "test");
  const auto segment = CudaSegmentMaker(0).create(kMiB, "test").segment;
  void* managed = nullptr;
  XD_CUDA_CHECK(cudaMallocManaged(&managed, kMiB));
  for (int again = 0; again < 2; ++again) {
    for (const void* here :
         std::initializer_list<const void*>{pooled.data(), segment->base(), managed}) {
      EXPECT_FALSE(refused(here, kMiB, false));
      EXPECT_FALSE(refused(here, kMiB, true));
      EXPECT_TRUE(refused(here, std::size_t{1} << 46, false)) << "longer than any device's";
      EXPECT_TRUE(refused(here, SIZE_MAX, false)) << "longer than addresses";
    }
    const cuda::PinnedBlock block(0, 256);
    EXPECT_TRUE(refused(block.data(), 256, false));
    EXPECT_FALSE(refused(block.data(), 256, true));
    const std::vector<char> pageable(256);
    EXPECT_TRUE(refused(pageable.data(), 256, false));
    EXPECT_TRUE(refused(pageable.data(), 256, true));
    EXPECT_FALSE(refused(pageable.data(), 0, false)) << "nothing is touched";
  }
  XD_CUDA_CHECK(cudaFree(managed));
}

// A device has few hardware queues.
TEST_F(CudaTest, StreamsAreUsedAgain) {
  cudaStream_t first = nullptr;
  {
    const cuda::Stream one(0), other(0);
    EXPECT_NE(one.get(), other.get());
    first = one.get();
  }
  const cuda::Stream again(0), more(0);
  EXPECT_TRUE(again.get() == first || more.get() == first);
}

TEST_F(CudaTest, BuffersAreRead) {
  const cuda::DeviceBuffer buffer(0, 1000, "test");
  const cuda::PinnedBlock block(0, 256);
  buffer.write(900, "abc", 3);
  ASSERT_TRUE(buffer.read(900, block.data(), 3, Deadline::after_ms(20000)));
  EXPECT_EQ(std::memcmp(block.data(), "abc", 3), 0);
}

TEST_F(CudaTest, BuffersAreZeroAndWritable) {
  const cuda::DeviceBuffer buffer(0, 1000, "test");
  EXPECT_EQ(read_back(buffer.data(), 1000), std::vector<unsigned char>(1000));
  buffer.write(999, "x", 1);
  EXPECT_EQ(read_back(buffer.data(), 1000)[999], 'x');
  expect_error(error_of([] { cuda::DeviceBuffer(0, std::size_t{1} << 50, "test"); }),
               XD_ERROR_OUT_OF_MEMORY, "");
}

TEST_F(CudaTest, PinnedBlocksAreReusedAndZeroed) {
  std::byte* first = nullptr;
  {
    const cuda::PinnedBlock block(0, 300);
    first = block.data();
    std::memset(first, 1, 300);
    const cuda::PinnedBlock other(0, 300);
    EXPECT_NE(other.data(), first);
  }
  const cuda::PinnedBlock again(0, 400), more(0, 400);
  const std::byte* reused = again.data() == first ? again.data() : more.data();
  EXPECT_EQ(reused, first);
  for (int i = 0; i < 400; ++i) EXPECT_EQ(reused[i], std::byte{0});
  EXPECT_EQ(read_back(again.data(), 4), std::vector<unsigned char>(4)) << "devices see it too";
}

TEST_F(CudaTest, SegmentsAreZeroAndMappedOncePerProcess) {
  const CudaSegmentMaker maker(0);
  auto made = maker.create(3 * kMiB, "test");
  EXPECT_EQ(made.segment->bytes(), 4 * kMiB);
  EXPECT_EQ(read_back(made.segment->base(), 4 * kMiB), std::vector<unsigned char>(4 * kMiB));
  const auto second = maker.open(1, made.description, std::move(made.fd));
  EXPECT_EQ(second, made.segment);
  made.description.pop_back();
  EXPECT_EQ(error_of([&] { maker.open(1, made.description, {}); })->status(), XD_ERROR_MISMATCH);
  expect_error(error_of([&] { maker.create(std::size_t{1} << 50, "test"); }),
               XD_ERROR_OUT_OF_MEMORY, "");
}

TEST_F(CudaTest, RanksOfOtherKindsDoNotMix) {
  const xd_unique_id id = new_id();
  const auto errors = on_threads(2, [&](int rank) {
    xd_comm_config config = id_config(id, rank, 2);
    if (rank == 1) config.device = {kDLCUDA, 0};
    Comm::create(config);
  });
  for (const auto& error : errors) {
    expect_error(error, XD_ERROR_MISMATCH, "the CPU on rank 0 and a CUDA device on rank 1");
  }
}

TEST_F(CudaTest, MemoryThatCannotBeLentIsRefused) {
  const auto comms = make_cuda_comms(2, kMiB);
  const auto refused = [&](void* ptr, std::size_t bytes, xd_status status) {
    const auto errors = on_threads(2, [&](int rank) {
      std::int32_t number = -1;
      comms[at(rank)]->memory().enlist(rank == 0 ? ptr : nullptr, rank == 0 ? bytes : 0, &number);
    });
    expect_error(errors[0], status, "");
    expect_error(errors[1], XD_ERROR_MISMATCH, "");
  };
  const cuda::DeviceBuffer pooled(0, kMiB, "test");
  refused(pooled.data(), kMiB, XD_ERROR_UNSUPPORTED);
  std::vector<char> host(64);
  refused(host.data(), host.size(), XD_ERROR_INVALID_ARGUMENT);
  const cuda::DeviceGuard guard(0);
  void* memory = nullptr;
  XD_CUDA_CHECK(cudaMalloc(&memory, kMiB));
  refused(memory, 64 * kMiB, XD_ERROR_INVALID_ARGUMENT);
  XD_CUDA_CHECK(cudaFree(memory));
  refused(nullptr, 1, XD_ERROR_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace xd::test
