// The library's environment variables, read once.
#pragma once

#include <string>

namespace xd {

struct Env {
#define XD_ENV_TEXT(field, variable, default_value, meaning)          std::string field;
#define XD_ENV_NUMBER(field, variable, default_value, least, meaning) int field;
#include "base/env.def"
#undef XD_ENV_TEXT
#undef XD_ENV_NUMBER
};

// The least time, beside -1, after which a machine may be taken for lost.
inline constexpr int kLeastSilenceMs = 1000;

// The variables' values in this process.
const Env& env();

// Reads the variables. A bad value, whatever is bad about it, is ignored with one warning: the
// variable keeps its default.
Env read_env();

// The timeout that a config means: milliseconds, where 0 stands for the environment's. Throws
// INVALID_ARGUMENT.
int resolve_timeout(int timeout_ms);

}  // namespace xd
