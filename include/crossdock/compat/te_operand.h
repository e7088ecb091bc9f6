/* Crossdock: TransformerEngine's tensors as Crossdock's calls take them. Part of te_ep.h and
 * te_comm_gemm.h; not for programs. C++17. */
#ifndef CROSSDOCK_COMPAT_TE_OPERAND_H_
#define CROSSDOCK_COMPAT_TE_OPERAND_H_

#include <crossdock/compat/te_comm_window.h>
#include <crossdock/compat/te_tensor.h>
#include <crossdock/tensor.h>

namespace crossdock::te::detail {

inline DLDataType dtype_of(const char* name, NVTEDType type) {
  switch (type) {
    case kNVTEByte:
      return XD_DTYPE_UINT8;
    case kNVTEInt32:
      return XD_DTYPE_INT32;
    case kNVTEInt64:
      return XD_DTYPE_INT64;
    case kNVTEFloat32:
      return XD_DTYPE_FLOAT32;
    case kNVTEFloat16:
      return XD_DTYPE_FLOAT16;
    case kNVTEBFloat16:
      return XD_DTYPE_BFLOAT16;
    case kNVTEFloat8E4M3:
      return XD_DTYPE_FLOAT8_E4M3FN;
    case kNVTEFloat8E5M2:
      return XD_DTYPE_FLOAT8_E5M2;
    case kNVTEFloat8E8M0:
      return XD_DTYPE_FLOAT8_E8M0FNU;
    default:
      refuse(std::string(name) + ": NVTEDType " + std::to_string(type) +
             ", expected a type that Crossdock has, not 16-bit integers nor 4-bit numbers");
  }
}

/* A part of a tensor as a vector or matrix: all dimensions but the last count as rows. It points
 * into itself, and so is not copied. */
class Operand {
 public:
  /* Not given. */
  Operand() = default;
  /* `part` of a tensor, or nothing where the tensor is NULL. */
  Operand(const char* name, NVTETensor tensor, DLDevice device, int ndim,
          NVTETensorParam part = kNVTERowwiseData) {
    if (tensor == nullptr) return;
    NVTEBasicTensor basic{};
    nvte_get_tensor_param_v2(tensor, part, &basic, sizeof(basic), nullptr);
    set(name, basic, device, ndim);
  }
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;

  void set(const char* name, const NVTEBasicTensor& basic, DLDevice device, int ndim) {
    int64_t count = 1;
    for (size_t d = 0; d < basic.shape.ndim; ++d)
      count *= static_cast<int64_t>(basic.shape.data[d]);
    const DLDataType type = dtype_of(name, basic.dtype);
    if (ndim == 1 || basic.shape.ndim < 2) {
      tensor_ = xd_tensor_1d(basic.data_ptr, type, device, count);
    } else {
      const auto columns = static_cast<int64_t>(basic.shape.data[basic.shape.ndim - 1]);
      tensor_ =
          xd_tensor_2d(basic.data_ptr, type, device, columns > 0 ? count / columns : 0, columns);
    }
    given_ = true;
  }

  /* Where the tensor lies according to a window. */
  void move_to(void* data) { tensor_.dl.data = data; }

  const DLTensor* get() { return given_ ? xd_tensor_view(&tensor_) : nullptr; }
  bool given() const { return given_; }
  void* data() const { return tensor_.dl.data; }
  DLDataType dtype() const { return tensor_.dl.dtype; }
  bool is_8_bits_wide() const { return given_ && tensor_.dl.dtype.bits == 8; }
  int64_t rows() const { return tensor_.shape[0]; }
  int64_t columns() const { return tensor_.dl.ndim > 1 ? tensor_.shape[1] : 1; }
  int64_t size() const { return rows() * columns(); }

 private:
  xd_tensor tensor_{};
  bool given_ = false;
};

}  // namespace crossdock::te::detail

#endif /* CROSSDOCK_COMPAT_TE_OPERAND_H_ */
