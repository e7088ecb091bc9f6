#include "conformance/case.h"

#include <algorithm>
#include <array>
#include <set>
#include <sstream>

#include "conformance/dimensions.h"
#include "support/random.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

constexpr std::array kLayouts{XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR};
constexpr std::array kDtypes{kBf16, kF16, kF32};
constexpr std::array kCargoes{Cargo::payload,        Cargo::e4m3_with_floats,
                              Cargo::e5m2_with_e8m0, Cargo::quantised,
                              Cargo::mxfp8,          Cargo::fp4};
constexpr std::array kAlignments{1, 4, 16, 128};
constexpr std::array kIndexTypes{kI32, kI64};
constexpr std::array kPatterns{Pattern::uniform, Pattern::zipf,     Pattern::holes,
                               Pattern::one_hot, Pattern::one_rank, Pattern::empty_ranks,
                               Pattern::nobody};
constexpr std::array kTokens{Tokens::full, Tokens::differ, Tokens::some_zero, Tokens::all_zero};
constexpr std::array kMaxTokens{24, 1, 7, 64};
constexpr std::array kTopks{2, 1, 3, 8, 32};
constexpr std::array kLocalExperts{2, 1, 5, 32};
constexpr std::array kHomes{Homes::even, Homes::interleaved, Homes::ragged, Homes::one_without,
                            Homes::one_rank};
constexpr std::array kRowUnits{3, 1, 15, 32, 261};  // the last is more than a piece of a sum
constexpr std::array kWeights{false, true};
constexpr std::array kPlacings{Placing::ordinary, Placing::symmetric, Placing::mixed,
                               Placing::unstaged};
constexpr std::array kCapacities{Capacity::bound, Capacity::exact, Capacity::larger,
                                 Capacity::refusing, Capacity::dropping};
constexpr std::array kReceiveRows{ReceiveRows::exact, ReceiveRows::capacity, ReceiveRows::more};
constexpr std::array kZeroTails{ZeroTail::off, ZeroTail::on, ZeroTail::differ};
constexpr std::array kPerPlan{PerPlan::bound, PerPlan::own};
constexpr std::array kDuplicates{false, true};

// Rows of all ranks' receive tensors stay below this, so that a case takes milliseconds.
constexpr std::int64_t kMaxReceiveBytes = std::int64_t{2} << 20;

}  // namespace

// Calls visit(field, table) for every dimension, always in the same order.
template <class Visit>
static void for_each_dimension(Case& c, Visit&& visit) {
  visit(c.layout, kLayouts);
  visit(c.dtype, kDtypes);
  visit(c.cargo, kCargoes);
  visit(c.alignment, kAlignments);
  visit(c.index_type, kIndexTypes);
  visit(c.output_type, kIndexTypes);
  visit(c.pattern, kPatterns);
  visit(c.tokens, kTokens);
  visit(c.max_tokens, kMaxTokens);
  visit(c.topk, kTopks);
  visit(c.local_experts, kLocalExperts);
  visit(c.homes, kHomes);
  visit(c.row_units, kRowUnits);
  visit(c.weights, kWeights);
  visit(c.placing, kPlacings);
  visit(c.capacity, kCapacities);
  visit(c.receive_rows, kReceiveRows);
  visit(c.zero_tail, kZeroTails);
  visit(c.alignments, kPerPlan);
  visit(c.topks, kPerPlan);
  visit(c.duplicates, kDuplicates);
}

namespace {

Case make_case(int num_ranks, const std::vector<int>& values, std::uint64_t seed) {
  Case c;
  c.num_ranks = num_ranks;
  c.seed = seed;
  set_values(c, values);
  c.row_units = std::max(c.row_units, c.least_row_units());
  const std::int64_t row_bytes = std::int64_t{16} * c.row_units;
  c.settle(c.homes);
  int most_experts = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    most_experts = std::max(most_experts, c.local_experts_of(rank));
  }
  const std::int64_t bytes_per_token = row_bytes * c.num_ranks * std::min(c.topk, most_experts);
  c.max_tokens = static_cast<int>(
      std::clamp<std::int64_t>(kMaxReceiveBytes / bytes_per_token, 1, c.max_tokens));
  return c;
}

std::int64_t bound_of(const Case& c, const std::vector<std::int32_t>& expert_ranks) {
  std::int64_t rows = 0;
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = c.num_ranks;
  config.num_experts = c.num_experts();
  config.expert_ranks = expert_ranks.empty() ? nullptr : expert_ranks.data();
  config.max_topk = c.topk;
  config.max_tokens_per_rank = c.max_tokens;
  config.hidden = 8;
  config.layout = c.layout;
  config.alignment = c.alignment;
  ok(xd_ep_recv_bound(&config, &rows));
  return rows;
}

}  // namespace

void Case::settle(Homes where) {
  homes = where;
  expert_ranks_.clear();
  if (homes == Homes::even) return;
  const auto ranks = static_cast<std::uint64_t>(num_ranks);
  const auto chosen = static_cast<std::int32_t>(mix(seed, 0x40) % ranks);
  const int experts = num_ranks * local_experts + (homes == Homes::ragged ? 1 : 0);
  for (int e = 0; e < experts; ++e) {
    auto rank = static_cast<std::int32_t>(mix(seed, 0x41, static_cast<std::uint64_t>(e)) % ranks);
    if (homes == Homes::interleaved) rank = e % num_ranks;
    if (homes == Homes::one_without && rank == chosen) rank = (rank + 1) % num_ranks;
    expert_ranks_.push_back(homes == Homes::one_rank ? chosen : rank);
  }
}

int Case::num_experts() const {
  return expert_ranks_.empty() ? num_ranks * local_experts : static_cast<int>(expert_ranks_.size());
}

int Case::local_experts_of(int rank) const {
  return expert_ranks_.empty() ? local_experts
                               : static_cast<int>(std::ranges::count(expert_ranks_, rank));
}

int Case::alignment_of(int step) const {
  int result = alignment;
  if (alignments == PerPlan::bound) return result;
  std::uint64_t chance = mix(seed, 0xA1, static_cast<std::uint64_t>(step));
  for (; result > 1 && chance % 2 == 0; chance /= 2) result /= 2;
  return result;
}

int Case::topk_of(int step) const {
  if (topks == PerPlan::bound) return topk;
  const std::uint64_t chance = mix(seed, 0x70, static_cast<std::uint64_t>(step));
  return 1 + static_cast<int>(chance % static_cast<std::uint64_t>(topk));
}

RoutingShape Case::routing(int step) const {
  return {num_ranks, num_experts(), topk_of(step), max_tokens, pattern, tokens, expert_ranks_};
}

std::vector<std::int32_t> Case::owners() const {
  if (!expert_ranks_.empty()) return expert_ranks_;
  std::vector<std::int32_t> result;
  for (int e = 0; e < num_experts(); ++e) result.push_back(e / local_experts);
  return result;
}

Table Case::table(int step) const {
  return make_table(tables, num_ranks, num_experts(),
                    mix(seed, 0x7AB, static_cast<std::uint64_t>(step)));
}

std::vector<Choices> Case::ids(int step) const {
  const std::uint64_t batch = mix(seed, static_cast<std::uint64_t>(step));
  RoutingShape shape = routing(step);
  if (tables != Tables::none) {
    // Patterns that know of ranks need some for logical experts as well.
    shape.num_experts = logical_experts(tables, num_experts());
    shape.expert_ranks.clear();
    for (int e = 0; e < shape.num_experts; ++e) shape.expert_ranks.push_back(e % num_ranks);
  }
  std::vector<Choices> ranks = make_routing(shape, batch);
  if (duplicates) repeat_ids(ranks, mix(batch, 0xD0));
  if (bad_ids) spoil_ids(ranks, shape.num_experts, batch);
  for (int r = 0; r < num_ranks; ++r) {
    if (is_gone(r)) ranks[static_cast<std::size_t>(r)] = {0, shape.topk, {}};
  }
  return ranks;
}

// Choices of experts on ranks that are gone are there still.
std::vector<Choices> Case::placed(int step) const {
  if (tables == Tables::none) return ids(step);
  return table(step).in_slots(ids(step), owners(), duplicates);
}

std::vector<Choices> Case::choices(int step) const {
  std::vector<Choices> ranks = placed(step);
  if (gone == 0) return ranks;
  const std::vector<std::int32_t> owner = owners();
  for (Choices& choices : ranks) {
    for (std::int64_t& id : choices.ids) {
      if (id >= 0 && is_gone(owner[static_cast<std::size_t>(id)])) id = -1;
    }
  }
  return ranks;
}

std::int64_t Case::unplaced(int step, int rank) const {
  const auto at = static_cast<std::size_t>(rank);
  std::int64_t count = tables == Tables::none ? 0 : table(step).unplaced(ids(step)[at]);
  if (gone == 0) return count;
  const Choices all = placed(step)[at];
  const std::vector<std::int32_t> owner = owners();
  for (int token = 0; token < all.tokens; ++token) {
    std::set<std::int64_t> chosen;  // each once
    for (int k = 0; k < all.topk; ++k) chosen.insert(all.id(token, k));
    count += std::ranges::count_if(chosen, [&](std::int64_t id) {
      return id >= 0 && is_gone(owner[static_cast<std::size_t>(id)]);
    });
  }
  return count;
}

Placement Case::placement(int step) const {
  return {num_ranks,
          local_experts,
          layout,
          alignment_of(step),
          capacities(),
          overflow(),
          duplicates ? XD_EP_DUPLICATE_IDS_COLLAPSE : XD_EP_DUPLICATE_IDS_ERROR,
          expert_ranks_};
}

// Where nothing overflows, the policy must not matter.
xd_ep_overflow Case::overflow() const {
  const bool drop =
      capacity == Capacity::dropping || (capacity == Capacity::exact && mix(seed) % 2 == 0);
  return drop ? XD_EP_OVERFLOW_DROP : XD_EP_OVERFLOW_ERROR;
}

std::vector<std::int64_t> Case::capacities() const {
  const std::int64_t bound = bound_of(*this, expert_ranks_);
  std::vector<std::int64_t> result(static_cast<std::size_t>(num_ranks), bound);
  if (capacity == Capacity::bound) return result;
  Case full = *this;
  full.gone = 0;
  std::vector<Routed> roomy;
  for (int step = 0; step < kSteps; ++step) {
    roomy.emplace_back(Placement{num_ranks, local_experts, layout, alignment_of(step), result,
                                 XD_EP_OVERFLOW_ERROR, XD_EP_DUPLICATE_IDS_ERROR, expert_ranks_},
                       full.placed(step));
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::int64_t& rows = result[static_cast<std::size_t>(rank)];
    std::int64_t most = 0;
    for (const Routed& routed : roomy) most = std::max(most, routed.received(rank).total);
    const std::uint64_t chance = mix(seed, static_cast<std::uint64_t>(rank));
    const std::int64_t padded = (most + alignment - 1) / alignment * alignment;
    const bool scarce = rank == 0 || chance % 2 == 0;
    if (capacity == Capacity::exact) rows = std::max<std::int64_t>(padded, alignment);
    if (capacity == Capacity::larger) rows = bound + std::int64_t{3} * alignment;
    if ((capacity == Capacity::refusing || capacity == Capacity::dropping) && scarce) {
      rows = std::max<std::int64_t>(most * 2 / 3 / alignment * alignment, alignment);
    }
    // Rows beyond a multiple of the alignment are none that could be received.
    rows += static_cast<std::int64_t>(mix(chance) % static_cast<std::uint64_t>(alignment));
  }
  return result;
}

// A row of quantised cargo is one block of bf16 columns at least.
int Case::least_row_units() const {
  if (wire > XD_EP_WIRE_FLOAT32) return 128 * static_cast<int>(element_bytes(dtype)) / 16;
  return cargo == Cargo::quantised ? 16 : cargo == Cargo::mxfp8 ? 4 : 1;
}

bool Case::zeroes_tail(int rank) const {
  return zero_tail == ZeroTail::on || (zero_tail == ZeroTail::differ && rank % 2 == 1);
}

xd_ep_config Case::config(int rank) const {
  const std::vector<std::int64_t> rows = capacities();
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = num_ranks;
  config.num_experts = num_experts();
  config.expert_ranks = expert_ranks_.empty() ? nullptr : expert_ranks_.data();
  config.max_topk = topk;
  config.max_tokens_per_rank = max_tokens;
  config.dtype = dtype;
  config.hidden = 16 * row_units / static_cast<int>(element_bytes(dtype));
  config.max_scale_bytes = carries_scales() ? 4 * row_units : 0;
  config.layout = layout;
  config.alignment = alignment;
  config.recv_capacity = capacity == Capacity::bound ? 0 : rows[static_cast<std::size_t>(rank)];
  config.overflow = overflow();
  config.duplicate_ids = duplicates ? XD_EP_DUPLICATE_IDS_COLLAPSE : XD_EP_DUPLICATE_IDS_ERROR;
  config.staging = placing == Placing::unstaged ? XD_EP_STAGING_NONE : XD_EP_STAGING_AUTO;
  config.zero_tail = zeroes_tail(rank) ? 1 : 0;
  config.wire_formats = wire != XD_EP_WIRE_SAME ? XD_EP_WIRE_BIT(wire) : 0;
  config.num_logical_experts = logical_experts(tables, num_experts());
  config.on_peer_loss = resumes ? XD_EP_PEER_LOSS_RESUME : XD_EP_PEER_LOSS_FATAL;
  return config;
}

std::string Case::description() const {
  constexpr const char* kCargoNames[] = {"payload",   "e4m3+f32", "e5m2+e8m0",
                                         "quantised", "mxfp8",    "fp4"};
  constexpr const char* kPlacingNames[] = {"ordinary", "symmetric", "mixed", "unstaged"};
  constexpr const char* kCapacityNames[] = {"bound", "exact", "larger", "refusing", "dropping"};
  constexpr const char* kHomesNames[] = {"even", "interleaved", "ragged", "one without",
                                         "one rank"};
  constexpr const char* kRowsNames[] = {"exact", "capacity", "more"};
  constexpr const char* kTailNames[] = {"off", "on", "differ"};
  std::ostringstream text;
  text << "seed " << seed << ": W=" << num_ranks << " E=" << num_experts() << " on ranks "
       << kHomesNames[static_cast<int>(homes)] << " K=" << topk << " T<=" << max_tokens
       << (layout == XD_EP_EXPERT_MAJOR ? " expert-major" : " rank-major")
       << (dtype.code == kDLBfloat ? " bf" : " f") << int{dtype.bits} << " rows of "
       << 16 * row_units << " bytes, dispatch " << kCargoNames[static_cast<int>(cargo)]
       << ", alignment " << alignment << ", int" << int{index_type.bits} << " in, int"
       << int{output_type.bits} << " out, routing " << name_of(pattern) << ", tokens "
       << name_of(tokens) << (weights ? ", weights" : ", no weights") << ", memory "
       << kPlacingNames[static_cast<int>(placing)] << ", capacity "
       << kCapacityNames[static_cast<int>(capacity)] << ", receive rows "
       << kRowsNames[static_cast<int>(receive_rows)] << ", zero tail "
       << kTailNames[static_cast<int>(zero_tail)];
  for (int step = 0; step < kSteps; ++step) {
    text << ", batch " << step << " alignment " << alignment_of(step) << " K=" << topk_of(step);
  }
  if (duplicates) text << ", duplicates collapse";
  if (parts > 1) text << ", in " << parts << " parts";
  if (wire != XD_EP_WIRE_SAME) text << ", wire " << static_cast<int>(wire);
  if (tables != Tables::none) text << ", tables " << static_cast<int>(tables);
  return text.str();
}

void PrintTo(const Case& c, std::ostream* out) { *out << c.description(); }

std::vector<Case> cases_with_wires(std::vector<Case> cases) {
  if (!full_tests()) std::erase_if(cases, [](const Case& c) { return mix(c.seed, 0x9D) % 2 == 0; });
  std::size_t number = 0;
  for (Case& c : cases) {
    c.wire = kWires[number++ % std::size(kWires)];
    if (c.wire == XD_EP_WIRE_FLOAT32) continue;
    // One to three blocks.
    const int block = c.least_row_units();
    c.row_units = block * (1 + static_cast<int>(mix(c.seed, 0x9C) % 3));
    c.max_tokens = std::min(c.max_tokens, 24);
  }
  return cases;
}

std::vector<Case> cases_with_tables(std::vector<Case> cases) {
  if (!full_tests()) std::erase_if(cases, [](const Case& c) { return mix(c.seed, 0x7A) % 2 == 0; });
  constexpr std::array kTables{Tables::in_order, Tables::permuted, Tables::replicas,
                               Tables::with_gaps, Tables::with_lists};
  std::size_t number = 0;
  for (Case& c : cases) c.tables = kTables[number++ % kTables.size()];
  return cases;
}

std::vector<Case> cases_in_parts(int num_ranks) {
  constexpr std::array kParts{2, 3, 4, 8, 16};
  std::vector<Case> cases;
  for (Case c : all_cases(num_ranks)) {
    if (c.layout != XD_EP_EXPERT_MAJOR || (!full_tests() && mix(c.seed, 0x9A) % 2 == 0)) continue;
    c.parts = kParts[cases.size() % kParts.size()];
    // Often no multiple of the parts.
    c.local_experts =
        c.parts + static_cast<int>(mix(c.seed, 0x9B) % static_cast<std::uint64_t>(c.parts));
    c.settle(c.homes == Homes::interleaved || c.homes == Homes::even ? c.homes : Homes::ragged);
    int most = 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
      c.parts = std::min(c.parts, c.local_experts_of(rank));
      most = std::max(most, c.local_experts_of(rank));
    }
    if (c.parts < 2) continue;
    // As few tokens as make_case() takes, and zones that are not mostly padding.
    const std::int64_t row_bytes = std::int64_t{16} * c.row_units;
    c.max_tokens = static_cast<int>(std::clamp<std::int64_t>(
        kMaxReceiveBytes / (row_bytes * num_ranks * std::min(c.topk, most)), 1, c.max_tokens));
    while (c.alignment > 1 && std::int64_t{most} * c.alignment * row_bytes > kMaxReceiveBytes / 4) {
      c.alignment /= 2;
    }
    cases.push_back(c);
  }
  return cases;
}

std::vector<Case> all_cases(int num_ranks) {
  const std::uint64_t seed = test_seed();
  const Samples how{seed, mix(seed, 0x5A), full_tests() ? 2000 : 24};
  std::vector<Case> cases;
  for (const std::vector<int>& row : value_rows(dimension_sizes<Case>(), how)) {
    cases.push_back(make_case(num_ranks, row, mix(seed, cases.size())));
  }
  return cases;
}

}  // namespace xd::test
