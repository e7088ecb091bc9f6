// In builds that found no headers of libfabric.
#include "base/error.h"
#include "net/fabric/fabric.h"

namespace xd::net {
namespace {

[[noreturn]] void fail_unbuilt() {
  fail(XD_ERROR_UNSUPPORTED,
       "this library was built without libfabric (Debian and Ubuntu: apt-get install "
       "libfabric-dev, version 1.17 or later, and build again)");
}

}  // namespace

class FabricLibrary {};

std::shared_ptr<const FabricLibrary> load_fabric(const std::string&) { fail_unbuilt(); }
std::string fabric_version(const FabricLibrary&) { fail_unbuilt(); }
std::vector<Adapter> fabric_adapters(const FabricLibrary&, const std::string&, Where,
                                     const std::filesystem::path&) {
  fail_unbuilt();
}
std::unique_ptr<Engine> open_fabric(std::shared_ptr<const FabricLibrary>, const Adapter&) {
  fail_unbuilt();
}

}  // namespace xd::net
