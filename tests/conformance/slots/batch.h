// Valid arguments of low-latency dispatch and combine for one batch, and all that the calls must
// write: tests run them as they are, or damage one of them.
#pragma once

#include <crossdock/low_latency.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "conformance/image.h"
#include "conformance/slots/case.h"
#include "conformance/slots/reference.h"
#include "conformance/strided.h"
#include "support/outcome.h"

namespace xd::test {

class LlBatch {
 public:
  // A tensor argument. Inputs are those of the send half, outputs of the receive half.
  struct Field {
    xd_ll_operation operation;
    const char* name;
    const DLTensor** slot;
    bool output;
    Strided* tensor;
  };

  // `number` chooses one of the case's batches. `absent`: ranks that the group has masked.
  LlBatch(const Rank& rank, const LlCase& c, int number, const std::vector<bool>& absent = {});

  // Makes the call, and waits until it has ended.
  LlOutcome call(xd_ll_group* group, xd_ll_operation operation,
                 xd_ll_phase phase = XD_LL_PHASE_BOTH);
  // Makes the call only; where operations are asynchronous, finish() tells how it ended.
  xd_status enqueue(xd_ll_group* group, xd_ll_operation operation,
                    xd_ll_phase phase = XD_LL_PHASE_BOTH);

  // Make the call and check its status and every byte that it may or may not have written. After a
  // send half the inputs are overwritten, and the next call of that operation writes them anew.
  void dispatch(xd_ll_group* group, xd_ll_phase phase = XD_LL_PHASE_BOTH);
  void combine(xd_ll_group* group, xd_ll_phase phase = XD_LL_PHASE_BOTH);

  // Checks what a call that has ended with `outcome` has written.
  void expect_dispatched(const LlOutcome& outcome);
  // Checks the rows of a dispatch without gaps, of packed tensors, in which a source may have been
  // lost: each of its rows has come as a whole, or is zero with all beside it, or none is counted.
  void expect_rows_whole_or_zero(int source);
  void expect_combined(const LlOutcome& outcome);
  // Names of the operation's outputs that have been written, or beside which a byte has; empty =
  // none. Times do not count: they are told of errors as well.
  std::string written(xd_ll_operation operation) const;

  void reset_tensors(xd_ll_operation operation);  // all as before the first call
  void next_combine();                            // other results of the experts, and other weights
  void overwrite_inputs(xd_ll_operation operation);

  std::vector<Field>& fields() { return fields_; }
  Field& field(xd_ll_operation operation, const std::string& name);
  const SlotRouting& routing() const { return routing_; }
  Buffer& plan() { return plan_; }
  void use_plan(const Buffer& plan);  // in combine
  xd_ll_plan_info plan_info() const;
  int tokens() const { return choices_.tokens; }

  xd_ll_dispatch_args dispatch_args = XD_LL_DISPATCH_ARGS_INIT;
  xd_ll_combine_args combine_args = XD_LL_COMBINE_ARGS_INIT;

  // Chooses the weights of dispatch.
  static constexpr std::uint64_t kDispatchWeights = 0xD1;

  LlBatch(const LlBatch&) = delete;  // fields point into this object
  LlBatch& operator=(const LlBatch&) = delete;

 private:
  // A row that has been sent, and its scales.
  struct SentRow {
    std::vector<std::byte> bytes;
    std::vector<std::uint32_t> scales;  // one per element of recv_scales
  };

  LlOutcome call_sparingly(xd_ll_group* group, xd_ll_operation operation, xd_ll_phase phase);
  Strided& add(xd_ll_operation operation, const char* name, const DLTensor** slot, bool output,
               Strided tensor);
  void add_dispatch_inputs();
  void add_dispatch_outputs();
  void add_combine();
  void fill_inputs(xd_ll_operation operation);
  void fill_weights(Strided& tensor, std::uint64_t salt) const;
  void fill_results(Strided& tensor) const;
  std::vector<std::int64_t> strides_of(Slots slots, std::int64_t columns, std::int64_t pad) const;
  // Where rows lie without gaps: slots/received.cc.
  void add_received_outputs();
  void expect_received_rows(int lossy = -1);
  void fill_received_results(Strided& tensor) const;
  std::vector<std::int64_t> row_strides(Slots slots, std::int64_t columns, std::int64_t pad) const;
  std::int64_t row_bound() const;
  std::int32_t call_tokens() const;

  static std::vector<std::byte> bytes_of(const std::vector<std::uint32_t>& codes, DLDataType type);
  std::vector<std::byte> token_row(int source, int token) const;
  // Some rows that are given are ones altogether, and so are their scales.
  std::uint32_t ones_of(int token) const;
  bool has_words_of_ones(int token) const;
  // This byte of a row that has such words; -1 = any.
  static int byte_of_ones(std::uint64_t row, std::size_t at);
  std::uint32_t given_scale(int source, int token, std::int64_t column) const;
  const SentRow& sent_row(int source, int token);
  std::vector<std::uint32_t> result_row(int expert, std::int64_t slot) const;
  float weight(std::uint64_t salt, int source, int token, int k) const;

  void expect_rows();
  void expect_slots();
  void expect_ranges();
  void expect_plan() const;
  void expect_waits(const char* name, Strided& tensor) const;
  // Weights that dispatch is given count in combine only where rows have slots.
  bool weighted() const {
    return case_.weighs_combine() || (case_.has_slots() && case_.weighs_dispatch());
  }

  const Rank& rank_;
  const LlCase case_;
  int number_;
  std::uint64_t seed_;
  SlotRouting routing_;
  ReceivedRows received_;  // of this rank, where rows lie without gaps
  Choices choices_;        // this rank's, as they are given
  SentTypes types_;
  std::int64_t columns_;          // of dispatched rows
  std::int64_t combine_columns_;  // of combined rows
  std::uint64_t combines_ = 0;    // chooses the results and weights of the next combine
  Buffer plan_;
  std::deque<Strided> tensors_;
  std::vector<Field> fields_;
  std::map<std::pair<int, int>, SentRow> sent_rows_;
};

}  // namespace xd::test
