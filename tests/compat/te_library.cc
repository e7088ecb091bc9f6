// A shared library that uses the group of its process.
#include "compat/te_library.h"

#include <crossdock/compat/te_ep.h>

namespace xd::test {

xd_ep_group* group_seen_by_library() { return crossdock::te::ep_group(); }

}  // namespace xd::test
