#include "capsule.h"

#include <dlpack/dlpack.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>

#include "arguments.h"

namespace xdpy {
namespace {

struct Managed {
  DLManagedTensor tensor{};
  std::vector<std::int64_t> shape;
  nb::object owner, released;
};

// As of a destructor: an error that is on its way through Python stays as it is.
void tell_released(const Managed& managed) {
  if (managed.released.is_none()) return;
  const nb::error_scope under_way;
  const auto result = nb::steal(PyObject_CallOneArg(managed.released.ptr(), managed.owner.ptr()));
  if (!result.is_valid()) PyErr_WriteUnraisable(managed.released.ptr());
}

void release(DLManagedTensor* tensor) {
  // The owner of a tensor that outlives the interpreter is gone already.
  if (!nb::is_alive()) return;
  const nb::gil_scoped_acquire gil;
  const std::unique_ptr<Managed> managed(static_cast<Managed*>(tensor->manager_ctx));
  tell_released(*managed);
}

// A consumer renames the capsule to "used_dltensor" and calls the deleter itself.
void release_unused(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  release(static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
}

}  // namespace

nb::object as_dlpack(std::uintptr_t address, std::vector<std::int64_t> shape, int dtype,
                     int device_type, int device_id, nb::object owner, nb::object released) {
  auto managed = std::make_unique<Managed>();
  managed->shape = std::move(shape);
  managed->owner = std::move(owner);
  managed->released = std::move(released);
  DLTensor& tensor = managed->tensor.dl_tensor;
  tensor.data = pointer(address);
  tensor.device = {static_cast<DLDeviceType>(device_type), device_id};
  tensor.ndim = static_cast<int>(managed->shape.size());
  tensor.dtype = data_type(dtype);
  tensor.shape = managed->shape.data();
  managed->tensor.manager_ctx = managed.get();
  managed->tensor.deleter = &release;
  Managed* const held = managed.release();
  PyObject* capsule = PyCapsule_New(&held->tensor, "dltensor", &release_unused);
  if (capsule == nullptr) {
    release(&held->tensor);
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

}  // namespace xdpy
