// The reference's own number formats, against facts from their definitions.
#include "conformance/numeric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace xd::test {
namespace {

class Numeric : public testing::TestWithParam<Format> {};

TEST_P(Numeric, EveryFiniteNumberSurvivesARoundTrip) {
  const Format format = GetParam();
  for (std::uint32_t magnitude = 0; magnitude <= format.max_finite(); ++magnitude) {
    EXPECT_EQ(encode(decode(magnitude, format), format), magnitude);
    const std::uint32_t negative = magnitude | format.sign_bit();
    EXPECT_EQ(encode(decode(negative, format), format), negative);
  }
}

TEST_P(Numeric, TiesGoToTheEvenNeighbourAndAllElseToTheNearest) {
  const Format format = GetParam();
  for (std::uint32_t low = 0; low < format.max_finite(); ++low) {
    const float a = decode(low, format);
    const float b = decode(low + 1, format);
    const float middle = a + (b - a) / 2;
    EXPECT_EQ(encode(middle, format), low % 2 == 0 ? low : low + 1);
    EXPECT_EQ(encode(std::nextafter(middle, a), format), low);
    EXPECT_EQ(encode(std::nextafter(middle, b), format), low + 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Numeric, testing::Values(kFormatBf16, kFormatF16, kFormatE4m3));

TEST(NumericFacts, ExamplesFromTheDefinitions) {
  EXPECT_EQ(decode(0x3F80, kFormatBf16), 1.0f);
  EXPECT_EQ(decode(0x3C00, kFormatF16), 1.0f);
  EXPECT_EQ(decode(0x7BFF, kFormatF16), 65504.0f);
  EXPECT_EQ(decode(0x0001, kFormatF16), 0x1.0p-24f);
  EXPECT_EQ(decode(0x7E, kFormatE4m3), 448.0f);
  EXPECT_EQ(decode(0x01, kFormatE4m3), 0x1.0p-9f);
  EXPECT_EQ(decode(0x3F800000, kFormatF32), 1.0f);
}

TEST(NumericFacts, WhatIsTooLargeBecomesInfinityOrNan) {
  EXPECT_EQ(encode(65519.0f, kFormatF16), 0x7BFFu);
  EXPECT_EQ(encode(65520.0f, kFormatF16), 0x7C00u);
  EXPECT_EQ(encode(-std::numeric_limits<float>::infinity(), kFormatBf16), 0xFF80u);
  EXPECT_EQ(encode(std::numeric_limits<float>::max(), kFormatBf16), 0x7F80u);
  EXPECT_EQ(encode(464.0f, kFormatE4m3), 0x7Eu);
  EXPECT_EQ(encode(480.0f, kFormatE4m3), 0x7Fu);
}

}  // namespace
}  // namespace xd::test
