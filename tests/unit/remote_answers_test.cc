#include "ep/bulk/cpu/remote/answers.h"

#include <gtest/gtest.h>

namespace xd::test {
namespace {

using ep::RequestItem;
using ep::cpu::RemoteAnswers;

RequestItem answer(std::uint32_t token, std::uint32_t place) {
  return {.token = token, .place = place, .host = 0, .form = 0};
}

// Three tokens with two, no and one answers, in the places 0 and 1, none, and 2.
RemoteAnswers expected() {
  RemoteAnswers answers(3);
  EXPECT_EQ(answers.expect(0, 2), 0U);
  EXPECT_EQ(answers.expect(1, 0), 2U);
  EXPECT_EQ(answers.expect(2, 1), 2U);
  return answers;
}

TEST(RemoteAnswers, ComeInAnyOrder) {
  RemoteAnswers answers = expected();
  EXPECT_TRUE(answers.has_all(1));
  EXPECT_TRUE(answers.take(answer(2, 2)));
  EXPECT_TRUE(answers.has_all(2));
  EXPECT_TRUE(answers.take(answer(0, 1)));
  EXPECT_FALSE(answers.has_all(0));
  EXPECT_TRUE(answers.take(answer(0, 0)));
  EXPECT_TRUE(answers.has_all(0));
  EXPECT_EQ(answers.first_place(2), 2U);
}

// Its row would be read as a sum of the token, where there may be no memory for one.
TEST(RemoteAnswers, InThePlaceOfAnotherTokenAreRefused) {
  RemoteAnswers answers = expected();
  EXPECT_FALSE(answers.take(answer(0, 2)));
  EXPECT_FALSE(answers.take(answer(2, 1))) << "before its first place";
  EXPECT_FALSE(answers.take(answer(2, 3)));
  EXPECT_FALSE(answers.take(answer(2, UINT32_MAX)));
  EXPECT_TRUE(answers.take(answer(2, 2)));
}

TEST(RemoteAnswers, ThatNobodyAskedForAreRefused) {
  RemoteAnswers answers = expected();
  EXPECT_FALSE(answers.take(answer(1, 2)));
  EXPECT_FALSE(answers.take(answer(3, 0)));
  EXPECT_FALSE(answers.take(answer(UINT32_MAX, 0)));
  EXPECT_TRUE(answers.take(answer(2, 2)));
  EXPECT_FALSE(answers.take(answer(2, 2))) << "twice";
  EXPECT_TRUE(answers.take(answer(0, 1)));
  EXPECT_FALSE(answers.take(answer(0, 1))) << "twice, in the place of one that is missing";
  EXPECT_FALSE(answers.has_all(0));
}

TEST(RemoteAnswers, MayBeAsManyAsATokenHasChoices) {
  RemoteAnswers answers(1);
  answers.expect(0, 32);
  for (std::uint32_t place = 0; place < 32; ++place) {
    EXPECT_FALSE(answers.has_all(0));
    EXPECT_TRUE(answers.take(answer(0, place)));
  }
  EXPECT_TRUE(answers.has_all(0));
  EXPECT_FALSE(answers.take(answer(0, 32)));
}

}  // namespace
}  // namespace xd::test
