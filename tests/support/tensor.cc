#include "support/tensor.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__  // as GCC calls it
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace xd::test {
namespace {

constexpr std::byte kGuardByte{0x5C};

// Under AddressSanitizer guard zones in host memory are forbidden ground, for reads too.
#if defined(__SANITIZE_ADDRESS__)
void forbid(void* at, std::size_t bytes) { __asan_poison_memory_region(at, bytes); }
void allow(void* at, std::size_t bytes) { __asan_unpoison_memory_region(at, bytes); }
#else
void forbid(void*, std::size_t) {}
void allow(void*, std::size_t) {}
#endif

std::size_t bytes_of(DLDataType type, const std::vector<std::int64_t>& shape) {
  std::size_t bytes = element_bytes(type);
  for (const std::int64_t extent : shape) bytes *= static_cast<std::size_t>(extent);
  return bytes;
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

Tensor::Tensor(const Rank& rank, DLDataType type, std::vector<std::int64_t> shape, Place place)
    : type_(type),
      shape_(std::move(shape)),
      place_(place),
      buffer_(rank, bytes_of(type_, shape_), place) {
  buffer_.fill(kPoison);
  dl_.device = rank.memory->device();
}

const DLTensor* Tensor::dl() {
  const bool null = buffer_.bytes() == 0 && place_ == Place::ordinary;
  dl_.data = null ? nullptr : buffer_.data();
  dl_.ndim = static_cast<int>(shape_.size());
  dl_.dtype = type_;
  dl_.shape = shape_.data();
  return &dl_;
}

bool Tensor::untouched() const {
  return std::ranges::all_of(read(), [](std::byte byte) { return byte == kPoison; });
}

}  // namespace xd::test
