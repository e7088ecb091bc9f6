#include "base/dtype.h"

#include <array>

#include "base/error.h"

namespace xd {
namespace {

struct Entry {
  DType type;
  std::uint8_t code, bits;
  const char* name;
  std::uint8_t lanes = 1;
};

// The entries stand in the order of DType, so that a type is its entry's index.
constexpr std::array kEntries = {
    Entry{DType::bf16, kDLBfloat, 16, "bfloat16"},
    Entry{DType::f16, kDLFloat, 16, "float16"},
    Entry{DType::f32, kDLFloat, 32, "float32"},
    Entry{DType::i32, kDLInt, 32, "int32"},
    Entry{DType::i64, kDLInt, 64, "int64"},
    Entry{DType::i8, kDLInt, 8, "int8"},
    Entry{DType::u8, kDLUInt, 8, "uint8"},
    Entry{DType::e4m3, kDLPackFloat8E4m3fn, 8, "float8_e4m3fn"},
    Entry{DType::e5m2, kDLPackFloat8E5m2, 8, "float8_e5m2"},
    Entry{DType::e8m0, kDLPackFloat8E8m0fnu, 8, "float8_e8m0fnu"},
    Entry{DType::boolean, kDLPackBool, 8, "bool"},
    Entry{DType::e2m1x2, kDLPackFloat4E2m1fn, 4, "float4_e2m1fn_x2", 2},
};

const Entry& entry(DType type) { return kEntries[static_cast<std::size_t>(type)]; }

}  // namespace

std::optional<DType> dtype_of(DLDataType type) {
  for (const Entry& e : kEntries) {
    if (e.code == type.code && e.bits == type.bits && e.lanes == type.lanes) return e.type;
  }
  return std::nullopt;
}

DLDataType dl_dtype(DType type) { return {entry(type).code, entry(type).bits, entry(type).lanes}; }

std::size_t dtype_bytes(DType type) { return entry(type).bits * entry(type).lanes / 8u; }
const char* dtype_name(DType type) {
  return static_cast<std::size_t>(type) < kEntries.size() ? entry(type).name : "unknown type";
}

std::string describe_dtype(DLDataType type) {
  if (const auto known = dtype_of(type)) return dtype_name(*known);
  return concat("type (code ", int{type.code}, ", ", int{type.bits}, " bits, ", int{type.lanes},
                " lanes)");
}

}  // namespace xd
