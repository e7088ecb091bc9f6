// How cuBLASMp is found, and what it is asked for. A library of the tests stands in its place; that
// it computes what it is asked for is for tests on GPUs.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gemm/cublasmp/engine.h"
#include "gemm/cublasmp/library.h"
#include "unit/cublasmp/support.h"
#include "unit/net_support.h"

#if __has_include(<cublasmp.h>) && __has_include(<nccl.h>) && __has_include(<cublas_v2.h>)
#include <cublasmp.h>
#if __has_include(<nccl_device/host.h>)
#include <nccl_device/host.h>
#else
#include <nccl_device/core.h>
#endif

// The restated names are those of the header, where it is installed.
namespace xd::gemm::cublasmp {
namespace {

static_assert(mp::kSuccess == CUBLASMP_STATUS_SUCCESS &&
              mp::kInvalidValue == CUBLASMP_STATUS_INVALID_VALUE &&
              mp::kArchitectureMismatch == CUBLASMP_STATUS_ARCHITECTURE_MISMATCH &&
              mp::kNotSupported == CUBLASMP_STATUS_NOT_SUPPORTED);
static_assert(mp::kColumnMajor == CUBLASMP_GRID_LAYOUT_COL_MAJOR &&
              mp::kRowMajor == CUBLASMP_GRID_LAYOUT_ROW_MAJOR);
static_assert(mp::kNotTransposed == CUBLAS_OP_N && mp::kTransposed == CUBLAS_OP_T);
static_assert(mp::kCompute32F == CUBLAS_COMPUTE_32F &&
              mp::kComputeTf32 == CUBLAS_COMPUTE_32F_FAST_TF32);
static_assert(int{mp::kTransposeFirst} == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA &&
              int{mp::kTransposeSecond} == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB &&
              int{mp::kAlgorithm} == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_ALGO_TYPE &&
              int{mp::kMultiprocessors} ==
                  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_SM_COUNT &&
              int{mp::kEpilogue} == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE &&
              int{mp::kBiasPointer} == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_POINTER &&
              int{mp::kBiasType} == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_DATA_TYPE &&
              int{mp::kFirstScalePointer} == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_POINTER &&
              int{mp::kFirstScaleMode} == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_MODE &&
              int{mp::kSecondScalePointer} ==
                  CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_POINTER &&
              int{mp::kSecondScaleMode} == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_MODE &&
              int{mp::kTransferType} == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_TYPE);
static_assert(mp::kDefault == CUBLASMP_MATMUL_ALGO_TYPE_DEFAULT &&
              mp::kSplitP2p == CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_P2P &&
              mp::kSplitMulticast == CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_MULTICAST &&
              mp::kAtomicP2p == CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_P2P &&
              mp::kAtomicMulticast == CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_MULTICAST &&
              mp::kNoOverlap == CUBLASMP_MATMUL_ALGO_TYPE_NO_OVERLAP);
#if CUBLASMP_VERSION >= 1000
static_assert(mp::kFused == CUBLASMP_MATMUL_ALGO_TYPE_FUSED);
#endif
static_assert(mp::kEpilogueNone == CUBLASMP_MATMUL_EPILOGUE_DEFAULT &&
              mp::kEpilogueAllReduce == CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE &&
              mp::kEpilogueRelu == CUBLASMP_MATMUL_EPILOGUE_RELU &&
              mp::kEpilogueBias == CUBLASMP_MATMUL_EPILOGUE_BIAS &&
              mp::kScaleScalar == CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32);
static_assert(sizeof(nccl::UniqueId) == sizeof(ncclUniqueId) && NCCL_API_MAGIC == 0xcafebeef &&
              nccl::kSuccess == ncclSuccess && nccl::kInProgress == ncclInProgress);

// Handles are restated as void*, and enums as int, so the number of arguments and their sizes are
// what can be compared.
template <class Result, class... Arguments>
constexpr std::size_t sizes_of(Result (*)(Arguments...)) {
  std::size_t all = sizeof(Result);
  ((all = all * 31 + sizeof(Arguments)), ...);
  return all;
}
#define XD_MP_FUNCTION(name, result, arguments) \
  static_assert(sizes_of(decltype(&cublasMp##name){}) == sizes_of(decltype(mp::Functions::name){}));
XD_MP_FUNCTIONS
#undef XD_MP_FUNCTION
#define XD_NCCL_FUNCTION(name, result, arguments) \
  static_assert(sizes_of(decltype(&nccl##name){}) == sizes_of(decltype(nccl::Functions::name){}));
XD_NCCL_FUNCTIONS
#undef XD_NCCL_FUNCTION
static_assert(offsetof(nccl::Properties, multicast) ==
                  offsetof(ncclCommProperties_t, multimemSupport) &&
              sizeof(nccl::Properties) >= sizeof(ncclCommProperties_t));
#if NCCL_VERSION_CODE == 22902
static_assert(nccl::Properties{}.size == sizeof(ncclCommProperties_t) &&
              nccl::Properties{}.version == NCCL_VERSION_CODE);
#endif
static_assert(NCCL_REVOKE_DEFAULT == 0 &&
              sizes_of(&ncclCommRevoke) == sizes_of(decltype(nccl::Functions::CommRevoke){}));

}  // namespace
}  // namespace xd::gemm::cublasmp
#endif

namespace xd::gemm::cublasmp {
namespace {

using test::error_of;
using test::expect_error;
using test::expect_words;

template <class Do>
void expect_unsupported(Do&& act, std::initializer_list<std::string> words) {
  expect_error(error_of(act), XD_ERROR_UNSUPPORTED, words);
}

TEST(CublasMpLibrary, IsNamedWhereItIsMissing) {
  expect_unsupported([] { find_library("libxd_no_such_library.so.0"); },
                     {"cuBLASMp is missing", "libxd_no_such_library.so.0"});
}

TEST(CublasMpLibrary, SaysWhyItCannotBeLoadedWhereItIsThere) {
  expect_unsupported([] { find_library("/dev/null"); },
                     {"/dev/null cannot be loaded", "file too short"});
}

TEST(CublasMpLibrary, SaysWhichVersionIsNeededAndWhichWasFound) {
  CublasMpFake fake;
  const auto find = [] { find_library(CUBLASMP_FAKE_NAME); };
  fake.have_versions(1000, 22809);
  expect_unsupported(find, {"libnccl.so.2", "NCCL 2.29.2 or later", "found NCCL 2.28.9"});
  fake.have_versions(1000, 22902, 130002);
  expect_unsupported(find,
                     {"libcublasLt.so.13", "cuBLASLt 13.1.0 or later", "found cuBLASLt 13.0.2"});
  fake.have_versions(702);
  expect_unsupported(find, {"is cuBLASMp 0.7.2", "expected 0.8.0 or later"});
  fake.have_versions();
}

TEST(CublasMpLibrary, NamesTheFunctionThatItLacks) {
  expect_unsupported([] { find_library(CUBLASMP_FAKE_PARTIAL_NAME); },
                     {"has no cublasMpMatmul", "0.8.0 or later"});
}

// Bound when it is first called, such a function would end the process.
TEST(CublasMpLibrary, NamesTheFunctionThatALibraryBelowItLacks) {
  expect_unsupported([] { find_library(CUBLASMP_FAKE_UNBOUND_NAME); },
                     {"cannot be loaded", "fake_that_is_nowhere"});
}

TEST(CublasMpLibrary, TakesALentCommunicatorOnlyIfItsWaitsCanBeEnded) {
  EXPECT_EQ(why_not_lent(CublasMpFake().library()), "");
  const std::string reason = why_not_lent(CublasMpFake(CUBLASMP_FAKE_NO_REVOKE_NAME).library());
  expect_words(reason, {"config.nccl_comm needs an NCCL with ncclCommRevoke", "found NCCL 2.29.2"});
}

// Every function of the tables exists in the installed library, whether or not there is a device.
TEST(CublasMpLibrary, EitherHasAllFunctionsOrAReason) {
  if (*why_no_library() != '\0') {
    EXPECT_THROW(library(), Error);
    return;
  }
  EXPECT_GE(library().version, 800);
}

TEST(CublasMpLibrary, WritesVersionsAsPeopleDo) {
  EXPECT_EQ(version_text(901), "0.9.1");
  EXPECT_EQ(version_text(1000), "0.10.0");
  EXPECT_EQ(version_text(22902), "2.29.2");
}

// The memory is registered with both grids, and everything ends before the communicator does.
TEST_F(CublasMpEngine, MakesAndEndsEverythingInOrder) {
  {
    const Engine made = engine();
    const std::string text = fake_.taken();
    EXPECT_EQ(text.find("CommInitRank 2 u 1;Create;GridCreate 2 1 0 77;GridCreate 1 2 1 77;"), 0u)
        << text;
    expect_words(text, {"Malloc 11 2097152;BufferRegister 12 99 2097152;"});
    EXPECT_FALSE(made.abilities().multicast);
    EXPECT_EQ(made.abilities().version, 1000);
  }
  EXPECT_EQ(fake_.taken(),
            "OperationDestroy;MatrixDestroy 21;MatrixDestroy 22;MatrixDestroy 23;BufferDeregister "
            "12 99;Free 11 99;GridDestroy 12;GridDestroy 11;Destroy;CommDestroy 77;");
}

// Its owner frees it. Objects that cuBLASMp has made of it need all ranks to end.
TEST_F(CublasMpEngine, RevokesALentCommunicatorAndLeavesItToItsOwner) {
  int lent = 0;
  {
    Engine made = engine(&lent);
    EXPECT_EQ(fake_.taken().find("CommInitRank"), std::string::npos);
    made.stop();
    const std::string revoked = fake_.taken();
    EXPECT_EQ(revoked.find("CommRevoke "), 0u) << revoked;
    made.give_up();
  }
  EXPECT_EQ(fake_.taken(), "");
}

TEST_F(CublasMpEngine, RevokesItsOwnCommunicatorOnceAndAbortsItLater) {
  {
    Engine made = engine();
    fake_.taken();
    made.stop();
    made.stop();
    EXPECT_EQ(fake_.taken(), "CommRevoke 77;");
    made.give_up();
    made.give_up();
    EXPECT_EQ(fake_.taken(), "CommAbort 77;");
  }
  EXPECT_EQ(fake_.taken(), "");
}

TEST_F(CublasMpEngine, AbortsItsOwnCommunicatorWhereItCannotBeRevoked) {
  {
    Engine made = engine();
    fake_.begin("CommRevoke", 5);
    made.stop();
    EXPECT_EQ(fake_.taken(), "CommRevoke 77;CommAbort 77;");
    made.give_up();
  }
  EXPECT_EQ(fake_.taken(), "");

  CublasMpFake without(CUBLASMP_FAKE_NO_REVOKE_NAME);
  {
    Engine made(without.library(), config_, ranks(), xd::cuda::Stream());
    without.begin();
    made.stop();
    made.give_up();
  }
  EXPECT_EQ(without.taken(), "CommAbort 77;");
}

// NCCL's communicator may be gone.
TEST_F(CublasMpEngine, EnqueuesNothingOnceItHasBeenStopped) {
  Engine made = engine();
  made.stop();
  fake_.taken();
  const Operands operands = operands_of(call(), nullptr, false);
  for (const auto& error : {error_of([&] { made.require(description(), operands); }),
                            error_of([&] { made.enqueue(description(), operands, nullptr); })}) {
    expect_error(error, XD_ERROR_UNSUPPORTED, "was stopped");
  }
  EXPECT_EQ(fake_.taken(), "");
}

// The caller may destroy its stream when its call has failed.
TEST_F(CublasMpEngine, GivesTheHandleItsStreamBackWhereAProductFails) {
  Engine made = engine();
  const Operands operands = operands_of(call(), nullptr, false);
  made.require(description(), operands);
  fake_.begin("Matmul");
  const auto error =
      error_of([&] { made.enqueue(description(), operands, reinterpret_cast<cudaStream_t>(4)); });
  expect_error(error, XD_ERROR_INTERNAL, "cublasMpMatmul: fake reason");
  const std::string text = fake_.taken();
  EXPECT_TRUE(text.ends_with(";SetStream 0;")) << text;
}

// A product may read its host memory while it runs, and explain() may ask for more meanwhile.
TEST_F(CublasMpEngine, FreesNoHostMemoryThatAProductWasGiven) {
  constexpr std::size_t kBytes = std::size_t{4} << 20;  // malloc gives so much back to the system
  Engine made = engine();
  const Operands operands = operands_of(call(), nullptr, false);
  fake_.need_host_memory(kBytes);
  made.require(description(), operands);
  made.enqueue(description(), operands, nullptr);
  fake_.need_host_memory(3 * kBytes);
  made.require(description(), operands);
  EXPECT_EQ(fake_.read_host_memory(), kBytes);
  made.enqueue(description(), operands, nullptr);
  EXPECT_EQ(fake_.read_host_memory(), 3 * kBytes);
}

TEST_F(CublasMpEngine, TakesHostMemoryForItsLargestCallsBeforehand) {
  constexpr std::size_t kBytes = 1000;
  fake_.need_host_memory(kBytes);
  Engine made = engine();
  made.enqueue(description(), operands_of(call(), nullptr, false), nullptr);
  EXPECT_EQ(fake_.read_host_memory(), kBytes);
}

// The other ranks may have made theirs, so ends that need all ranks would not return.
TEST_F(CublasMpEngine, EndsAloneWhereItCannotBeMade) {
  fake_.begin("Malloc");
  expect_error(error_of([&] { engine(); }), XD_ERROR_INTERNAL, "cublasMpMalloc: fake reason");
  const std::string text = fake_.taken();
  EXPECT_TRUE(text.ends_with(";Malloc 11 2097152;CommAbort 77;")) << text;
}

// b is the first matrix, [16,8] = 8 x 16 in columns, of 16 = 2 * 8 rows on all ranks; a the second.
TEST_F(CublasMpEngine, PassesACallOn) {
  Engine made = engine();
  fake_.taken();
  const ProductCall product = call();
  Operands operands = operands_of(product, reinterpret_cast<void*>(3), false);
  operands.first = reinterpret_cast<void*>(1);
  operands.second = reinterpret_cast<void*>(2);
  made.require(description(), operands);
  fake_.taken();
  made.enqueue(description(), operands, reinterpret_cast<cudaStream_t>(4));
  EXPECT_EQ(fake_.taken(),
            "Operation 68;Set 0 1;Set 1 0;Set 3 1;Set 5 0;Set 27 14;"
            "Matrix 21 16 16 8 16 8 14 11;Matrix 22 16 6 8 3 8 14 11;Matrix 23 16 6 16 3 16 14 12;"
            "SetStream 4;Matmul 16 6 16 0.5 1 2 0 0 3 99 2097152;SetStream 0;");
}

TEST_F(CublasMpEngine, PassesBiasScalesAndMultiprocessorsOn) {
  config_.operations = XD_GEMM_BIT(XD_GEMM_ALL_GATHER);
  config_.num_comm_sms = 7;
  Engine made = engine();
  fake_.taken();
  ProductCall product = call();
  product.operation = XD_GEMM_ALL_GATHER;
  product.a_rows = 3;
  product.bias.given = product.c.given = product.b_scale.given = true;
  product.bias.type = DType::f32;
  product.epilogue = XD_GEMM_EPILOGUE_RELU;
  product.beta = 2;
  const Description description = describe(product, config_, DType::bf16, true);
  Operands operands = operands_of(product, nullptr, true);
  EXPECT_NE(operands.c, nullptr);
  operands.bias = reinterpret_cast<void*>(8);
  operands.first_scale = reinterpret_cast<float*>(9);
  made.require(description, operands);
  const std::string text = fake_.taken();
  expect_words(
      text, {"Set 4 7;Set 5 6;Set 8 0;Set 6 8;Set 17 0;Set 16 9;Matrix", "bufferSize 32 6 8 c;"});
}

TEST_F(CublasMpEngine, RefusesWhatNeedsMoreMemoryThanItTook) {
  Engine made = engine();
  fake_.begin("", 0, 3000000);
  expect_unsupported([&] { made.require(description(), operands_of(call(), nullptr, false)); },
                     {"needs 3000000 bytes", "has 2097152"});
}

// A value that cuBLASMp does not take is no fault of this library: others may be taken.
TEST_F(CublasMpEngine, RefusesWhatCublasMpRefuses) {
  Engine made = engine();
  const Operands operands = operands_of(call(), nullptr, false);
  for (const mp::Status status :
       {mp::kInvalidValue, mp::kArchitectureMismatch, mp::kNotSupported}) {
    fake_.begin("bufferSize", status);
    expect_unsupported([&] { made.require(description(), operands); },
                       {"cublasMpMatmul_bufferSize: fake reason"});
  }
  fake_.begin("bufferSize");
  expect_error(error_of([&] { made.require(description(), operands); }), XD_ERROR_INTERNAL,
               "cublasMpMatmul_bufferSize: fake reason");
}

// An invalid value of what every product needs is a fault of this library.
TEST_F(CublasMpEngine, TellsAnInvalidValueOutsideOfProductsAsItsOwnFault) {
  for (const char* failing : {"GridCreate", "Malloc"}) {
    fake_.begin(failing, mp::kInvalidValue);
    expect_error(error_of([&] { engine(); }), XD_ERROR_INTERNAL, failing);
  }
  fake_.begin();
  Engine made = engine();
  fake_.begin("Set", mp::kInvalidValue);
  const Operands operands = operands_of(call(), nullptr, false);
  expect_error(error_of([&] { made.require(description(), operands); }), XD_ERROR_INTERNAL,
               "cublasMpMatmulDescriptorSetAttribute");
  for (const mp::Status status : {mp::kArchitectureMismatch, mp::kNotSupported}) {
    fake_.begin("Malloc", status);
    expect_unsupported([&] { engine(); }, {"cublasMpMalloc: fake reason"});
  }
}

// As cuBLASMp 0.10.0 does with all_gather by ATOMIC_P2P: it says the bytes that the product needs,
// and refuses to enqueue it.
TEST_F(CublasMpEngine, TellsARefusalOfAProductThatIsToBeEnqueued) {
  for (const mp::Status status :
       {mp::kInvalidValue, mp::kArchitectureMismatch, mp::kNotSupported}) {
    Engine made = engine();
    const Operands operands = operands_of(call(), nullptr, false);
    made.require(description(), operands);
    fake_.begin("Matmul", status);
    expect_unsupported([&] { made.enqueue(description(), operands, nullptr); },
                       {"cublasMpMatmul: fake reason"});
  }
}

TEST_F(CublasMpEngine, ConnectsTheRanksByTheProductsThatCublasMpTakes) {
  config_.operations = XD_GEMM_BIT(XD_GEMM_REDUCE_SCATTER) | XD_GEMM_BIT(XD_GEMM_ALL_GATHER);
  std::vector<std::byte> matrices(Engine::small_bytes(config_));
  Engine made = engine();
  fake_.begin("Matmul", mp::kNotSupported);
  made.enqueue_small(matrices.data());
  fake_.begin("Matmul");
  expect_error(error_of([&] { engine().enqueue_small(matrices.data()); }), XD_ERROR_INTERNAL,
               "cublasMpMatmul: fake reason");
}

}  // namespace
}  // namespace xd::gemm::cublasmp
