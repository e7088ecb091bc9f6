// One batch through a layer, by the layer's calls and by the calls that it is made of.
#pragma once

#include <crossdock/moe.h>

#include <utility>
#include <vector>

#include "conformance/batch.h"
#include "conformance/case.h"
#include "support/outcome.h"
#include "support/tensor.h"

namespace xd::test {

// A case whose plans have `parts`, with rows on every rank.
Case layer_case(int num_ranks, int parts);

// Gives each token the choices of another one of its rank, and other experts of the same ranks, so
// that as many rows arrive everywhere. The batch's next prepare reads that. Equal on all ranks.
void turn_routing(const Rank& rank, const Case& c, Batch& batch, int by);

class Layer {
 public:
  struct Options {
    bool weighted = true;
    DLDataType grad_type = kBf16;  // of gradients of weights
    bool accumulate = false;
    bool in_place = false;  // grad_inner is inner
    xd_gated_activation activation = XD_GATED_SILU;
    Place place = Place::ordinary;  // of rows that peers read and write
  };

  // Layers of one case and number have equal inputs. `batch` has the plan, and outlives this.
  Layer(const Rank& rank, const Case& c, Batch& batch, Options options);
  Layer(const Layer&) = delete;  // arguments point into this object
  Layer& operator=(const Layer&) = delete;

  // Make the calls and wait until all has ended.
  Outcome forward(xd_ep_group* group, int parts, int num_sms = 0);
  Outcome backward(xd_ep_group* group, int parts, int num_sms = 0);
  // The same by calls of ep.h, grouped.h and gated.h.
  void forward_by_calls(xd_ep_group* group) const;
  void backward_by_calls(xd_ep_group* group) const;

  // Every element of every tensor that is written.
  void expect_equal(const Layer& other) const;
  bool untouched() const;
  const Tensor& grad_tokens() const { return grad_tokens_; }
  const Tensor& grad_w_in() const { return grad_w_in_; }
  const Tensor& grad_w_out() const { return grad_w_out_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t hidden() const { return hidden_; }

  xd_moe_forward_args forward_args = XD_MOE_FORWARD_ARGS_INIT;
  xd_moe_backward_args backward_args = XD_MOE_BACKWARD_ARGS_INIT;

  // Every tensor argument of both calls, by name.
  struct Field {
    const char* name;
    const DLTensor** slot;
    bool backward;
  };
  std::vector<Field> fields();

 private:
  void fill(Tensor& tensor, std::uint64_t salt);
  void set_forward();
  void set_backward();
  void product(const DLTensor* a, const DLTensor* b, const DLTensor* d) const;
  void outer(const DLTensor* a, const DLTensor* b, const DLTensor* d) const;
  std::vector<std::pair<const char*, const Tensor*>> outputs() const;

  const Rank& rank_;
  const Options options_;
  Batch& batch_;
  const std::int64_t experts_, tokens_count_, topk_, rows_, hidden_, ffn_;
  const std::uint64_t seed_;
  Tensor tokens_, topk_weights_, w_in_, w_out_, grad_out_;
  Tensor recv_tokens_, recv_weights_, inner_, activated_, expert_out_, out_;
  Tensor grad_expert_out_, grad_recv_weights_, grad_activated_, grad_inner_, grad_recv_tokens_;
  Tensor grad_tokens_, grad_topk_weights_, grad_w_in_, grad_w_out_;
};

}  // namespace xd::test
