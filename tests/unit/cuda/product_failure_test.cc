// Products that fail when they are enqueued, before and behind the launch that carries their
// operation's turn. Ranks are threads that share device 0.
#include <crossdock/gemm.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "base/math.h"
#include "comm/feature.h"
#include "cuda/cublaslt.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "gemm/cuda/cuda_context.h"
#include "unit/comms.h"

namespace xd::test {
namespace {

constexpr int kRanks = 2, kDevice = 0, kRows = 8, kSize = 64;

// cuBLASLt, with products that fail on threads that ask for it.
class BrokenProducts {
 public:
  BrokenProducts() : table_(const_cast<cuda::lt::Library&>(cuda::lt::library())), whole_(table_) {
    matmul_ = table_.Matmul;
    table_.Matmul = [](cuda::lt::Handle handle, cuda::lt::Operation operation, const void* alpha,
                       const void* first, cuda::lt::Layout of_first, const void* second,
                       cuda::lt::Layout of_second, const void* beta, const void* c,
                       cuda::lt::Layout of_c, void* d, cuda::lt::Layout of_d,
                       const cuda::lt::Algorithm* algorithm, void* workspace, std::size_t bytes,
                       cudaStream_t stream) -> cuda::lt::Status {
      constexpr cuda::lt::Status kInternalError = 14;
      if (broken_here) return kInternalError;
      return matmul_(handle, operation, alpha, first, of_first, second, of_second, beta, c, of_c, d,
                     of_d, algorithm, workspace, bytes, stream);
    };
  }
  ~BrokenProducts() { table_ = whole_; }
  BrokenProducts(const BrokenProducts&) = delete;
  BrokenProducts& operator=(const BrokenProducts&) = delete;

  static inline thread_local bool broken_here = false;

 private:
  static inline decltype(cuda::lt::Library::Matmul) matmul_ = nullptr;
  cuda::lt::Library& table_;
  const cuda::lt::Library whole_;
};

// The tensors of a call of any operation, all zeros.
class Zeros {
 public:
  Zeros() : memory_(kDevice, 3 * kBytes, "zeros") {
    const std::vector<std::byte> zeros(memory_.bytes());
    memory_.write(0, zeros.data(), zeros.size());
  }
  xd_gemm_args args(xd_gemm_operation operation) {
    const bool gathers = operation == XD_GEMM_ALL_GATHER;
    const bool scatters = operation == XD_GEMM_REDUCE_SCATTER;
    xd_gemm_args args = XD_GEMM_ARGS_INIT;
    args.a = tensor(0, gathers ? kRows : kRows * kRanks);
    args.b = tensor(1, kSize);
    args.d = tensor(2, scatters ? kRows : kRows * kRanks);
    return args;
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{kSize} * kSize * 4;
  const DLTensor* tensor(std::size_t number, std::int64_t rows) {
    DLTensor& t = tensors_[number];
    shapes_[number] = {rows, kSize};
    t = {memory_.data() + number * kBytes,
         {kDLCUDA, kDevice},
         2,
         {kDLBfloat, 16, 1},
         shapes_[number].data(),
         nullptr,
         0};
    return &t;
  }

  cuda::DeviceBuffer memory_;
  std::array<DLTensor, 3> tensors_{};
  std::array<std::array<std::int64_t, 2>, 3> shapes_{};
};

struct Moment {
  const char* name;
  xd_gemm_operation operation;
  xd_gemm_algo algo;
  bool in_the_turn;  // the product comes behind the launch that carries the turn
};

void PrintTo(const Moment& moment, std::ostream* out) { *out << moment.name; }

class CudaProductFailure : public testing::TestWithParam<Moment> {
 protected:
  void SetUp() override {
    const Feature cuda = feature(XD_FEATURE_CUDA);
    if (!cuda.available) GTEST_SKIP() << cuda.reason;
    comms_ = make_cuda_comms(kRanks);
    expect_no_errors(on_threads(kRanks, [&](int rank) {
      comms_[at(rank)]->begin_group();
      xd_gemm_config bounds = XD_GEMM_CONFIG_INIT;
      bounds.operations = XD_GEMM_BIT(GetParam().operation);
      bounds.max_tokens = kRows;
      bounds.max_k = bounds.max_n = kSize;
      contexts_[at(rank)] = std::make_unique<gemm::cuda::CudaContext>(comms_[at(rank)], &bounds);
    }));
  }

  // The error of the call, if it has one.
  std::optional<Error> call(int rank, bool broken) {
    const cuda::Stream stream(kDevice);
    Zeros zeros;
    xd_gemm_args args = zeros.args(GetParam().operation);
    args.algo = GetParam().algo;
    BrokenProducts::broken_here = broken;
    const std::optional<Error> met =
        error_of([&] { contexts_[at(rank)]->product(GetParam().operation, &args, stream.get()); });
    BrokenProducts::broken_here = false;
    stream.synchronize();
    return met;
  }

  // The peer's error takes a moment to come.
  const FatalError* fatal_error(int rank) const {
    const Errors& errors = comms_[at(rank)]->errors();
    if (GetParam().in_the_turn) eventually([&] { return errors.fatal_error() != nullptr; }, 5000);
    return errors.fatal_error();
  }

  std::vector<std::shared_ptr<Comm>> comms_;
  std::vector<std::unique_ptr<gemm::cuda::CudaContext>> contexts_{kRanks};
};

// Before the turn has begun it is the turn of a call that has failed: the peer hears of it, and the
// context goes on. Behind that no rank may go on, since one turn cannot be taken twice.
TEST_P(CudaProductFailure, EndsTheTurnOrTheCommunicator) {
  const BrokenProducts breaking;
  const auto start = std::chrono::steady_clock::now();
  expect_no_errors(on_threads(kRanks, [&](int rank) {
    EXPECT_FALSE(call(rank, false).has_value());
    const std::optional<Error> met = call(rank, rank == 0);
    if (rank == 0) {
      expect_error(met, XD_ERROR_INTERNAL, "cublasLtMatmul");
    }
  }));
  expect_no_errors(on_threads(kRanks, [&](int rank) {
    const FatalError* fatal = fatal_error(rank);
    if (!GetParam().in_the_turn) {
      EXPECT_EQ(fatal, nullptr);
      EXPECT_EQ(contexts_[at(rank)]->take_status().status,
                rank == 0 ? XD_SUCCESS : XD_ERROR_MISMATCH);
      EXPECT_FALSE(call(rank, false).has_value());
      EXPECT_EQ(contexts_[at(rank)]->take_status().status, XD_SUCCESS);
      return;
    }
    ASSERT_NE(fatal, nullptr);
    EXPECT_EQ(fatal->status, XD_ERROR_INTERNAL);
    EXPECT_EQ(fatal->rank, 0);
    EXPECT_EQ(fatal->operation, GetParam().operation);
    expect_error(call(rank, false), XD_ERROR_INTERNAL, "");
  }));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

INSTANTIATE_TEST_SUITE_P(
    Moments, CudaProductFailure,
    testing::Values(
        Moment{"behind the push", XD_GEMM_ALL_GATHER, XD_GEMM_ALGO_SEQUENTIAL, true},
        Moment{"beside the copies", XD_GEMM_ALL_GATHER, XD_GEMM_ALGO_SPLIT, true},
        Moment{"before the copies of terms", XD_GEMM_REDUCE_SCATTER, XD_GEMM_ALGO_SPLIT, true},
        Moment{"before the words", XD_GEMM_REDUCE_SCATTER, XD_GEMM_ALGO_SEQUENTIAL, false},
        Moment{"before the words for all", XD_GEMM_ALL_REDUCE, XD_GEMM_ALGO_AUTO, false}));

}  // namespace
}  // namespace xd::test
