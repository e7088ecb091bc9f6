// A GoogleTest program that is also the rank processes that its tests start. --executor=cpu or cuda
// beside GoogleTest's options.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "faults/rank_program.h"
#include "support/gtest_main.h"
#include "support/instruments.h"
#include "support/memory.h"

int main(int argc, char** argv) {
  xd::test::take_instruments(argv);
  if (xd::test::run_if_rank_program(std::vector<std::string>(argv + 1, argv + argc))) return 0;
  testing::InitGoogleTest(&argc, argv);
  const std::string option = "--executor=";
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]).starts_with(option)) {
      xd::test::set_executor(std::string(argv[i]).substr(option.size()));
    }
  }
  try {
    xd::test::device_count(xd::test::executor());
  } catch (const xd::test::Unavailable& missing) {
    std::fprintf(stderr, "skipped: %s\n", missing.what());
    return xd::test::kSkipped;
  }
  return RUN_ALL_TESTS();
}
