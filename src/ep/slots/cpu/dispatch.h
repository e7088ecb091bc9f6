// dispatch of low latency on the CPU.
//
//   send     for each token: its row into this rank's own memory, and an item to every rank that
//            holds one of its experts; for remote ranks both into the message to each
//   receive  by source rank, item by item: the row, from the source's memory or message, to a slot
//            of every expert that the item names, or to its place in [N,H] (delivery.cc)
#pragma once

#include <array>

#include "ep/plan/cpu/rows.h"
#include "ep/slots/cpu/operation.h"
#include "ep/slots/message.h"

namespace xd::ep::cpu {

class LlDispatch {
 public:
  using Args = xd_ll_dispatch_args;
  explicit LlDispatch(const LlContext& context) : context_(context) {}

  // These throw INVALID_ARGUMENT where the half's arguments are bad.
  void check_send(const Args& args) { send_ = read_ll_send(args, context_.group.call_context()); }
  void check_receive(const Args& args, const LlRecord& sent) {
    receive_ = read_ll_receive(args, context_.group.call_context());
    require_fits(receive_, sent);
  }
  LlRecord record() const { return record_of(send_); }

  // Between begin() and the end of the send half; enters. `stage_own`: the receive half is another
  // call, which takes this rank's own rows out of the staging.
  void send(bool stage_own);
  // Between sent and leave(); awaits. `own_staged`: as `stage_own` was.
  LlOperationError receive(bool own_staged);

 private:
  struct TokenRoute;
  const LlConfig& config() const { return context_.config(); }
  LlMemory::Cell own_cell(int source) const {
    return {context_.self(), source, context_.pipeline.next()};
  }
  // Of the messages of an operation with that record.
  static LlRemoteRows message_layout(const LlRecord& record);
  TokenRoute route(std::int64_t token, const std::uint32_t* experts) const;
  void open_messages();
  void send_messages() const;
  void send_row(std::int64_t token, const TokenRoute& route) const;
  std::uint64_t take_items(int source, std::byte* plan_items);
  void take_item(const LlItem& from, LlItem& to);
  const LlRemoteMessage& message_of(int source) const;
  const LlItem& remote_item(int source, std::uint64_t i) const;
  void judge_remote(int source) const;
  void begin_rows();
  void place_rows(int source, std::byte* plan_items);
  void place_row(LlItem& item, const std::byte* row);
  void write_choices(std::int64_t row, const LlItem& item) const;
  void end_rows();
  void zero_rows(const std::byte* plan_items, std::uint64_t count) const;
  void zero_row(std::int64_t row) const;
  void write_scales(std::int64_t expert, std::int64_t slot, const std::byte* scales) const;
  const std::byte* row_of(NearRank source, const LlItem& item) const;
  void write_plan(std::int64_t items) const;
  void write_counts() const;
  LlOperationError report() const;
  PlanHeader header() const;
  LlPlanMap plan_map() const;

  LlContext context_;
  LlDispatchSend send_;
  LlDispatchReceive receive_;
  LlRemoteRows sending_{};    // of the messages of the call whose rows are sent
  LlRemoteRows receiving_{};  // of the one whose rows are received
  bool own_staged_ = false;
  LlRecord sent_{};        // this rank's record of the operation that is received
  std::int64_t rows_ = 0;  // the end of the rows that have places
};

}  // namespace xd::ep::cpu
