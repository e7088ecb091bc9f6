// What a shared library, compiled by itself with hidden symbols, sees of its process.
#pragma once

#include <crossdock/ep.h>

namespace xd::test {

// The group behind TransformerEngine's functions.
XD_API xd_ep_group* group_seen_by_library();

}  // namespace xd::test
