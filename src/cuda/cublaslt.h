// Products by cuBLASLt, which is found at run time: it is needed neither to build this library nor
// to load it. Its names that are used here are restated below, since its header may not be there.
//
// Everything here is row-major, and cuBLASLt is column-major: it is given B as its first operand
// and A as its second one, and computes D transposed, which is D.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace xd::cuda {

namespace lt {

using Handle = void*;      // a cublasLtHandle_t
using Operation = void*;   // a cublasLtMatmulDesc_t
using Layout = void*;      // a cublasLtMatrixLayout_t
using Preference = void*;  // a cublasLtMatmulPreference_t
using Status = int;        // a cublasStatus_t

inline constexpr Status kSuccess = 0, kInvalidValue = 7, kNotSupported = 15;
inline constexpr int kNotTransposed = 0, kTransposed = 1;  // cublasOperation_t
inline constexpr int kCompute32F = 68, kComputeTf32 = 77;  // cublasComputeType_t
enum OperationAttribute : int {                            // cublasLtMatmulDescAttributes_t
  kTransposeFirst = 3,
  kTransposeSecond = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kFirstScalePointer = 17,
  kSecondScalePointer = 18,
  kFastAccumulate = 25,
  kBiasType = 26,
  kFirstScaleMode = 31,
  kSecondScaleMode = 32,
};
enum PreferenceAttribute : int {  // cublasLtMatmulPreferenceAttributes_t
  kMaxWorkspaceBytes = 1,
  kReductionSchemes = 3,
  kMinAlignmentFirst = 5,
  kMinAlignmentSecond = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};
// cublasLtReductionScheme_t, as a mask: parts of a sum along K are added as float32 in working
// memory, never as rounded elements of D.
inline constexpr std::uint32_t kReduceInComputeType = 2;
// cublasLtEpilogue_t
inline constexpr int kEpilogueNone = 1, kEpilogueRelu = 2, kEpilogueBias = 4;
// cublasLtMatmulMatrixScale_t
inline constexpr int kScaleScalar = 0, kScaleOuterVector = 3, kScaleVector128 = 4,
                     kScaleBlock128 = 5;
// As GetVersion() tells them: the first with these last two.
inline constexpr std::size_t kFirstWithBlockScales = 120900;

struct Algorithm {  // a cublasLtMatmulAlgo_t: plain words, the same on equal devices
  std::uint64_t data[8];

  auto operator<=>(const Algorithm&) const = default;
};

struct Suggestion {  // a cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  std::size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

// XD_LT_FUNCTION(name in the library without its prefix, result, arguments)
#define XD_LT_FUNCTIONS                                                                           \
  XD_LT_FUNCTION(Create, Status, (Handle*))                                                       \
  XD_LT_FUNCTION(GetVersion, std::size_t, ())                                                     \
  XD_LT_FUNCTION(GetStatusString, const char*, (Status))                                          \
  XD_LT_FUNCTION(MatmulDescCreate, Status, (Operation*, int compute, int scale_type))             \
  XD_LT_FUNCTION(MatmulDescDestroy, Status, (Operation))                                          \
  XD_LT_FUNCTION(MatmulDescSetAttribute, Status, (Operation, int, const void*, std::size_t))      \
  XD_LT_FUNCTION(MatrixLayoutCreate, Status,                                                      \
                 (Layout*, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t ld)) \
  XD_LT_FUNCTION(MatrixLayoutDestroy, Status, (Layout))                                           \
  XD_LT_FUNCTION(MatmulPreferenceCreate, Status, (Preference*))                                   \
  XD_LT_FUNCTION(MatmulPreferenceDestroy, Status, (Preference))                                   \
  XD_LT_FUNCTION(MatmulPreferenceSetAttribute, Status,                                            \
                 (Preference, int, const void*, std::size_t))                                     \
  XD_LT_FUNCTION(MatmulAlgoGetHeuristic, Status,                                                  \
                 (Handle, Operation, Layout first, Layout second, Layout c, Layout d, Preference, \
                  int most, Suggestion*, int* count))                                             \
  XD_LT_FUNCTION(MatmulAlgoCheck, Status,                                                         \
                 (Handle, Operation, Layout first, Layout second, Layout c, Layout d,             \
                  const Algorithm*, Suggestion*))                                                 \
  XD_LT_FUNCTION(Matmul, Status,                                                                  \
                 (Handle, Operation, const void* alpha, const void* first, Layout,                \
                  const void* second, Layout, const void* beta, const void* c, Layout, void* d,   \
                  Layout, const Algorithm*, void* workspace, std::size_t, cudaStream_t))

struct Library {
// NOLINTBEGIN(bugprone-macro-parentheses): arguments that are types take none
#define XD_LT_FUNCTION(name, result, arguments) result(*name) arguments = nullptr;
  XD_LT_FUNCTIONS
#undef XD_LT_FUNCTION
  // NOLINTEND(bugprone-macro-parentheses)

  // Throws INTERNAL with the call's name and cuBLASLt's reason; UNSUPPORTED where that is the
  // reason.
  void check(Status status, const char* call) const;
};

// Looks first for a library that the process has loaded, then loads one and never unloads it. The
// names: of this build's major version of CUDA, then of others. Throws UNSUPPORTED with what is
// missing.
const Library& library();
Library find_library(const std::vector<const char*>& names);

}  // namespace lt

// The reason why there are no products; empty if there are. Never throws.
const char* why_no_products() noexcept;

// Sizes and types of a product D [m,n] = alpha * op(A) * op(B) + beta * C. Everything that is not a
// pointer, so that an algorithm chosen for a shape fits every call of that shape.
struct ProductShape {
  std::int64_t m = 0, n = 0, k = 0;
  cudaDataType_t a_type = CUDA_R_16BF, b_type = CUDA_R_16BF, d_type = CUDA_R_16BF;
  cudaDataType_t bias_type = CUDA_R_16BF;
  // Storage: A is [m,k], or [k,m] if transposed; B is [k,n], or [n,k] if transposed.
  bool transpose_a = false, transpose_b = true;
  std::int64_t a_pitch = 0, b_pitch = 0, d_pitch = 0;  // elements from row to row; C has D's
  int compute = lt::kCompute32F;
  int epilogue = lt::kEpilogueNone;
  int a_scale_mode = -1, b_scale_mode = -1;  // -1 = not scaled
  bool fast_accumulate = false;
  // D lies in other devices' memory. cuBLASLt does not know, but other algorithms are fastest.
  bool stores_at_peers = false;

  // Products with scales of blocks, one for 128 elements of a row of A, and one for 128 x 128 of B,
  // have a multiple of so many rows: how scales of others lie is not documented.
  static constexpr std::int64_t kBlockScaledRows = 16;
  bool has_block_scales() const { return a_scale_mode == lt::kScaleVector128; }

  bool operator==(const ProductShape&) const = default;
  auto operator<=>(const ProductShape&) const = default;
};
// For errors: sizes, storage and types.
std::string text_of(const ProductShape& shape);

struct ProductPointers {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;  // nullptr = D
  void* d = nullptr;
  const void* bias = nullptr;
  const float* a_scale = nullptr;
  const float* b_scale = nullptr;
};

// A handle of cuBLASLt for the current device. It comes from a pool and goes back to it: to destroy
// one waits for everything that runs on the device.
class ProductLibrary {
 public:
  ProductLibrary();
  ~ProductLibrary();
  ProductLibrary(const ProductLibrary&) = delete;
  ProductLibrary& operator=(const ProductLibrary&) = delete;

  lt::Handle handle() const { return handle_; }

 private:
  int device_ = -1;
  lt::Handle handle_ = nullptr;
};

// A described product. Its functions may be called by one thread at a time.
class Product {
 public:
  // Throws UNSUPPORTED if cuBLASLt has no algorithm for it within the workspace.
  Product(const ProductLibrary& library, const ProductShape& shape, std::size_t workspace_bytes);
  ~Product();
  Product(Product&& other) noexcept;
  Product& operator=(Product&&) = delete;

  const ProductShape& shape() const { return shape_; }
  // The suggestions of cuBLASLt, the best first; never empty.
  const std::vector<lt::Algorithm>& candidates() const { return candidates_; }
  // The algorithm that run() takes; the first candidate until another is chosen.
  const lt::Algorithm& chosen() const { return chosen_; }
  // False: this product cannot take the algorithm (another shape's, or another device's).
  bool choose(const lt::Algorithm& algorithm);

  // Enqueues it. The workspace is this product's until it has ended.
  void run(const ProductPointers& pointers, float alpha, float beta, void* workspace,
           cudaStream_t stream);

 private:
  void describe();
  void set(int attribute, const void* value, std::size_t bytes);
  void set_scale_mode(int attribute, int mode);
  template <class T>
  void set(int attribute, const T& value) {
    set(attribute, &value, sizeof(value));
  }
  void suggest();
  void release() noexcept;

  const ProductLibrary* library_;
  ProductShape shape_;
  std::size_t workspace_bytes_;
  lt::Operation operation_ = nullptr;
  lt::Layout first_ = nullptr, second_ = nullptr, d_ = nullptr;
  std::vector<lt::Algorithm> candidates_;
  lt::Algorithm chosen_{};
};

}  // namespace xd::cuda
