// combine of low latency on the CPU.
//
//   send     the weights of this rank's tokens, if the call has some, to the ranks that hold their
//            rows; then the sum of the rows that this rank holds of each token, to its source
//   receive  for each token: the sum of its ranks' sums
//
// The receive half waits for the records of all ranks; then for the word `landed` of each near rank
// that holds rows of this rank's tokens, and for the message of each remote one.
//
// Remote ranks get a message with the sums, or one with the weights and another with the sums.
//
// A rank tells its peers of the operation, and sends its weights, before it waits for theirs.
#pragma once

#include <array>

#include "ep/plan/cpu/rows.h"
#include "ep/slots/cpu/operation.h"

namespace xd::ep::cpu {

class LlCombine {
 public:
  using Args = xd_ll_combine_args;
  explicit LlCombine(const LlContext& context) : context_(context) {}

  // These throw INVALID_ARGUMENT where the half's arguments are bad.
  void check_send(const Args& args);
  void check_receive(const Args& args, const LlRecord& sent);
  LlRecord record() const;

  // Between begin() and the end of the send half; enters. `stage_own`: the receive half is another
  // call, which takes this rank's own sums out of the staging.
  void send(bool stage_own);
  // Between sent and leave(); awaits. `own_staged`: as `stage_own` was.
  LlOperationError receive(bool own_staged);

 private:
  struct Terms;
  const LlConfig& config() const { return context_.config(); }
  bool weighted() const { return send_.topk_weights || plan_.facts().weighted != 0; }
  LlPlanView open(const PlanBytes& bytes) const;
  void send_weights() const;
  void send_remote_weights() const;
  void open_remote_sums();
  void send_remote_sums() const;
  void judge_weights(int source) const;
  bool takes_part(int source);
  std::byte* target_of(const LlItem& item);
  void keep_target(const LlItem& item);
  void send_partials();
  const float* weights_of(const LlItem& item) const;
  int collect(const LlItem& item, Terms& terms) const;
  void await_partials();
  void await_remote_sums();
  void read_remote_sums();
  void sum_tokens();
  bool collect_token(std::int64_t token, Terms& terms);
  const LlItem* own_item(std::int64_t token);
  void add_partial(const RankBits& home, int rank, std::int64_t token, Terms& terms) const;
  void add_remote_partial(int rank, std::int64_t token, Terms& terms) const;
  bool is_remote(int rank) const { return !context_.group.comm().hosts().is_near(rank); }

  LlContext context_;
  LlCombineSend send_;
  LlCombineReceive receive_;
  LlPlanView plan_;
  bool own_staged_ = false;
  int source_ = -1;            // the source of the item that was sent last
  bool wanted_ = false;        // whether that source gets sums
  std::int64_t next_own_ = 0;  // where this rank's next own item is looked for
};

}  // namespace xd::ep::cpu
