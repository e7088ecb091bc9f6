// The functions of libfabric that are looked up; all others are called through tables in the
// objects that these return. Types are those of its headers, of whatever version: what 1.17 has of
// a struct, later ones have at the same places, and more behind it (abi.h).
#pragma once

#include <rdma/fabric.h>

#include <memory>
#include <string>

#include "net/fabric/fabric.h"

namespace xd::net {

class FabricLibrary {
 public:
  explicit FabricLibrary(const std::string& name);

  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;
  decltype(&::fi_version) version = nullptr;

  // Throws SYSTEM with call and reason if the result is negative, as libfabric's errors are.
  void check(std::int64_t result, const char* call) const;
  std::string text_of(std::int64_t error) const;  // of a number of either sign

 private:
  template <class Function>
  void look_up(void* handle, const char* symbol, const char* version, Function& found) const;

  std::string name_;
};

// A list of libfabric's infos, freed with the object.
struct FreeInfo {
  decltype(&::fi_freeinfo) free;
  void operator()(fi_info* info) const { free(info); }
};
using Infos = std::unique_ptr<fi_info, FreeInfo>;

// All ways of this machine to do what the engine needs, from the interface with this address; empty
// = from anywhere. `provider` = one of them; empty = any.
Infos find_infos(const FabricLibrary& library, const std::string& address,
                 const std::string& provider);
// The first of them that is this adapter's; null if there is none.
Infos find_info(const FabricLibrary& library, const Adapter& adapter);

}  // namespace xd::net
