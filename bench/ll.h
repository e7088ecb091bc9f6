// crossdock-bench ll: low-latency dispatch and combine over a range of batch sizes, beside the
// layout that takes three calls.
#pragma once

#include <string>
#include <vector>

namespace bench {

const char* ll_help();

// Returns the exit code: 0 if all was measured and right. Throws std::invalid_argument naming the
// option.
int run_ll_command(const std::vector<std::string>& arguments);

}  // namespace bench
