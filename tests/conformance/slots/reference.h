// The definition of low-latency dispatch and combine, written as plainly as possible and sharing no
// code with the library: which slot every row has, and what a token's sum must be.
#pragma once

#include <crossdock/low_latency.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "conformance/numeric.h"
#include "conformance/routing.h"
#include "support/hosts.h"

namespace xd::test {

// A row of an expert: a token of a source rank.
struct SlotRow {
  int source;
  int token;
  int k;
};

class SlotRouting {
 public:
  // `owners` = the rank of each expert. Ids that are out of range or repeated in a row count as -1,
  // and as bad, but repeated ones where they are collapsed. Ranks with `absent` set have no tokens
  // and no experts: what a group does without them.
  SlotRouting(int num_ranks, std::vector<std::int32_t> owners, std::vector<Choices> choices,
              xd_ep_duplicate_ids duplicates, const std::vector<bool>& absent = {});

  int num_ranks() const { return num_ranks_; }
  int owner(std::int64_t expert) const { return owners_[static_cast<std::size_t>(expert)]; }
  // The experts of a rank by local index.
  const std::vector<int>& experts_of(int rank) const {
    return experts_of_[static_cast<std::size_t>(rank)];
  }
  // The rows of an expert by slot.
  const std::vector<SlotRow>& rows(int expert) const {
    return rows_[static_cast<std::size_t>(expert)];
  }
  const Choices& choices(int rank) const { return choices_[static_cast<std::size_t>(rank)]; }
  std::int64_t slot(int source, int token, int k) const;  // of a choice that is not -1
  std::int64_t rows_of(int rank) const;                   // of all experts of a rank

  std::int64_t bad_ids() const { return bad_ids_; }
  int bad_id_rank() const { return bad_id_rank_; }  // lowest; -1 = none

 private:
  void remove_bad_ids(xd_ep_duplicate_ids duplicates);

  int num_ranks_;
  std::vector<std::int32_t> owners_;
  std::vector<Choices> choices_;
  std::vector<std::vector<int>> experts_of_;
  std::vector<std::vector<SlotRow>> rows_;
  std::vector<std::vector<std::int64_t>> slots_;  // [source][token * topk + k]
  std::int64_t bad_ids_ = 0;
  int bad_id_rank_ = -1;
};

// A row of a tensor [N,H]: of a token's choice, or of the first of its choices on the rank, and
// then for the others as well. Padding has source -1.
struct ReceivedRow {
  int source = -1, token = -1, k = -1;
  int expert = -1;
  std::int64_t slot = -1;
};
struct ReceivedRows {
  std::vector<ReceivedRow> rows;
  std::vector<std::int64_t> offsets;  // of zones, or source ranks; behind the last, the end
};
ReceivedRows received_rows(const SlotRouting& routing, int rank, xd_ll_receive form, int alignment);

// The codes of an expert's result for one slot.
using ResultRow = std::function<std::vector<std::uint32_t>(int expert, std::int64_t slot)>;
// The weight of a token's choice.
using ChoiceWeight = std::function<float(int token, int k)>;

// The row of `out` for a token of `source`, as codes of `format`: on each rank the sum over its
// rows by ascending k, rounded; then the sum over the ranks of each host, rounded where there are
// several; then the sum over the hosts, rounded; with a wire as that says.
struct Combined {
  const ResultRow& result;
  const ChoiceWeight* weight = nullptr;
  bool one_per_rank = false;  // of a token's rows on a rank only the first counts
  xd_ep_wire wire = XD_EP_WIRE_SAME;
};
std::vector<std::uint32_t> combined_row(const SlotRouting& routing, const Hosts& hosts, int source,
                                        int token, std::size_t columns, Format format,
                                        const Combined& how);

}  // namespace xd::test
