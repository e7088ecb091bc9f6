// Tensors of up to three extents with any strides, for which every byte is known: those of their
// elements, and those between them, which nobody may write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "support/tensor.h"

namespace xd::test {

// A tensor and the image of its buffer: first one is made, then the other is written or compared.
class Strided {
 public:
  // `strides` in elements, none = packed; negative ones run backwards. Buffer and image have `fill`
  // everywhere. Without elements data = NULL.
  Strided(const Rank& rank, DLDataType type, std::vector<std::int64_t> shape,
          std::vector<std::int64_t> strides = {}, std::byte fill = kPoison);
  Strided(Strided&& other) noexcept = default;

  // Points into this object: valid until it is moved or destroyed.
  const DLTensor* dl();
  const std::vector<std::int64_t>& shape() const { return shape_; }
  DLDataType type() const { return type_; }
  std::int64_t extent(std::size_t dimension) const { return shape_[dimension]; }

  // One element of the image; indices of missing extents are 0.
  void set(std::int64_t i, std::int64_t j, std::int64_t k, std::uint64_t code);
  void set(std::int64_t i, std::uint64_t code) { set_at({i, 0, 0}, code); }
  void set(std::int64_t i, std::int64_t j, std::uint64_t code) { set_at({i, j, 0}, code); }
  // A row along the last extent of three, which is contiguous.
  void set_row(std::int64_t i, std::int64_t j, std::span<const std::byte> bytes);
  void fill_image(std::byte value);

  void upload();                        // image -> buffer
  void expect(const char* name) const;  // fails the test where buffer and image differ
  bool untouched() const;               // buffer == image, guard zones included
  std::vector<std::byte> read_buffer() const { return buffer_.read(); }
  Buffer& buffer() { return buffer_; }

 private:
  struct Place3 {
    std::int64_t i, j, k;
  };
  void set_at(const Place3& at, std::uint64_t code);
  std::size_t offset(const Place3& at) const;  // in bytes
  std::string name_at(std::size_t byte) const;

  DLDataType type_;
  std::vector<std::int64_t> shape_, strides_;
  bool packed_;
  std::int64_t first_ = 0;  // element [0,0,0], counted from the lowest address
  Buffer buffer_;
  std::vector<std::byte> image_;
  DLTensor dl_{};
};

}  // namespace xd::test
