// Copies between matrices of any strides and packed rows.
#pragma once

#include "base/tensor.h"

namespace xd::ep::cpu {

void gather_row(const Tensor& from, std::int64_t row, std::byte* packed);

// Writes the packed row, or zeros if it is null, into row `row` of `to`.
void scatter_row(const Tensor& to, std::int64_t row, const std::byte* packed);

}  // namespace xd::ep::cpu
