// The library's environment variables, read once.
#pragma once

#include <string>

namespace xd {

struct Env {
#define XD_ENV(field, type, variable, default_value, meaning) type field;
#include "base/env.def"
#undef XD_ENV
};

// Values of this process. A variable that does not parse keeps its default, with one warning.
const Env& env();

// A timeout as configs have it: milliseconds, 0 = the environment's. Throws INVALID_ARGUMENT.
int resolve_timeout(int timeout_ms);

}  // namespace xd
