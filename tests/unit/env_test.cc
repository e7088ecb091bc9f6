// The library's environment variables: bad values are ignored with a warning, all alike.
#include "base/env.h"

#include <cstdlib>

#include "unit/net_support.h"

namespace xd::test {
namespace {

struct Value {
  const char* variable;
  const char* text;
  bool good;
};

class EnvValues : public testing::TestWithParam<Value> {
 protected:
  EnvValues() {
    for (const char* name : {"XD_LOG", "XD_TIMEOUT_MS", "XD_SPIN_US", "XD_SILENCE_MS"})
      ::unsetenv(name);
  }
};
INSTANTIATE_TEST_SUITE_P(
    Each, EnvValues,
    testing::Values(Value{"XD_TIMEOUT_MS", "1", true}, Value{"XD_TIMEOUT_MS", "", true},
                    Value{"XD_TIMEOUT_MS", "0", false}, Value{"XD_TIMEOUT_MS", "-5", false},
                    Value{"XD_TIMEOUT_MS", "9999999999", false},
                    Value{"XD_TIMEOUT_MS", "10s", false}, Value{"XD_SPIN_US", "0", true},
                    Value{"XD_SPIN_US", "-1", true}, Value{"XD_SPIN_US", "-2", false},
                    Value{"XD_SPIN_US", "much", false}, Value{"XD_SILENCE_MS", "1000", true},
                    Value{"XD_SILENCE_MS", "-1", true}, Value{"XD_SILENCE_MS", "0", false},
                    Value{"XD_SILENCE_MS", "999", false}, Value{"XD_SILENCE_MS", "-2", false},
                    Value{"XD_LOG", "comm,plan", true}, Value{"XD_LOG", "all", true},
                    Value{"XD_LOG", "everything", false}));

TEST_P(EnvValues, BadOnesAreIgnoredWithOneWarning) {
  const auto [variable, text, good] = GetParam();
  const Env defaults = read_env();
  ::setenv(variable, text, 1);
  LogCapture log;
  const Env values = read_env();
  const auto lines = log.end();
  ::unsetenv(variable);
  if (good) {
    EXPECT_TRUE(lines.empty()) << lines[0];
    return;
  }
  ASSERT_EQ(lines.size(), 1U) << variable << "=" << text;
  EXPECT_TRUE(lines[0].starts_with(
      concat("crossdock: warning: ", variable, "=", text, " is ignored: expected ")))
      << lines[0];
  EXPECT_EQ(values.timeout_ms, defaults.timeout_ms);
  EXPECT_EQ(values.spin_us, defaults.spin_us);
  EXPECT_EQ(values.silence_ms, defaults.silence_ms);
  EXPECT_EQ(values.log, defaults.log);
}

TEST(EnvNumbers, SayTheirWholeRange) {
  ::setenv("XD_TIMEOUT_MS", "2147483648", 1);
  LogCapture log;
  read_env();
  const auto lines = log.end();
  ::unsetenv("XD_TIMEOUT_MS");
  ASSERT_EQ(lines.size(), 1U);
  expect_words(lines[0], {"expected a whole number from 1 to 2147483647;"});
}

TEST(EnvLog, KeepsTheTopicsThatThereAre) {
  ::setenv("XD_LOG", "plan,nonsense,comm", 1);
  LogCapture log;
  EXPECT_EQ(read_env().log, "plan,comm");
  EXPECT_EQ(log.end().size(), 1U);
  ::unsetenv("XD_LOG");
}

TEST(EnvTimeout, OfZeroIsTheEnvironments) {
  EXPECT_EQ(resolve_timeout(0), env().timeout_ms);
  EXPECT_EQ(resolve_timeout(7), 7);
  expect_error(error_of([] { resolve_timeout(-1); }), XD_ERROR_INVALID_ARGUMENT,
               "config.timeout_ms = -1");
}

}  // namespace
}  // namespace xd::test
