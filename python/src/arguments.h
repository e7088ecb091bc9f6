// Turns Python values into C values, with errors that name the argument.
#pragma once

#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "fields.h"

namespace xdpy {

namespace nb = nanobind;

// TypeError: "<name>: expected <what>, got <value>".
[[noreturn]] void expected(const char* name, const char* what, nb::handle value);

template <class Int>
Int integer(nb::handle value, const char* name) {
  Int result{};
  if (!nb::try_cast<Int>(value, result, /*convert=*/false)) {
    expected(name, sizeof(Int) == 4 ? "an integer of 32 bits" : "an integer of 64 bits", value);
  }
  return result;
}

// The type of DLPack's code and bits in one number, code << 8 | bits: float32 is 0x220.
DLDataType data_type(int packed);

// Whether objects of this Python class are tensors that tell C code where they lie, as those of
// torch do from release 2.10 on.
bool reads(nb::handle kind);

// A tensor argument: None, an object of a class that `reads` knows, or (address, shape, dtype) of a
// C-contiguous tensor, or with its strides in elements as a fourth item. It lives as long as the
// call, and owns nothing.
class Tensor {
 public:
  Tensor(nb::handle spec, const char* name, DLDevice device);
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  // NULL for None.
  [[nodiscard]] const DLTensor* get() const { return given_ ? &tensor_ : nullptr; }
  [[nodiscard]] void* data() const { return tensor_.data; }
  [[nodiscard]] std::size_t bytes() const;  // of a packed one

 private:
  static constexpr std::size_t max_dims = 4;

  bool given_ = false;
  DLTensor tensor_{};
  std::array<std::int64_t, max_dims> shape_{}, strides_{};
};

// The address in a Python integer.
inline void* pointer(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}
inline std::uintptr_t address(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}
inline xd_stream stream_of(std::uintptr_t address) {
  return static_cast<xd_stream>(pointer(address));
}

float real_number(nb::handle value, const char* name);

// The integers of a sequence, which TypeError calls `what`.
template <class Int>
std::vector<Int> integers(nb::handle sequence, const char* name, const char* what) {
  if (!PySequence_Check(sequence.ptr())) expected(name, what, sequence);
  std::vector<Int> numbers;
  for (const nb::handle number : nb::cast<nb::sequence>(sequence)) {
    numbers.push_back(integer<Int>(number, name));
  }
  return numbers;
}

// ValueError unless a list has `wanted` items: "<name>: expected <what> <wanted> <things>, ...".
void check_length(const char* name, std::size_t length, std::int64_t wanted, const char* what,
                  const char* things);

// A struct of arguments, or a config, from a dict of its fields by name, as of keyword arguments.
// Fields that are left out are as in _INIT. A dtype is as data_type() takes it, and a plan is a
// tensor of bytes. A struct with tensors may come with a `stream`.
template <class Struct>
class Given {
 public:
  // TypeError for a name that does not exist. `num_ranks`: of tokens_per_rank.
  explicit Given(const nb::dict& given, DLDevice device = {}, int num_ranks = 0)
      : device_(device), num_ranks_(num_ranks) {
    Py_ssize_t found = 0;
    const auto look_up = [&](PyObject* key) {
      PyObject* const value = PyDict_GetItemWithError(given.ptr(), key);
      found += value != nullptr;
      return nb::handle(value);
    };
    const auto* key = keys().data();
    for_each_field<Struct>([&](const auto& field) {
      const nb::handle value = look_up(*key++);
      if (value.is_valid()) set(struct_.*field.at, field.name, value);
    });
    if constexpr (num_tensors != 0) {
      const nb::handle stream = look_up(*key);
      if (stream.is_valid()) stream_ = stream_of(integer<std::uint64_t>(stream, "stream"));
    }
    if (found != PyDict_Size(given.ptr())) refuse_unknown(given);
  }
  // Only of a struct without tensors, to which it would refer where they were. Lists stay in place.
  Given(Given&&) noexcept = default;
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;

  // Refers to this object's lists.
  [[nodiscard]] const Struct* get() const { return &struct_; }
  [[nodiscard]] xd_stream stream() const { return stream_; }

 private:
  static constexpr std::size_t num_fields = std::tuple_size_v<decltype(Fields<Struct>::list)>;
  static constexpr std::size_t num_tensors =
      std::apply([](const auto&... field) { return (std::size_t{0} + ... + field.is_tensor()); },
                 Fields<Struct>::list);

  // The names of the fields, and "stream", as strings that a dict finds at once.
  static const std::array<PyObject*, num_fields + 1>& keys() {
    static const auto interned = [] {
      std::array<PyObject*, num_fields + 1> all{};
      auto* key = all.data();
      for_each_field<Struct>(
          [&](const auto& field) { *key++ = PyUnicode_InternFromString(field.name); });
      *key = PyUnicode_InternFromString("stream");
      return all;
    }();
    return interned;
  }

  [[noreturn]] static void refuse_unknown(const nb::dict& given) {
    std::string unknown;
    for (auto [key, value] : given) {
      const auto is_it = [&key](PyObject* known) { return key.equal(nb::handle(known)); };
      const auto* const end = keys().begin() + num_fields + (num_tensors != 0);
      if (std::none_of(keys().begin(), end, is_it)) unknown = nb::str(key).c_str();
    }
    throw nb::type_error(
        (std::string("unknown field of ") + Fields<Struct>::name + ": " + unknown).c_str());
  }

  void set(const DLTensor*& to, const char* name, nb::handle value) {
    to = tensors_[used_++].emplace(value, name, device_).get();
  }
  // A plan, or the address of another library's object.
  template <class Void>
  requires std::is_void_v<Void>
  void set(Void*& to, const char* name, nb::handle value) {
    if constexpr (requires { struct_.plan_bytes; }) {
      const Tensor plan(value, name, device_);
      to = plan.data();
      struct_.plan_bytes = plan.bytes();
    } else {
      to = pointer(integer<std::uintptr_t>(value, name));
    }
  }
  template <class Number>
  requires std::is_integral_v<Number>
  void set(Number& to, const char* name, nb::handle value) { to = integer<Number>(value, name); }
  template <class Enum>
  requires std::is_enum_v<Enum>
  void set(Enum& to, const char* name, nb::handle value) {
    to = static_cast<Enum>(integer<std::int32_t>(value, name));
  }
  void set(float& to, const char* name, nb::handle value) { to = real_number(value, name); }
  void set(DLDataType& to, const char* name, nb::handle value) {
    to = data_type(integer<std::int32_t>(value, name));
  }
  void set(const std::int32_t*& to, const char* name, nb::handle value) {  // expert_ranks
    if (value.is_none()) return;
    ranks_ = integers<std::int32_t>(value, name, "a sequence with the rank of each expert");
    check_length(name, ranks_.size(), struct_.num_experts, "the ranks of num_experts =", "experts");
    to = ranks_.data();
  }
  void set(const std::int64_t*& to, const char* name, nb::handle value) {  // tokens_per_rank
    if (value.is_none()) return;
    tokens_ = integers<std::int64_t>(value, name, "a sequence with the tokens of each rank");
    check_length(name, tokens_.size(), num_ranks_, "the tokens of", "ranks");
    to = tokens_.data();
  }
  void set(const xd_gemm_args*& to, const char* name, nb::handle value) {
    if (value.is_none()) return;
    if (!PyDict_Check(value.ptr())) expected(name, "a dict of fields", value);
    product_ =
        std::make_unique<Given<xd_gemm_args>>(nb::cast<nb::dict>(value), device_, num_ranks_);
    to = product_->get();
  }

  DLDevice device_;
  int num_ranks_;
  Struct struct_ = Fields<Struct>::init;
  xd_stream stream_ = nullptr;
  std::array<std::optional<Tensor>, num_tensors> tensors_;
  std::size_t used_ = 0;
  std::vector<std::int32_t> ranks_;
  std::vector<std::int64_t> tokens_;
  std::unique_ptr<Given<xd_gemm_args>> product_;
};

// A field that the library has written, as a value of Python. A name may have been cut inside a
// character.
inline nb::object value_of(const char* text) {
  return nb::bytes(text).attr("decode")("utf-8", "replace");
}
inline nb::object value_of(xd_status status) { return nb::str(xd_status_name(status)); }
inline nb::object value_of(DLDataType type) { return nb::int_(type.code << 8 | type.bits); }
inline nb::object value_of(const void* place) { return nb::int_(address(place)); }
template <class Number>
requires std::is_arithmetic_v<Number> nb::object value_of(Number number) {
  return nb::cast(number);
}
template <class Enum>
requires std::is_enum_v<Enum> nb::object value_of(Enum code) {
  return nb::int_(static_cast<int>(code));
}
template <std::size_t length>
nb::object value_of(const std::uint64_t (&numbers)[length]) {
  nb::list list;
  for (const std::uint64_t number : numbers) list.append(number);
  return nb::tuple(list);
}

// A dict of the struct's fields by name; a status is its name.
template <class Struct>
nb::dict fields_of(const Struct& filled) {
  nb::dict found;
  for_each_field<Struct>(
      [&](const auto& field) { found[field.name] = value_of(filled.*field.at); });
  return found;
}
// Masks as tuples of ranks.
nb::dict fields_of(const xd_ll_status& status);

}  // namespace xdpy
