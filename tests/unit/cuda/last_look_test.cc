// A group that goes takes a last look at its device, whether an operation still runs there. A look
// that has not come back may come at any time later, and must find its memory.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <latch>
#include <memory>
#include <vector>

#include "comm/feature.h"
#include "cuda/device.h"
#include "cuda/error.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "ep/bulk/group.h"
#include "ep/executors.h"
#include "unit/comms.h"

namespace xd::test {
namespace {

constexpr std::size_t kLookBytes = 8;  // blocks of this size are the pool's smallest

// The stream that the library uses next takes nothing until the end of the scope.
class StuckStream {
 public:
  StuckStream() {
    const cuda::DeviceGuard guard(0);
    const cuda::Stream stream(0);  // and back to the pool, on top
    stream_ = stream.get();
    XD_CUDA_CHECK(cudaLaunchHostFunc(
        stream_, [](void* latch) { static_cast<std::latch*>(latch)->wait(); }, &released_));
  }
  ~StuckStream() { release(); }
  StuckStream(const StuckStream&) = delete;
  StuckStream& operator=(const StuckStream&) = delete;

  // Returns when all that was enqueued there meanwhile has been done.
  void release() {
    if (!released_.try_wait()) released_.count_down();
    const cuda::DeviceGuard guard(0);
    XD_CUDA_CHECK(cudaStreamSynchronize(stream_));
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::latch released_{1};
};

std::unique_ptr<ep::Group> small_group(const std::shared_ptr<Comm>& comm) {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = 1;
  config.num_experts = 2;
  config.max_topk = 1;
  config.max_tokens_per_rank = 4;
  config.hidden = 64;
  return ep::cuda::kBulk.make_group(comm, &config);
}

// Also after a fatal error, which otherwise says that nothing of the group runs any more.
TEST(CudaLastLook, ThatHasNotComeBackIsNotGivenMemoryOfOthers) {
  const Feature cuda = feature(XD_FEATURE_CUDA);
  if (!cuda.available) GTEST_SKIP() << cuda.reason;
  const std::shared_ptr<Comm> comm = make_cuda_comms(1, std::size_t{1} << 20)[0];
  const std::byte* next = cuda::PinnedBlock(0, kLookBytes).data();
  std::unique_ptr<ep::Group> group = small_group(comm);
  ASSERT_NE(cuda::PinnedBlock(0, kLookBytes).data(), next) << "the group looks elsewhere";
  comm->errors().abort();

  StuckStream stuck;
  group.reset();
  std::vector<cuda::PinnedBlock> blocks;
  for (int i = 0; i < 8; ++i) {  // the block that has been given back last comes first
    std::byte* const block = blocks.emplace_back(0, kLookBytes).data();
    EXPECT_NE(block, next) << "the look goes there";
    std::memset(block, 0xA5, kLookBytes);
  }
  stuck.release();
  for (const cuda::PinnedBlock& block : blocks) {
    EXPECT_TRUE(std::all_of(block.data(), block.data() + kLookBytes,
                            [](std::byte b) { return b == std::byte{0xA5}; }));
  }
}

}  // namespace
}  // namespace xd::test
