#include "operands.h"

#include <algorithm>

namespace xdjax {
namespace {

using xla::ffi::DataType;

// bits = 0: the library has no such type.
DLDataType data_type(DataType type) {
  constexpr auto dl = [](int code, int bits) {
    return DLDataType{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
  };
  switch (type) {
    case DataType::S8:
      return dl(kDLInt, 8);
    case DataType::S32:
      return dl(kDLInt, 32);
    case DataType::S64:
      return dl(kDLInt, 64);
    case DataType::U8:
      return dl(kDLUInt, 8);
    case DataType::F16:
      return dl(kDLFloat, 16);
    case DataType::F32:
      return dl(kDLFloat, 32);
    case DataType::BF16:
      return dl(kDLBfloat, 16);
    // Some versions of dlpack.h lack these types; crossdock/ep.h has their codes.
    case DataType::F8E4M3FN:
      return dl(10, 8);
    case DataType::F8E5M2:
      return dl(12, 8);
    case DataType::F8E8M0FNU:
      return dl(14, 8);
    default:
      return dl(0, 0);
  }
}

}  // namespace

std::optional<Problem> Operands::add(std::string_view name, const xla::ffi::AnyBuffer& buffer) {
  auto item = std::make_unique<Item>();
  item->name = name;
  const auto dimensions = buffer.dimensions();
  if (dimensions.size() > max_dims) {
    return invalid(std::string(name) + ": expected at most " + std::to_string(max_dims) +
                   " dimensions, got " + std::to_string(dimensions.size()));
  }
  std::copy(dimensions.begin(), dimensions.end(), item->shape.begin());
  DLTensor& tensor = item->tensor;
  tensor.data = buffer.untyped_data();
  tensor.device = device_;
  tensor.ndim = static_cast<int>(dimensions.size());
  tensor.dtype = data_type(buffer.element_type());
  tensor.shape = item->shape.data();
  if (tensor.dtype.bits == 0) {
    return invalid(std::string(name) + ": expected an element type of crossdock/ep.h, got XLA's " +
                   std::to_string(static_cast<int>(buffer.element_type())));
  }
  items_.push_back(std::move(item));
  return std::nullopt;
}

void Operands::shorten(std::string_view name, std::int64_t rows) {
  if (Item* const found = item(name)) found->shape[0] -= rows;
}

const DLTensor* Operands::find(std::string_view name) const {
  const Item* const found = item(name);
  return found == nullptr ? nullptr : &found->tensor;
}

Operands::Item* Operands::item(std::string_view name) const {
  const auto found = std::find_if(items_.begin(), items_.end(),
                                  [&](const auto& item) { return item->name == name; });
  return found == items_.end() ? nullptr : found->get();
}

void* Operands::data(std::string_view name) const {
  const DLTensor* tensor = find(name);
  return tensor == nullptr ? nullptr : tensor->data;
}

std::size_t Operands::bytes(std::string_view name) const {
  const DLTensor* tensor = find(name);
  if (tensor == nullptr) return 0;
  std::size_t bytes = tensor->dtype.bits / 8;
  for (int i = 0; i < tensor->ndim; ++i) bytes *= static_cast<std::size_t>(tensor->shape[i]);
  return bytes;
}

}  // namespace xdjax
