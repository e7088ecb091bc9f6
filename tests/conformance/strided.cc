#include "conformance/strided.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

namespace xd::test {
namespace {

std::vector<std::int64_t> packed_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t d = shape.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

std::size_t bytes_of(DLDataType type, const std::vector<std::int64_t>& shape,
                     const std::vector<std::int64_t>& strides) {
  std::int64_t span = 1;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0) return 0;
    span += (shape[d] - 1) * std::abs(strides[d]);
  }
  return static_cast<std::size_t>(span) * element_bytes(type);
}

}  // namespace

Strided::Strided(const Rank& rank, DLDataType type, std::vector<std::int64_t> shape,
                 std::vector<std::int64_t> strides, std::byte fill)
    : type_(type),
      shape_(std::move(shape)),
      strides_(strides.empty() ? packed_strides(shape_) : std::move(strides)),
      packed_(strides_ == packed_strides(shape_)),
      buffer_(rank, bytes_of(type_, shape_, strides_), Place::ordinary),
      image_(buffer_.bytes(), fill) {
  for (std::size_t d = 0; d < shape_.size(); ++d) {
    if (strides_[d] < 0) first_ -= (shape_[d] - 1) * strides_[d];
  }
  dl_.device = rank.memory->device();
  upload();
}

const DLTensor* Strided::dl() {
  dl_.data = image_.empty() ? nullptr
                            : static_cast<std::byte*>(buffer_.data()) +
                                  static_cast<std::size_t>(first_) * element_bytes(type_);
  dl_.ndim = static_cast<int>(shape_.size());
  dl_.dtype = type_;
  dl_.shape = shape_.data();
  dl_.strides = packed_ ? nullptr : strides_.data();
  return &dl_;
}

std::size_t Strided::offset(const Place3& at) const {
  const std::int64_t indices[] = {at.i, at.j, at.k};
  std::int64_t element = first_;
  for (std::size_t d = 0; d < shape_.size(); ++d) element += indices[d] * strides_[d];
  return static_cast<std::size_t>(element) * element_bytes(type_);
}

void Strided::set_at(const Place3& at, std::uint64_t code) {
  std::memcpy(image_.data() + offset(at), &code, element_bytes(type_));  // little-endian
}

void Strided::set(std::int64_t i, std::int64_t j, std::int64_t k, std::uint64_t code) {
  set_at({i, j, k}, code);
}

void Strided::set_row(std::int64_t i, std::int64_t j, std::span<const std::byte> bytes) {
  std::copy(bytes.begin(), bytes.end(),
            image_.begin() + static_cast<std::ptrdiff_t>(offset({i, j, 0})));
}

void Strided::fill_image(std::byte value) { std::ranges::fill(image_, value); }

void Strided::upload() { buffer_.write(image_); }

bool Strided::untouched() const { return buffer_.guards_intact() && buffer_.read() == image_; }

// The element that a byte belongs to, for messages; slow.
std::string Strided::name_at(std::size_t byte) const {
  const std::int64_t ni = shape_[0], nj = shape_.size() > 1 ? shape_[1] : 1,
                     nk = shape_.size() > 2 ? shape_[2] : 1;
  for (std::int64_t i = 0; i < ni; ++i) {
    for (std::int64_t j = 0; j < nj; ++j) {
      for (std::int64_t k = 0; k < nk; ++k) {
        const std::size_t first = offset({i, j, k});
        if (byte < first || byte >= first + element_bytes(type_)) continue;
        return "[" + std::to_string(i) + ", " + std::to_string(j) + ", " + std::to_string(k) + "]";
      }
    }
  }
  return " between its elements";
}

void Strided::expect(const char* name) const {
  EXPECT_TRUE(buffer_.guards_intact()) << name << ": bytes beside the tensor were written";
  const std::vector<std::byte> got = buffer_.read();
  if (got == image_) return;
  std::size_t wrong = 0, first = got.size();
  for (std::size_t i = got.size(); i-- > 0;) {
    if (got[i] == image_[i]) continue;
    ++wrong;
    first = i;
  }
  ADD_FAILURE() << name << name_at(first) << ", byte " << first << ": "
                << std::to_integer<int>(got[first]) << ", expected "
                << std::to_integer<int>(image_[first]) << "; " << wrong << " of " << got.size()
                << " bytes differ";
}

}  // namespace xd::test
