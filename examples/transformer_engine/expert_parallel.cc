// One layer of experts, forward and backward, by TransformerEngine's functions:
//
//   crossdock-run -n 4 ./expert_parallel          # on the CPU
//   crossdock-run -n 4 ./expert_parallel cuda     # on four GPUs
//
// Every line that names nvte_ is as it would be with TransformerEngine's own library. Expert e
// multiplies its tokens by e + 1, so every rank knows what must come back.
#include <transformer_engine/ep.h>

#include <cstdio>
#include <exception>
#include <vector>

#include "device.h"

namespace {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;
using Floats = std::vector<float>;
using Shape = std::vector<size_t>;

constexpr int kTokens = 8, kHidden = 64, kTopK = 2, kLocalExperts = 2, kAlignment = 4;
constexpr NVTECommWindow kNoWindow{};

// The batch of one rank.
struct Batch {
  Floats tokens, weights, grad;  // grad: of the layer's result
  std::vector<int64_t> experts;
};

Batch make_batch(int rank, int num_experts) {
  Batch batch;
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kHidden; ++h) {
      batch.tokens.push_back(static_cast<float>((3 * rank + 5 * t + h) % 8));
      batch.grad.push_back(static_cast<float>((rank + t + 3 * h) % 4));
    }
    for (int k = 0; k < kTopK; ++k) {
      batch.experts.push_back((rank + 3 * t + k) % num_experts);
      batch.weights.push_back(k == 0 ? 0.75f : 0.25f);
    }
  }
  return batch;
}

// The rows of the experts of this rank, as the library and the experts hand them to one another.
class Layer {
 public:
  Layer(Device& device, const Batch& batch)
      : device_(device), batch_(batch), rows_(static_cast<size_t>(device.num_ranks) * 64) {
    NVTEEpGroupConfig group = NVTE_EP_GROUP_CONFIG_INIT;
    group.ep_size = device.num_ranks;
    group.num_experts = device.num_ranks * kLocalExperts;
    group.max_tokens_per_rank = kTokens;
    group.max_recv_tokens_per_rank = static_cast<int>(rows_);
    group.hidden_dim = kHidden;
    group.max_token_dtype = kNVTEFloat32;
    group.num_topk = kTopK;
    nvte_ep_initialize(crossdock::te::as_nccl(device.comm), &group);  // or NCCL's communicator
    config_.top_k = kTopK;
    config_.dispatch_output_per_expert_alignment = kAlignment;
    handle_ = tensor(nvte_ep_handle_mem_size(&config_), DType::kByte, {}, 1);
  }
  ~Layer() { nvte_ep_shutdown(); }

  // Returns the result of every token.
  Floats forward() {
    TensorWrapper topk_idx = input(batch_.experts, {kTokens, kTopK}, DType::kInt64);
    TensorWrapper counts = tensor(kLocalExperts, DType::kInt64, {}, 8);
    nvte_ep_prepare(handle_.data(), topk_idx.data(), counts.data(), nullptr, &config_,
                    device_.stream);
    TensorWrapper tokens = input(batch_.tokens, {kTokens, kHidden});
    TensorWrapper weights = input(batch_.weights, {kTokens, kTopK});
    TensorWrapper recv = output({rows_, kHidden}), recv_weights = output({rows_});
    nvte_ep_dispatch(handle_.data(), topk_idx.data(), tokens.data(), kNoWindow, weights.data(),
                     kNoWindow, recv.data(), kNoWindow, recv_weights.data(), kNoWindow,
                     device_.stream);
    counts_ = device_.download<int64_t>(counts.dptr(), kLocalExperts);
    recv_ = floats(recv);
    recv_weights_ = floats(recv_weights);

    Floats out(recv_.size());
    for_each_row([&](size_t row, float factor) {
      for (size_t i = row * kHidden; i < (row + 1) * kHidden; ++i) {
        out[i] = recv_[i] * factor * recv_weights_[row];
      }
    });
    TensorWrapper expert_out = input(out, {rows_, kHidden});
    TensorWrapper result = output({kTokens, kHidden});
    nvte_ep_combine(handle_.data(), expert_out.data(), kNoWindow, result.data(), device_.stream);
    return floats(result);
  }

  struct Gradients {
    Floats tokens, weights;
  };
  Gradients backward() {
    TensorWrapper grad = input(batch_.grad, {kTokens, kHidden});
    TensorWrapper grad_out = output({rows_, kHidden});
    nvte_ep_combine_bwd(handle_.data(), grad.data(), kNoWindow, grad_out.data(), kNoWindow,
                        device_.stream);
    const Floats out = floats(grad_out);

    Floats grad_rows(recv_.size()), grad_weights(rows_);
    for_each_row([&](size_t row, float factor) {
      for (size_t i = row * kHidden; i < (row + 1) * kHidden; ++i) {
        grad_rows[i] = out[i] * factor * recv_weights_[row];
        grad_weights[row] += out[i] * factor * recv_[i];
      }
    });
    TensorWrapper g_recv = input(grad_rows, {rows_, kHidden});
    TensorWrapper g_recv_weights = input(grad_weights, {rows_});
    TensorWrapper grad_tokens = output({kTokens, kHidden});
    TensorWrapper grad_topk_weights = output({kTokens, kTopK});
    nvte_ep_dispatch_bwd(handle_.data(), g_recv.data(), kNoWindow, g_recv_weights.data(), kNoWindow,
                         grad_tokens.data(), grad_topk_weights.data(), device_.stream);
    return {floats(grad_tokens), floats(grad_topk_weights)};
  }

 private:
  TensorWrapper tensor(size_t count, DType type, Shape shape, size_t element_bytes) {
    if (shape.empty()) shape = {count};
    return TensorWrapper(device_.allocate(count * element_bytes), shape, type);
  }
  TensorWrapper output(const Shape& shape) {
    size_t count = 1;
    for (const size_t extent : shape) count *= extent;
    return tensor(count, DType::kFloat32, shape, sizeof(float));
  }
  template <class T>
  TensorWrapper input(const std::vector<T>& values, const Shape& shape,
                      DType type = DType::kFloat32) {
    return TensorWrapper(device_.upload(values), shape, type);
  }
  Floats floats(const TensorWrapper& tensor) {
    return device_.download<float>(tensor.dptr(), tensor.numel());
  }

  // Calls visit(row, factor of its expert) for the rows that have come, padding included.
  template <class Visit>
  void for_each_row(const Visit& visit) {
    size_t row = 0;
    for (int e = 0; e < kLocalExperts; ++e) {
      const auto factor = static_cast<float>(device_.rank * kLocalExperts + e + 1);
      for (int64_t i = 0; i < counts_[static_cast<size_t>(e)]; ++i) visit(row++, factor);
    }
  }

  Device& device_;
  const Batch& batch_;
  const size_t rows_;  // room for rows
  NVTEEpLayerConfig config_ = NVTE_EP_LAYER_CONFIG_INIT;
  TensorWrapper handle_;
  std::vector<int64_t> counts_;
  Floats recv_, recv_weights_;
};

int count_wrong(const Batch& batch, const Floats& result, const Layer::Gradients& gradients) {
  int wrong = 0;
  for (size_t t = 0; t < kTokens; ++t) {
    float factor = 0, dot = 0;
    for (size_t k = t * kTopK; k < (t + 1) * kTopK; ++k) {
      factor += batch.weights[k] * static_cast<float>(batch.experts[k] + 1);
    }
    for (size_t i = t * kHidden; i < (t + 1) * kHidden; ++i) {
      wrong += result[i] != batch.tokens[i] * factor;
      wrong += gradients.tokens[i] != batch.grad[i] * factor;
      dot += batch.tokens[i] * batch.grad[i];
    }
    for (size_t k = t * kTopK; k < (t + 1) * kTopK; ++k) {
      wrong += gradients.weights[k] != dot * static_cast<float>(batch.experts[k] + 1);
    }
  }
  return wrong;
}

int run(int argc, char** argv) {
  Device device(argc, argv);
  const Batch batch = make_batch(device.rank, device.num_ranks * kLocalExperts);
  Layer layer(device, batch);
  const Floats result = layer.forward();
  const int wrong = count_wrong(batch, result, layer.backward());
  std::printf("rank %d of %d: forward and backward, %d wrong elements\n", device.rank,
              device.num_ranks, wrong);
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
