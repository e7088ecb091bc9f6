// How cuBLASMp is found, and what it is asked for. A library of the tests stands in its place; that
// it computes what it is asked for is for tests on GPUs.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "gemm/cublasmp/engine.h"
#include "gemm/cublasmp/library.h"

#if __has_include(<cublasmp.h>) && __has_include(<nccl.h>) && __has_include(<cublas_v2.h>)
#include <cublasmp.h>

// The restated names are those of the header, where it is installed.
namespace xd::gemm::cublasmp {
namespace {

static_assert(mp::kSuccess == CUBLASMP_STATUS_SUCCESS &&
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
static_assert(sizeof(nccl::UniqueId) == sizeof(ncclUniqueId) && NCCL_API_MAGIC == 0xcafebeef);

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

}  // namespace
}  // namespace xd::gemm::cublasmp
#endif

namespace xd::gemm::cublasmp {
namespace {

template <class Do>
void expect_unsupported(Do&& act, const std::vector<std::string>& parts) {
  try {
    act();
    FAIL() << "nothing is missing";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), XD_ERROR_UNSUPPORTED) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
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
  expect_unsupported([] { find_library(CUBLASMP_FAKE_OLD_NCCL_NAME); },
                     {"libnccl.so.2", "NCCL 2.29.2 or later", "found NCCL 2.28.9"});
  expect_unsupported([] { find_library(CUBLASMP_FAKE_OLD_LT_NAME); },
                     {"libcublasLt.so.13", "cuBLASLt 13.1.0 or later", "found cuBLASLt 13.0.2"});
  expect_unsupported([] { find_library(CUBLASMP_FAKE_OLD_NAME); },
                     {"is cuBLASMp 0.7.2", "expected 0.8.0 or later"});
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

// An engine on the library of the tests, which needs no device.
class CublasMpEngine : public testing::Test {
 protected:
  CublasMpEngine() : library_(find_library(CUBLASMP_FAKE_NAME)) {
    void* const opened = ::dlopen(CUBLASMP_FAKE_NAME, RTLD_NOW | RTLD_NOLOAD);
    begin_ =
        reinterpret_cast<void (*)(const char*, int, std::size_t)>(::dlsym(opened, "fake_begin"));
    text_ = reinterpret_cast<const char* (*)()>(::dlsym(opened, "fake_text"));
    ::dlclose(opened);
    config_.ranks = 2;
    config_.operations = XD_GEMM_BIT(XD_GEMM_REDUCE_SCATTER);
    config_.max_tokens = 64;
    config_.max_k = config_.max_n = 128;
    begin();
  }

  // From now on `failing` fails with that status.
  void begin(const char* failing = "", int status = 6, std::size_t bytes = 100) {
    begin_(failing, status, bytes);
  }
  std::string taken() {
    std::string text = text_();
    begin();
    return text;
  }
  Engine engine(nccl::Comm lent = nullptr) {
    Ranks ranks{.count = 2, .rank = 1, .lent = lent};
    ranks.id.bytes[0] = 'u';
    return Engine(library_, config_, ranks, xd::cuda::Stream());
  }
  // reduce_scatter of 6 tokens, N = 16 and K = 8 on each of two ranks.
  ProductCall call() {
    ProductCall call{.operation = XD_GEMM_REDUCE_SCATTER};
    call.a.type = call.b.type = call.d.type = DType::bf16;
    call.algo = XD_GEMM_ALGO_CUBLASMP_SPLIT_P2P;
    call.a_rows = 6;
    call.n = 16;
    call.k = 8;
    call.alpha = 0.5f;
    call.shares = Shares(starts_);
    return call;
  }

  const Library library_;
  Config config_;
  const std::vector<std::int64_t> starts_{0, 3, 6};
  void (*begin_)(const char*, int, std::size_t) = nullptr;
  const char* (*text_)() = nullptr;
};

// The memory is registered with both grids, and everything ends before the communicator does.
TEST_F(CublasMpEngine, MakesAndEndsEverythingInOrder) {
  {
    const Engine made = engine();
    const std::string text = taken();
    EXPECT_EQ(text.find("CommInitRank 2 u 1;Create;GridCreate 2 1 0 77;GridCreate 1 2 1 77;"), 0u)
        << text;
    EXPECT_NE(text.find("Malloc 11 2097152;BufferRegister 12 99 2097152;"), std::string::npos)
        << text;
    EXPECT_FALSE(made.abilities().multicast);
    EXPECT_EQ(made.abilities().version, 1000);
  }
  EXPECT_EQ(taken(),
            "OperationDestroy;MatrixDestroy 21;MatrixDestroy 22;MatrixDestroy 23;BufferDeregister "
            "12 99;Free 11 99;GridDestroy 12;GridDestroy 11;Destroy;CommDestroy 77;");
}

TEST_F(CublasMpEngine, LeavesALentCommunicatorToItsOwner) {
  int lent = 0;
  {
    Engine made = engine(&lent);
    EXPECT_EQ(taken().find("CommInitRank"), std::string::npos);
    made.abort();
  }
  EXPECT_EQ(taken(), "");
}

TEST_F(CublasMpEngine, AbortsItsOwnCommunicatorOnceAndLeavesTheRest) {
  {
    Engine made = engine();
    taken();
    made.abort();
    made.abort();
  }
  EXPECT_EQ(taken(), "CommAbort 77;");
}

TEST_F(CublasMpEngine, EndsWhatThereIsWhereItCannotBeMade) {
  begin("Malloc");
  try {
    engine();
    FAIL() << "it was made";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), XD_ERROR_INTERNAL);
    EXPECT_STREQ(error.what(), "cublasMpMalloc: fake reason");
  }
  const std::string text = taken();
  const std::size_t end = text.find("OperationDestroy;");
  ASSERT_NE(end, std::string::npos) << text;
  EXPECT_EQ(text.substr(end),
            "OperationDestroy;MatrixDestroy 21;MatrixDestroy 22;MatrixDestroy 23;GridDestroy "
            "12;GridDestroy 11;Destroy;CommDestroy 77;");
}

// b is the first matrix, [16,8] = 8 x 16 in columns, of 16 = 2 * 8 rows on all ranks; a the second.
TEST_F(CublasMpEngine, PassesACallOn) {
  Engine made = engine();
  taken();
  const ProductCall product = call();
  const Description description = describe(product, config_, DType::bf16, false);
  Operands operands = operands_of(product, reinterpret_cast<void*>(3), false);
  operands.first = reinterpret_cast<void*>(1);
  operands.second = reinterpret_cast<void*>(2);
  made.require(description, operands);
  taken();
  made.enqueue(description, operands, reinterpret_cast<cudaStream_t>(4));
  EXPECT_EQ(taken(),
            "SetStream 4;Operation 68;Set 0 1;Set 1 0;Set 3 1;Set 5 0;Set 27 14;"
            "Matrix 21 16 16 8 16 8 14 11;Matrix 22 16 6 8 3 8 14 11;Matrix 23 16 6 16 3 16 14 12;"
            "Matmul 16 6 16 0.5 1 2 0 0 3 99 2097152;SetStream 0;");
}

TEST_F(CublasMpEngine, PassesBiasScalesAndMultiprocessorsOn) {
  config_.operations = XD_GEMM_BIT(XD_GEMM_ALL_GATHER);
  config_.num_comm_sms = 7;
  Engine made = engine();
  taken();
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
  const std::string text = taken();
  EXPECT_NE(text.find("Set 4 7;Set 5 6;Set 8 0;Set 6 8;Set 17 0;Set 16 9;Matrix"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("bufferSize 32 6 8 c;"), std::string::npos) << text;
}

TEST_F(CublasMpEngine, RefusesWhatNeedsMoreMemoryThanItTook) {
  Engine made = engine();
  begin("", 0, 3000000);
  const Description description = describe(call(), config_, DType::bf16, false);
  expect_unsupported([&] { made.require(description, operands_of(call(), nullptr, false)); },
                     {"needs 3000000 bytes", "has 2097152"});
}

TEST_F(CublasMpEngine, RefusesWhatCublasMpDoesNotSupport) {
  Engine made = engine();
  begin("bufferSize", mp::kNotSupported);
  const Description description = describe(call(), config_, DType::bf16, false);
  expect_unsupported([&] { made.require(description, operands_of(call(), nullptr, false)); },
                     {"cublasMpMatmul_bufferSize: fake reason"});
}

}  // namespace
}  // namespace xd::gemm::cublasmp
