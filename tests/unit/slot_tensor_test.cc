// Tensors [L,S,columns]: which strides give each row, or element, a place of its own.
#include "ep/slots/slot_tensor.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "unit/errors.h"

namespace xd::ep {
namespace {

using test::expect_words;
using Triple = std::array<std::int64_t, 3>;

constexpr std::array kTypes = {DType::u8};
constexpr TensorSpec kSpec{
    .name = "slots", .ndim = 3, .types = kTypes, .device = {kDLCPU, 0}, .optional = true};

alignas(16) std::byte memory[16];  // checks do not touch it

DLTensor tensor_of(Triple& shape, Triple& strides) {
  return {.data = memory,
          .device = {kDLCPU, 0},
          .ndim = 3,
          .dtype = {kDLUInt, 8, 1},
          .shape = shape.data(),
          .strides = strides.data(),
          .byte_offset = 0};
}

std::string refusal(Triple shape, Triple strides, SlotFit fit) {
  const DLTensor tensor = tensor_of(shape, strides);
  return test::refusal_of([&] { read_slot_tensor(&tensor, kSpec, fit); });
}

// The definition, element by element.
bool elements_meet(const Triple& shape, const Triple& strides) {
  std::set<std::int64_t> places;
  for (std::int64_t l = 0; l < shape[0]; ++l) {
    for (std::int64_t s = 0; s < shape[1]; ++s) {
      for (std::int64_t c = 0; c < shape[2]; ++c) {
        if (!places.insert(l * strides[0] + s * strides[1] + c * strides[2]).second) return true;
      }
    }
  }
  return false;
}

TEST(SlotTensorTest, OutputsAreRefusedExactlyWhereTwoElementsMeet) {
  std::mt19937 random(7);
  const auto number = [&](int low, int high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  int refused = 0;
  constexpr int kCases = 20000;
  for (int i = 0; i < kCases; ++i) {
    const Triple shape{number(1, 5), number(1, 5), number(1, 5)};
    const Triple strides{number(-30, 30), number(-12, 30), number(-5, 12)};
    const std::string text = refusal(shape, strides, SlotFit::elements);
    ASSERT_EQ(!text.empty(), elements_meet(shape, strides))
        << shape[0] << "," << shape[1] << "," << shape[2] << " strides " << strides[0] << ","
        << strides[1] << "," << strides[2] << ": " << text;
    refused += text.empty() ? 0 : 1;
  }
  EXPECT_GT(refused, kCases / 10);
  EXPECT_LT(refused, kCases * 9 / 10);
}

TEST(SlotTensorTest, RowsOfAnOutputAreRefusedExactlyWhereTwoMeet) {
  std::mt19937 random(8);
  const auto number = [&](int low, int high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (int i = 0; i < 20000; ++i) {
    const Triple shape{number(1, 5), number(1, 5), 16 * number(1, 3)};
    const Triple strides{16 * number(-12, 12), 16 * number(-5, 12), 1};
    ASSERT_EQ(!refusal(shape, strides, SlotFit::rows_out).empty(), elements_meet(shape, strides))
        << shape[0] << "," << shape[1] << "," << shape[2] << " strides " << strides[0] << ","
        << strides[1];
    ASSERT_EQ(refusal(shape, strides, SlotFit::rows_in), "");
  }
}

TEST(SlotTensorTest, RowsAreContiguousAndBeginAtMultiplesOf16Bytes) {
  expect_words(refusal({2, 2, 16}, {64, 32, 2}, SlotFit::rows_in), {"contiguous"});
  expect_words(refusal({2, 2, 16}, {64, 24, 1}, SlotFit::rows_in), {"multiples of 16 bytes"});
  EXPECT_EQ(refusal({1, 1, 16}, {3, 5, 1}, SlotFit::rows_out), "");  // never used
}

TEST(SlotTensorTest, WithoutElementsNeedsNoMemory) {
  Triple shape{0, 4, 16}, strides{1, 1, 1};
  DLTensor tensor = tensor_of(shape, strides);
  tensor.data = nullptr;
  const SlotTensor read = read_slot_tensor(&tensor, kSpec, SlotFit::rows_out);
  EXPECT_TRUE(read);
  EXPECT_EQ(read.bytes(), 0u);
}

}  // namespace
}  // namespace xd::ep
