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

#include "comm/comm.h"
#include "gemm/cublasmp/errand.h"
#include "gemm/family.h"
#include "unit/cublasmp_support.h"
#include "unit/net_support.h"

namespace xd::gemm::cublasmp {
namespace {

using test::error_of;
using test::eventually;
using test::expect_error;
using test::ms_since;
using Clock = std::chrono::steady_clock;

constexpr int kTimeoutMs = 300, kPatienceMs = 400;
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
  explicit ImaginedMarks(ImaginedStream& stream) : stream_(stream) { ++stream.made; }
  void begin(cudaStream_t) override {
    if (stream_.cannot_mark) fail(XD_ERROR_SYSTEM, "the stream takes no mark");
    ++stream_.begins;
  }
  void end(cudaStream_t) override { ++stream_.ends; }
  bool begun() const noexcept override { return stream_.at_product; }
  bool ended() const noexcept override { return stream_.behind_product; }

 private:
  ImaginedStream& stream_;
};

// The communicators of some ranks, with their engines attended.
class CublasMpAttendant : public CublasMpEngine {
 protected:
  void connect(int num_ranks, int timeout_ms = kTimeoutMs) {
    comms_.resize(at(num_ranks));
    const xd_unique_id id = test::new_id();
    test::expect_no_errors(test::on_threads(num_ranks, [&](int rank) {
      xd_comm_config config = test::id_config(id, rank, num_ranks);
      config.timeout_ms = timeout_ms;
      comms_[at(rank)] = Comm::create(config);
      comms_[at(rank)]->errors().name_operations(Family::kOperations);
    }));
  }
  Comm& comm(int rank = 0) { return *comms_[at(rank)]; }
  std::unique_ptr<Attendant> attend(ImaginedStream& stream, nccl::Comm lent = nullptr) {
    auto made = std::make_shared<Engine>(fake_.library(), config_, ranks(lent), cuda::Stream());
    fake_.begin();
    return std::make_unique<Attendant>(
        comm(), std::move(made), [&stream] { return std::make_unique<ImaginedMarks>(stream); },
        kPatienceMs);
  }
  void enqueue(Attendant& attendant) {
    attendant.enqueue(kTurn, description(), operands_of(call(), nullptr, false), nullptr);
  }
  bool is_revoked() {
    return eventually([&] { return fake_.has_called("CommRevoke 77;"); });
  }
  // Ends the engine, which takes at least so long, and returns what is logged of it.
  std::vector<std::string> end(std::unique_ptr<Attendant>& attendant, int at_least_ms) {
    const auto start = Clock::now();
    test::LogCapture log;
    attendant.reset();
    EXPECT_GE(ms_since(start), at_least_ms);
    EXPECT_LT(ms_since(start), kPatienceMs + kAtOnceMs);
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
};

// The failing scenario: some rank stops behind the agreement, and no rank makes another call.
TEST_F(CublasMpAttendant, EndsAProductThatTakesLongerThanTheTimeoutOnAllRanks) {
  connect(2);
  ImaginedStream stream;
  const auto attendant = attend(stream);
  const auto start = Clock::now();
  enqueue(*attendant);
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
  stream.behind_product = true;
}

TEST_F(CublasMpAttendant, DoesNotCountTheTimeThatTheStreamNeedsToComeToAProduct) {
  connect(1);
  ImaginedStream stream;
  stream.at_product = false;
  const auto attendant = attend(stream);
  enqueue(*attendant);
  std::this_thread::sleep_for(std::chrono::milliseconds(3 * kTimeoutMs));
  EXPECT_EQ(fatal(), nullptr);
  const auto start = Clock::now();
  stream.at_product = true;
  EXPECT_TRUE(eventually([&] { return fatal() != nullptr; }));
  EXPECT_GE(ms_since(start), kTimeoutMs);
  stream.behind_product = true;
}

TEST_F(CublasMpAttendant, LeavesProductsAloneThatEndInTime) {
  connect(1);
  ImaginedStream stream;
  stream.behind_product = true;
  const auto attendant = attend(stream);
  const auto start = Clock::now();
  int products = 0;
  while (ms_since(start) < 3 * kTimeoutMs) {
    enqueue(*attendant);
    ++products;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(fatal(), nullptr);
  EXPECT_FALSE(fake_.has_called("CommRevoke"));
  EXPECT_EQ(stream.begins, products);
  EXPECT_EQ(stream.ends, products);
  EXPECT_LT(stream.made, products) << "marks are used again";
}

// Each product of a queue has the timeout for itself.
TEST_F(CublasMpAttendant, CountsTheTimeOfEachProductFromTheEndOfTheOneBefore) {
  connect(1);
  ImaginedStream first, second;
  std::vector<ImaginedStream*> streams = {&second, &first};
  auto made = std::make_shared<Engine>(fake_.library(), config_, ranks(nullptr), cuda::Stream());
  Attendant attendant(comm(), std::move(made), [&streams] {
    ImaginedStream* const stream = streams.back();
    streams.pop_back();
    return std::make_unique<ImaginedMarks>(*stream);
  });
  enqueue(attendant);
  enqueue(attendant);
  std::this_thread::sleep_for(std::chrono::milliseconds(kTimeoutMs * 2 / 3));
  first.behind_product = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(kTimeoutMs * 2 / 3));
  EXPECT_EQ(fatal(), nullptr);
  second.behind_product = true;
}

// cuBLASMp's call itself may wait, where NCCL connects ranks, however far the stream is.
TEST_F(CublasMpAttendant, BoundsTheCallOfTheHost) {
  connect(1);
  ImaginedStream stream;
  stream.at_product = false;
  const auto attendant = attend(stream);
  enqueue(*attendant);
  fake_.let_wait("Matmul");
  const auto start = Clock::now();
  std::thread caller([&] { enqueue(*attendant); });
  EXPECT_TRUE(eventually([&] { return fatal() != nullptr; }));
  EXPECT_EQ(fatal()->status, XD_ERROR_TIMEOUT);
  caller.join();  // the revoked communicator lets it go
  EXPECT_LT(ms_since(start), kTimeoutMs + kAtOnceMs);
  EXPECT_EQ(stream.ends, 2);
  stream.behind_product = true;
}

TEST_F(CublasMpAttendant, EndsWhatWaitsWhereTheCommunicatorIsFinishedOtherwise) {
  connect(1, 60000);
  ImaginedStream stream;
  const auto attendant = attend(stream);
  enqueue(*attendant);
  comm().errors().abort();
  EXPECT_TRUE(eventually([&] { return fake_.has_called("CommRevoke 77;"); }, kAtOnceMs));
  EXPECT_FALSE(frees_anything()) << fake_.text();
  stream.behind_product = true;
}

// A product that failed may have been enqueued in part.
TEST_F(CublasMpAttendant, LooksAfterAProductThatCouldNotBeEnqueued) {
  connect(1);
  ImaginedStream stream;
  const auto attendant = attend(stream);
  fake_.begin("Matmul");
  expect_error(error_of([&] { enqueue(*attendant); }), XD_ERROR_INTERNAL, "cublasMpMatmul");
  EXPECT_EQ(stream.ends, 1);
  EXPECT_TRUE(is_revoked());
  stream.behind_product = true;
}

TEST_F(CublasMpAttendant, ForgetsAProductOfWhichNothingWasEnqueued) {
  connect(1);
  ImaginedStream stream;
  const auto attendant = attend(stream);
  stream.cannot_mark = true;
  expect_error(error_of([&] { enqueue(*attendant); }), XD_ERROR_SYSTEM, "takes no mark");
  std::this_thread::sleep_for(std::chrono::milliseconds(2 * kTimeoutMs));
  EXPECT_EQ(fatal(), nullptr);
  EXPECT_EQ(fake_.text(), "");
}

// ---- The end -----------------------------------------------------------------------------------

TEST_F(CublasMpAttendant, WaitsForAProductBeforeItEndsTheEngine) {
  connect(1, 60000);
  ImaginedStream stream;
  auto attendant = attend(stream);
  enqueue(*attendant);
  std::thread device([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(kPatienceMs / 4));
    EXPECT_FALSE(frees_anything()) << fake_.text();
    stream.behind_product = true;
  });
  attendant.reset();
  device.join();
  const std::string text = fake_.text();
  EXPECT_NE(text.find("SetStream 0;OperationDestroy;"), std::string::npos) << text;
  EXPECT_NE(text.find("Free 11 99;"), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("CommDestroy 77;")) << text;
}

TEST_F(CublasMpAttendant, FreesNothingUnderAProductThatDoesNotEnd) {
  connect(1, 60000);
  auto* const stream = new ImaginedStream;  // what is kept refers to it for good
  auto attendant = attend(*stream);
  enqueue(*attendant);
  const std::vector<std::string> lines = end(attendant, kPatienceMs);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("a product by cuBLASMp is under way [rank 0 of 1]"), std::string::npos)
      << lines[0];
  EXPECT_FALSE(frees_anything()) << fake_.text();
  stream->behind_product = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_FALSE(frees_anything()) << "its owner has gone: " << fake_.text();
}

// The bound outlives the context and its communicator.
TEST_F(CublasMpAttendant, BoundsAProductThatOutlivesItsContext) {
  constexpr int kLongMs = kPatienceMs + 600;
  connect(1, kLongMs);
  auto* const stream = new ImaginedStream;
  auto attendant = attend(*stream);
  enqueue(*attendant);
  end(attendant, kPatienceMs);
  comms_.clear();
  EXPECT_FALSE(fake_.has_called("CommRevoke"));
  EXPECT_TRUE(is_revoked());
  EXPECT_FALSE(frees_anything()) << fake_.text();
}

// The stopped product ends, so NCCL can free its communicator. cuBLASMp's own ends need all ranks.
TEST_F(CublasMpAttendant, GivesNcclsCommunicatorBackWhenAProductThatWasStoppedHasEnded) {
  connect(1);
  ImaginedStream stream;
  auto attendant = attend(stream);
  enqueue(*attendant);
  ASSERT_TRUE(is_revoked());
  stream.behind_product = true;
  fake_.begin();
  attendant.reset();
  EXPECT_EQ(fake_.text(), "CommAbort 77;");
}

TEST_F(CublasMpAttendant, FreesNothingUnderAProductThatCannotBeStopped) {
  connect(1);
  auto* const stream = new ImaginedStream;
  auto attendant = attend(*stream);
  enqueue(*attendant);
  ASSERT_TRUE(is_revoked());
  EXPECT_EQ(end(attendant, 0).size(), 1u);
  EXPECT_FALSE(frees_anything()) << fake_.text();
}

// NCCL need not return from anything.
TEST_F(CublasMpAttendant, ReturnsFromItsEndThoughNcclDoesNotReturn) {
  connect(1);
  auto* const stream = new ImaginedStream;
  auto attendant = attend(*stream);
  fake_.let_wait("CommRevoke");
  enqueue(*attendant);
  ASSERT_TRUE(is_revoked());
  stream->behind_product = true;
  EXPECT_EQ(end(attendant, 0).size(), 1u);
  EXPECT_FALSE(frees_anything()) << fake_.text();
  fake_.end_waits();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the thread leaves the library
}

TEST_F(CublasMpAttendant, ReturnsFromItsEndThoughAPeerDoesNotEndItsEngine) {
  connect(1);
  ImaginedStream stream;
  auto attendant = attend(stream);
  fake_.let_wait("GridDestroy");
  const std::vector<std::string> lines = end(attendant, kPatienceMs);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("ranks that have not destroyed their contexts"), std::string::npos);
  fake_.end_waits();
  EXPECT_TRUE(eventually([&] { return fake_.has_called("CommDestroy 77;"); }));
}

TEST_F(CublasMpAttendant, LeavesALentCommunicatorToItsOwnerAfterAnError) {
  connect(1);
  ImaginedStream stream;
  int lent = 0;
  auto attendant = attend(stream, &lent);
  enqueue(*attendant);
  ASSERT_TRUE(eventually([&] { return fake_.has_called("CommRevoke "); }));
  stream.behind_product = true;
  fake_.begin();
  attendant.reset();
  EXPECT_EQ(fake_.text(), "");
}

// The communicator was finished while nothing was under way: nothing waits.
TEST_F(CublasMpAttendant, EndsAloneWhereTheCommunicatorIsFinished) {
  connect(1);
  ImaginedStream stream;
  auto attendant = attend(stream);
  comm().errors().abort();
  attendant.reset();
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
