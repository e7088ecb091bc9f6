// The restated names of cuBLASLt against its header, where that is installed, and the library that
// is found at run time.
#include "cuda/cublaslt.h"

#include <gtest/gtest.h>

#include <string>

#include "unit/errors.h"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>

namespace xd::cuda::lt {
namespace {

static_assert(kSuccess == CUBLAS_STATUS_SUCCESS && kNotSupported == CUBLAS_STATUS_NOT_SUPPORTED);
static_assert(kNotTransposed == CUBLAS_OP_N && kTransposed == CUBLAS_OP_T);
static_assert(kCompute32F == CUBLAS_COMPUTE_32F && kComputeTf32 == CUBLAS_COMPUTE_32F_FAST_TF32);
static_assert(int{kTransposeFirst} == CUBLASLT_MATMUL_DESC_TRANSA &&
              int{kTransposeSecond} == CUBLASLT_MATMUL_DESC_TRANSB &&
              int{kEpilogue} == CUBLASLT_MATMUL_DESC_EPILOGUE &&
              int{kBiasPointer} == CUBLASLT_MATMUL_DESC_BIAS_POINTER &&
              int{kFirstScalePointer} == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER &&
              int{kSecondScalePointer} == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER &&
              int{kFastAccumulate} == CUBLASLT_MATMUL_DESC_FAST_ACCUM &&
              int{kBiasType} == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE &&
              int{kFirstScaleMode} == CUBLASLT_MATMUL_DESC_A_SCALE_MODE &&
              int{kSecondScaleMode} == CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
static_assert(int{kMaxWorkspaceBytes} == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES &&
              int{kMinAlignmentFirst} == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES &&
              int{kMinAlignmentSecond} == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES &&
              int{kMinAlignmentC} == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES &&
              int{kMinAlignmentD} == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(kEpilogueNone == CUBLASLT_EPILOGUE_DEFAULT &&
              kEpilogueRelu == CUBLASLT_EPILOGUE_RELU && kEpilogueBias == CUBLASLT_EPILOGUE_BIAS &&
              (kEpilogueRelu | kEpilogueBias) == CUBLASLT_EPILOGUE_RELU_BIAS);
static_assert(int{kReductionSchemes} == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK &&
              kReduceInComputeType == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
static_assert(kInvalidValue == CUBLAS_STATUS_INVALID_VALUE);
static_assert(kScaleScalar == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F &&
              kScaleOuterVector == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F &&
              kScaleVector128 == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F &&
              kScaleBlock128 == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(Suggestion) == sizeof(cublasLtMatmulHeuristicResult_t) &&
              offsetof(Suggestion, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));

}  // namespace
}  // namespace xd::cuda::lt
#endif

namespace xd::cuda {
namespace {

using test::error_of;
using test::expect_error;

TEST(CublasLt, NamesWhatIsMissing) {
  expect_error(error_of([] {
                 lt::find_library({"libxd_no_such_library.so.1", "libxd_no_such_library.so.2"});
               }),
               XD_ERROR_UNSUPPORTED, "libxd_no_such_library.so.1 or libxd_no_such_library.so.2");
}

TEST(CublasLt, NamesTheFunctionThatALibraryLacks) {
  expect_error(error_of([] { lt::find_library({"libm.so.6"}); }), XD_ERROR_UNSUPPORTED,
               "cublasLtCreate");
}

// Every function of the table exists in the installed library, whether or not there is a device.
TEST(CublasLt, EitherHasAllFunctionsOrAReason) {
  if (*why_no_products() != '\0') {
    EXPECT_THROW(lt::library(), Error);
    return;
  }
  EXPECT_GE(lt::library().GetVersion(), 120000u);
}

}  // namespace
}  // namespace xd::cuda
