// Tensors whose rows are not packed, of numbers in any format.
#pragma once

#include <dlpack/dlpack.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "conformance/numeric.h"
#include "support/tensor.h"

namespace xd::test {

inline Format format_with_fp8(DLDataType type) {
  return type.code == kE4m3.code ? kFormatE4m3 : format_of(type);
}

// A tensor of two or three dimensions, whose last one is packed and whose rows begin at multiples
// of 16 elements; between them lie `gaps`.
class Spread3 {
 public:
  Spread3(const Rank& rank, DLDataType type, const std::vector<std::int64_t>& shape,
          std::byte gaps = kPoison)
      : format_(format_with_fp8(type)) {
    std::copy(shape.rbegin(), shape.rend(), shape_.rbegin());
    const std::int64_t pitch = (shape_[2] + 15) / 16 * 16;
    strides_ = {shape_[1] * pitch, pitch, 1};
    bytes_.assign(static_cast<std::size_t>(shape_[0] * strides_[0] * format_.bytes), gaps);
    buffer_ = Buffer(rank, bytes_.size(), Place::ordinary);
    dl_.data = buffer_.data();
    dl_.device = rank.memory->device();
    dl_.ndim = static_cast<std::int32_t>(shape.size());
    dl_.dtype = type;
    dl_.shape = shape_.data() + 3 - shape.size();
    dl_.strides = strides_.data() + 3 - shape.size();
  }
  Spread3(const Spread3&) = delete;
  Spread3& operator=(const Spread3&) = delete;

  // The tensor with its last two dimensions exchanged, of the same memory.
  void transpose() {
    std::swap(shape_[1], shape_[2]);
    std::swap(strides_[1], strides_[2]);
  }
  const DLTensor* dl() const { return &dl_; }
  std::int64_t columns() const { return shape_[2]; }

  // Element i, in the order of packed rows.
  double get(std::int64_t i) const {
    std::uint32_t code = 0;
    std::memcpy(&code, &bytes_[place(i)], static_cast<std::size_t>(format_.bytes));
    return decode(code, format_);
  }
  // Returns `value` as this tensor rounds it.
  double rounded(double value) const {
    return decode(encode(static_cast<float>(value), format_), format_);
  }
  void fill(const std::function<double(std::int64_t)>& value) {
    values_.clear();
    for (std::int64_t i = 0; i < shape_[0] * shape_[1] * shape_[2]; ++i) {
      const double v = value(i);
      const std::uint32_t code =
          std::isnan(v) ? nan_code() : encode(static_cast<float>(v), format_);
      std::memcpy(&bytes_[place(i)], &code, static_cast<std::size_t>(format_.bytes));
      values_.push_back(decode(code, format_));
    }
  }
  // Element i as fill() has set it.
  double value(std::int64_t i) const { return values_[static_cast<std::size_t>(i)]; }
  void upload() { buffer_.write(bytes_); }
  void download() { bytes_ = buffer_.read(); }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  bool guards_intact() const { return buffer_.guards_intact(); }

 private:
  std::uint32_t nan_code() const {
    return format_.has_infinity ? format_.max_finite() + 2 : format_.max_finite() + 1;
  }
  std::size_t place(std::int64_t i) const {
    const std::int64_t c = i % shape_[2], r = i / shape_[2] % shape_[1];
    const std::int64_t e = i / shape_[2] / shape_[1];
    return static_cast<std::size_t>((e * strides_[0] + r * strides_[1] + c * strides_[2]) *
                                    format_.bytes);
  }

  const Format format_;
  std::array<std::int64_t, 3> shape_ = {1, 1, 1}, strides_{};
  std::vector<std::byte> bytes_;
  std::vector<double> values_;
  Buffer buffer_;
  DLTensor dl_{};
};

}  // namespace xd::test
