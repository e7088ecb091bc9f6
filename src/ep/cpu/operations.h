// The five operations of the CPU executor; the steps are described at turn::HostOperation.
#pragma once

#include "ep/cpu/operation.h"

namespace xd::ep::cpu {

class PrepareOp {
 public:
  PrepareOp(const Context& context, const xd_ep_prepare_args* args);
  Record record() const;
  void stage_in();
  void announce();
  Setback obstacle() const { return {}; }
  void move();
  Setback complete();

 private:
  PlanMap plan_map() const;
  CountTable gather_counts() const;
  std::uint64_t fingerprint_of(const CountTable& counts) const;
  Numbering begin_numbering() const;
  void send_kept(std::span<const std::uint32_t> kept) const;
  void collect_kept();
  std::int64_t collect_lists() const;
  std::uint32_t* list_of(int owner, int source) const;
  void write_zones() const;
  void write_header() const;
  void write_outputs() const;
  Setback report() const;
  const Placement& placement() const { return context_.scratch.placement; }
  bool drops() const { return config().overflow == XD_EP_OVERFLOW_DROP; }
  const Config& config() const { return context_.group.config(); }
  std::int64_t capacity_of(int rank) const {
    return whole_rows(context_.group.capacities()[at(rank)], call_.alignment);
  }

  Context context_;
  PrepareCall call_;
  int tokens_;
  int topk_;
  Choices choices_;                // from stage_in() on
  std::uint64_t fingerprint_ = 0;  // from move() on
};

class DispatchOp : public PlanOperation {
 public:
  DispatchOp(const Context& context, const xd_ep_dispatch_args* args)
      : DispatchOp(context, read_dispatch(args, context.group.call_context())) {}
  Record record() const;
  void stage_in() {}
  void move();
  Setback complete();

 private:
  DispatchOp(const Context& context, const DispatchCall& call);
  void send_row(std::int64_t token, const TokenRows& rows) const;
  void send_quantised(std::int64_t token, const TokenRows& rows) const;
  void send_weights(std::int64_t token, const TokenRows& rows) const;
  void send_choices(std::int64_t token, const TokenRows& rows) const;
  void end_choices() const;

  DispatchCall call_;
  ReceiveTensor recv_tokens_, recv_scales_, recv_weights_, recv_topk_idx_;
  rows::Store store_ = rows::Store::cached;
};

// combine, and the tokens of dispatch_bwd: sums of rows that this rank reads from its peers.
class CombineOp : public PlanOperation {
 public:
  CombineOp(const Context& context, const xd_ep_combine_args* args)
      : CombineOp(context, read_combine(args, context.group.call_context())) {}
  Record record() const;
  void stage_in();
  void move();
  Setback complete() { return {}; }

 private:
  CombineOp(const Context& context, const CombineCall& call);

  CombineCall call_;
  ReceiveTensor expert_out_, weights_;
};

class DispatchBwdOp : public PlanOperation {
 public:
  DispatchBwdOp(const Context& context, const xd_ep_dispatch_bwd_args* args)
      : DispatchBwdOp(context, read_dispatch_bwd(args, context.group.call_context())) {}
  Record record() const;
  void stage_in();
  void move();
  Setback complete() { return {}; }

 private:
  DispatchBwdOp(const Context& context, const DispatchBwdCall& call);
  void read_weights() const;

  DispatchBwdCall call_;
  ReceiveTensor grad_recv_tokens_, grad_recv_weights_;
};

class CombineBwdOp : public PlanOperation {
 public:
  CombineBwdOp(const Context& context, const xd_ep_combine_bwd_args* args)
      : CombineBwdOp(context, read_combine_bwd(args, context.group.call_context())) {}
  Record record() const;
  void stage_in();
  void move();
  Setback complete();

 private:
  CombineBwdOp(const Context& context, const CombineBwdCall& call);
  struct WeightedRow {
    float weight = 0.0f;
    std::byte* grad_expert_out = nullptr;
    const std::byte* expert_out = nullptr;  // read for grad_weight alone
    float* grad_weight = nullptr;           // null = not asked for
  };
  // True if the operation is weighted, and staged in EXPERT_MAJOR.
  bool finishes_here() const {
    return call_.weights && config().layout.row_per_expert && grad_expert_out_.staged();
  }
  void send_scaled(const std::byte* grad, const TokenRows& rows) const;
  void finish_row(const std::byte* grad, const WeightedRow& row) const;
  void finish_rows() const;

  CombineBwdCall call_;
  ReceiveTensor grad_expert_out_, grad_expert_out_scales_, expert_out_, weights_, grad_weights_;
  rows::Store store_ = rows::Store::cached;
};

// Computes out[t] = the sum over token t's rows in the peers' tensors, for all tokens; `weighted`
// multiplies each row by its weight there.
void sum_rows(const Context& context, const PlanView& plan, const Tensor& out, bool weighted);

}  // namespace xd::ep::cpu
