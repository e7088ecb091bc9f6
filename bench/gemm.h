// crossdock-bench gemm: products with their transfer hidden behind them, beside the same two steps
// one after the other.
#pragma once

#include <string>
#include <vector>

namespace bench {

const char* gemm_help();

// Returns the exit code: 0 if all was measured and right. Throws std::invalid_argument naming the
// option.
int run_gemm_command(const std::vector<std::string>& arguments);

}  // namespace bench
