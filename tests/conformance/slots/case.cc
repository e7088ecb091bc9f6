#include "conformance/slots/case.h"

#include <algorithm>
#include <array>
#include <sstream>

#include "conformance/case.h"
#include "conformance/dimensions.h"
#include "support/random.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

constexpr std::array kDtypes{kBf16, kF16, kF32};
constexpr std::array kIndexTypes{kI32, kI64};
constexpr std::array kSent{Sent::as_they_are,
                           Sent::float_scales,
                           Sent::powers_of_two,
                           Sent::e8m0,
                           Sent::e8m0_as_uint8,
                           Sent::packed,
                           Sent::e4m3_and_floats,
                           Sent::e4m3_and_e8m0,
                           Sent::fp4_and_e4m3,
                           Sent::fp4_and_e8m0,
                           Sent::bytes};
constexpr std::array kOwners{Owners::even, Owners::dealt, Owners::uneven, Owners::on_one,
                             Owners::replicas};
constexpr std::array kPatterns{Pattern::uniform, Pattern::zipf, Pattern::holes, Pattern::one_hot,
                               Pattern::nobody};
constexpr std::array kTokens{Tokens::full, Tokens::differ, Tokens::some_zero, Tokens::all_zero};
constexpr std::array kMaxTokens{7, 1, 24, 128};
constexpr std::array kTopks{2, 1, 8, 9, 32};
constexpr std::array kLocalExperts{2, 1, 72};
// 16 times an odd number; 2048 and 7168 elements of 16 bits.
constexpr std::array kRowUnits{3, 1, 256, 896};
constexpr std::array kFlags{false, true};
constexpr std::array kWeights{Weights::none, Weights::at_dispatch, Weights::at_combine,
                              Weights::both};
constexpr std::array kSlots{Slots::packed, Slots::padded, Slots::slots_first, Slots::backwards};
constexpr std::array kOrders{Order::whole,   Order::halves, Order::pairs,
                             Order::crossed, Order::deep,   Order::mixed};
constexpr std::array kInFlight{0, 2, 3, 4};
constexpr std::array kNumSms{0, 2, 3, 20};
constexpr std::array kReceive{XD_LL_SLOTS, XD_LL_BY_EXPERT, XD_LL_BY_RANK};
constexpr std::array kAlignments{1, 4, 16};

// The rows that all ranks send, and their receive tensors, stay below this, so that a case takes
// milliseconds. In bytes.
struct Bounds {
  std::int64_t sent, received;
};

}  // namespace

// Calls visit(field, table) for every dimension, always in the same order.
template <class Visit>
static void for_each_dimension(LlCase& c, Visit&& visit) {
  visit(c.dtype, kDtypes);
  visit(c.combine_dtype, kDtypes);
  visit(c.index_type, kIndexTypes);
  visit(c.sent, kSent);
  visit(c.owned, kOwners);
  visit(c.pattern, kPatterns);
  visit(c.tokens, kTokens);
  visit(c.max_tokens, kMaxTokens);
  visit(c.topk, kTopks);
  visit(c.local_experts, kLocalExperts);
  visit(c.row_units, kRowUnits);
  visit(c.shorter_rows, kFlags);
  visit(c.fewer_choices, kFlags);
  visit(c.weights, kWeights);
  visit(c.slots, kSlots);
  visit(c.scale_slots, kSlots);
  visit(c.order, kOrders);
  visit(c.in_flight, kInFlight);
  visit(c.receive, kReceive);
  visit(c.alignment, kAlignments);
  visit(c.bounded, kFlags);
  visit(c.duplicates, kFlags);
  visit(c.bad_ids, kFlags);
  visit(c.extras, kFlags);
  visit(c.num_sms, kNumSms);
}

namespace {

// Rows come in whole blocks of scales, of so many units.
int grain_of(Sent sent) {
  switch (sent) {
    case Sent::as_they_are:
    case Sent::bytes:
      return 1;
    case Sent::fp4_and_e4m3:
    case Sent::fp4_and_e8m0:
      return 2;
    case Sent::packed:
      return 64;
    default:
      return 16;
  }
}

LlCase make_case(int num_ranks, const std::vector<int>& values, std::uint64_t seed,
                 const Bounds& bounds) {
  LlCase c;
  c.num_ranks = num_ranks;
  c.seed = seed;
  set_values(c, values);
  if (c.sent != Sent::as_they_are && !is_given(c.sent)) c.dtype = kBf16;
  c.row_units = std::max(c.row_units, grain_of(c.sent));
  const std::int64_t row_bytes = std::int64_t{16} * c.row_units;
  const std::int64_t most_of_one = c.owned == Owners::on_one   ? num_ranks
                                   : c.owned == Owners::uneven ? 2
                                                               : 1;
  const std::int64_t sent_per_token = row_bytes * c.topk;
  const std::int64_t received_per_token = row_bytes * num_ranks * c.local_experts * most_of_one;
  c.max_tokens = static_cast<int>(std::clamp<std::int64_t>(
      std::min(bounds.sent / sent_per_token, bounds.received / received_per_token) / num_ranks, 1,
      c.max_tokens));
  const std::int64_t padding = received_per_token / num_ranks * c.alignment;
  if (c.receive != XD_LL_BY_EXPERT || padding > bounds.received) c.alignment = 1;
  if (c.receive == XD_LL_BY_RANK) {
    c.weights = c.weighs_dispatch() ? Weights::at_dispatch : Weights::none;
  }
  return c;
}

// Experts that the router knows, where physical ones are replicas of them.
int logical_experts(const LlCase& c, std::size_t experts) {
  const int all = static_cast<int>(experts);
  return c.owned == Owners::replicas ? std::max(1, all * 2 / 3) : all;
}

// Sizes as they are served: many experts, many tokens, long rows. Bounds do not hold for them.
std::vector<LlCase> large_cases(int num_ranks) {
  if (num_ranks != 2) return {};           // more would only take longer
  LlCase many = plain_ll_case(num_ranks);  // all slots of many experts, long lists
  many.local_experts = 72;
  many.topk = 8;
  many.max_tokens = 128;
  many.row_units = 3;
  LlCase long_rows = plain_ll_case(num_ranks);
  long_rows.topk = 8;
  long_rows.local_experts = 8;
  long_rows.max_tokens = 16;
  long_rows.row_units = 896;
  long_rows.sent = Sent::packed;
  LlCase most = plain_ll_case(num_ranks);  // the bounds of tokens and choices
  most.local_experts = 16;
  most.topk = 32;
  most.max_tokens = XD_LL_MAX_TOKENS;
  most.row_units = 1;
  most.order = Order::pairs;
  LlCase longest = plain_ll_case(num_ranks);  // many scales and weights travel behind a row
  longest.topk = 32;
  longest.max_tokens = 3;
  longest.row_units = 12800;
  longest.sent = Sent::float_scales;
  longest.order = Order::pairs;
  LlCase by_expert = many;
  by_expert.receive = XD_LL_BY_EXPERT;
  by_expert.alignment = 16;
  LlCase by_rank = most;
  by_rank.receive = XD_LL_BY_RANK;
  LlCase few_blocks = plain_ll_case(num_ranks);  // each block has many rows, and several tokens
  few_blocks.num_sms = 7;
  few_blocks.topk = 8;
  few_blocks.local_experts = 6;
  few_blocks.max_tokens = 40;
  few_blocks.row_units = 896;
  LlCase few_quantised = few_blocks;
  few_quantised.sent = Sent::float_scales;
  few_quantised.weights = Weights::at_combine;
  LlCase few_halves = few_blocks;
  few_halves.order = Order::pairs;
  LlCase few_pieces = few_blocks;  // rows that no group of threads has at once
  few_pieces.num_sms = 4;
  few_pieces.max_tokens = 12;
  few_pieces.row_units = 1000;
  return {many,    long_rows,  most,          longest,    by_expert,
          by_rank, few_blocks, few_quantised, few_halves, few_pieces};
}

}  // namespace

SentTypes sent_types(const LlCase& c) {
  switch (c.sent) {
    case Sent::as_they_are:
      return {XD_EP_QUANTISE_NONE, c.dtype, c.dtype, kF32, 0};
    case Sent::float_scales:
      return {XD_EP_QUANTISE_FP8_BLOCK128, kBf16, kE4m3, kF32, 128};
    case Sent::powers_of_two:
      return {XD_EP_QUANTISE_FP8_BLOCK128_POW2, kBf16, kE4m3, kF32, 128};
    case Sent::e8m0:
      return {XD_EP_QUANTISE_FP8_BLOCK128_E8M0, kBf16, kE4m3, kE8m0, 128};
    case Sent::e8m0_as_uint8:
      return {XD_EP_QUANTISE_FP8_BLOCK128_E8M0, kBf16, kE4m3, kU8, 128};
    case Sent::packed:
      return {XD_EP_QUANTISE_FP8_BLOCK128_E8M0, kBf16, kE4m3, kI32, 512};
    case Sent::e4m3_and_floats:
      return {XD_EP_QUANTISE_NONE, kE4m3, kE4m3, kF32, 128};
    case Sent::e4m3_and_e8m0:
      return {XD_EP_QUANTISE_NONE, kE4m3, kE4m3, kE8m0, 128};
    case Sent::fp4_and_e4m3:
      return {XD_EP_QUANTISE_NONE, kE2m1x2, kE2m1x2, kE4m3, 8};
    case Sent::fp4_and_e8m0:
      return {XD_EP_QUANTISE_NONE, kE2m1x2, kE2m1x2, kE8m0, 16};
    case Sent::bytes:
      return {XD_EP_QUANTISE_NONE, kU8, kU8, kU8, 0};
  }
  return {};
}

LlCase plain_ll_case(int num_ranks) {
  LlCase c;
  c.seed = test_seed();
  c.num_ranks = num_ranks;
  c.dtype = c.combine_dtype = kBf16;
  c.index_type = kI64;
  c.max_tokens = 12;
  c.topk = 3;
  c.local_experts = 3;
  c.row_units = 4;
  c.weights = Weights::at_dispatch;
  c.extras = true;
  return c;
}

int LlCase::topk_of(int batch) const {
  if (!fewer_choices) return topk;
  const std::uint64_t chance = mix(seed, 0x70, static_cast<std::uint64_t>(batch));
  return 1 + static_cast<int>(chance % static_cast<std::uint64_t>(topk));
}

int LlCase::units_of(int batch) const {
  if (!shorter_rows) return row_units / grain_of(sent) * grain_of(sent);
  const std::uint64_t chance = mix(seed, 0x57, static_cast<std::uint64_t>(batch));
  const int grains = row_units / grain_of(sent);
  return (1 + static_cast<int>(chance % static_cast<std::uint64_t>(grains))) * grain_of(sent);
}

std::int64_t LlCase::columns_of(int batch) const {
  const std::int64_t bytes = std::int64_t{16} * units_of(batch);
  const SentTypes types = sent_types(*this);
  if (is_given(sent)) return full_rows ? bytes : (bytes / 2 + 15) / 16 * 16;
  return bytes / static_cast<std::int64_t>(element_bytes(types.tokens));
}

std::vector<std::int32_t> LlCase::owners() const {
  const int even = num_ranks * local_experts;
  std::vector<std::int32_t> result(
      static_cast<std::size_t>(owned == Owners::uneven ? even + 1 : even));
  const int holders = std::max(1, num_ranks - 1);  // where the last rank has none
  for (std::size_t e = 0; e < result.size(); ++e) {
    const auto expert = static_cast<std::int32_t>(e);
    if (owned == Owners::even) result[e] = expert / local_experts;
    if (owned == Owners::dealt || owned == Owners::replicas) result[e] = expert % num_ranks;
    if (owned == Owners::uneven) {
      result[e] =
          static_cast<std::int32_t>(mix(seed, 0x0E, e) % static_cast<std::uint64_t>(holders));
    }
  }
  return result;
}

Table LlCase::table(int batch) const {
  return make_table(tables, num_ranks, static_cast<int>(owners().size()),
                    mix(seed, 0x7AB, static_cast<std::uint64_t>(batch / batches_together())));
}

std::vector<Choices> LlCase::choices(int batch) const {
  if (tables == Tables::none) return ids(batch);
  return table(batch).in_slots(ids(batch), owners(), duplicates);
}

std::vector<Choices> LlCase::ids(int batch) const {
  std::vector<std::int32_t> owner = owners();
  if (tables != Tables::none) {
    owner.resize(
        static_cast<std::size_t>(test::logical_experts(tables, static_cast<int>(owner.size()))));
  }
  const std::uint64_t number = mix(seed, 0x11, static_cast<std::uint64_t>(batch));
  const int logical = logical_experts(*this, owner.size());
  // No pattern of these needs equally many experts per rank.
  std::vector<Choices> ranks =
      make_routing({num_ranks, logical, topk_of(batch), max_tokens, pattern, tokens}, number);
  if (owned == Owners::replicas) {
    const auto copies = static_cast<std::int64_t>(owner.size()) - logical;
    Random random(number);
    for (Choices& choices : ranks) {
      for (std::int64_t& id : choices.ids) {
        if (id >= 0 && id < copies && random.one_in(2)) id += logical;
      }
    }
  }
  if (duplicates) repeat_ids(ranks, mix(number, 0xD0));
  if (bad_ids) spoil_ids(ranks, static_cast<std::int64_t>(owner.size()), number);
  return ranks;
}

SlotRouting LlCase::routing(int batch, const std::vector<bool>& absent) const {
  return {num_ranks, owners(), choices(batch),
          duplicates ? XD_EP_DUPLICATE_IDS_COLLAPSE : XD_EP_DUPLICATE_IDS_ERROR, absent};
}

xd_ll_config LlCase::config(const std::vector<std::int32_t>& owners) const {
  xd_ll_config config = XD_LL_CONFIG_INIT;
  config.num_ranks = num_ranks;
  config.num_experts = static_cast<std::int32_t>(owners.size());
  config.max_topk = topk;
  config.max_tokens_per_rank = max_tokens;
  config.dtype = dtype;
  config.hidden = 16 * row_units / static_cast<int>(element_bytes(dtype));
  config.duplicate_ids = duplicates ? XD_EP_DUPLICATE_IDS_COLLAPSE : XD_EP_DUPLICATE_IDS_ERROR;
  config.in_flight = in_flight;
  config.num_sms = num_sms;
  config.expert_ranks = owned == Owners::even ? nullptr : owners.data();
  config.receive = receive;
  config.alignment = alignment;
  config.wire_formats = wire != XD_EP_WIRE_SAME ? XD_EP_WIRE_BIT(wire) : 0;
  config.num_logical_experts = test::logical_experts(tables, static_cast<int>(owners.size()));
  return config;
}

LlGroup make_group(const Rank& rank, const LlCase& c) {
  const std::vector<std::int32_t> owners = c.owners();
  return make_group(rank.comm, c.config(owners));
}

std::string LlCase::description() const {
  constexpr const char* kSentNames[] = {"as they are",       "fp8+float32",    "fp8+powers of two",
                                        "fp8+e8m0",          "fp8+uint8",      "fp8+packed",
                                        "given fp8+float32", "given fp8+e8m0", "given fp4+e4m3",
                                        "given fp4+e8m0",    "given bytes"};
  constexpr const char* kOwnerNames[] = {"even", "dealt", "uneven", "on rank 0", "replicas"};
  constexpr const char* kWeightNames[] = {"none", "at dispatch", "at combine", "at both"};
  constexpr const char* kSlotNames[] = {"packed", "padded", "slots first", "backwards"};
  constexpr const char* kOrderNames[] = {"whole", "halves", "pairs", "crossed", "deep", "mixed"};
  const auto type = [](DLDataType t) {
    return (t.code == kDLBfloat ? "bf" : "f") + std::to_string(int{t.bits});
  };
  std::ostringstream text;
  text << "seed " << seed << ": W=" << num_ranks << " L=" << local_experts << " K=" << topk
       << (fewer_choices ? " or fewer" : "") << " T<=" << max_tokens << " rows of "
       << 16 * row_units << " bytes" << (shorter_rows ? " or fewer, " : ", ") << type(dtype)
       << " sent " << kSentNames[static_cast<int>(sent)] << ", combined " << type(combine_dtype)
       << ", ids int" << int{index_type.bits} << ", experts "
       << kOwnerNames[static_cast<int>(owned)] << ", routing " << name_of(pattern) << ", tokens "
       << name_of(tokens) << ", weights " << kWeightNames[static_cast<int>(weights)] << ", slots "
       << kSlotNames[static_cast<int>(slots)] << ", scales "
       << kSlotNames[static_cast<int>(scale_slots)] << ", order "
       << kOrderNames[static_cast<int>(order)] << ", in flight " << in_flight << ", SMs "
       << num_sms;
  if (receive == XD_LL_BY_EXPERT) text << ", by expert, alignment " << alignment;
  if (receive == XD_LL_BY_RANK) text << ", by rank";
  if (!has_slots() && bounded) text << ", bounded";
  if (duplicates) text << ", duplicates collapse";
  if (bad_ids) text << ", bad ids";
  if (extras) text << ", optional outputs";
  if (wire != XD_EP_WIRE_SAME) text << ", wire " << static_cast<int>(wire);
  if (tables != Tables::none) text << ", tables " << static_cast<int>(tables);
  return text.str();
}

std::vector<LlCase> cases_with_tables(std::vector<LlCase> cases) {
  if (!full_tests()) {
    std::erase_if(cases, [](const LlCase& c) { return mix(c.seed, 0x7A) % 2 == 0; });
  }
  constexpr std::array kTables{Tables::in_order, Tables::permuted, Tables::replicas,
                               Tables::with_gaps, Tables::with_lists};
  std::size_t number = 0;
  for (LlCase& c : cases) {
    c.tables = kTables[number++ % kTables.size()];
    c.max_tokens = std::min(c.max_tokens, 24);
    c.local_experts = std::min(c.local_experts, 12);
  }
  return cases;
}

std::vector<LlCase> cases_with_wires(std::vector<LlCase> cases) {
  if (!full_tests()) {
    std::erase_if(cases, [](const LlCase& c) { return mix(c.seed, 0x9D) % 2 == 0; });
  }
  std::size_t number = 0;
  for (LlCase& c : cases) {
    c.wire = kWires[number++ % std::size(kWires)];
    if (c.wire == XD_EP_WIRE_FLOAT32) continue;
    c.row_units = 64;  // whole blocks of any type, and of packed scales
    c.shorter_rows = false;
    c.max_tokens = std::min(c.max_tokens, 12);
    c.local_experts = std::min(c.local_experts, 8);
  }
  return cases;
}

std::vector<LlCase> all_ll_cases(int num_ranks) {
  const std::uint64_t seed = mix(test_seed(), 0x11);
  // Cases of more ranks take longer, most of all under ThreadSanitizer.
  const int samples = !full_tests() ? 8 : num_ranks > 4 ? 400 : 1000;
  const Bounds bounds = full_tests() ? Bounds{1 << 22, 1 << 25} : Bounds{1 << 18, 1 << 22};
  std::vector<LlCase> cases = large_cases(num_ranks);
  for (const std::vector<int>& row :
       value_rows(dimension_sizes<LlCase>(), {seed, mix(seed, 0x5A), samples})) {
    cases.push_back(make_case(num_ranks, row, mix(seed, cases.size()), bounds));
  }
  return cases;
}

}  // namespace xd::test
