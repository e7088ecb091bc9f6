// main() of GoogleTest programs that crossdock-run starts: --executor=cpu or cuda beside
// GoogleTest's options. A launch that this machine cannot run says why and ends with kSkipped.
#include "support/gtest_main.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "support/instruments.h"

namespace xd::test {
namespace {

std::unique_ptr<World> the_world;

// All processes of a launch run the same tests. One of them prints everything, and the others only
// their failures.
class FailuresOnly final : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override { test_ = &test; }
  void OnTestEnd(const testing::TestInfo&) override { test_ = nullptr; }
  // GoogleTest holds its lock here, so it must not be called.
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "%s:%d: %s.%s\n%s\n", result.file_name() ? result.file_name() : "?",
                 result.line_number(), test_ ? test_->test_suite_name() : "?",
                 test_ ? test_->name() : "?", result.message());
    std::fflush(stderr);
  }

  const testing::TestInfo* test_ = nullptr;  // the test that runs
};

std::string executor_option(int argc, char** argv) {
  constexpr std::string_view kOption = "--executor=";
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with(kOption)) return std::string(argument.substr(kOption.size()));
  }
  return "cpu";
}

int run_tests(int argc, char** argv) {
  the_world = std::make_unique<World>(executor_option(argc, argv));
  testing::InitGoogleTest(&argc, argv);
  if (!world().reports()) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly);  // owned by GoogleTest
  }
  const int result = RUN_ALL_TESTS();
  the_world.reset();
  return result;
}

}  // namespace

World& world() { return *the_world; }

void on_every_rank(const std::function<void(Rank&)>& body) {
  for (const RankFailure& failure : world().run(body)) {
    ADD_FAILURE() << "rank " << failure.rank << ": " << failure.text;
  }
}

}  // namespace xd::test

int main(int argc, char** argv) {
  try {
    xd::test::take_instruments(argv);
    return xd::test::run_tests(argc, argv);
  } catch (const xd::test::Unavailable& missing) {
    std::fprintf(stderr, "skipped: %s\n", missing.what());
    return xd::test::kSkipped;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 2;
  }
}
