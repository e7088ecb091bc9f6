// The forward pass of an MLP that is spread over N ranks, by TransformerEngine's functions:
//
//   crossdock-run -n 4 ./tensor_parallel          # on the CPU
//   crossdock-run -n 4 ./tensor_parallel cuda     # on four GPUs
//
//   y = gelu(x * w1^T + b1)   each rank has some rows of w1; tokens are gathered
//   z = y * w2^T              each rank has some columns of w2; tokens are summed and scattered
//
// Every line that names nvte_ is as it would be with TransformerEngine's own library. Each rank
// then checks its tokens against plain loops over the whole layer.
#include <transformer_engine/comm_gemm.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include "device.h"

namespace {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;
using Floats = std::vector<float>;

constexpr int64_t kTokens = 30, kHidden = 16, kInnerPerRank = 12;

enum Matrix { kX, kW1, kB1, kW2 };

// Element (row, column) of a matrix of the whole layer: every rank knows every number.
float number(Matrix matrix, int64_t row, int64_t column) {
  const int64_t mixed = (int64_t{matrix} * 7919 + row * 104729 + column * 1299709) % 1009;
  return static_cast<float>(mixed - 504) / 1009.0f;
}

// Some rows and columns of a matrix.
Floats part(Matrix matrix, int64_t first_row, int64_t rows, int64_t first_column, int64_t columns) {
  Floats values;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      values.push_back(number(matrix, first_row + i, first_column + j));
    }
  }
  return values;
}

class Layer {
 public:
  explicit Layer(Device& device)
      : device_(device),
        ctx_(nvte_comm_gemm_ctx_create(crossdock::te::as_nccl(device.comm), device.num_ranks,
                                       device.rank)),  // or NCCL's communicator
        inner_(kInnerPerRank * device.num_ranks),
        first_inner_(kInnerPerRank * device.rank),
        tokens_(nvte_comm_gemm_numroc(ctx_, kTokens)),
        first_token_((kTokens + device.num_ranks - 1) / device.num_ranks * device.rank) {}
  ~Layer() { nvte_comm_gemm_ctx_destroy(ctx_); }

  int count_wrong() {
    const Floats z = forward();
    int wrong = 0;
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int64_t h = 0; h < kHidden; ++h) {
        const double expected = z_of(first_token_ + t, h);
        const double error = std::fabs(z[static_cast<size_t>(t * kHidden + h)] - expected);
        wrong += !(error <= 1e-4 * (1 + std::fabs(expected)));
      }
    }
    return wrong;
  }
  int64_t tokens() const { return tokens_; }

 private:
  Floats forward() {
    // By rows: x [tokens, hidden], w1 [inner of this rank, hidden], y [all tokens, inner].
    TensorWrapper x = input(part(kX, first_token_, tokens_, 0, kHidden), tokens_, kHidden);
    TensorWrapper w1 =
        input(part(kW1, first_inner_, kInnerPerRank, 0, kHidden), kInnerPerRank, kHidden);
    TensorWrapper b1 = input(part(kB1, 0, 1, first_inner_, kInnerPerRank), 1, kInnerPerRank);
    TensorWrapper before_gelu = output(kTokens, kInnerPerRank), y = output(kTokens, kInnerPerRank);
    nvte_all_gather_gemm(ctx_, inner_, kTokens, kHidden, w1.data(), x.data(), y.data(), b1.data(),
                         before_gelu.data(), /*transa=*/true, /*transb=*/false, /*grad=*/false,
                         /*accumulate=*/false, /*comm_sm_count=*/0, device_.stream,
                         kNVTECommGemmAlgoDefault);

    TensorWrapper w2 =
        input(part(kW2, 0, kHidden, first_inner_, kInnerPerRank), kHidden, kInnerPerRank);
    TensorWrapper z = output(tokens_, kHidden), none;
    nvte_gemm_reduce_scatter(ctx_, kHidden, kTokens, inner_, w2.data(), y.data(), z.data(),
                             none.data(), none.data(), /*transa=*/true, /*transb=*/false,
                             /*grad=*/false, /*accumulate=*/false, /*comm_sm_count=*/0,
                             device_.stream, kNVTECommGemmAlgoDefault);
    return device_.download<float>(z.dptr(), z.numel());
  }

  TensorWrapper input(const Floats& values, int64_t rows, int64_t columns) {
    return tensor(device_.upload(values), rows, columns);
  }
  TensorWrapper output(int64_t rows, int64_t columns) {
    return tensor(device_.allocate(static_cast<size_t>(rows * columns) * sizeof(float)), rows,
                  columns);
  }
  static TensorWrapper tensor(void* data, int64_t rows, int64_t columns) {
    return TensorWrapper(
        data, std::vector<size_t>{static_cast<size_t>(rows), static_cast<size_t>(columns)},
        DType::kFloat32);
  }

  double z_of(int64_t token, int64_t h) const {
    double z = 0;
    for (int64_t f = 0; f < inner_; ++f) {
      double x = number(kB1, 0, f);
      for (int64_t i = 0; i < kHidden; ++i) x += number(kX, token, i) * number(kW1, f, i);
      const double gelu = x / 2 * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
      z += gelu * number(kW2, h, f);
    }
    return z;
  }

  Device& device_;
  NVTECommGemmCtx* const ctx_;
  const int64_t inner_, first_inner_;   // of all ranks; of this rank
  const int64_t tokens_, first_token_;  // of this rank
};

int run(int argc, char** argv) {
  Device device(argc, argv);
  Layer layer(device);
  const int wrong = layer.count_wrong();
  std::printf("rank %d of %d: %d of %d tokens, %d wrong elements\n", device.rank, device.num_ranks,
              static_cast<int>(layer.tokens()), static_cast<int>(kTokens), wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
