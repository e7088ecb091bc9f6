// Parts of every operation's arguments.
#pragma once

#include <array>
#include <cstddef>

#include "base/error.h"
#include "base/tensor.h"
#include "ep/plan/config.h"

namespace xd::ep {

template <class Sizes>
struct CallContextOf {
  const Sizes* config;
  DLDevice device;
};
using CallContext = CallContextOf<Config>;

// The types of rows that dispatch moves, and of scales that callers give beside them.
inline constexpr std::array kMovedTypes = {DType::bf16, DType::f16, DType::f32, DType::e4m3,
                                           DType::e5m2, DType::i8,  DType::u8,  DType::e2m1x2};
inline constexpr std::array kGivenScaleTypes = {DType::f32, DType::e8m0, DType::u8, DType::e4m3};

// Throws INVALID_ARGUMENT unless scales beside FP4 rows are one for 16 numbers, or for 32.
inline void require_fp4_scales(const Tensor& scales, const Tensor& rows) {
  if (rows.type != DType::e2m1x2) return;
  const std::int64_t numbers = 2 * rows.cols;
  XD_REQUIRE(scales.cols * 16 == numbers || scales.cols * 32 == numbers, scales.name, ": has ",
             scales.cols, " columns beside ", rows.name, " of ", rows.cols,
             " bytes of two numbers, expected one for 16 or for 32 numbers");
}

struct PlanBytes {
  const void* data = nullptr;
  std::size_t bytes = 0;
};

}  // namespace xd::ep
