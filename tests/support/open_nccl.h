// Finds NCCL for tests and for the benchmark, which are built without it.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

namespace xd::test {

// The folder of the library in Python's package nvidia-nccl; empty if there is none.
inline std::string nccl_folder_of_python() {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(
      ::popen("python3 -c 'import importlib.util as u; "
              "print(list(u.find_spec(\"nvidia.nccl\").submodule_search_locations)[0])' "
              "2>/dev/null",
              "re"),
      ::pclose);
  char line[4096] = {};
  if (!pipe || std::fgets(line, sizeof(line), pipe.get()) == nullptr) return "";
  const std::string folder(line);
  return folder.substr(0, folder.find('\n')) + "/lib";
}

// Opens libnccl.so.2 where XD_NCCL_LIB says (the library or its folder), or where the loader finds
// it, or in Python's package. Returns a handle for dlsym(), or null.
inline void* open_nccl() {
  constexpr const char* kName = "libnccl.so.2";
  const auto open = [](const std::string& path) {
    return ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  };
  if (const char* const path = std::getenv("XD_NCCL_LIB"); path != nullptr && *path != '\0') {
    return open(std::filesystem::is_directory(path) ? std::string(path) + "/" + kName : path);
  }
  if (void* const found = open(kName)) return found;
  const std::string folder = nccl_folder_of_python();
  return folder.empty() ? nullptr : open(folder + "/" + kName);
}

}  // namespace xd::test
