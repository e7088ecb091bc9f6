#include "gemm/cublasmp/library.h"

#include <dlfcn.h>

#include "base/error.h"

namespace xd::gemm::cublasmp {
namespace {

// As cuBLASMp's packages ask for. A cuBLASLt of CUDA 12 belongs to another build of cuBLASMp.
constexpr int kLeast = 800, kLeastNccl = 22902;
constexpr int kFirstWithNewCublasLt = 1000, kNewCublasLt = 130100, kFirstOfCuda13 = 130000;

// Closed unless kept: a library that cannot be used would otherwise stay, with its NCCL.
class Opened {
 public:
  Opened(const char* name, int mode) : name_(name), handle_(::dlopen(name, mode | RTLD_LOCAL)) {
    if (handle_ != nullptr) return;
    const char* const text = ::dlerror();
    if (text != nullptr) reason_ = text;
  }
  ~Opened() {
    if (handle_ != nullptr) ::dlclose(handle_);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  explicit operator bool() const { return handle_ != nullptr; }
  // The loader's reason why there is no library.
  const std::string& reason() const { return reason_; }

  // Also finds the functions of the libraries that it was linked with.
  template <class Function>
  bool find(const char* function, Function& found) const {
    found = reinterpret_cast<Function>(::dlsym(handle_, function));
    return found != nullptr;
  }
  template <class Function>
  void look_up(const char* function, Function& found) const {
    if (find(function, found)) return;
    fail(XD_ERROR_UNSUPPORTED, name_, " has no ", function, ": expected cuBLASMp ",
         version_text(kLeast), " or later, with NCCL ", version_text(kLeastNccl), " or later");
  }
  void keep() { handle_ = nullptr; }

 private:
  const char* const name_;
  void* handle_;
  std::string reason_;
};

void require_nccl(const char* name, const Opened& opened, nccl::Functions& nccl) {
  opened.look_up("ncclGetErrorString", nccl.GetErrorString);
  opened.look_up("ncclGetVersion", nccl.GetVersion);
  int version = 0;
  nccl.check(nccl.GetVersion(&version), "GetVersion");
  if (version < kLeastNccl) {
    fail(XD_ERROR_UNSUPPORTED, name, " needs libnccl.so.2 of NCCL ", version_text(kLeastNccl),
         " or later, found NCCL ", version_text(version));
  }
}

// Returns the version of cuBLASMp.
int require_versions(const char* name, const Opened& opened, mp::Functions& mp) {
  opened.look_up("cublasMpGetStatusString", mp.GetStatusString);
  opened.look_up("cublasMpGetVersion", mp.GetVersion);
  int version = 0;
  mp.check(mp.GetVersion(&version), "GetVersion");
  if (version < kLeast) {
    fail(XD_ERROR_UNSUPPORTED, name, " is cuBLASMp ", version_text(version), ", expected ",
         version_text(kLeast), " or later");
  }
  std::size_t (*get_version)() = nullptr;
  opened.look_up("cublasLtGetVersion", get_version);
  const auto cublaslt = static_cast<int>(get_version());
  if (version >= kFirstWithNewCublasLt && cublaslt >= kFirstOfCuda13 && cublaslt < kNewCublasLt) {
    fail(XD_ERROR_UNSUPPORTED, "cuBLASMp ", version_text(version),
         " needs libcublasLt.so.13 of cuBLASLt ", version_text(kNewCublasLt),
         " or later, found cuBLASLt ", version_text(cublaslt));
  }
  return version;
}

// The loader says which function is not there, and not that it is an old library which lacks it.
[[noreturn]] void fail_to_open(const char* name, const std::string& reason) {
  // A library whose functions are bound when they are first called opens without them.
  if (const Opened lazy(name, RTLD_LAZY); lazy) {
    nccl::Functions nccl;
    mp::Functions mp;
    require_nccl(name, lazy, nccl);
    require_versions(name, lazy, mp);
  }
  if (reason.starts_with(concat(name, ": cannot open"))) {
    fail(XD_ERROR_UNSUPPORTED, "cuBLASMp is missing: no ", name, " (", reason, ")");
  }
  fail(XD_ERROR_UNSUPPORTED, name, " cannot be loaded: ", reason);
}

}  // namespace

void mp::Functions::check(Status status, const char* call) const {
  if (status == kSuccess) return;
  const bool refused = status == kArchitectureMismatch || status == kNotSupported;
  fail(refused ? XD_ERROR_UNSUPPORTED : XD_ERROR_INTERNAL, "cublasMp", call, ": ",
       GetStatusString(status));
}

void mp::Functions::check_product(Status status, const char* call) const {
  if (status != kInvalidValue) return check(status, call);
  fail(XD_ERROR_UNSUPPORTED, "cublasMp", call, ": ", GetStatusString(status));
}

void nccl::Functions::check(Result result, const char* call) const {
  if (result == kSuccess) return;
  fail(XD_ERROR_SYSTEM, "nccl", call, ": ", GetErrorString(result), " (NCCL result ", result, ")");
}

// All functions are bound at once: one that is missing would otherwise end the process when it is
// first called.
Library find_library(const char* name) {
  Opened opened(name, RTLD_NOW);
  if (!opened) fail_to_open(name, opened.reason());
  Library found;
  // Versions come first: they explain what else is missing.
  require_nccl(name, opened, found.nccl);
  found.version = require_versions(name, opened, found.mp);
#define XD_NCCL_FUNCTION(function, result, arguments) \
  opened.look_up("nccl" #function, found.nccl.function);
  XD_NCCL_FUNCTIONS
#undef XD_NCCL_FUNCTION
#define XD_MP_FUNCTION(function, result, arguments) \
  opened.look_up("cublasMp" #function, found.mp.function);
  XD_MP_FUNCTIONS
#undef XD_MP_FUNCTION
  opened.find("ncclCommRevoke", found.nccl.CommRevoke);
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

std::string version_text(int version) {
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace xd::gemm::cublasmp
