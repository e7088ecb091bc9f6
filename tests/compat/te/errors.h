// Errors as callers of TransformerEngine's functions catch them.
#pragma once

#include <crossdock/compat/te_tensor.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>

#include "conformance/said.h"

namespace xd::test {

struct Thrown {
  xd_status status = XD_SUCCESS;
  std::string text;
};

// The error of a call. On CUDA an error that the device has found is told by the next call.
inline Thrown thrown_by(const std::function<void()>& call,
                        const std::function<void()>& next = nullptr) {
  try {
    call();
    if (next) next();
  } catch (const std::runtime_error& error) {
    const auto* const told = dynamic_cast<const crossdock::te::Error*>(&error);
    EXPECT_NE(told, nullptr) << error.what();
    return {told != nullptr ? told->status() : XD_ERROR_INTERNAL, error.what()};
  }
  return {};
}

inline void expect_error(const Thrown& thrown, xd_status status, const std::string& part) {
  EXPECT_EQ(thrown.status, status) << thrown.text;
  expect_words(thrown.text, {part});
}

}  // namespace xd::test
