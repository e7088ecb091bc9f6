// Tensors and plans for tests: device memory with guard zones on both sides, described by DLPack.
#pragma once

#include <crossdock/ep.h>
#include <crossdock/tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "support/world.h"

namespace xd::test {

inline constexpr DLDataType kBf16{kDLBfloat, 16, 1};
inline constexpr DLDataType kF16{kDLFloat, 16, 1};
inline constexpr DLDataType kF32{kDLFloat, 32, 1};
inline constexpr DLDataType kI32{kDLInt, 32, 1};
inline constexpr DLDataType kI64{kDLInt, 64, 1};
inline constexpr DLDataType kU8{kDLUInt, 8, 1};
inline constexpr DLDataType kBool = XD_DTYPE_BOOL;
inline constexpr DLDataType kE4m3 = XD_DTYPE_FLOAT8_E4M3FN;
inline constexpr DLDataType kE5m2 = XD_DTYPE_FLOAT8_E5M2;
inline constexpr DLDataType kE8m0 = XD_DTYPE_FLOAT8_E8M0FNU;
inline constexpr DLDataType kE2m1x2 = XD_DTYPE_FLOAT4_E2M1FN_X2;

constexpr std::size_t element_bytes(DLDataType type) { return type.bits * type.lanes / 8u; }

// Where a tensor lies: in the device's ordinary memory, or in the communicator's symmetric memory.
enum class Place { ordinary, symmetric };

// Bytes in device memory between two guard zones.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Rank& rank, std::size_t bytes, Place place);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer();

  void* data() const { return base_ + kGuard; }
  std::size_t bytes() const { return bytes_; }
  void write(std::span<const std::byte> bytes);
  void fill(std::byte value);
  std::vector<std::byte> read() const;
  bool guards_intact() const;

 private:
  void swap(Buffer& other) noexcept;
  void close_guards() const;
  void open_guards() const;

  // The size is a multiple of 16 but of no larger power of two, so that data is aligned as little
  // as the library allows.
  static constexpr std::size_t kGuard = std::size_t{16} * 9;

  Memory* memory_ = nullptr;
  xd_comm* comm_ = nullptr;  // set for symmetric memory
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

// Memory for a plan of a group with this config.
Buffer make_plan(const Rank& rank, const xd_ep_config& config);
Buffer make_plan(const Rank& rank, const xd_ll_config& config);

// Sets the plan in an operation's arguments.
template <class Args>
void set_plan(Args& args, const Buffer& plan) {
  args.plan = plan.data();
  args.plan_bytes = plan.bytes();
}

// The byte that fills outputs before the call, and that the library should never pass on from an
// input.
inline constexpr std::byte kPoison{0xA5};

// How a tensor's elements lie in its buffer, in elements.
struct Spread {
  std::int64_t shift = 0;  // distance of the first address from a multiple of 16 bytes
  // Strides of a matrix; none = packed rows. Negative strides run backwards.
  std::vector<std::int64_t> strides;
};

class Tensor {
 public:
  // The tensor is poisoned. Without elements it has data = NULL in ordinary memory.
  Tensor(const Rank& rank, DLDataType type, std::vector<std::int64_t> shape,
         Place place = Place::ordinary, Spread spread = {});
  Tensor(Tensor&& other) noexcept = default;

  // Points into this object: valid until it is moved or destroyed.
  const DLTensor* dl();
  const std::vector<std::int64_t>& shape() const { return shape_; }
  DLDataType type() const { return type_; }
  Buffer& buffer() { return buffer_; }
  const Buffer& buffer() const { return buffer_; }
  std::vector<std::byte> read() const;  // its elements, as packed rows
  bool untouched() const;               // still poisoned all over
  bool gaps_intact() const;             // the bytes between its elements are still poisoned

  template <class T>
  Tensor& write(const std::vector<T>& values) {
    write_bytes(std::as_bytes(std::span(values)));
    return *this;
  }
  template <class T>
  std::vector<T> read_as() const {
    const std::vector<std::byte> bytes = read();
    std::vector<T> values(bytes.size() / sizeof(T));
    std::copy(bytes.begin(), bytes.end(), std::as_writable_bytes(std::span(values)).begin());
    return values;
  }

 private:
  void write_bytes(std::span<const std::byte> packed);
  // Bytes of the buffer that hold elements one after another, and nothing else.
  struct Run {
    std::size_t offset, bytes;
  };
  std::vector<Run> runs() const;  // in the order of packed rows

  DLDataType type_;
  std::vector<std::int64_t> shape_;
  Spread spread_;
  Place place_;
  Buffer buffer_;
  DLTensor dl_{};
};

}  // namespace xd::test
