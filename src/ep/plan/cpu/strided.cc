#include "ep/plan/cpu/strided.h"

#include <cstring>

namespace xd::ep::cpu {
namespace {

// Calls body(address, number) for every element of a row.
template <class Body>
void for_each_element(const Tensor& tensor, std::int64_t row, Body&& body) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(tensor.type));
  std::byte* const first = tensor.data + row * tensor.row_stride * bytes;
  for (std::int64_t c = 0; c < tensor.cols; ++c) body(first + c * tensor.col_stride * bytes, c);
}

}  // namespace

void gather_row(const Tensor& from, std::int64_t row, std::byte* packed) {
  const std::size_t bytes = dtype_bytes(from.type);
  for_each_element(from, row, [&](const std::byte* element, std::int64_t c) {
    std::memcpy(packed + static_cast<std::size_t>(c) * bytes, element, bytes);
  });
}

void scatter_row(const Tensor& to, std::int64_t row, const std::byte* packed) {
  const std::size_t bytes = dtype_bytes(to.type);
  for_each_element(to, row, [&](std::byte* element, std::int64_t c) {
    if (packed == nullptr) {
      std::memset(element, 0, bytes);
    } else {
      std::memcpy(element, packed + static_cast<std::size_t>(c) * bytes, bytes);
    }
  });
}

}  // namespace xd::ep::cpu
