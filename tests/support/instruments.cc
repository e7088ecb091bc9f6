#include "support/instruments.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace xd::test {
namespace {

// The folder of the tests' library, which is beside the library that this program has.
std::string folder_of_instruments() {
  Dl_info info{};
  void* const function = ::dlsym(RTLD_DEFAULT, "xd_comm_create");
  if (function == nullptr || ::dladdr(function, &info) == 0)
    throw std::runtime_error("this program has no library crossdock");
  const std::string library = info.dli_fname;
  return library.substr(0, library.rfind('/')) + "/instrumented";
}

}  // namespace

void take_instruments(char** arguments) {
  const char* const wish = std::getenv("XD_NET_TEST");
  if (wish == nullptr || *wish == '\0') return;
  if (::dlsym(RTLD_DEFAULT, "xd_test_instruments") != nullptr) return;
  const char* const set = std::getenv("LD_LIBRARY_PATH");
  const std::string folder = folder_of_instruments(), others = set != nullptr ? set : "";
  if (others.substr(0, others.find(':')) == folder)
    throw std::runtime_error("XD_NET_TEST is set, and " + folder + " has no library of the tests");
  const std::string path = others.empty() ? folder : folder + ":" + others;
  ::setenv("LD_LIBRARY_PATH", path.c_str(), 1);
  ::execv("/proc/self/exe", arguments);
  throw std::runtime_error(std::string("begin anew: ") + std::strerror(errno));
}

}  // namespace xd::test
