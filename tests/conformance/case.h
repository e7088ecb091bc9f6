// One case of the conformance grid: a value in each dimension, and what follows from them.
#pragma once

#include <crossdock/ep.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "conformance/dimensions.h"
#include "conformance/reference.h"
#include "conformance/routing.h"
#include "conformance/tables.h"

namespace xd::test {

// The rows that dispatch carries, and combine_bwd without weights; the other operations carry
// `dtype`.
enum class Cargo {
  payload,           // rows of `dtype`
  e4m3_with_floats,  // opaque e4m3 rows with float32 scales
  e5m2_with_e8m0,    // opaque e5m2 rows with e8m0 scales
  // bf16 rows become e4m3 rows with scales on the way, in blocks of 128 columns or of 32;
  // combine_bwd carries `dtype`
  quantised,
  mxfp8,
  fp4,  // opaque rows of two numbers in a byte, with a scale for 16 or 32 numbers
};

enum class Placing {
  ordinary,   // all tensors outside symmetric memory: staged
  symmetric,  // all inside: zero-copy
  mixed,      // differs per tensor and per rank
  unstaged,   // groups without staging; receive tensors symmetric, the others ordinary
};

enum class Capacity {
  bound,     // the default: no routing overflows it
  exact,     // the most rows any step needs
  larger,    // more than the bound
  refusing,  // some ranks have too little, under XD_EP_OVERFLOW_ERROR
  dropping,  // some ranks have too little, under XD_EP_OVERFLOW_DROP
};

// Which rank holds which experts.
enum class Homes {
  even,         // equally many on every rank, in order: expert_ranks = NULL
  interleaved,  // equally many, dealt out one by one
  ragged,       // one more than ranks share evenly, anywhere
  one_without,  // one rank holds none, the others any number
  one_rank,     // one rank holds all
};

enum class ReceiveRows { exact, capacity, more };
enum class ZeroTail { off, on, differ };

// The alignment and top-k that the batches of a case use, within the group's bounds.
enum class PerPlan {
  bound,  // every batch has the group's alignment, by default, and its largest top-k
  own,    // every batch has values of its own, up to the bounds
};

struct Case {
  std::uint64_t seed = 0;
  int num_ranks = 1;
  xd_ep_layout layout = XD_EP_EXPERT_MAJOR;
  DLDataType dtype{};
  Cargo cargo = Cargo::payload;
  int alignment = 1;         // the group's
  DLDataType index_type{};   // type of topk_idx
  DLDataType output_type{};  // type of prepare's outputs and recv_topk_idx
  Pattern pattern = Pattern::uniform;
  Tokens tokens = Tokens::full;
  int max_tokens = 1;
  int topk = 1;           // the group's bound
  int local_experts = 1;  // on every rank, or on average: see Homes
  Homes homes = Homes::even;
  int row_units = 1;  // bytes of the largest row, in units of 16
  bool weights = false;
  Placing placing = Placing::ordinary;
  Capacity capacity = Capacity::bound;
  ReceiveRows receive_rows = ReceiveRows::exact;
  ZeroTail zero_tail = ZeroTail::off;
  PerPlan alignments = PerPlan::bound;
  PerPlan topks = PerPlan::bound;
  bool duplicates = false;  // some ids are repeated in a row, and the group collapses them
  bool bad_ids = false;     // some ids are out of range or repeated
  int parts = 1;            // operations are called part by part
  xd_ep_wire wire = XD_EP_WIRE_SAME;  // of combine
  Tables tables = Tables::none;       // a new one for each batch
  bool resumes = false;               // the group outlives losses
  std::uint64_t gone = 0;             // bit r: the group goes on without rank r

  static constexpr int kSteps = 2;  // batches that go through the group

  // Says who holds which experts; after num_ranks, local_experts and seed.
  void settle(Homes where);
  int num_experts() const;
  int local_experts_of(int rank) const;

  int alignment_of(int step) const;
  int topk_of(int step) const;
  RoutingShape routing(int step) const;
  std::vector<Choices> ids(int step) const;      // as callers give them
  Table table(int step) const;                   // where ids are those of logical experts
  std::vector<Choices> choices(int step) const;  // by the group's experts, of ranks that are there
  std::int64_t unplaced(int step, int rank) const;  // choices that have no expert there
  bool is_gone(int rank) const { return (gone >> rank & 1) != 0; }
  Placement placement(int step) const;  // with the capacities of all ranks
  xd_ep_config config(int rank) const;
  bool zeroes_tail(int rank) const;
  int least_row_units() const;  // units of the shortest row that dispatch can carry
  bool carries_scales() const {
    return cargo == Cargo::e4m3_with_floats || cargo == Cargo::e5m2_with_e8m0 ||
           cargo == Cargo::fp4;
  }
  std::string description() const;

 private:
  std::vector<std::int32_t> expert_ranks_;  // empty where homes is even; configs point to it

  std::vector<std::int32_t> owners() const;  // of all experts
  std::vector<Choices> placed(int step) const;

  std::vector<std::int64_t> capacities() const;  // capacities of all ranks, as configured
  xd_ep_overflow overflow() const;
};

void PrintTo(const Case& c, std::ostream* out);  // for GoogleTest

// The cases of a launch with this number of ranks: all pairs of values, then random samples. The
// seed is XD_TEST_SEED, else 1; XD_TEST_FULL=1 makes many more.
std::vector<Case> all_cases(int num_ranks);

// The wires of combine that have another form than rows.
inline constexpr xd_ep_wire kWires[] = {XD_EP_WIRE_FLOAT32, XD_EP_WIRE_FP8_BLOCK128,
                                        XD_EP_WIRE_FP8_BLOCK128_POW2, XD_EP_WIRE_FP8_BLOCK128_E8M0};

// Some of these cases, by the seed, with wires, one after another; rows are as long as the wires
// ask.
std::vector<Case> cases_with_wires(std::vector<Case> cases);

// Some of these cases, by the seed, with logical experts, by one kind of tables after another.
std::vector<Case> cases_with_tables(std::vector<Case> cases);

// Some of these cases, by the seed, with plans that have parts, and with enough experts.
std::vector<Case> cases_in_parts(int num_ranks);

}  // namespace xd::test
