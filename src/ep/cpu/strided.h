// Matrices of any strides, from and to packed rows.
#pragma once

#include "ep/tensor.h"

namespace xd::ep::cpu {

void gather_row(const Tensor& from, std::int64_t row, std::byte* packed);

// Row `row` of `to` gets the packed row; zeros where it is null.
void scatter_row(const Tensor& to, std::int64_t row, const std::byte* packed);

}  // namespace xd::ep::cpu
