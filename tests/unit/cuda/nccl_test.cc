// Communicators made from NCCL's, on GPUs. Ranks are threads, one per device, as NCCL wants it.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include "comm/comm.h"
#include "comm/feature.h"
#include "cuda/device.h"
#include "meet/nccl/library.h"
#include "support/open_nccl.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

struct UniqueId {
  char internal[128];
};

// The caller's part before a meeting through NCCL: communicators of NCCL.
struct Nccl {
  int (*get_unique_id)(UniqueId*) = nullptr;
  int (*comm_init_rank)(NcclComm*, int, UniqueId, int) = nullptr;
  int (*comm_abort)(NcclComm) = nullptr;
  int (*comm_destroy)(NcclComm) = nullptr;
};

class CudaNccl : public testing::Test {
 protected:
  void SetUp() override {
    const Feature cuda = feature(XD_FEATURE_CUDA);
    if (!cuda.available) GTEST_SKIP() << cuda.reason;
    void* const handle = open_nccl();
    if (handle == nullptr) GTEST_SKIP() << "libnccl.so.2 was not found (XD_NCCL_LIB may name it)";
    look_up(handle, "ncclGetUniqueId", nccl_.get_unique_id);
    look_up(handle, "ncclCommInitRank", nccl_.comm_init_rank);
    look_up(handle, "ncclCommAbort", nccl_.comm_abort);
    look_up(handle, "ncclCommDestroy", nccl_.comm_destroy);
    int devices = 0;
    ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
    num_ranks_ = std::min(devices, 4);
  }

  template <class Function>
  void look_up(void* handle, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(handle, name));
    ASSERT_NE(function, nullptr) << name;
  }

  // Every rank's communicator of NCCL's, made on its thread, then `body`.
  std::vector<std::optional<Error>> on_ranks(const std::function<void(int, NcclComm)>& body) {
    UniqueId id{};
    EXPECT_EQ(nccl_.get_unique_id(&id), 0);
    return on_threads(num_ranks_, [&](int rank) {
      cuda::DeviceGuard guard(rank);
      NcclComm comm = nullptr;
      ASSERT_EQ(nccl_.comm_init_rank(&comm, num_ranks_, id, rank), 0);
      try {
        body(rank, comm);
      } catch (...) {
        nccl_.comm_abort(comm);
        throw;
      }
      EXPECT_EQ(nccl_.comm_destroy(comm), 0);
    });
  }

  static xd_comm_config config(int rank, NcclComm comm) {
    xd_comm_config config = XD_COMM_CONFIG_INIT;
    config.bootstrap = XD_BOOTSTRAP_NCCL;
    config.nccl_comm = comm;
    config.device = {kDLCUDA, rank};
    config.heap_bytes = std::size_t{1} << 20;
    config.timeout_ms = 60000;
    return config;
  }

  Nccl nccl_;
  int num_ranks_ = 0;
};

TEST_F(CudaNccl, RanksMeetThroughItTwiceAndItStaysTheCallers) {
  expect_no_errors(on_ranks([&](int rank, NcclComm nccl) {
    for (int time = 0; time < 2; ++time) {
      const auto comm = Comm::create(config(rank, nccl));
      EXPECT_EQ(comm->rank(), rank);
      EXPECT_EQ(comm->num_ranks(), num_ranks_);
      comm->collective().barrier();
    }
  }));
}

TEST_F(CudaNccl, ItsDeviceIsTheRanksWhereNoneIsNamed) {
  expect_no_errors(on_ranks([&](int rank, NcclComm nccl) {
    xd_comm_config unnamed = config(rank, nccl);
    unnamed.device = {kDLCUDA, -1};
    const auto comm = Comm::create(unnamed);
    EXPECT_EQ(comm->device().device_id, rank);
    comm->collective().barrier();
  }));
}

TEST_F(CudaNccl, RanksOnTheCpuMayMeetThroughItToo) {
  expect_no_errors(on_ranks([&](int rank, NcclComm nccl) {
    xd_comm_config on_cpu = config(rank, nccl);
    on_cpu.device = {kDLCPU, 0};
    const auto comm = Comm::create(on_cpu);
    EXPECT_EQ(comm->rank(), rank);
    comm->collective().barrier();
  }));
}

TEST_F(CudaNccl, AnotherRankThanItsIsRefused) {
  expect_no_errors(on_ranks([&](int rank, NcclComm nccl) {
    xd_comm_config wrong = config(rank, nccl);
    wrong.num_ranks = num_ranks_ + 1;
    wrong.rank = rank;
    expect_error(error_of([&] { Comm::create(wrong); }), XD_ERROR_INVALID_ARGUMENT,
                 "config.nccl_comm");
  }));
}

// The last rank does not come: the others leave in time, also where NCCL itself would wait.
TEST_F(CudaNccl, WaitingForARankThatDoesNotComeIsBounded) {
  if (num_ranks_ < 2) GTEST_SKIP() << "one GPU: NCCL has no two ranks on it";
  std::atomic<int> ended{0};
  const auto errors = on_ranks([&](int rank, NcclComm nccl) {
    if (rank == num_ranks_ - 1) {
      EXPECT_TRUE(eventually([&] { return ended == num_ranks_ - 1; }, 30000));
      fail(XD_ERROR_ABORTED, "to abort the communicator");
    }
    xd_comm_config brief = config(rank, nccl);
    brief.timeout_ms = 2000;
    const auto start = std::chrono::steady_clock::now();
    const auto error = error_of([&] { Comm::create(brief); });
    EXPECT_LT(ms_since(start), 10000);
    ++ended;
    if (error) throw *error;
  });
  for (int rank = 0; rank < num_ranks_ - 1; ++rank)
    expect_error(errors[static_cast<std::size_t>(rank)], XD_ERROR_TIMEOUT,
                 "some rank of config.nccl_comm has not come");
}

}  // namespace
}  // namespace xd::test
