// Element types as they cross the C API in a DLDataType.
#pragma once

#include <dlpack/dlpack.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace xd {

enum class DType : std::uint8_t {
  bf16,
  f16,
  f32,
  i32,
  i64,
  i8,
  u8,
  e4m3,
  e5m2,
  e8m0,
  boolean,
  e2m1x2
};

// DLPack codes that an older DLPack header does not name.
inline constexpr std::uint8_t kDLPackBool = 6;
inline constexpr std::uint8_t kDLPackFloat8E4m3fn = 10;
inline constexpr std::uint8_t kDLPackFloat8E5m2 = 12;
inline constexpr std::uint8_t kDLPackFloat8E8m0fnu = 14;
inline constexpr std::uint8_t kDLPackFloat4E2m1fn = 17;

std::optional<DType> dtype_of(DLDataType type);
DLDataType dl_dtype(DType type);
std::size_t dtype_bytes(DType type);
const char* dtype_name(DType type);

// For error texts: the name of a known type, else "type (code c, b bits, l lanes)".
std::string describe_dtype(DLDataType type);

}  // namespace xd
