// The operations of the CPU executor; the steps are described at turn::HostOperation.
#pragma once

#include "ep/bulk/cpu/operation.h"
#include "ep/bulk/cpu/remote/sums.h"

namespace xd::ep::cpu {

class PrepareOp {
 public:
  PrepareOp(const Context& context, const PrepareCall& call);
  Record record() const;
  void stage_in();
  void announce();
  OperationError obstacle() const { return {}; }
  void move();
  OperationError complete();

 private:
  PlanMap plan_map() const;
  CountTable gather_counts() const;
  std::uint64_t fingerprint_of(const CountTable& counts) const;
  Numbering begin_numbering() const;
  void send_kept(std::span<const std::uint32_t> kept) const;
  void send_remote(RemoteSide& side, std::span<const std::uint32_t> kept) const;
  void bring_words(const RemoteHeader& header, std::span<const std::byte> items) const;
  bool may_send_words(int remote_rank) const {
    return context_.group.config_of(remote_rank).keeps.lists || tells_kept();
  }
  void collect_kept();
  std::int64_t collect_lists() const;
  std::uint32_t* kept_of(NearRank owner, int source) const;
  NearMemory list_of(NearRank owner, int source) const;
  void write_zones() const;
  void write_header() const;
  void write_outputs() const;
  OperationError report() const;
  const Placement& placement() const { return context_.scratch.placement; }
  bool drops() const { return config().overflow == XD_EP_OVERFLOW_DROP; }
  // Sources tell owners how many of their pairs have been kept.
  bool tells_kept() const { return !config().layout.row_per_expert && drops(); }
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

// Moves nothing: the ranks only compare their tables.
class SetPlacementOp {
 public:
  SetPlacementOp(const Context& context, const xd_ep_placement* placement)
      : context_(context),
        table_(SlotTable::read(placement, context.group.config(), context.group.rank())) {}
  Record record() const { return record_of(table_); }
  void stage_in() {}
  void announce() {}
  OperationError obstacle() const { return {}; }
  void move() {}
  OperationError complete() {
    context_.group.use(std::move(table_));
    context_.order.resume();
    return {};
  }

 private:
  Context context_;
  SlotTable table_;
};

class DispatchOp : public PlanOperation {
 public:
  DispatchOp(const Context& context, const DispatchCall& call);
  Record record() const;
  void stage_in() {}
  void move();
  OperationError complete();

 private:
  RowsLayout layout() const {
    return {.topk = plan_.header().topk,
            .weights = static_cast<bool>(call_.topk_weights),
            .row_bytes = call_.recv_tokens.row_bytes(),
            .scale_bytes = call_.recv_scales.row_bytes()};
  }
  TokenData read(std::int64_t token) const;
  void deliver(const TokenData& token, const TokenRows& rows) const;
  void store_weights(const TokenData& token, const TokenRows& rows) const;
  void store_choices(const TokenData& token, const TokenRows& rows) const;
  void end_choices() const;

  DispatchCall call_;
  ReceiveTensor recv_tokens_, recv_scales_, recv_weights_, recv_topk_idx_;
  rows::Store store_ = rows::Store::cached;
};

// combine, and the tokens of dispatch_bwd: sums of rows that this rank reads from its peers, with a
// weight beside each row.
class SumOperation : public PlanOperation {
 public:
  Record record() const {
    Record record = plan_record();
    record.rows_in = rows_.place();
    record.weights_in = weights_.place();
    return record;
  }
  OperationError complete() const {
    advance();
    return {};
  }

 protected:
  using PlanOperation::PlanOperation;

  void receive(const Record& record, const Tensor& rows, const Tensor& weights) {
    rows_ = receive_rows(rows);
    weights_ = receive_beside(weights, own_map().weights);
    require_order(record, {.rows = rows_.staged()});
  }
  // Sums of rows that are staged are made part by part, and all the rest in the last part.
  // `factors` multiply the rows where they are added up here; null = none.
  void stage(const float* factors, const WireFormat& wire = {}) {
    rows_.add_up(plan_, config(), scope(part().ends()), factors, wire);
    if (part().ends()) weights_.copy_in(plan_, config(), {});
  }
  // Constructors end with it.
  void list_requests(const RemoteSums::Wish& wish) const {
    RemoteSide* const side = context_.lockstep.remote();
    if (side == nullptr || plan_.refused() || !part().ends()) return;
    side->items().list(context_, plan_, RemotePlace::host,
                       RemoteSums::requests_in_chunk(*side, plan_, wish));
  }
  void sum(const RemoteSums::Wish& wish) const;

 private:
  ReceiveTensor rows_, weights_;
};

class CombineOp : public SumOperation {
 public:
  CombineOp(const Context& context, const CombineCall& call);
  void stage_in() { stage(call_.weights ? call_.weights.as<float>() : nullptr, call_.wire); }
  void move();

 private:
  RemoteSums::Wish wish() const {
    return {.sums = call_.out,
            .weighted = static_cast<bool>(call_.weights),
            .gradients = {},
            .wire = call_.wire};
  }

  CombineCall call_;
};

class DispatchBwdOp : public SumOperation {
 public:
  DispatchBwdOp(const Context& context, const DispatchBwdCall& call);
  void stage_in() { stage(nullptr); }
  void move();

 private:
  RemoteSums::Wish wish() const {
    return {.sums = call_.grad_tokens,
            .weighted = false,
            .gradients = call_.grad_topk_weights,
            .wire = {}};
  }
  void read_weights() const;

  DispatchBwdCall call_;
};

class CombineBwdOp : public PlanOperation {
 public:
  CombineBwdOp(const Context& context, const CombineBwdCall& call);
  Record record() const;
  void stage_in();
  void move();
  OperationError complete();

 private:
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
  // The scales of a weighted sum are not there: weights are the rows' owner's.
  RowsLayout layout() const {
    return {.topk = plan_.header().topk,
            .weights = false,
            .row_bytes = call_.grad_out.row_bytes(),
            .scale_bytes = call_.grad_out_scales.row_bytes()};
  }
  void deliver(const TokenData& token, const TokenRows& rows) const;
  void send_scaled(const std::byte* grad, const TokenRows& rows) const;
  void finish_row(const std::byte* grad, const WeightedRow& row) const;
  void finish_rows() const;

  CombineBwdCall call_;
  ReceiveTensor grad_expert_out_, grad_expert_out_scales_, expert_out_, weights_, grad_weights_;
  rows::Store store_ = rows::Store::cached;
};

// Computes the sums of the wish, out[t] = the sum over token t's rows in the peers' tensors. All
// ranks are near.
void sum_rows(const Context& context, const PlanView& plan, const RemoteSums::Wish& wish);

}  // namespace xd::ep::cpu
