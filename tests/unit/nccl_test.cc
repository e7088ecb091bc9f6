// The calls to NCCL of a communicator that is made from an ncclComm_t, with a library in NCCL's
// place. The gathering itself needs GPUs: see cuda/nccl_test.cc.
#include <dlfcn.h>

#include "meet/nccl/library.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

struct FakeComm {
  int count = 4, rank = 2, device = 1, result = 0;
};

xd_comm_config config_of(FakeComm& comm) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.bootstrap = XD_BOOTSTRAP_NCCL;
  config.nccl_comm = &comm;
  return config;
}

TEST(NcclLibrary, ThatIsNowhereIsUnsupportedAndNamed) {
  const auto error = error_of([] { find_nccl("libnccl-nowhere.so.2"); });
  expect_error(error, XD_ERROR_UNSUPPORTED, {"this process has no NCCL", "libnccl-nowhere.so.2"});
}

TEST(NcclLibrary, ThatLacksFunctionsIsUnsupportedAndTheyAreNamed) {
  expect_error(error_of([] { find_nccl(NCCL_FAKE_PARTIAL_PATH); }), XD_ERROR_UNSUPPORTED,
               "this process's NCCL has no ncclCommGetAsyncError, ncclAllGather");
}

TEST(NcclLibrary, IsFoundByName) {
  FakeComm comm;
  const NcclRank seat = read_nccl_rank(find_nccl(NCCL_FAKE_PATH), config_of(comm));
  EXPECT_EQ(seat.num_ranks, 4);
  EXPECT_EQ(seat.rank, 2);
  EXPECT_EQ(seat.device, 1);
}

// As a framework has done that was linked with another name, or with NCCL inside.
TEST(NcclLibrary, ThatTheProcessHasLoadedComesFirst) {
  void* const loaded = ::dlopen(NCCL_FAKE_PATH, RTLD_NOW | RTLD_GLOBAL);
  ASSERT_NE(loaded, nullptr) << ::dlerror();
  FakeComm comm;
  EXPECT_EQ(read_nccl_rank(find_nccl("libnccl-nowhere.so.2"), config_of(comm)).num_ranks, 4);
}

TEST(NcclRank, MustBeWhatTheConfigSays) {
  const NcclLibrary nccl = find_nccl(NCCL_FAKE_PATH);
  FakeComm comm;
  xd_comm_config config = config_of(comm);
  config.num_ranks = 4;
  config.rank = 2;
  EXPECT_EQ(read_nccl_rank(nccl, config).rank, 2);
  config.rank = 1;
  expect_error(error_of([&] { read_nccl_rank(nccl, config); }), XD_ERROR_INVALID_ARGUMENT,
               "config.rank = 1, expected 2 as in config.nccl_comm");
  config.num_ranks = 3;
  expect_error(error_of([&] { read_nccl_rank(nccl, config); }), XD_ERROR_INVALID_ARGUMENT,
               "config.num_ranks = 3, expected 0 or the 4 of config.nccl_comm");
  comm.count = 1025;
  expect_error(error_of([&] { read_nccl_rank(nccl, config_of(comm)); }), XD_ERROR_INVALID_ARGUMENT,
               "config.nccl_comm has 1025 ranks");
}

TEST(NcclRank, OfACommunicatorThatFailsIsAnErrorWithItsReason) {
  FakeComm comm;
  comm.result = 3;
  expect_error(error_of([&] { read_nccl_rank(find_nccl(NCCL_FAKE_PATH), config_of(comm)); }),
               XD_ERROR_SYSTEM, "ncclCommCuDevice: fake reason (NCCL result 3)");
}

// A communicator whose asynchronous state the test sets.
struct Waiting {
  NcclLibrary nccl;
  int state = NcclLibrary::kSuccess;
  int looks = 0;
  NcclPatience patience;

  Waiting() {
    nccl.comm_get_async_error = [](NcclComm comm, int* error) {
      auto* const self = static_cast<Waiting*>(comm);
      ++self->looks;
      // Enqueues at the third look.
      *error = self->state == NcclLibrary::kInProgress && self->looks >= 3 ? NcclLibrary::kSuccess
                                                                           : self->state;
      return NcclLibrary::kSuccess;
    };
    nccl.get_error_string = [](int) { return "remote process has gone"; };
  }
};

TEST(NcclWait, EndsWhenTheBytesHaveLanded) {
  Waiting at;
  int asked = 0;
  EXPECT_TRUE(wait_for_nccl(
      at.nccl, &at, [&] { return ++asked == 3; }, at.patience));
  EXPECT_EQ(asked, 3);
}

// The stream of a communicator that has not enqueued anything yet is idle as well.
TEST(NcclWait, DoesNotTakeAnIdleStreamForAnAnswerBeforeAnythingIsEnqueued) {
  Waiting at;
  at.state = NcclLibrary::kInProgress;
  EXPECT_TRUE(wait_for_nccl(
      at.nccl, &at, [] { return true; }, at.patience));
  EXPECT_EQ(at.looks, 3);
}

TEST(NcclWait, EndsWhenTheCommunicatorFails) {
  Waiting at;
  at.state = 6;
  expect_error(error_of([&] {
                 wait_for_nccl(
                     at.nccl, &at, [] { return false; }, at.patience);
               }),
               XD_ERROR_SYSTEM, "ncclAllGather: remote process has gone (NCCL result 6)");
}

TEST(NcclWait, EndsWhenItsCallerHasGivenUp) {
  Waiting at;
  std::thread caller([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const std::lock_guard lock(at.patience.mutex);
    at.patience.given_up = true;
  });
  EXPECT_FALSE(wait_for_nccl(
      at.nccl, &at, [] { return false; }, at.patience));
  caller.join();
}

TEST(NcclConfig, MistakesAreNamed) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.bootstrap = XD_BOOTSTRAP_NCCL;
  expect_error(error_of([&] { make_bootstrap(config); }), XD_ERROR_INVALID_ARGUMENT,
               "config.nccl_comm = NULL, expected an ncclComm_t");
#if !XD_CUDA
  FakeComm comm;
  expect_error(error_of([&] { make_bootstrap(config_of(comm)); }), XD_ERROR_UNSUPPORTED,
               "config.bootstrap = XD_BOOTSTRAP_NCCL: this library was built without CUDA");
#endif
}

}  // namespace
}  // namespace xd::test
