#include "gemm/cpu/finish.h"

#include <algorithm>
#include <bit>

#include "gemm/cpu/elements.h"

namespace xd::gemm::cpu {
namespace {

std::byte* place(const Tensor& tensor, std::int64_t row, std::int64_t column) {
  return tensor.data + at(row * tensor.cols + column) * dtype_bytes(tensor.type);
}

}  // namespace

bool is_plain(const ProductCall& call) {
  return call.d.type == DType::f32 && call.alpha == 1.0f && !call.c && !call.bias &&
         call.epilogue == XD_GEMM_EPILOGUE_NONE && !call.bias_grad && !call.d_amax;
}

void Finish::begin(const ProductCall& call, std::span<float> column_sums) {
  call_ = &call;
  largest_ = 0;
  if (call.bias_grad) std::ranges::fill(column_sums, 0.0f);
}

void Finish::activate(float* x, std::int64_t row, std::int64_t column, std::size_t columns) {
  const Tensor& pre = call_->pre_activation;
  float* const given = scratch_.other_line();
  if (pre && call_->has_activation_input()) {
    widen(pre.type, given, place(pre, row, column), columns);
  } else if (pre) {
    narrow(pre.type, place(pre, row, column), x, columns);
  }
  switch (call_->epilogue) {
    case XD_GEMM_EPILOGUE_NONE:
      return;
    case XD_GEMM_EPILOGUE_GELU:
      return gelu(x, columns);
    case XD_GEMM_EPILOGUE_DGELU:
      return dgelu(x, given, columns);
    case XD_GEMM_EPILOGUE_RELU:
      return relu(x, columns);
    case XD_GEMM_EPILOGUE_DRELU:
      return drelu(x, given, columns);
  }
}

void Finish::row(float* x, std::int64_t row, std::int64_t column, std::int64_t columns,
                 float* column_sums) {
  const std::size_t n = at(columns);
  float* const term = scratch_.other_line();
  if (call_->c) {
    widen(call_->c.type, term, place(call_->c, row, column), n);
    add_scaled(x, term, call_->beta, n);
  }
  if (call_->bias) {
    widen(call_->bias.type, term, call_->bias.data + at(column) * dtype_bytes(call_->bias.type), n);
    add(x, term, n);
  }
  activate(x, row, column, n);
  if (call_->bias_grad) add(column_sums + column, x, n);
  if (call_->d_amax) largest_ = std::max(largest_, largest_magnitude(x, n));
  if (call_->d_scale) scale(x, *call_->d_scale.as<float>(), n);
  narrow(call_->d.type, place(call_->d, row, column), x, n);
}

void Finish::end() {
  if (!call_->d_amax) return;
  const std::uint32_t nan = 0x7fc00000u;
  *call_->d_amax.as<float>() = std::bit_cast<float>(largest_ > 0x7f800000u ? nan : largest_);
}

}  // namespace xd::gemm::cpu
