#include "net/fabric/library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "base/error.h"
#include "net/fabric/abi.h"

namespace xd::net {
namespace {

// The loader's path, and where AWS installs it. A libfabric that the process has loaded already is
// found by its name: there must not be two.
constexpr const char* kNames[] = {"libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1",
                                  "/opt/amazon/efa/lib/libfabric.so.1"};

void* open(const std::string& name) {
  void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) return handle;
  const char* const reason = ::dlerror();
  fail(XD_ERROR_UNSUPPORTED, "libfabric is missing: ", reason != nullptr ? reason : name,
       " (Debian and Ubuntu: apt-get install libfabric1)");
}

std::string first_that_opens() {
  for (const char* name : kNames) {
    if (void* const handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
      ::dlclose(handle);
      return name;
    }
  }
  return kNames[0];
}

}  // namespace

// By the versions that 1.17 has of them: a newer library has newer ones as well, which fill longer
// structs, and those would be found without.
FabricLibrary::FabricLibrary(const std::string& name)
    : name_(name.empty() ? first_that_opens() : name) {
  void* const handle = open(name_);
  look_up(handle, "fi_getinfo", "FABRIC_1.3", getinfo);
  look_up(handle, "fi_freeinfo", "FABRIC_1.3", freeinfo);
  look_up(handle, "fi_dupinfo", "FABRIC_1.3", dupinfo);
  look_up(handle, "fi_fabric", "FABRIC_1.1", fabric);
  look_up(handle, "fi_strerror", "FABRIC_1.0", strerror);
  look_up(handle, "fi_version", "FABRIC_1.0", version);
  if (version() < FI_VERSION(1, 17)) {
    fail(XD_ERROR_UNSUPPORTED, name_, " is libfabric ", fabric_version(*this),
         ", expected 1.17 or later");
  }
}

template <class Function>
void FabricLibrary::look_up(void* handle, const char* symbol, const char* version_of_symbol,
                            Function& found) const {
  found = reinterpret_cast<Function>(::dlvsym(handle, symbol, version_of_symbol));
  if (found == nullptr) {
    fail(XD_ERROR_UNSUPPORTED, name_, " has no ", symbol, " of version ", version_of_symbol,
         ", expected libfabric 1.17 or later (Debian and Ubuntu: apt-get install libfabric1)");
  }
}

void FabricLibrary::check(std::int64_t result, const char* call) const {
  if (result < 0) fail(XD_ERROR_SYSTEM, call, ": ", text_of(result), " (libfabric)");
}

std::string FabricLibrary::text_of(std::int64_t error) const {
  return strerror(static_cast<int>(std::abs(error)));
}

std::shared_ptr<const FabricLibrary> load_fabric(const std::string& name) {
  return std::make_shared<FabricLibrary>(name);
}

std::string fabric_version(const FabricLibrary& library) {
  const std::uint32_t version = library.version();
  return concat(FI_MAJOR(version), ".", FI_MINOR(version));
}

}  // namespace xd::net
