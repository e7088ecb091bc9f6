// The errors that the library's own functions throw.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "base/error.h"
#include "conformance/said.h"

namespace xd::test {

template <class Body>
std::optional<Error> error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

inline void expect_error(const std::optional<Error>& error, xd_status status,
                         std::initializer_list<std::string> words) {
  ASSERT_TRUE(error) << "expected an error with: " << testing::PrintToString(Words(words));
  EXPECT_EQ(error->status(), status) << error->text();
  expect_words(error->text(), words);
}
inline void expect_error(const std::optional<Error>& error, xd_status status,
                         const std::string& words) {
  expect_error(error, status, {words});
}

// The text of the error of `body`, which has this status; empty if there is none.
template <class Body>
std::string refusal_of(Body&& body, xd_status status = XD_ERROR_INVALID_ARGUMENT) {
  const std::optional<Error> error = error_of(body);
  if (!error) return "";
  EXPECT_EQ(error->status(), status) << error->text();
  return error->text();
}

}  // namespace xd::test
