// Tables that place logical experts in slots, and the rule by which a choice finds one, written as
// plainly as possible and sharing no code with the library.
#pragma once

#include <crossdock/placement.h>

#include <cstdint>
#include <vector>

#include "conformance/routing.h"

namespace xd::test {

// How the slots of a case's group are used, from one batch to the next.
enum class Tables {
  none,        // ids name the group's experts
  in_order,    // as many logical experts as slots, each in the slot of its number
  permuted,    // as many, anywhere
  replicas,    // fewer, and no slot is empty
  with_gaps,   // some slots are empty, and some experts have none
  with_lists,  // as `replicas`, and every rank has lists of its own, which may repeat slots
};

struct Table {
  int num_ranks = 1;
  int logical = 1;
  std::vector<std::int32_t> expert_of_slot;  // -1 = empty
  // Of (source, expert), where they are given: the slots that its tokens take in turn; an empty
  // list stands for the rule.
  std::vector<std::vector<std::int32_t>> lists;

  // Whether tokens have hints of their own: hint_of() takes the place of their numbers.
  bool hints = false;
  static std::int32_t hint_of(int source, int token);
  // The number by which a token takes its turn.
  std::int32_t turn_of(int source, int token) const {
    return hints ? hint_of(source, token) : token;
  }

  // The slot of a choice; -1 = its expert has none. `owners`: the rank of each slot.
  std::int64_t slot_of(int source, int token, std::int64_t expert,
                       const std::vector<std::int32_t>& owners) const;
  // The slots of every choice, in the place of its id. Ids that are bad are no slot of any group.
  std::vector<Choices> in_slots(const std::vector<Choices>& ids,
                                const std::vector<std::int32_t>& owners, bool collapse) const;
  // The choices of a rank whose expert has no slot.
  std::int64_t unplaced(const Choices& ids) const;
};

int logical_experts(Tables tables, int slots);
Table make_table(Tables tables, int num_ranks, int slots, std::uint64_t seed);

// A table as the library takes it.
class Given {
 public:
  explicit Given(const Table& table);
  Given(const Given&) = delete;  // the struct points into this object
  Given& operator=(const Given&) = delete;
  const xd_ep_placement* get() const { return &placement_; }

 private:
  std::vector<std::int32_t> expert_of_slot_, first_{0}, slots_;
  xd_ep_placement placement_ = XD_EP_PLACEMENT_INIT;
};

}  // namespace xd::test
