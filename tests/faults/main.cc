// A GoogleTest program that is also the rank processes that its tests start.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "faults/rank_program.h"

int main(int argc, char** argv) {
  if (xd::test::run_if_rank_program(std::vector<std::string>(argv + 1, argv + argc))) return 0;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
