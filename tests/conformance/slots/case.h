// One case of the low-latency grid: a value in each dimension, and what follows from them.
#pragma once

#include <crossdock/low_latency.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/routing.h"
#include "conformance/slots/reference.h"
#include "conformance/tables.h"
#include "support/world.h"

namespace xd::test {

// Where the experts lie.
enum class Owners {
  even,      // expert_ranks = NULL: E / W experts each, in order
  dealt,     // as many each, one after another to each rank
  uneven,    // anywhere, E no multiple of W; the last rank has none
  on_one,    // all on rank 0
  replicas,  // as `dealt`, and the router chooses among the replicas of fewer experts
};

// The type of dispatched rows and of their scales.
enum class Sent {
  as_they_are,
  float_scales,
  powers_of_two,
  e8m0,           // one byte each
  e8m0_as_uint8,  // likewise, by another name
  packed,         // four in an int32
  // Rows of any bytes, and scales that the caller gives beside them:
  e4m3_and_floats,  // one for 128 columns
  e4m3_and_e8m0,    // likewise
  fp4_and_e4m3,     // one for 16 numbers
  fp4_and_e8m0,     // one for 32 numbers
  bytes,            // none
};
constexpr bool is_given(Sent sent) { return sent >= Sent::e4m3_and_floats; }

enum class Weights { none, at_dispatch, at_combine, both };

// Strides of [L,S,H] and [L,S,C].
enum class Slots { packed, padded, slots_first, backwards };

// How the batches of a case go through the group.
enum class Order {
  whole,    // one call per operation
  halves,   // each receive half after its send half
  pairs,    // S(A) S(B) R(A) R(B) for either kind
  crossed,  // as a decoder with two micro-batches: one's dispatch beside the other's combine
  deep,     // as many sends as may be in flight, then as many receives
  mixed,    // odd ranks whole, even ranks pairs
};

struct LlCase {
  std::uint64_t seed = 0;
  int num_ranks = 1;
  DLDataType dtype{};
  DLDataType combine_dtype{};
  DLDataType index_type{};
  Sent sent = Sent::as_they_are;
  Owners owned = Owners::even;
  Pattern pattern = Pattern::uniform;
  Tokens tokens = Tokens::full;
  int max_tokens = 1;
  int topk = 1;  // the group's bound
  int local_experts = 1;
  int row_units = 1;           // bytes of the group's rows, in units of 16
  bool shorter_rows = false;   // the batches have fewer
  bool full_rows = false;      // of bytes, as long as the group's
  bool fewer_choices = false;  // the batches' K is below the bound
  Weights weights = Weights::none;
  Slots slots = Slots::packed;
  Slots scale_slots = Slots::packed;
  Order order = Order::whole;
  int in_flight = 0;
  int num_sms = 0;  // CUDA; elsewhere it changes nothing
  xd_ll_receive receive = XD_LL_SLOTS;
  int alignment = 1;        // of zones, by expert
  bool bounded = false;     // not into slots: calls say how many tokens a rank has at most
  bool duplicates = false;  // some ids are repeated in a row, and the group collapses them
  bool bad_ids = false;     // some ids are out of range or repeated
  bool extras = false;      // the outputs that are optional
  xd_ep_wire wire = XD_EP_WIRE_SAME;  // of combine
  Tables tables = Tables::none;       // a new one for each batch
  // Together the tokens are all numbers of 16 bits: neighbours in even batches, mixed in odd ones.
  bool every_number = false;

  bool has_slots() const { return receive == XD_LL_SLOTS; }
  bool weighs_dispatch() const {
    return weights == Weights::at_dispatch || weights == Weights::both;
  }
  bool weighs_combine() const { return weights == Weights::at_combine || weights == Weights::both; }
  int in_flight_of_group() const { return in_flight == 0 ? 2 : in_flight; }
  std::int64_t num_slots() const { return std::int64_t{num_ranks} * max_tokens; }
  int topk_of(int batch) const;
  // Units of a batch's rows, in dispatch and in combine.
  int units_of(int batch) const;
  // Columns of its rows in dispatch. Rows that are given leave half of the group's row for scales,
  // but those of bytes where `full_rows` is set.
  std::int64_t columns_of(int batch) const;
  std::vector<std::int32_t> owners() const;   // of all experts
  std::vector<Choices> ids(int batch) const;  // as callers give them
  // Where ids are those of logical experts. Batches that may be in flight together have one.
  Table table(int batch) const;
  int batches_together() const { return order == Order::deep ? in_flight_of_group() : 2; }
  std::vector<Choices> choices(int batch) const;  // by the group's experts
  SlotRouting routing(int batch, const std::vector<bool>& absent = {}) const;
  // expert_ranks lies in `owners`, which must live as long as the config is used.
  xd_ll_config config(const std::vector<std::int32_t>& owners) const;
  std::string description() const;
};

// A case that any number of ranks can run: three choices per token, bf16, weights at dispatch. Each
// test changes the part that it is about.
LlCase plain_ll_case(int num_ranks);

// The cases of a launch with this number of ranks: a few large ones, all pairs of values, then
// random samples. The seed is XD_TEST_SEED, else 1; XD_TEST_FULL=1 makes many more.
std::vector<LlCase> all_ll_cases(int num_ranks);

// Some of these cases, by the seed, with wires, one after another; rows are as long as the wires
// ask.
std::vector<LlCase> cases_with_wires(std::vector<LlCase> cases);

// Some of these cases, by the seed, with logical experts, by one kind of tables after another.
std::vector<LlCase> cases_with_tables(std::vector<LlCase> cases);

// The type of rows that dispatch takes, of those that it makes, of their scales, and the columns of
// a scale.
struct SentTypes {
  xd_ep_quantise quantise;
  DLDataType tokens, rows, scales;
  std::int64_t columns_per_scale;  // 0 = no scales
};
SentTypes sent_types(const LlCase& c);

// A group of this case. Collective.
LlGroup make_group(const Rank& rank, const LlCase& c);

}  // namespace xd::test
