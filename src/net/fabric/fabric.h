// An engine on libfabric, which is found at run time: TCP between any hosts, and the networks for
// which libfabric has a provider that can do what is needed. Only TCP has been run by us.
//
// Data are neither encrypted nor authenticated: keys of regions are random, and so is what tags are
// checked by (tag_seal.h); whoever has listened to the network and reaches the port may write into
// regions. Over TCP peers' hosts alone reach the port, and nobody after shut() (door.h).
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "net/engine.h"
#include "net/fabric/adapter.h"

namespace xd::net {

// A libfabric that this process has loaded. It is never unloaded.
class FabricLibrary;

// `name` is a file, or a name that the loader looks for; empty = wherever libfabric.so.1 is usually
// found. Throws UNSUPPORTED with what is missing and how to install it.
std::shared_ptr<const FabricLibrary> load_fabric(const std::string& name = {});
std::string fabric_version(const FabricLibrary& library);  // "1.17"

// The adapters that can do what the engine needs, those of the best provider first; an adapter with
// several providers comes once for each. `control` is the numeric IP address at which ranks reach
// one another already: of an adapter's addresses this one is taken, else one of its family.
enum class Where {
  at_address,  // the interface with the address `control`, and adapters behind it
  anywhere,    // of this machine; `control` may be empty
};
std::vector<Adapter> fabric_adapters(const FabricLibrary& library, const std::string& control,
                                     Where where, const std::filesystem::path& sysfs = kSysfs);

// The best provider that all ranks have; lists are by rank. Throws MISMATCH, on all ranks alike,
// with what each has.
std::string agree_on_provider(std::span<const std::vector<std::string>> of_ranks);

// Throws SYSTEM with the call of libfabric that failed. May take a second.
std::unique_ptr<Engine> open_fabric(std::shared_ptr<const FabricLibrary> library,
                                    const Adapter& adapter);

}  // namespace xd::net
