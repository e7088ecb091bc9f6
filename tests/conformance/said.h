// Words that an error's text must have.
#pragma once

#include <crossdock/status.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace xd::test {

using Words = std::vector<std::string>;

inline void expect_words(const std::string& text, const Words& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "expected '" << word << "' in: " << text;
  }
}

// Of the error that this thread's last call has returned.
inline void expect_said(const std::string& words) { expect_words(xd_last_error(), {words}); }

inline void expect_error(xd_status status, xd_status expected, const std::string& words) {
  EXPECT_EQ(status, expected) << xd_last_error();
  expect_said(words);
}

}  // namespace xd::test
