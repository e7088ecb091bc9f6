// Streams that are being captured: effects of the library on a capture, and of a capture on the
// library.
#include <gtest/gtest.h>

#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "conformance/cuda/graph.h"
#include "conformance/cuda/stream.h"
#include "conformance/fixed_step.h"
#include "conformance/said.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

void expect_good_step(const Rank& rank, xd_ep_group* group, FixedStep& step, int number) {
  step.load(number);
  step.enqueue_all(group);
  ok(finish(rank, group, XD_SUCCESS));
  step.check();
}

// All that a call may be by now: well formed, wrong, or known to be wrong by a binding.
void expect_refused_locally(const Rank& rank, xd_ep_group* group, FixedStep& step) {
  for (const xd_ep_operation operation : kStepOperations) {
    EXPECT_NE(step.enqueue(group, operation), XD_SUCCESS);
    expect_said("capture");
  }
  EXPECT_EQ(xd_ep_join_failed(group, XD_EP_PREPARE, "a mistake", rank.stream()),
            XD_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS) << comm_error(rank.comm).text;
  EXPECT_EQ(group_status(group).status, XD_SUCCESS) << "no operation has been";
}

// PyTorch's users catch the error of a capture that went wrong, and go on without a graph.
TEST(InvalidatedCapture, FailsCallsOnThatStreamAloneAndHarmsNothing) {
  on_every_rank([](Rank& rank) {
    FixedStep step(rank, FixedShape{});
    const Group group = make_group(rank.comm, FixedShape{}.config(rank.num_ranks));
    int number = 0;  // number of the batch, equal on all ranks
    for (const int guilty : {0, rank.num_ranks - 1, rank.rank}) {  // the last time all are
      expect_good_step(rank, group.get(), step, number++);
      if (rank.rank == guilty) {
        Capture capture(rank, rank.stream(), cudaStreamCaptureModeThreadLocal);
        EXPECT_NE(cudaStreamSynchronize(rank.stream()), cudaSuccess) << "a forbidden wait";
        cudaGetLastError();
        expect_refused_locally(rank, group.get(), step);
        EXPECT_EQ(capture.end(), cudaErrorStreamCaptureInvalidated);
      }
      expect_good_step(rank, group.get(), step, number++);
    }
  });
}

// ---- Mistakes that a capture keeps, where errors are fatal --------------------------------------

// A communicator with a group whose errors finish it, and two operations that have gone well. An
// operation that is captured there and never launched has a number among the calls, and none among
// the epochs.
class FatalGroup {
 public:
  explicit FatalGroup(const Rank& rank)
      : comm_(rank.another_comm("fatal", std::size_t{8} << 20)), rank_(rank) {
    rank_.comm = comm_.get();
    xd_ep_config config = FixedShape{}.config(rank.num_ranks);
    config.on_error = XD_EP_ON_ERROR_FATAL;
    group_ = make_group(comm_.get(), config);
    step_.emplace(rank_, FixedShape{});
    step_->load(0);
    {
      Capture capture(rank_, rank_.stream(), cudaStreamCaptureModeThreadLocal);
      ok(step_->enqueue(group_.get(), XD_EP_PREPARE));
      ok(step_->enqueue(group_.get(), XD_EP_DISPATCH));
      fail("captured, and never launched");
      EXPECT_EQ(capture.end(), cudaSuccess);
    }
    ok(step_->enqueue(group_.get(), XD_EP_PREPARE));
    ok(step_->enqueue(group_.get(), XD_EP_DISPATCH));
    rank_.memory->synchronize();
    EXPECT_EQ(comm_error(comm_.get()).status, XD_SUCCESS);
  }

  const Rank& rank() const { return rank_; }
  void fail(const char* text) {
    EXPECT_EQ(xd_ep_join_failed(group_.get(), XD_EP_COMBINE_BWD, text, rank_.stream()),
              XD_ERROR_INVALID_ARGUMENT);
  }
  // By its third operation.
  void expect_finished_by(const std::string& text) {
    rank_.memory->synchronize();
    const xd_error_info info = comm_error(comm_.get());
    EXPECT_EQ(info.status, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(info.rank, rank_.rank);
    EXPECT_EQ(info.peer, rank_.rank);
    EXPECT_EQ(info.operation, XD_EP_COMBINE_BWD);
    EXPECT_EQ(info.expected_epoch, 3u);
    const std::string expected = "xd_ep_combine_bwd of group 0, epoch 3: " + text + " [rank ";
    EXPECT_EQ(std::string(info.text).substr(0, expected.size()), expected);
    EXPECT_EQ(step_->enqueue(group_.get(), XD_EP_COMBINE), XD_ERROR_INVALID_ARGUMENT);
    expect_said(text);
  }

 private:
  const Comm comm_;
  Rank rank_;
  Group group_;
  std::optional<FixedStep> step_;
};

TEST(CapturedMistake, IsNotTheCauseIfAnotherOneRuns) {
  on_every_rank([](Rank& rank) {
    FatalGroup group(rank);
    group.fail("made at once");
    group.expect_finished_by("made at once");
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(CapturedMistake, IsTheCauseOnceItsGraphRuns) {
  on_every_rank([](Rank& rank) {
    FatalGroup group(rank);
    const Graph wrong(group.rank(), [&] { group.fail("captured first"); });
    const Graph later(group.rank(), [&] { group.fail("captured last"); });
    wrong.launch();
    group.expect_finished_by("captured first");
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(CapturedMistake, IsNotTheCauseIfTheStreamTookNoWork) {
  on_every_rank([](Rank& rank) {
    FatalGroup group(rank);
    {
      Capture capture(rank, rank.stream(), cudaStreamCaptureModeThreadLocal);
      EXPECT_NE(cudaStreamSynchronize(rank.stream()), cudaSuccess) << "a forbidden wait";
      cudaGetLastError();
      group.fail("on an invalidated capture");
      EXPECT_EQ(capture.end(), cudaErrorStreamCaptureInvalidated);
    }
    group.fail("made at once");
    group.expect_finished_by("made at once");
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(BlockingCapture, IsNotTakenDownByACallOnTheDefaultStream) {
  on_every_rank([](Rank& rank) {
    FixedStep step(rank, FixedShape{});
    const Group group = make_group(rank.comm, FixedShape{}.config(rank.num_ranks));
    cudaStream_t blocking = nullptr;
    cuda_ok(cudaSetDevice(rank.memory->device().device_id), "cudaSetDevice");
    cuda_ok(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault), "a blocking stream");
    OnStream memory(*rank.memory, nullptr);
    const Rank there = rank.on(memory);
    FixedStep elsewhere(there, FixedShape{});
    ok(xd_comm_barrier(rank.comm));
    {
      Capture capture(rank, blocking, cudaStreamCaptureModeThreadLocal);
      expect_refused_locally(there, group.get(), elsewhere);
      EXPECT_EQ(capture.end(), cudaSuccess);
    }
    cuda_ok(cudaStreamDestroy(blocking), "cudaStreamDestroy");
    expect_good_step(rank, group.get(), step, 1);
  });
}

// All calls that are no operations. There are so many groups that they need pinned memory that was
// not used before.
void use_the_library(const Rank& rank, const std::string& name, Buffer& lent) {
  constexpr int kGroups = 24;
  const Comm comm = rank.another_comm(name, std::size_t{2} << 20);
  std::vector<Group> groups;
  for (int i = 0; i < kGroups; ++i) {
    groups.push_back(make_group(comm.get(), FixedShape{}.config(rank.num_ranks)));
    EXPECT_EQ(group_status(groups.back().get()).status, XD_SUCCESS);
  }
  ok(xd_mem_grow(comm.get(), std::size_t{2} << 20));
  void* ptr = nullptr;
  ok(xd_mem_alloc(comm.get(), 4096, &ptr));
  ok(xd_mem_free(comm.get(), ptr));
  std::int32_t registration = -1;
  ok(xd_mem_register(comm.get(), lent.data(), lent.bytes(), &registration));
  ok(xd_mem_deregister(comm.get(), registration));
  EXPECT_EQ(comm_error(comm.get()).status, XD_SUCCESS);
  while (!groups.empty()) groups.pop_back();
}

// The mode in which PyTorch captures: calls of any thread of the process may spoil the capture.
TEST(GlobalCapture, IsDisturbedByNoCallOfTheLibraryOnAnyThread) {
  on_every_rank([](Rank& rank) {
    FixedStep step(rank, FixedShape{});
    const Group group = make_group(rank.comm, FixedShape{}.config(rank.num_ranks));
    Buffer lent(rank, 65536, Place::ordinary), lent_beside(rank, 65536, Place::ordinary);
    step.load(0);
    cuda_ok(cudaSetDevice(rank.memory->device().device_id), "cudaSetDevice");
    ok(xd_comm_barrier(rank.comm));  // from here on ranks only call the library
    cuda_ok(cudaStreamBeginCapture(rank.stream(), cudaStreamCaptureModeGlobal), "begin");
    ok(step.enqueue(group.get(), XD_EP_PREPARE));
    ok(step.enqueue(group.get(), XD_EP_DISPATCH));
    ok(xd_comm_barrier(rank.comm));  // all capture
    std::exception_ptr failure;
    std::thread([&] {
      try {
        use_the_library(rank, "beside", lent_beside);
      } catch (...) {
        failure = std::current_exception();
      }
    }).join();
    use_the_library(rank, "within", lent);
    for (const auto operation : {XD_EP_COMBINE, XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD}) {
      ok(step.enqueue(group.get(), operation));
    }
    ok(xd_comm_barrier(rank.comm));
    cudaGraph_t graph = nullptr;
    const cudaError_t end = cudaStreamEndCapture(rank.stream(), &graph);
    ok(xd_comm_barrier(rank.comm));  // none captures any more
    if (failure) std::rethrow_exception(failure);
    cuda_ok(end, "end of capture");
    cudaGraphExec_t executable = nullptr;
    cuda_ok(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    for (int number = 0; number < 3; ++number) {
      step.load(number);
      cuda_ok(cudaGraphLaunch(executable, rank.stream()), "cudaGraphLaunch");
      ok(finish(rank, group.get(), XD_SUCCESS));
      step.check();
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  });
}

}  // namespace
}  // namespace xd::test
