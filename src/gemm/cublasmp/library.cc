#include "gemm/cublasmp/library.h"

#include <dlfcn.h>

#include "base/error.h"

namespace xd::gemm::cublasmp {
namespace {

constexpr int kLeastNccl = 22902;  // 2.29.2, as cuBLASMp 0.8.0 and later ask for

// Closed unless kept: a library that cannot be used would otherwise stay, with its NCCL.
class Opened {
 public:
  // Functions of NCCL are bound when they are first called, so that one which an older NCCL lacks
  // does not hide which version was found.
  explicit Opened(const char* name) : name_(name), handle_(::dlopen(name, RTLD_LAZY | RTLD_LOCAL)) {
    if (handle_ != nullptr) return;
    const char* reason = ::dlerror();
    fail(XD_ERROR_UNSUPPORTED, "cuBLASMp is missing: no ", name, " (",
         reason != nullptr ? reason : "not found", ")");
  }
  ~Opened() {
    if (handle_ != nullptr) ::dlclose(handle_);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  // Also finds the functions of the libraries that it was linked with.
  template <class Function>
  void look_up(const char* function, Function& found) const {
    found = reinterpret_cast<Function>(::dlsym(handle_, function));
    if (found == nullptr) {
      fail(XD_ERROR_UNSUPPORTED, name_, " has no ", function,
           ": expected cuBLASMp 0.8.0 or later, with NCCL ", nccl_version_text(kLeastNccl),
           " or later");
    }
  }
  void keep() { handle_ = nullptr; }

 private:
  const char* const name_;
  void* handle_;
};

void require_nccl(const char* name, const nccl::Functions& nccl) {
  int version = 0;
  nccl.check(nccl.GetVersion(&version), "GetVersion");
  if (version < kLeastNccl) {
    fail(XD_ERROR_UNSUPPORTED, name, " needs libnccl.so.2 of NCCL ", nccl_version_text(kLeastNccl),
         " or later, found NCCL ", nccl_version_text(version));
  }
}

}  // namespace

void mp::Functions::check(Status status, const char* call) const {
  if (status == kSuccess) return;
  fail(status == kNotSupported ? XD_ERROR_UNSUPPORTED : XD_ERROR_INTERNAL, "cublasMp", call, ": ",
       GetStatusString(status));
}

void nccl::Functions::check(Result result, const char* call) const {
  if (result == 0) return;
  fail(XD_ERROR_SYSTEM, "nccl", call, ": ", GetErrorString(result), " (NCCL result ", result, ")");
}

Library find_library(const char* name) {
  Opened opened(name);
  Library found;
  // The version of NCCL comes first: it explains what else is missing.
  opened.look_up("ncclGetErrorString", found.nccl.GetErrorString);
  opened.look_up("ncclGetVersion", found.nccl.GetVersion);
  require_nccl(name, found.nccl);
#define XD_NCCL_FUNCTION(function, result, arguments) \
  opened.look_up("nccl" #function, found.nccl.function);
  XD_NCCL_FUNCTIONS
#undef XD_NCCL_FUNCTION
#define XD_MP_FUNCTION(function, result, arguments) \
  opened.look_up("cublasMp" #function, found.mp.function);
  XD_MP_FUNCTIONS
#undef XD_MP_FUNCTION
  found.mp.check(found.mp.GetVersion(&found.version), "GetVersion");
  opened.keep();
  return found;
}

const Library& library() {
  static const Library found = find_library("libcublasmp.so.0");
  return found;
}

const char* why_no_library() noexcept {
  static const std::string reason = [] {
    try {
      library();
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    } catch (...) {
      return std::string("cuBLASMp could not be loaded");
    }
  }();
  return reason.c_str();
}

std::string version_text(int cublasmp) {
  return concat(cublasmp / 10000, ".", cublasmp / 100 % 100, ".", cublasmp % 100);
}

std::string nccl_version_text(int nccl) {
  return concat(nccl / 10000, ".", nccl / 100 % 100, ".", nccl % 100);
}

}  // namespace xd::gemm::cublasmp
