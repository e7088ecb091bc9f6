// cuBLASMp and the NCCL that it stands on, found at run time: they are needed neither to build this
// library nor to load it. Their names that are used here are restated below, since their headers
// may not be there. They are those of cuBLASMp 0.8 to 0.10 and of NCCL 2.29.2 and later.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace xd::gemm::cublasmp {

namespace mp {

using Handle = void*;     // a cublasMpHandle_t
using Grid = void*;       // a cublasMpGrid_t: the ranks, as rows and columns of processes
using Matrix = void*;     // a cublasMpMatrixDescriptor_t
using Operation = void*;  // a cublasMpMatmulDescriptor_t
using Status = int;       // a cublasMpStatus_t

inline constexpr Status kSuccess = 0, kInvalidValue = 3, kArchitectureMismatch = 4,
                        kNotSupported = 7;
inline constexpr int kColumnMajor = 0, kRowMajor = 1;      // cublasMpGridLayout_t
inline constexpr int kNotTransposed = 0, kTransposed = 1;  // cublasOperation_t
inline constexpr int kCompute32F = 68, kComputeTf32 = 77;  // cublasComputeType_t
enum Attribute : int {                                     // cublasMpMatmulDescriptorAttribute_t
  kTransposeFirst = 0,
  kTransposeSecond = 1,
  kAlgorithm = 3,
  kMultiprocessors = 4,
  kEpilogue = 5,
  kBiasPointer = 6,
  kBiasType = 8,
  kFirstScalePointer = 16,
  kFirstScaleMode = 17,
  kSecondScalePointer = 18,
  kSecondScaleMode = 19,
  kTransferType = 27,
};
// cublasMpMatmulAlgoType_t
inline constexpr int kDefault = 0, kSplitP2p = 1, kSplitMulticast = 2, kAtomicP2p = 3,
                     kAtomicMulticast = 4, kNoOverlap = 5, kFused = 6;
// cublasMpMatmulEpilogue_t
inline constexpr int kEpilogueNone = 0, kEpilogueAllReduce = 1, kEpilogueRelu = 2,
                     kEpilogueBias = 4;
inline constexpr int kScaleScalar = 0;  // cublasMpMatmulMatrixScale_t

// XD_MP_FUNCTION(name in the library without its prefix, result, arguments)
#define XD_MP_FUNCTIONS                                                                            \
  XD_MP_FUNCTION(GetVersion, Status, (int*))                                                       \
  XD_MP_FUNCTION(GetStatusString, const char*, (Status))                                           \
  XD_MP_FUNCTION(Create, Status, (Handle*, cudaStream_t))                                          \
  XD_MP_FUNCTION(Destroy, Status, (Handle))                                                        \
  XD_MP_FUNCTION(SetStream, Status, (Handle, cudaStream_t))                                        \
  XD_MP_FUNCTION(GridCreate, Status,                                                               \
                 (std::int64_t rows, std::int64_t columns, int layout, void* nccl_comm, Grid*))    \
  XD_MP_FUNCTION(GridDestroy, Status, (Grid))                                                      \
  XD_MP_FUNCTION(BufferRegister, Status, (Grid, void*, std::size_t))                               \
  XD_MP_FUNCTION(BufferDeregister, Status, (Grid, void*))                                          \
  XD_MP_FUNCTION(Malloc, Status, (Grid, void**, std::size_t))                                      \
  XD_MP_FUNCTION(Free, Status, (Grid, void*))                                                      \
  XD_MP_FUNCTION(MatrixDescriptorCreate, Status,                                                   \
                 (std::int64_t rows, std::int64_t columns, std::int64_t block_rows,                \
                  std::int64_t block_columns, std::int64_t first_row, std::int64_t first_column,   \
                  std::int64_t pitch, cudaDataType_t, Grid, Matrix*))                              \
  XD_MP_FUNCTION(MatrixDescriptorInit, Status,                                                     \
                 (std::int64_t rows, std::int64_t columns, std::int64_t block_rows,                \
                  std::int64_t block_columns, std::int64_t first_row, std::int64_t first_column,   \
                  std::int64_t pitch, cudaDataType_t, Grid, Matrix))                               \
  XD_MP_FUNCTION(MatrixDescriptorDestroy, Status, (Matrix))                                        \
  XD_MP_FUNCTION(MatmulDescriptorCreate, Status, (Operation*, int compute))                        \
  XD_MP_FUNCTION(MatmulDescriptorInit, Status, (Operation, int compute))                           \
  XD_MP_FUNCTION(MatmulDescriptorDestroy, Status, (Operation))                                     \
  XD_MP_FUNCTION(MatmulDescriptorSetAttribute, Status,                                             \
                 (Operation, int attribute, const void*, std::size_t))                             \
  XD_MP_FUNCTION(                                                                                  \
      Matmul_bufferSize, Status,                                                                   \
      (Handle, Operation, std::int64_t m, std::int64_t n, std::int64_t k, const void* alpha,       \
       const void* a, std::int64_t ia, std::int64_t ja, Matrix, const void* b, std::int64_t ib,    \
       std::int64_t jb, Matrix, const void* beta, const void* c, std::int64_t ic, std::int64_t jc, \
       Matrix, void* d, std::int64_t id, std::int64_t jd, Matrix, std::size_t* device_bytes,       \
       std::size_t* host_bytes))                                                                   \
  XD_MP_FUNCTION(                                                                                  \
      Matmul, Status,                                                                              \
      (Handle, Operation, std::int64_t m, std::int64_t n, std::int64_t k, const void* alpha,       \
       const void* a, std::int64_t ia, std::int64_t ja, Matrix, const void* b, std::int64_t ib,    \
       std::int64_t jb, Matrix, const void* beta, const void* c, std::int64_t ic, std::int64_t jc, \
       Matrix, void* d, std::int64_t id, std::int64_t jd, Matrix, void* device_memory,             \
       std::size_t, void* host_memory, std::size_t))

struct Functions {
// NOLINTBEGIN(bugprone-macro-parentheses): arguments that are types take none
#define XD_MP_FUNCTION(name, result, arguments) result(*name) arguments = nullptr;
  XD_MP_FUNCTIONS
#undef XD_MP_FUNCTION
  // NOLINTEND(bugprone-macro-parentheses)

  // Throws with the call's name and cuBLASMp's reason: UNSUPPORTED where that is another
  // architecture or what is not supported, else INTERNAL.
  void check(Status status, const char* call) const;
  // Of a whole product, where an invalid value is UNSUPPORTED, too: cuBLASMp does not publish which
  // values it takes together.
  void check_product(Status status, const char* call) const;
};

}  // namespace mp

namespace nccl {

using Comm = void*;  // an ncclComm_t
using Result = int;  // an ncclResult_t

struct UniqueId {  // an ncclUniqueId
  char bytes[128];
};

// An ncclCommProperties_t of NCCL 2.29.2, as which later ones fill it in, and room for one that is
// larger.
struct Properties {
  std::size_t size = 40;
  unsigned magic = 0xcafebeef, version = 22902;
  int rank = 0, ranks = 0, cuda_device = 0, nvml_device = 0;
  bool device_functions = false, multicast = false;
  std::byte more[256] = {};
};

// XD_NCCL_FUNCTION(name in the library without its prefix, result, arguments)
#define XD_NCCL_FUNCTIONS                                                        \
  XD_NCCL_FUNCTION(GetVersion, Result, (int*))                                   \
  XD_NCCL_FUNCTION(GetErrorString, const char*, (Result))                        \
  XD_NCCL_FUNCTION(GetUniqueId, Result, (UniqueId*))                             \
  XD_NCCL_FUNCTION(CommInitRank, Result, (Comm*, int ranks, UniqueId, int rank)) \
  XD_NCCL_FUNCTION(CommDestroy, Result, (Comm))                                  \
  XD_NCCL_FUNCTION(CommAbort, Result, (Comm))                                    \
  XD_NCCL_FUNCTION(CommCount, Result, (Comm, int*))                              \
  XD_NCCL_FUNCTION(CommUserRank, Result, (Comm, int*))                           \
  XD_NCCL_FUNCTION(CommCuDevice, Result, (Comm, int*))                           \
  XD_NCCL_FUNCTION(CommQueryProperties, Result, (Comm, Properties*))

inline constexpr Result kSuccess = 0, kInProgress = 7;

struct Functions {
// NOLINTBEGIN(bugprone-macro-parentheses): arguments that are types take none
#define XD_NCCL_FUNCTION(name, result, arguments) result(*name) arguments = nullptr;
  XD_NCCL_FUNCTIONS
#undef XD_NCCL_FUNCTION
  // NOLINTEND(bugprone-macro-parentheses)

  // Ends what a communicator does and waits for, and frees nothing. nullptr = this NCCL has none.
  Result (*CommRevoke)(Comm, int flags) = nullptr;

  // Throws SYSTEM with the call's name and NCCL's reason.
  void check(Result result, const char* call) const;
};

}  // namespace nccl

struct Library {
  mp::Functions mp;
  nccl::Functions nccl;  // of the NCCL that this cuBLASMp calls
  int version = 0;       // of cuBLASMp: 900 is 0.9.0, 1000 is 0.10.0
};

// Loads cuBLASMp, with the NCCL that the process has loaded or that the loader finds, and never
// unloads it. Throws UNSUPPORTED with what is missing: cuBLASMp, a library that it stands on, a
// function of one of them, or the version of cuBLASMp, NCCL or cuBLASLt that is needed.
Library find_library(const char* name);
// The library of this process.
const Library& library();
// The reason why there is none; empty if there is one. Never throws.
const char* why_no_library() noexcept;

// "0.10.0" of 1000, as cuBLASMp, NCCL and cuBLASLt count versions.
std::string version_text(int version);

}  // namespace xd::gemm::cublasmp
