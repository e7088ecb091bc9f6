// The facts about a plan's bytes that tests through the C API know. tests/unit/plan_test.cc holds
// it against the library's own definition.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xd::test {

// Of the header, to its last byte: any wrong bit in it is found.
inline constexpr std::size_t kPlanHeaderBytes = 176;
// A 32-bit number that tells how to read the others.
inline constexpr std::size_t kPlanVersionAt = 8;
inline constexpr std::uint32_t kPlanVersion = 3;
inline constexpr std::uint32_t kPlanHasParts = 1 << 16;  // set in it where the plan has parts
inline constexpr std::size_t kPlanPartsAt = 45;          // of such plans, the lowest byte of P

}  // namespace xd::test
