// A fuzz target is two functions: LLVMFuzzerTestOneInput, and seeds(), valid inputs to start from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace xd::fuzz {

std::vector<std::vector<std::byte>> seeds();

}  // namespace xd::fuzz
