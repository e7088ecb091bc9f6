#include "ep/slots/slot_tensor.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/math.h"
#include "ep/slots/config.h"

namespace xd::ep {
namespace {

std::int64_t magnitude(std::int64_t stride) { return stride < 0 ? -stride : stride; }

// One dimension of pieces of memory: the pieces lie `stride` apart.
struct Dimension {
  std::int64_t extent, stride;
};

// True if two of the pieces, which have `length` elements each and lie along the dimensions, share
// an element. Sorted by stride, dimensions mostly nest. If they do not, all distances along the
// first two are looked at, and for each of them the nearest pieces along the last.
bool pieces_meet(std::array<Dimension, 3> d, std::int64_t length) {
  for (Dimension& each : d) {
    each.stride = magnitude(each.stride);
    if (each.extent <= 1) each = {1, 0};
  }
  std::ranges::sort(d, {}, &Dimension::stride);
  bool nests = true;
  std::int64_t reach = length;
  for (const Dimension& each : d) {
    if (each.extent == 1) continue;
    nests &= each.stride >= reach;
    reach += (each.extent - 1) * each.stride;
  }
  if (nests) return false;
  const std::int64_t last = std::max<std::int64_t>(d[2].stride, 1);
  for (std::int64_t i = 1 - d[0].extent; i < d[0].extent; ++i) {
    for (std::int64_t j = 1 - d[1].extent; j < d[1].extent; ++j) {
      const std::int64_t distance = i * d[0].stride + j * d[1].stride;
      // Of the pieces along the last dimension one of these two is the nearest.
      for (const std::int64_t k : {-distance / last, -distance / last + (distance < 0 ? 1 : -1)}) {
        if ((i == 0 && j == 0 && k == 0) || magnitude(k) >= d[2].extent) continue;
        if (magnitude(distance + k * d[2].stride) < length) return true;
      }
    }
  }
  return false;
}

void read_strides(const DLTensor& user, SlotTensor& t) {
  t.slot_stride = t.cols;
  t.expert_stride = t.slots * t.cols;
  if (user.strides == nullptr) return;
  if (user.ndim == 3) t.expert_stride = user.strides[0];
  t.slot_stride = user.strides[user.ndim - 2];
  t.col_stride = user.strides[user.ndim - 1];
}

void require_strides(const SlotTensor& t, SlotFit fit) {
  constexpr std::int64_t kFarthest = std::int64_t{1} << 55;  // bytes to any element fit 64 bits
  for (const auto& [extent, stride] :
       {Dimension{t.experts, t.expert_stride}, Dimension{t.slots, t.slot_stride},
        Dimension{t.cols, t.col_stride}}) {
    XD_REQUIRE(extent <= 1 || (stride >= -kFarthest / extent && stride <= kFarthest / extent),
               t.name, ": has a stride of ", stride,
               ", expected ones that stay within 2^55 elements");
  }
  const auto require_apart = [&](std::int64_t length, const Dimension& columns, const char* what) {
    XD_REQUIRE(
        !pieces_meet({Dimension{t.experts, t.expert_stride}, {t.slots, t.slot_stride}, columns},
                     length),
        t.name, ": has strides ", t.expert_stride, ", ", t.slot_stride, " and ", t.col_stride,
        ", expected each ", what, " to have a place of its own");
  };
  if (fit == SlotFit::elements) return require_apart(1, {t.cols, t.col_stride}, "element");
  XD_REQUIRE(t.row_is_contiguous(), t.name, ": has a stride of ", t.col_stride,
             " between columns, expected contiguous rows");
  const auto element = static_cast<std::int64_t>(dtype_bytes(t.type));
  constexpr auto kAlignment = static_cast<std::int64_t>(kRowAlignment);
  XD_REQUIRE((t.experts <= 1 || t.expert_stride * element % kAlignment == 0) &&
                 (t.slots <= 1 || t.slot_stride * element % kAlignment == 0),
             t.name, ": has strides ", t.expert_stride, " and ", t.slot_stride, " of ", element,
             "-byte elements, expected multiples of ", kAlignment, " bytes");
  if (fit == SlotFit::rows_out) require_apart(t.cols, {1, 0}, "row");
}

}  // namespace

SlotTensor read_slot_tensor(const DLTensor* user, const TensorSpec& spec, SlotFit fit) {
  if (user == nullptr) {
    XD_REQUIRE(spec.optional, spec.name, " = NULL, expected a tensor");
    return SlotTensor{.name = spec.name};
  }
  SlotTensor t{.name = spec.name,
               .data = static_cast<std::byte*>(user->data),
               .type = read_element_type(*user, spec),
               .experts = spec.ndim == 3 ? user->shape[0] : 1,
               .slots = user->shape[spec.ndim - 2],
               .cols = user->shape[spec.ndim - 1],
               .given = true};
  checked_mul(checked_mul(static_cast<std::uint64_t>(t.experts),
                          static_cast<std::uint64_t>(t.slots), spec.name),
              t.row_bytes(), spec.name);
  if (t.bytes() == 0) return t;
  read_strides(*user, t);
  require_strides(t, fit);
  XD_REQUIRE(t.data != nullptr, spec.name, ".data = NULL, expected ", t.bytes(), " bytes");
  t.data += user->byte_offset;
  const std::size_t wanted = fit == SlotFit::elements ? dtype_bytes(t.type) : kRowAlignment;
  XD_REQUIRE(reinterpret_cast<std::uintptr_t>(t.data) % wanted == 0, spec.name, ": data is at ",
             static_cast<const void*>(t.data), ", expected a ", wanted, "-byte aligned address");
  return t;
}

void require_type(const SlotTensor& tensor, DType type) {
  XD_REQUIRE(tensor.type == type, tensor.name, ": is ", dtype_name(tensor.type), ", expected ",
             dtype_name(type));
}

void require_columns(const SlotTensor& tensor, std::uint64_t columns, const char* what) {
  XD_REQUIRE(static_cast<std::uint64_t>(tensor.cols) == columns, tensor.name, ": has ", tensor.cols,
             " columns, expected ", columns, " (", what, ")");
}

}  // namespace xd::ep
