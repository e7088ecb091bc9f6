// Groups of both kinds: a sequence of operations of one family, whose sizes all ranks have
// agreed on. ep/bulk and ep/slots have a class each that derives from it, and an executor derives
// from that and carries the operations out.
#pragma once

#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "comm/comm.h"
#include "comm/hosts.h"
#include "comm/rank_set.h"
#include "ep/agreement.h"
#include "ep/plan/call.h"
#include "ep/plan/slot_table.h"
#include "turn/sequence.h"

namespace xd::ep {

template <class Family, class Sizes>
class GroupOf : public turn::Sequence<Family> {
 public:
  const Sizes& config() const { return config_; }
  // All ranks, whose rows a rank receives.
  const RankSet& ranks() const { return ranks_; }
  // The ranks whose memory this rank reads and writes in operations, itself included.
  const NearRanks& near() const { return hosts().near(); }
  NearRank self() const { return hosts().self(); }
  // Whether sums are made by host, as they are where ranks have named several.
  bool sums_by_host() const { return hosts().num_hosts() > 1; }
  CallContextOf<Sizes> call_context() const { return {&config_, this->comm().device()}; }
  // An operation: all ranks take another table.
  virtual void set_placement(const xd_ep_placement* placement, xd_stream stream) = 0;
  // The table by which this rank's tokens find slots; empty in groups without logical experts. An
  // executor that keeps it elsewhere has the first one here.
  const SlotTable& slot_table() const { return slot_table_; }
  void use(SlotTable&& table) noexcept { slot_table_ = std::move(table); }
  // A number that tells this group from others, equal on all ranks.
  std::uint64_t nonce() const { return nonce_; }

  // Rows of this rank's receive tensors, which an operation has gone through.
  void count_rows(std::int64_t rows, std::uint64_t row_bytes) {
    this->subject().counters().rows.add(at(rows));
    this->subject().counters().row_bytes.add(at(rows) * row_bytes);
  }
  // The tokens [T,H] of an operation, once.
  void count_tokens(const DLTensor& tokens) {
    const std::uint64_t rows = at(tokens.shape[0]);
    this->subject().counters().tokens.add(rows);
    this->subject().counters().token_bytes.add(rows * at(tokens.shape[1]) * tokens.dtype.bits / 8);
  }
  // Brings the losses that kernels have reported here.
  virtual void collect_losses() {}

  // Choices of logical experts without a slot, for the group's status.
  void count_unplaced(std::int64_t choices) {
    if (choices == 0) return;
    this->add_to_status(
        [=](typename Family::Status& status) { status.unplaced_choices += choices; });
  }
  // Bad ids of all batches, for the group's status and its numbers.
  void count_bad_ids(std::int64_t bad_ids) {
    this->subject().counters().bad_ids.add(static_cast<std::uint64_t>(bad_ids));
    this->add_to_status([=](typename Family::Status& status) { status.bad_ids += bad_ids; });
  }

 protected:
  explicit GroupOf(std::shared_ptr<Comm> comm)
      : turn::Sequence<Family>(std::move(comm)), ranks_(RankSet::all(this->comm().num_ranks())) {}

  const HostMap& hosts() const { return this->comm().hosts(); }

  // Collective: read(number of ranks) validates this rank's config. Returns what each rank tells of
  // its own, of which `equal` must be. Throws INVALID_ARGUMENT where a config is bad, and MISMATCH
  // elsewhere and where configs differ.
  template <class Terms, class Read>
  std::vector<Terms> agree_on_sizes(std::span<const turn::EqualField<Terms>> equal, Read&& read) {
    Comm& comm = this->comm();
    if (comm.adopted() != nullptr) return {take_over_sizes<Terms>(equal, read)};
    const std::vector<Terms> of_rank = comm.collective().agree_on(Family::kCreate, [&] {
      config_ = read(comm.num_ranks());
      require_device(config_, comm);
      slot_table_ = SlotTable::first(config_, this->rank());
      comm.collective().describe(Terms::sizes_of(config_));
      return Terms::of(config_);
    });
    require_common(Family::kCreate, comm, config_, {of_rank.begin(), of_rank.end()});
    turn::require_equal<Terms>(equal, of_rank);
    config_.local_experts = config_.map().local_experts(this->rank());
    nonce_ = of_rank[0].nonce;
    this->subject().describe(Terms::sizes_of(config_));
    return of_rank;
  }

  Sizes config_;
  std::uint64_t nonce_ = 0;

 private:
  // For a rank that takes the group over from a process before it: the config must be the group's.
  template <class Terms, class Read>
  Terms take_over_sizes(std::span<const turn::EqualField<Terms>> equal, Read&& read) {
    Comm& comm = this->comm();
    config_ = read(comm.num_ranks());
    require_device(config_, comm);
    Terms theirs;
    const Bytes& bytes = comm.adopted()->terms;
    if (bytes.size() != sizeof(theirs))
      fail(XD_ERROR_MISMATCH, "the other ranks run another version of the library");
    std::memcpy(static_cast<void*>(&theirs), bytes.data(), sizeof(theirs));
    const Terms mine = Terms::of(config_);
    require_common_as_theirs(theirs, mine);
    turn::require_as_theirs<Terms>(equal, theirs, mine);
    config_.local_experts = config_.map().local_experts(this->rank());
    nonce_ = theirs.nonce;
    this->subject().describe(Terms::sizes_of(config_));
    return theirs;
  }

  RankSet ranks_;
  SlotTable slot_table_;
};

}  // namespace xd::ep
