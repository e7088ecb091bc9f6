#include "arguments.h"

#include <nanobind/stl/string.h>

namespace xdpy {

void expected(const char* name, const char* what, nb::handle value) {
  const std::string got = nb::cast<std::string>(nb::repr(value));
  throw nb::type_error((std::string(name) + ": expected " + what + ", got " + got).c_str());
}

DLDataType data_type(int packed) {
  const auto bits = static_cast<std::uint8_t>(packed & 0xff);
  const std::uint16_t lanes = bits < 8 ? 8 / bits : 1;  // bytes of several numbers
  return {static_cast<std::uint8_t>(packed >> 8), bits, lanes};
}

namespace {

// The table of C functions of a framework that exchanges tensors, as DLPack 1.3 has it.
struct Exchange {
  std::uint32_t major, minor;
  Exchange* older;
  void *allocate, *from_object, *to_object;
  // The memory of a tensor, as long as it lives. 0, or -1 with an exception set.
  int (*describe)(void* object, DLTensor* out);
  void* current_stream;
};

// Of a Python class; nullptr if it has none that this code knows.
const Exchange* exchange_of(nb::handle kind) {
  static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  PyObject* const found = PyObject_GetAttr(kind.ptr(), name);
  if (found == nullptr) PyErr_Clear();
  const nb::object capsule = nb::steal(found);
  constexpr const char* what = "dlpack_exchange_api";
  if (!capsule.is_valid() || PyCapsule_IsValid(capsule.ptr(), what) == 0) return nullptr;
  const auto* table = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), what));
  while (table != nullptr && table->major > 1) table = table->older;
  const bool known = table != nullptr && table->major == 1 && table->describe != nullptr;
  return known ? table : nullptr;
}

// Writes `tensor` if the object is one that C code reads.
bool read_object(nb::handle object, DLTensor& tensor) {
  // Tables live as long as the process. With the GIL held, so that there is one thread.
  static PyTypeObject* kind = nullptr;
  static const Exchange* table = nullptr;
  if (Py_TYPE(object.ptr()) != kind) {
    const Exchange* const found = exchange_of(object.type());
    if (found == nullptr) return false;
    Py_XDECREF(reinterpret_cast<PyObject*>(kind));
    kind = Py_TYPE(object.ptr());
    Py_INCREF(reinterpret_cast<PyObject*>(kind));
    table = found;
  }
  if (table->describe(object.ptr(), &tensor) != 0) throw nb::python_error();
  return true;
}

}  // namespace

bool reads(nb::handle kind) { return exchange_of(kind) != nullptr; }

Tensor::Tensor(nb::handle spec, const char* name, DLDevice device) {
  if (spec.is_none()) return;
  if (!PyTuple_Check(spec.ptr()) && read_object(spec, tensor_)) {
    tensor_.device = device;  // pinned memory of the host also counts as the device's
    given_ = true;
    return;
  }
  const Py_ssize_t parts = PyTuple_Check(spec.ptr()) ? PyTuple_GET_SIZE(spec.ptr()) : 0;
  if (parts != 3 && parts != 4) {
    expected(name, "None, (address, shape, dtype) or (address, shape, dtype, strides)", spec);
  }
  const nb::handle shape = PyTuple_GET_ITEM(spec.ptr(), 1);
  if (!PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) > Py_ssize_t(max_dims)) {
    expected(name, "a shape of at most 4 dimensions", shape);
  }
  tensor_.data = pointer(integer<std::uint64_t>(PyTuple_GET_ITEM(spec.ptr(), 0), name));
  tensor_.ndim = static_cast<int>(PyTuple_GET_SIZE(shape.ptr()));
  for (int d = 0; d < tensor_.ndim; ++d) {
    shape_[d] = integer<std::int64_t>(PyTuple_GET_ITEM(shape.ptr(), d), name);
  }
  tensor_.shape = shape_.data();
  if (parts == 4) {
    const nb::handle strides = PyTuple_GET_ITEM(spec.ptr(), 3);
    if (!PyTuple_Check(strides.ptr()) || PyTuple_GET_SIZE(strides.ptr()) != tensor_.ndim) {
      expected(name, "as many strides as the shape has dimensions", strides);
    }
    for (int d = 0; d < tensor_.ndim; ++d) {
      strides_[d] = integer<std::int64_t>(PyTuple_GET_ITEM(strides.ptr(), d), name);
    }
    tensor_.strides = strides_.data();
  }
  tensor_.dtype = data_type(integer<std::int32_t>(PyTuple_GET_ITEM(spec.ptr(), 2), name));
  tensor_.device = device;
  given_ = true;
}

std::size_t Tensor::bytes() const {
  std::size_t elements = given_ ? 1 : 0;
  for (int d = 0; d < tensor_.ndim; ++d) elements *= static_cast<std::size_t>(tensor_.shape[d]);
  return elements * tensor_.dtype.bits / 8;
}

float real_number(nb::handle value, const char* name) {
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    expected(name, "a number", value);
  }
  return static_cast<float>(number);
}

void check_length(const char* name, std::size_t length, std::int64_t wanted, const char* what,
                  const char* things) {
  if (length != 0 && static_cast<std::int64_t>(length) == wanted) return;
  throw nb::value_error((std::string(name) + ": expected " + what + " " + std::to_string(wanted) +
                         " " + things + ", got " + std::to_string(length))
                            .c_str());
}

namespace {

// The ranks whose bits are set, in a tuple.
nb::tuple ranks_of(const std::uint64_t (&bits)[2]) {
  nb::list ranks;
  for (int rank = 0; rank < 128; ++rank) {
    if ((bits[rank / 64] >> (rank % 64) & 1) != 0) ranks.append(rank);
  }
  return nb::tuple(ranks);
}

}  // namespace

nb::dict fields_of(const xd_ll_status& status) {
  nb::dict found = fields_of<xd_ll_status>(status);
  found["masked"] = ranks_of(status.masked);
  found["masked_by"] = ranks_of(status.masked_by);
  return found;
}

}  // namespace xdpy
