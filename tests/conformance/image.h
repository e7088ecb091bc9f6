// The content that a tensor has or must have, in host memory; and the values of test data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "conformance/numeric.h"
#include "support/tensor.h"

namespace xd::test {

// A matrix of elements of 1, 2, 4 or 8 bytes, filled with one byte to begin with.
class Image {
 public:
  Image(std::int64_t rows, std::int64_t columns, DLDataType type, std::byte fill);

  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  void set(std::int64_t row, std::int64_t column, std::uint64_t code);
  void fill_row(std::int64_t row, std::byte value);
  void take_row(std::int64_t row, const std::vector<std::byte>& from);  // of an equal image
  // Writes code(row, column) for every column.
  template <class CodeAt>
  void set_row(std::int64_t row, const CodeAt& code) {
    for (std::int64_t column = 0; column < columns_; ++column) set(row, column, code(row, column));
  }

 private:
  std::int64_t rows_, columns_;
  std::size_t element_;
  std::vector<std::byte> bytes_;
};

// Fails the test at the first element in which the tensor differs, or if its guard zones are hurt.
void expect_image(const char* name, const Tensor& tensor, const Image& expected);

// Names of the tensors whose content is generated.
enum class Content : std::uint64_t {
  tokens,
  scales,
  topk_weights,
  expert_out,
  weights,
  grad_recv_tokens,
  grad_recv_weights,
  grad_out,
  grad_out_scales,
};

struct Element {
  std::uint64_t seed;
  Content content;
  int rank;
  std::int64_t row;
  std::int64_t column;
};

// Any bits: for rows that are moved and not computed with.
std::uint64_t any_code(const Element& at);
// A finite number; by column: ordinary magnitudes, subnormals, positive numbers near the largest
// (so that sums reach infinity, and never infinity - infinity), and zeros of both signs.
std::uint32_t float_code(const Element& at, Format format);
// A whole number of magnitude <= 8: dot products of such rows are exact in any order.
std::uint32_t small_integer_code(const Element& at, Format format);
// float32, 0 <= weight < 2.
float weight_value(const Element& at);

}  // namespace xd::test
