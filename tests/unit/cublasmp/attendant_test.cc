// How the waits of cuBLASMp's products are bounded, and what becomes of an engine whose product
// does not end. Communicators are of ranks on the CPU, streams are imagined, and cuBLASMp and NCCL
// are the library of the tests.
#include "gemm/cublasmp/attendant.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gemm/cublasmp/errand.h"
#include "gemm/family.h"
#include "unit/comms.h"
#include "unit/cublasmp/support.h"

namespace xd::gemm::cublasmp {
namespace {

using test::error_of;
using test::eventually;
using test::expect_error;
using test::expect_words;
using test::ms_since;
using Clock = std::chrono::steady_clock;

constexpr int kTimeoutMs = 300;  // and the patience of an end
constexpr int kAtOnceMs = 3000;  // on a busy machine
constexpr ProductTurn kTurn{.group = 0, .operation = XD_GEMM_REDUCE_SCATTER, .epoch = 7};

// A stream, and how far it has come.
struct ImaginedStream {
  std::atomic<bool> at_product{true}, behind_product{false};
  std::atomic<int> begins{0}, ends{0}, made{0};
  std::atomic<bool> cannot_mark{false};
};

class ImaginedMarks final : public Marks {
 public:
  explicit ImaginedMarks(std::shared_ptr<ImaginedStream> stream) : stream_(std::move(stream)) {
    ++stream_->made;
  }
  void begin(cudaStream_t) override {
    if (stream_->cannot_mark) fail(XD_ERROR_SYSTEM, "the stream takes no mark");
    ++stream_->begins;
  }
  void end(cudaStream_t) override { ++stream_->ends; }
  bool begun() const noexcept override { return stream_->at_product; }
  bool ended() const noexcept override { return stream_->behind_product; }

 private:
  const std::shared_ptr<ImaginedStream> stream_;  // outlives what may be kept for good
};

// The communicators of some ranks, and the engine of rank 0, attended.
class CublasMpAttendant : public CublasMpEngine {
 protected:
  // Nothing has to wait for products any more.
  ~CublasMpAttendant() override { stream_->behind_product = true; }

  void begin(int num_ranks = 1, int timeout_ms = kTimeoutMs, nccl::Comm lent = nullptr) {
    connect(num_ranks, timeout_ms);
    attendant_ = std::make_unique<Attendant>(comm(), made_engine(lent), [stream = stream_] {
      return std::make_unique<ImaginedMarks>(stream);
    });
    fake_.begin();
  }
  void connect(int num_ranks, int timeout_ms = kTimeoutMs) {
    xd_comm_config config = XD_COMM_CONFIG_INIT;
    config.timeout_ms = timeout_ms;
    comms_ = test::make_comms(num_ranks, config);
    for (const auto& comm : comms_) comm->errors().name_operations(Family::kOperations);
  }
  std::shared_ptr<Engine> made_engine(nccl::Comm lent = nullptr) {
    return std::make_shared<Engine>(fake_.library(), config_, ranks(lent), cuda::Stream());
  }
  Comm& comm(int rank = 0) { return *comms_[at(rank)]; }
  void enqueue(Attendant& attendant) {
    attendant.enqueue(kTurn, description(), operands_of(call(), nullptr, false), nullptr);
  }
  void enqueue() { enqueue(*attendant_); }
  bool is_revoked() {
    return eventually([&] { return fake_.has_called("CommRevoke 77;"); });
  }
  // Ends the engine, which takes at least so long, and returns what is logged of it.
  std::vector<std::string> end(int at_least_ms) {
    const auto start = Clock::now();
    test::LogCapture log;
    attendant_.reset();
    EXPECT_GE(ms_since(start), at_least_ms);
    EXPECT_LT(ms_since(start), kTimeoutMs + kAtOnceMs);
    return log.end();
  }
  const FatalError* fatal(int rank = 0) { return comm(rank).errors().fatal_error(); }
  bool frees_anything() const {
    const std::string text = fake_.text();
    for (const char* call : {"Free", "Destroy", "Deregister", "CommAbort"}) {
      if (text.find(call) != std::string::npos) return true;
    }
    return false;
  }

  std::vector<std::shared_ptr<Comm>> comms_;
  const std::shared_ptr<ImaginedStream> stream_ = std::make_shared<ImaginedStream>();
  std::unique_ptr<Attendant> attendant_;
};

// The failing scenario: some rank stops behind the agreement, and no rank makes another call.
TEST_F(CublasMpAttendant, EndsAProductThatTakesLongerThanTheTimeoutOnAllRanks) {
  begin(2);
  const auto start = Clock::now();
  enqueue();
  ASSERT_TRUE(eventually([&] { return fatal(0) != nullptr && fatal(1) != nullptr; }));
  EXPECT_GE(ms_since(start), kTimeoutMs);
  EXPECT_LT(ms_since(start), kTimeoutMs + kAtOnceMs);
  for (const int rank : {0, 1}) {
    const FatalError& error = *fatal(rank);
    EXPECT_EQ(error.status, XD_ERROR_TIMEOUT);
    EXPECT_EQ(error.phase, XD_PHASE_ROWS);
    EXPECT_EQ(error.rank, 0);
    EXPECT_EQ(error.peer, -1) << "NCCL does not say which";
    EXPECT_EQ(error.expected_epoch, 7u);
    EXPECT_EQ(comm(rank).errors().text_of(error),
              "rank 0 waited 300 ms in xd_gemm_reduce_scatter of group 0, epoch 7 for ranks that "
              "did not bring their rows");
  }
  EXPECT_TRUE(is_revoked());
  EXPECT_FALSE(frees_anything()) << fake_.text();
}

TEST_F(CublasMpAttendant, DoesNotCountTheTimeThatTheStreamNeedsToComeToAProduct) {
  stream_->at_product = false;
  begin();
  enqueue();
  std::this_thread::sleep_for(std::chrono::milliseconds(2 * kTimeoutMs));
  EXPECT_EQ(fatal(), nullptr);
  const auto start = Clock::now();
  stream_->at_product = true;
  EXPECT_TRUE(eventually([&] { return fatal() != nullptr; }));
  EXPECT_GE(ms_since(start), kTimeoutMs);
}

TEST_F(CublasMpAttendant, LeavesProductsAloneThatEndInTime) {
  stream_->behind_product = true;
  begin();
  const auto start = Clock::now();
  int products = 0;
  while (ms_since(start) < 2 * kTimeoutMs) {
    enqueue();
    ++products;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(fatal(), nullptr);
  EXPECT_FALSE(fake_.has_called("CommRevoke"));
  EXPECT_EQ(stream_->begins, products);
  EXPECT_EQ(stream_->ends, products);
  EXPECT_LT(stream_->made, products) << "marks are used again";
}

// Each product of a queue has the timeout for itself.
TEST_F(CublasMpAttendant, CountsTheTimeOfEachProductFromTheEndOfTheOneBefore) {
  connect(1);
  const auto first = std::make_shared<ImaginedStream>();
  std::vector<std::shared_ptr<ImaginedStream>> streams = {stream_, first};
  Attendant attendant(comm(), made_engine(), [&streams] {
    const auto stream = streams.back();
    streams.pop_back();
    return std::make_unique<ImaginedMarks>(stream);
  });
  enqueue(attendant);
  enqueue(attendant);
  std::this_thread::sleep_for(std::chrono::milliseconds(kTimeoutMs * 2 / 3));
  first->behind_product = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(kTimeoutMs * 2 / 3));
  EXPECT_EQ(fatal(), nullptr);
  stream_->behind_product = true;
}

// cuBLASMp's call itself may wait, where NCCL connects ranks, however far the stream is.
TEST_F(CublasMpAttendant, BoundsTheCallOfTheHost) {
  stream_->at_product = false;
  begin();
  enqueue();
  fake_.let_wait("Matmul");
  const auto start = Clock::now();
  std::thread caller([&] { enqueue(); });
  EXPECT_TRUE(eventually([&] { return fatal() != nullptr; }));
  EXPECT_EQ(fatal()->status, XD_ERROR_TIMEOUT);
  caller.join();  // the revoked communicator lets it go
  EXPECT_LT(ms_since(start), kTimeoutMs + kAtOnceMs);
  EXPECT_EQ(stream_->ends, 2);
}

TEST_F(CublasMpAttendant, EndsWhatWaitsWhereTheCommunicatorIsFinishedOtherwise) {
  begin(1, 60000);
  enqueue();
  comm().errors().abort();
  EXPECT_TRUE(eventually([&] { return fake_.has_called("CommRevoke 77;"); }, kAtOnceMs));
  EXPECT_FALSE(frees_anything()) << fake_.text();
}

// A product that failed may have been enqueued in part.
TEST_F(CublasMpAttendant, LooksAfterAProductThatCouldNotBeEnqueued) {
  begin();
  fake_.begin("Matmul");
  expect_error(error_of([&] { enqueue(); }), XD_ERROR_INTERNAL, "cublasMpMatmul");
  EXPECT_EQ(stream_->ends, 1);
  EXPECT_TRUE(is_revoked());
}

TEST_F(CublasMpAttendant, ForgetsAProductOfWhichNothingWasEnqueued) {
  begin();
  stream_->cannot_mark = true;
  expect_error(error_of([&] { enqueue(); }), XD_ERROR_SYSTEM, "takes no mark");
  std::this_thread::sleep_for(std::chrono::milliseconds(2 * kTimeoutMs));
  EXPECT_EQ(fatal(), nullptr);
  EXPECT_EQ(fake_.text(), "");
}

// ---- The end -----------------------------------------------------------------------------------

TEST_F(CublasMpAttendant, WaitsForAProductBeforeItEndsTheEngine) {
  begin(1, 60000);
  enqueue();
  std::thread device([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(kTimeoutMs / 4));
    EXPECT_FALSE(frees_anything()) << fake_.text();
    stream_->behind_product = true;
  });
  attendant_.reset();
  device.join();
  const std::string text = fake_.text();
  expect_words(text, {"SetStream 0;OperationDestroy;", "Free 11 99;"});
  EXPECT_TRUE(text.ends_with("CommDestroy 77;")) << text;
}

TEST_F(CublasMpAttendant, FreesNothingUnderAProductThatDoesNotEnd) {
  stream_->at_product = false;
  begin();
  enqueue();
  const std::vector<std::string> lines = end(kTimeoutMs);
  ASSERT_EQ(lines.size(), 1u);
  expect_words(lines[0], {"a product by cuBLASMp is under way [rank 0 of 1]"});
  EXPECT_FALSE(frees_anything()) << fake_.text();
  stream_->behind_product = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_FALSE(frees_anything()) << "its owner has gone: " << fake_.text();
}

// The bound outlives the context and its communicator.
TEST_F(CublasMpAttendant, BoundsAProductThatOutlivesItsContext) {
  stream_->at_product = false;
  begin();
  enqueue();
  end(kTimeoutMs);
  comms_.clear();
  EXPECT_FALSE(fake_.has_called("CommRevoke"));
  stream_->at_product = true;
  EXPECT_TRUE(is_revoked());
  EXPECT_FALSE(frees_anything()) << fake_.text();
}

// The stopped product ends, so NCCL can free its communicator. cuBLASMp's own ends need all ranks.
TEST_F(CublasMpAttendant, GivesNcclsCommunicatorBackWhenAProductThatWasStoppedHasEnded) {
  begin();
  enqueue();
  ASSERT_TRUE(is_revoked());
  stream_->behind_product = true;
  fake_.begin();
  attendant_.reset();
  EXPECT_EQ(fake_.text(), "CommAbort 77;");
}

TEST_F(CublasMpAttendant, FreesNothingUnderAProductThatCannotBeStopped) {
  begin();
  enqueue();
  ASSERT_TRUE(is_revoked());
  EXPECT_EQ(end(0).size(), 1u);
  EXPECT_FALSE(frees_anything()) << fake_.text();
}

// NCCL need not return from anything.
TEST_F(CublasMpAttendant, ReturnsFromItsEndThoughNcclDoesNotReturn) {
  begin();
  fake_.let_wait("CommRevoke");
  enqueue();
  ASSERT_TRUE(is_revoked());
  stream_->behind_product = true;
  EXPECT_EQ(end(0).size(), 1u);
  EXPECT_FALSE(frees_anything()) << fake_.text();
  fake_.end_waits();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the thread leaves the library
}

TEST_F(CublasMpAttendant, ReturnsFromItsEndThoughAPeerDoesNotEndItsEngine) {
  begin();
  fake_.let_wait("GridDestroy");
  const std::vector<std::string> lines = end(kTimeoutMs);
  ASSERT_EQ(lines.size(), 1u);
  expect_words(lines[0], {"ranks that have not destroyed their contexts"});
  fake_.end_waits();
  EXPECT_TRUE(eventually([&] { return fake_.has_called("CommDestroy 77;"); }));
}

TEST_F(CublasMpAttendant, LeavesALentCommunicatorToItsOwnerAfterAnError) {
  int lent = 0;
  begin(1, kTimeoutMs, &lent);
  enqueue();
  ASSERT_TRUE(eventually([&] { return fake_.has_called("CommRevoke "); }));
  stream_->behind_product = true;
  fake_.begin();
  attendant_.reset();
  EXPECT_EQ(fake_.text(), "");
}

// The communicator was finished while nothing was under way: nothing waits.
TEST_F(CublasMpAttendant, EndsAloneWhereTheCommunicatorIsFinished) {
  begin();
  comm().errors().abort();
  attendant_.reset();
  EXPECT_EQ(fake_.text(), "CommAbort 77;");
}

// ---- Errands -----------------------------------------------------------------------------------

TEST(CublasMpErrand, ReportsWhatItsWorkThrows) {
  expect_error(error_of([] {
                 Errand::run([] { fail(XD_ERROR_SYSTEM, "work fails"); },
                             Deadline::after_ms(10000));
               }),
               XD_ERROR_SYSTEM, "work fails");
}

TEST(CublasMpErrand, IsLeftAloneAtTheDeadlineAndWhereTheCallerGivesUp) {
  const auto go_on = std::make_shared<std::atomic<bool>>(false);
  const auto left = std::make_shared<std::atomic<int>>(0);
  const auto work = [go_on, left] {
    eventually([&] { return go_on->load(); });
    ++*left;
  };
  EXPECT_FALSE(Errand::run(work, Deadline::after_ms(50)));
  const auto start = Clock::now();
  expect_error(error_of([&] {
                 Errand::run(work, Deadline::after_ms(60000),
                             [] { fail(XD_ERROR_ABORTED, "the caller gives up"); });
               }),
               XD_ERROR_ABORTED, "the caller gives up");
  EXPECT_LT(ms_since(start), kAtOnceMs);
  *go_on = true;
  EXPECT_TRUE(eventually([&] { return *left == 2; }));
}

}  // namespace
}  // namespace xd::gemm::cublasmp
