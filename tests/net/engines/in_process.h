// An engine between ranks that are threads of one process, for tests: a put is a copy, made at
// once. A rank whose engine is destroyed is gone, and puts to it fail.
#pragma once

#include <memory>

#include "net/engine.h"

namespace xd::net {

// Makes an engine for each rank; engine r is rank r's. Peers are connected by their ranks'
// addresses, as with any engine.
std::vector<std::unique_ptr<Engine>> make_in_process_engines(int ranks);

}  // namespace xd::net
