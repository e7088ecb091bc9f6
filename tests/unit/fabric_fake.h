// A library in libfabric's place: it tells of the adapters that a test has given it, notes what it
// is asked for, and opens none of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace xd::test {

struct FakeAdapter {
  std::string provider, fabric, domain;
  std::string device{};   // of its NIC; empty = there is none in the info
  std::string address{};  // numeric IP; empty = addresses of another kind
  std::string pci{};      // "0000:17:00.0"; empty = the provider does not tell
  int link = 0;           // fi_link_state
  std::uint64_t speed = 0;
};

struct FabricFake {
  std::vector<FakeAdapter> adapters;
  std::vector<std::string> calls;
};

// By the name `fabric_fake`, from the library.
using FabricFakeFunction = FabricFake*();

}  // namespace xd::test
