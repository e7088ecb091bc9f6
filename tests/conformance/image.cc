#include "conformance/image.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iomanip>
#include <sstream>
#include <string>

#include "support/random.h"

namespace xd::test {
namespace {

// mix() of all fields. As many rows as one sum reads keep the part that their elements share.
std::uint64_t hash(const Element& at) {
  struct Row {
    Element first;
    std::uint64_t mixed;
    bool known;
  };
  thread_local std::array<Row, 64> rows{};
  const auto index = static_cast<std::uint64_t>(at.row) * 5 + static_cast<std::uint64_t>(at.rank);
  Row& row = rows[index % rows.size()];
  const Element& is = row.first;
  if (!row.known || is.row != at.row || is.rank != at.rank || is.content != at.content ||
      is.seed != at.seed) {
    row = {at,
           mix(at.seed, static_cast<std::uint64_t>(at.content), static_cast<std::uint64_t>(at.rank),
               static_cast<std::uint64_t>(at.row)),
           true};
  }
  return mix(row.mixed ^ static_cast<std::uint64_t>(at.column));
}

std::string hex(const std::byte* bytes, std::size_t count) {
  std::ostringstream text;
  text << "0x" << std::hex << std::setfill('0');
  for (std::size_t i = count; i > 0; --i) {
    text << std::setw(2) << std::to_integer<unsigned>(bytes[i - 1]);
  }
  return text.str();
}

}  // namespace

Image::Image(std::int64_t rows, std::int64_t columns, DLDataType type, std::byte fill)
    : rows_(rows),
      columns_(columns),
      element_(element_bytes(type)),
      bytes_(static_cast<std::size_t>(rows * columns) * element_, fill) {}

void Image::set(std::int64_t row, std::int64_t column, std::uint64_t code) {
  const auto index = static_cast<std::size_t>(row * columns_ + column);
  std::memcpy(bytes_.data() + index * element_, &code, element_);  // little-endian
}

void Image::fill_row(std::int64_t row, std::byte value) {
  const auto row_bytes = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(columns_) * element_);
  std::fill_n(bytes_.begin() + row * row_bytes, row_bytes, value);
}

void Image::take_row(std::int64_t row, const std::vector<std::byte>& from) {
  const auto row_bytes = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(columns_) * element_);
  std::copy_n(from.begin() + row * row_bytes, row_bytes, bytes_.begin() + row * row_bytes);
}

void expect_image(const char* name, const Tensor& tensor, const Image& expected) {
  EXPECT_TRUE(tensor.buffer().guards_intact()) << name << ": bytes beside the tensor were written";
  EXPECT_TRUE(tensor.gaps_intact()) << name << ": bytes between its elements were written";
  const std::vector<std::byte> got = tensor.read();
  const std::vector<std::byte>& want = expected.bytes();
  ASSERT_EQ(got.size(), want.size()) << name;
  if (got.empty() || std::memcmp(got.data(), want.data(), got.size()) == 0) return;
  const std::size_t element = element_bytes(tensor.type());
  const auto columns = static_cast<std::size_t>(expected.columns());
  std::size_t wrong = 0;
  std::size_t first = 0;
  for (std::size_t i = got.size() / element; i-- > 0;) {
    if (std::memcmp(&got[i * element], &want[i * element], element) == 0) continue;
    ++wrong;
    first = i;
  }
  ADD_FAILURE() << name << "[" << first / columns << ", " << first % columns
                << "] = " << hex(&got[first * element], element) << ", expected "
                << hex(&want[first * element], element) << "; " << wrong << " of "
                << got.size() / element << " elements of " << expected.rows() << " rows differ";
}

std::uint64_t any_code(const Element& at) { return hash(at); }

std::uint32_t float_code(const Element& at, Format format) {
  const std::uint64_t random = hash(at);
  const auto sign = static_cast<std::uint32_t>(random >> 63) * format.sign_bit();
  const auto mantissa = static_cast<std::uint32_t>(random) & ((1u << format.mantissa_bits) - 1);
  const auto jitter = static_cast<std::uint32_t>(random >> 40) % 8;
  const auto bias = static_cast<std::uint32_t>(format.bias());
  switch (at.column % 16) {
    case 5:
      return sign | mantissa;
    case 6:
      return (2 * bias << format.mantissa_bits) | mantissa;
    case 7:
      return sign;
    default:
      return sign | ((bias - 4 + jitter) << format.mantissa_bits) | mantissa;
  }
}

std::uint32_t small_integer_code(const Element& at, Format format) {
  return encode(static_cast<float>(static_cast<int>(hash(at) % 17) - 8), format);
}

float weight_value(const Element& at) { return static_cast<float>(hash(at) >> 40) * 0x1.0p-23f; }

}  // namespace xd::test
