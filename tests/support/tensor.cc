#include "support/tensor.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__  // GCC's name of it
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace xd::test {
namespace {

constexpr std::byte kGuardByte{0x5C};

// Under AddressSanitizer guard zones in host memory may be neither written nor read.
#if defined(__SANITIZE_ADDRESS__)
void forbid(void* at, std::size_t bytes) { __asan_poison_memory_region(at, bytes); }
void allow(void* at, std::size_t bytes) { __asan_unpoison_memory_region(at, bytes); }
#else
void forbid(void*, std::size_t) {}
void allow(void*, std::size_t) {}
#endif

std::size_t count_of(const std::vector<std::int64_t>& shape) {
  std::size_t count = 1;
  for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
  return count;
}

// Elements from the first in memory to the last one.
std::size_t span_of(const std::vector<std::int64_t>& shape, const Spread& spread) {
  const std::size_t count = count_of(shape);
  if (count == 0 || spread.strides.empty()) return count;
  std::size_t span = 1;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    span += static_cast<std::size_t>((shape[d] - 1) * std::abs(spread.strides[d]));
  }
  return span;
}

std::size_t bytes_of(DLDataType type, const std::vector<std::int64_t>& shape,
                     const Spread& spread) {
  const std::size_t span = span_of(shape, spread);
  return span == 0 ? 0 : element_bytes(type) * (span + static_cast<std::size_t>(spread.shift));
}

}  // namespace

Buffer::Buffer(const Rank& rank, std::size_t bytes, Place place)
    : memory_(rank.memory), bytes_(bytes) {
  const std::size_t with_guards = bytes + 2 * kGuard;
  if (place == Place::symmetric) {
    void* ptr = nullptr;
    ok(xd_mem_alloc(rank.comm, with_guards, &ptr));
    comm_ = rank.comm;
    base_ = static_cast<std::byte*>(ptr);
  } else {
    base_ = static_cast<std::byte*>(memory_->allocate(with_guards));
  }
  const std::vector<std::byte> guard(kGuard, kGuardByte);
  memory_->copy_in(base_, guard.data(), kGuard);
  memory_->copy_in(base_ + kGuard + bytes_, guard.data(), kGuard);
  close_guards();
}

Buffer::~Buffer() {
  if (!base_) return;
  open_guards();
  if (comm_) {
    xd_mem_free(comm_, base_);
  } else {
    memory_->release(base_);
  }
}

void Buffer::close_guards() const {
  if (memory_->device().device_type != kDLCPU) return;
  forbid(base_, kGuard);
  forbid(base_ + kGuard + bytes_, kGuard);
}

void Buffer::open_guards() const {
  if (memory_->device().device_type != kDLCPU) return;
  allow(base_, kGuard);
  allow(base_ + kGuard + bytes_, kGuard);
}

void Buffer::swap(Buffer& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(comm_, other.comm_);
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
}

void Buffer::write(std::span<const std::byte> bytes) {
  if (bytes.size() != bytes_) {
    throw std::logic_error("buffer of " + std::to_string(bytes_) + " bytes, written " +
                           std::to_string(bytes.size()));
  }
  memory_->copy_in(data(), bytes.data(), bytes_);
}

void Buffer::fill(std::byte value) { write(std::vector<std::byte>(bytes_, value)); }

std::vector<std::byte> Buffer::read() const {
  std::vector<std::byte> bytes(bytes_);
  memory_->copy_out(bytes.data(), data(), bytes_);
  return bytes;
}

bool Buffer::guards_intact() const {
  std::vector<std::byte> guards(2 * kGuard);
  open_guards();
  memory_->copy_out(guards.data(), base_, kGuard);
  memory_->copy_out(guards.data() + kGuard, base_ + kGuard + bytes_, kGuard);
  close_guards();
  return std::ranges::all_of(guards, [](std::byte byte) { return byte == kGuardByte; });
}

Buffer make_plan(const Rank& rank, const xd_ep_config& config) {
  std::size_t bytes = 0;
  ok(xd_ep_plan_size(&config, &bytes));
  return Buffer(rank, bytes, Place::ordinary);
}

Buffer make_plan(const Rank& rank, const xd_ll_config& config) {
  std::size_t bytes = 0;
  ok(xd_ll_plan_size(&config, &bytes));
  return Buffer(rank, bytes, Place::ordinary);
}

Tensor::Tensor(const Rank& rank, DLDataType type, std::vector<std::int64_t> shape, Place place,
               Spread spread)
    : type_(type),
      shape_(std::move(shape)),
      spread_(std::move(spread)),
      place_(place),
      buffer_(rank, bytes_of(type_, shape_, spread_), place) {
  buffer_.fill(kPoison);
  dl_.device = rank.memory->device();
}

const DLTensor* Tensor::dl() {
  const bool empty = buffer_.bytes() == 0;
  const bool null = empty && place_ == Place::ordinary;
  std::size_t first = 0;
  if (!empty) {  // without allocating, for a packed tensor: calls under test may rely on that
    first = spread_.strides.empty() ? static_cast<std::size_t>(spread_.shift) * element_bytes(type_)
                                    : runs().front().offset;
  }
  dl_.data = null ? nullptr : static_cast<std::byte*>(buffer_.data()) + first;
  dl_.ndim = static_cast<int>(shape_.size());
  dl_.dtype = type_;
  dl_.shape = shape_.data();
  dl_.strides = spread_.strides.empty() ? nullptr : spread_.strides.data();
  return &dl_;
}

std::vector<Tensor::Run> Tensor::runs() const {
  const std::size_t size = element_bytes(type_), count = count_of(shape_);
  if (count == 0) return {};
  if (spread_.strides.empty()) {
    return {{static_cast<std::size_t>(spread_.shift) * size, count * size}};
  }
  const std::int64_t rows = shape_[0], cols = shape_.size() > 1 ? shape_[1] : 1;
  const std::int64_t down = spread_.strides[0], along = cols > 1 ? spread_.strides[1] : 1;
  std::int64_t first = spread_.shift;
  if (down < 0) first -= (rows - 1) * down;
  if (along < 0) first -= (cols - 1) * along;
  const std::int64_t length = along == 1 ? cols : 1;  // of a run, in elements
  std::vector<Run> runs;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; j += length) {
      runs.push_back({static_cast<std::size_t>(first + i * down + j * along) * size,
                      static_cast<std::size_t>(length) * size});
    }
  }
  return runs;
}

std::vector<std::byte> Tensor::read() const {
  const std::vector<std::byte> bytes = buffer_.read();
  std::vector<std::byte> packed(count_of(shape_) * element_bytes(type_));
  auto to = packed.begin();
  for (const Run& run : runs()) {
    to = std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(run.offset), run.bytes, to);
  }
  return packed;
}

void Tensor::write_bytes(std::span<const std::byte> packed) {
  const std::size_t expected = count_of(shape_) * element_bytes(type_);
  if (packed.size() != expected) {
    throw std::logic_error("tensor of " + std::to_string(expected) + " bytes, written " +
                           std::to_string(packed.size()));
  }
  std::vector<std::byte> bytes = buffer_.read();
  auto from = packed.begin();
  for (const Run& run : runs()) {
    std::copy_n(from, run.bytes, bytes.begin() + static_cast<std::ptrdiff_t>(run.offset));
    from += static_cast<std::ptrdiff_t>(run.bytes);
  }
  buffer_.write(bytes);
}

bool Tensor::gaps_intact() const {
  std::vector<std::byte> bytes = buffer_.read();
  for (const Run& run : runs()) {
    std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(run.offset), run.bytes, kPoison);
  }
  return std::ranges::all_of(bytes, [](std::byte byte) { return byte == kPoison; });
}

bool Tensor::untouched() const {
  return std::ranges::all_of(buffer_.read(), [](std::byte byte) { return byte == kPoison; });
}

}  // namespace xd::test
