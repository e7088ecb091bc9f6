#include "cuda/cublaslt.h"

#include <dlfcn.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "base/error.h"
#include "cuda/error.h"

namespace xd::cuda {
namespace lt {
namespace {

void* open(const std::vector<const char*>& names) {
  for (const char* name : names) {
    if (void* const loaded = ::dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  }
  for (const char* name : names) {
    if (void* const opened = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return opened;
  }
  std::string tried;
  for (const char* name : names) tried += concat(tried.empty() ? "" : " or ", name);
  const char* reason = ::dlerror();
  fail(XD_ERROR_UNSUPPORTED, "cuBLASLt is missing: no ", tried, " (",
       reason != nullptr ? reason : "not found", ")");
}

void* symbol(void* library, const char* name) {
  void* const found = ::dlsym(library, name);
  if (found == nullptr) fail(XD_ERROR_UNSUPPORTED, "libcublasLt has no ", name);
  return found;
}

}  // namespace

Library find_library(const std::vector<const char*>& names) {
  void* const opened = open(names);
  Library table;
// NOLINTBEGIN(bugprone-macro-parentheses): arguments that are types take none
#define XD_LT_FUNCTION(name, result, arguments) \
  table.name = reinterpret_cast<result(*) arguments>(symbol(opened, "cublasLt" #name));
  XD_LT_FUNCTIONS
#undef XD_LT_FUNCTION
  // NOLINTEND(bugprone-macro-parentheses)
  return table;
}

const Library& library() {
  // Not constant: tests of failing products put functions of theirs in.
  static Library table = find_library(
      CUDART_VERSION >= 13000 ? std::vector<const char*>{"libcublasLt.so.13", "libcublasLt.so.12"}
                              : std::vector<const char*>{"libcublasLt.so.12", "libcublasLt.so.13"});
  return table;
}

void Library::check(Status status, const char* call) const {
  if (status == kSuccess) return;
  fail(status == kNotSupported ? XD_ERROR_UNSUPPORTED : XD_ERROR_INTERNAL, "cublasLt", call, ": ",
       GetStatusString(status));
}

}  // namespace lt

// XD_LT_CHECK(Matmul(...)): the text of the error names the function.
#define XD_LT_CHECK(call) lt::library().check(lt::library().call, #call)

namespace {

// The pointers of a description are read when a product runs, and then they are others; but
// cuBLASLt may look at their alignment before.
alignas(256) constexpr std::byte kSomewhere[256]{};

// The needs of a product that this cuBLASLt or this device does not meet, as far as they are known.
std::string needs_of(const ProductShape& shape) {
  if (!shape.has_block_scales()) return "";
  const std::size_t version = lt::library().GetVersion();
  if (version < lt::kFirstWithBlockScales) {
    return concat(": scales per 128 columns need cuBLASLt 12.9 or later, found ", version / 10000,
                  ".", version / 100 % 100);
  }
  int device = 0, major = 0, minor = 0;
  XD_CUDA_CHECK(cudaGetDevice(&device));
  XD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  XD_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major == 9) return "";
  return concat(": scales per 128 columns need a device of compute capability 9.0, found ", major,
                ".", minor);
}

// Throws what check() throws, with the product that was not to be had.
void check(lt::Status status, const char* call, const ProductShape& shape) {
  if (status == lt::kSuccess) return;
  fail(status == lt::kNotSupported ? XD_ERROR_UNSUPPORTED : XD_ERROR_INTERNAL, "cublasLt", call,
       ": ", lt::library().GetStatusString(status), " for ", text_of(shape), needs_of(shape));
}

// An older library may take a mode that it does not know without a word.
void require_block_scales(const ProductShape& shape) {
  if (lt::library().GetVersion() < lt::kFirstWithBlockScales) {
    fail(XD_ERROR_UNSUPPORTED, text_of(shape), needs_of(shape));
  }
  if (shape.m % ProductShape::kBlockScaledRows != 0) {
    fail(XD_ERROR_UNSUPPORTED, text_of(shape), ": has ", shape.m, " rows, expected a multiple of ",
         ProductShape::kBlockScaledRows, " with scales per 128 columns");
  }
}

}  // namespace

std::string text_of(const ProductShape& s) {
  return concat("a product of [", s.m, ",", s.k, "]", s.transpose_a ? " (transposed)" : "",
                " and [", s.k, ",", s.n, "]", s.transpose_b ? " (transposed)" : "",
                ", types of cudaDataType ", static_cast<int>(s.a_type), ", ",
                static_cast<int>(s.b_type), " to ", static_cast<int>(s.d_type), ", rows ",
                s.a_pitch, ", ", s.b_pitch, ", ", s.d_pitch, " apart, epilogue ", s.epilogue,
                ", scale modes ", s.a_scale_mode, ", ", s.b_scale_mode);
}

const char* why_no_products() noexcept {
  static const std::string reason = [] {
    try {
      lt::library();
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    } catch (...) {
      return std::string("cuBLASLt could not be loaded");
    }
  }();
  return reason.c_str();
}

namespace {

// Handles that are not in use at the moment, by device; never destroyed.
struct HandlePool {
  std::mutex mutex;
  std::multimap<int, lt::Handle> idle;

  static HandlePool& instance() {
    static HandlePool& pool = *new HandlePool;
    return pool;
  }
};

}  // namespace

ProductLibrary::ProductLibrary() {
  XD_CUDA_CHECK(cudaGetDevice(&device_));
  {
    HandlePool& pool = HandlePool::instance();
    const std::lock_guard lock(pool.mutex);
    if (auto node = pool.idle.extract(device_)) {
      handle_ = node.mapped();
      return;
    }
  }
  XD_LT_CHECK(Create(&handle_));
}

ProductLibrary::~ProductLibrary() {
  HandlePool& pool = HandlePool::instance();
  const std::lock_guard lock(pool.mutex);
  try {
    pool.idle.emplace(device_, handle_);
  } catch (...) {  // no host memory for the pool: the handle is lost
  }
}

Product::Product(const ProductLibrary& library, const ProductShape& shape,
                 std::size_t workspace_bytes)
    : library_(&library), shape_(shape), workspace_bytes_(workspace_bytes) {
  try {
    describe();
    suggest();
  } catch (...) {
    release();
    throw;
  }
}

Product::Product(Product&& other) noexcept
    : library_(other.library_),
      shape_(other.shape_),
      workspace_bytes_(other.workspace_bytes_),
      operation_(std::exchange(other.operation_, nullptr)),
      first_(std::exchange(other.first_, nullptr)),
      second_(std::exchange(other.second_, nullptr)),
      d_(std::exchange(other.d_, nullptr)),
      candidates_(std::move(other.candidates_)),
      chosen_(other.chosen_) {}

Product::~Product() { release(); }

// Does not throw: where there is a product, the library has been found.
// NOLINTNEXTLINE(bugprone-exception-escape)
void Product::release() noexcept {
  if (operation_ != nullptr) lt::library().MatmulDescDestroy(operation_);
  for (const lt::Layout layout : {first_, second_, d_}) {
    if (layout != nullptr) lt::library().MatrixLayoutDestroy(layout);
  }
}

void Product::set(int attribute, const void* value, std::size_t bytes) {
  XD_LT_CHECK(MatmulDescSetAttribute(operation_, attribute, value, bytes));
}

// A mode that the library does not know may be an invalid value to it.
void Product::set_scale_mode(int attribute, int mode) {
  const lt::Status status =
      lt::library().MatmulDescSetAttribute(operation_, attribute, &mode, sizeof(mode));
  check(status == lt::kInvalidValue ? lt::kNotSupported : status, "MatmulDescSetAttribute", shape_);
}

// A row-major matrix [r,c] is a column-major one of c rows. op(B) is [k,n], so the first operand is
// [n,k] in columns, which is B as it is stored unless B is transposed.
void Product::describe() {
  const ProductShape& s = shape_;
  if (s.has_block_scales()) require_block_scales(s);
  XD_LT_CHECK(MatmulDescCreate(&operation_, s.compute, CUDA_R_32F));
  set(lt::kTransposeFirst, s.transpose_b ? lt::kTransposed : lt::kNotTransposed);
  set(lt::kTransposeSecond, s.transpose_a ? lt::kTransposed : lt::kNotTransposed);
  set(lt::kEpilogue, s.epilogue);
  const void* const somewhere = kSomewhere;
  if ((s.epilogue & lt::kEpilogueBias) != 0) {
    set(lt::kBiasType, static_cast<int>(s.bias_type));
    set(lt::kBiasPointer, somewhere);
  }
  if (s.b_scale_mode > 0) set_scale_mode(lt::kFirstScaleMode, s.b_scale_mode);
  if (s.b_scale_mode >= 0) set(lt::kFirstScalePointer, somewhere);
  if (s.a_scale_mode > 0) set_scale_mode(lt::kSecondScaleMode, s.a_scale_mode);
  if (s.a_scale_mode >= 0) set(lt::kSecondScalePointer, somewhere);
  if (s.fast_accumulate) set(lt::kFastAccumulate, std::int8_t{1});
  const auto layout = [](lt::Layout* made, cudaDataType_t type, std::int64_t rows,
                         std::int64_t columns, std::int64_t pitch) {
    XD_LT_CHECK(MatrixLayoutCreate(made, static_cast<int>(type), static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(columns), pitch));
  };
  layout(&first_, s.b_type, s.transpose_b ? s.k : s.n, s.transpose_b ? s.n : s.k, s.b_pitch);
  layout(&second_, s.a_type, s.transpose_a ? s.m : s.k, s.transpose_a ? s.k : s.m, s.a_pitch);
  layout(&d_, s.d_type, s.n, s.m, s.d_pitch);
}

void Product::suggest() {
  constexpr int kMost = 16;
  lt::Preference preference = nullptr;
  XD_LT_CHECK(MatmulPreferenceCreate(&preference));
  std::array<lt::Suggestion, kMost> found{};
  int count = 0;
  const auto ask = [&] {
    XD_LT_CHECK(MatmulPreferenceSetAttribute(preference, lt::kMaxWorkspaceBytes, &workspace_bytes_,
                                             sizeof(workspace_bytes_)));
    XD_LT_CHECK(MatmulPreferenceSetAttribute(preference, lt::kReductionSchemes,
                                             &lt::kReduceInComputeType,
                                             sizeof(lt::kReduceInComputeType)));
    // Tensors of callers begin at multiples of 16 bytes, and so do rows of ranks inside them.
    constexpr std::uint32_t kAlignment = 16;
    for (const int attribute : {lt::kMinAlignmentFirst, lt::kMinAlignmentSecond, lt::kMinAlignmentC,
                                lt::kMinAlignmentD}) {
      XD_LT_CHECK(
          MatmulPreferenceSetAttribute(preference, attribute, &kAlignment, sizeof(kAlignment)));
    }
    const lt::Status status =
        lt::library().MatmulAlgoGetHeuristic(library_->handle(), operation_, first_, second_, d_,
                                             d_, preference, kMost, found.data(), &count);
    // A combination that it does not know at all may be an invalid value to it.
    check(status == lt::kInvalidValue ? lt::kNotSupported : status, "MatmulAlgoGetHeuristic",
          shape_);
  };
  try {
    ask();
  } catch (...) {
    lt::library().MatmulPreferenceDestroy(preference);
    throw;
  }
  lt::library().MatmulPreferenceDestroy(preference);
  for (int i = 0; i < count; ++i) {
    const lt::Suggestion& s = found[static_cast<std::size_t>(i)];
    if (s.state == lt::kSuccess) candidates_.push_back(s.algorithm);
  }
  if (candidates_.empty()) {
    fail(XD_ERROR_UNSUPPORTED, "cuBLASLt has no algorithm within ", workspace_bytes_,
         " bytes of working memory for ", text_of(shape_), needs_of(shape_));
  }
  chosen_ = candidates_.front();
}

bool Product::choose(const lt::Algorithm& algorithm) {
  lt::Suggestion checked{};
  const lt::Status status = lt::library().MatmulAlgoCheck(library_->handle(), operation_, first_,
                                                          second_, d_, d_, &algorithm, &checked);
  if (status != lt::kSuccess || checked.workspace_bytes > workspace_bytes_) return false;
  chosen_ = algorithm;
  return true;
}

void Product::run(const ProductPointers& p, float alpha, float beta, void* workspace,
                  cudaStream_t stream) {
  if ((shape_.epilogue & lt::kEpilogueBias) != 0) set(lt::kBiasPointer, p.bias);
  if (shape_.b_scale_mode >= 0) set(lt::kFirstScalePointer, p.b_scale);
  if (shape_.a_scale_mode >= 0) set(lt::kSecondScalePointer, p.a_scale);
  check(lt::library().Matmul(library_->handle(), operation_, &alpha, p.b, first_, p.a, second_,
                             &beta, p.c != nullptr ? p.c : p.d, d_, p.d, d_, &chosen_, workspace,
                             workspace_bytes_, stream),
        "Matmul", shape_);
}

#undef XD_LT_CHECK

}  // namespace xd::cuda
