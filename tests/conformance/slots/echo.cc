#include "conformance/slots/echo.h"

#include <bit>
#include <utility>

#include "support/random.h"

namespace xd::test {

LlCase echo_case(int num_ranks) {
  LlCase c = plain_ll_case(num_ranks);
  c.dtype = c.combine_dtype = kF32;
  c.pattern = Pattern::holes;
  c.tokens = Tokens::differ;
  c.local_experts = 2;
  c.max_tokens = 8;
  c.weights = Weights::none;
  return c;
}

LlGroup make_group(const Rank& rank, const LlCase& c, const EchoGroup& how) {
  const std::vector<std::int32_t> owners = c.owners();
  xd_ll_config config = c.config(owners);
  config.on_peer_loss = how.on_peer_loss;
  config.wait_timeout_ms = how.wait_timeout_ms;
  return make_group(rank.comm, config);
}

Echo::Echo(const Rank& rank, const LlCase& c, int number)
    : rank_(rank),
      case_(c),
      number_(number),
      choices_(c.choices(number)[static_cast<std::size_t>(rank.rank)]),
      owners_(c.owners()),
      topk_idx_(rank, kI64, {choices_.tokens, choices_.topk}),
      hints_(rank, kI32, {choices_.tokens}),
      weights_(rank, kF32, {choices_.tokens, choices_.topk}),
      tokens_(rank, kF32, {choices_.tokens, std::int64_t{4} * c.row_units}),
      rows_(rank, kF32, {c.local_experts, c.num_slots(), std::int64_t{4} * c.row_units}),
      counts_(rank, kI32, {c.local_experts}),
      ranges_(rank, kI64, {c.local_experts, c.num_ranks}),
      out_(rank, kF32, {choices_.tokens, std::int64_t{4} * c.row_units}),
      waits_(rank, kI64, {c.num_ranks}) {
  plan_ = make_plan(rank, c.config(owners_));
  load(number);
  weights_.write(std::vector<float>(choices_.ids.size(), 1.0f));
  set_plan(dispatch_, plan_);
  set_plan(combine_, plan_);
  dispatch_.tokens = tokens_.dl();
  dispatch_.topk_idx = topk_idx_.dl();
  if (c.tables != Tables::none) dispatch_.replica_hint = hints_.dl();
  dispatch_.recv_tokens = combine_.expert_out = rows_.dl();
  dispatch_.counts = counts_.dl();
  dispatch_.source_ranges = ranges_.dl();
  combine_.out = out_.dl();
  waits_.write(std::vector<std::int64_t>(static_cast<std::size_t>(c.num_ranks)));
  combine_.wait_ns = waits_.dl();
}

void Echo::load(int number) {
  number_ = number;
  choices_ = case_.choices(number)[static_cast<std::size_t>(rank_.rank)];
  topk_idx_.write(case_.ids(number)[static_cast<std::size_t>(rank_.rank)].ids);
  if (case_.tables != Tables::none) {
    const Table table = case_.table(number);
    std::vector<std::int32_t> hints;
    for (int t = 0; t < choices_.tokens; ++t) hints.push_back(table.turn_of(rank_.rank, t));
    hints_.write(hints);
  }
  for (int t = 0; t < choices_.tokens; ++t) {
    for (std::int64_t column = 0; column < tokens_.extent(1); ++column) {
      tokens_.set(t, column, std::bit_cast<std::uint32_t>(value(t, column)));
    }
  }
  tokens_.upload();
}

// Small enough that a few copies of it add up exactly.
float Echo::value(int token, std::int64_t column) const {
  return static_cast<float>(
      mix(static_cast<std::uint64_t>(number_), static_cast<std::uint64_t>(rank_.rank),
          static_cast<std::uint64_t>(token), static_cast<std::uint64_t>(column)) %
          2000 +
      1);
}

xd_status Echo::dispatch(xd_ll_group* group, xd_ll_phase phase) {
  dispatch_.phase = phase;
  return xd_ll_dispatch(group, &dispatch_, rank_.stream());
}

xd_status Echo::combine(xd_ll_group* group, xd_ll_phase phase) {
  combine_.phase = phase;
  return xd_ll_combine(group, &combine_, rank_.stream());
}

xd_status Echo::call(xd_ll_group* group, xd_ll_operation operation, xd_ll_phase phase) {
  return operation == XD_LL_DISPATCH ? dispatch(group, phase) : combine(group, phase);
}

std::string Echo::wrong(const std::vector<bool>& lost, bool unsure) const {
  const std::vector<float> back = out_.read_as<float>();
  const std::int64_t columns = tokens_.extent(1);
  for (int t = 0; t < choices_.tokens; ++t) {
    // The copies on ranks that are there, and those on each lost rank.
    int copies = 0;
    std::vector<int> possible(owners_.size());
    for (int k = 0; k < choices_.topk; ++k) {
      const std::int64_t id = choices_.id(t, k);
      if (id < 0) continue;
      const auto owner = static_cast<std::size_t>(owners_[static_cast<std::size_t>(id)]);
      ++(lost[owner] ? possible[owner] : copies);
    }
    for (std::int64_t column = 0; column < columns; ++column) {
      const float got = back[static_cast<std::size_t>(t * columns + column)];
      bool right = got == static_cast<float>(copies) * value(t, column);
      for (const int more : possible) {
        right = right || (unsure && got == static_cast<float>(copies + more) * value(t, column));
      }
      if (right) continue;
      return "batch " + std::to_string(number_) + ": token " + std::to_string(t) +
             " came back as " + std::to_string(got) + ", sent " + std::to_string(copies) +
             " times " + std::to_string(value(t, column));
    }
  }
  return {};
}

std::vector<std::int64_t> Echo::rows_by_source() const {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(rank_.num_ranks));
  const std::vector<std::int64_t> ranges = ranges_.read_as<std::int64_t>();
  for (std::size_t i = 0; i < ranges.size(); ++i) rows[i % rows.size()] += ranges[i] & 0xffffffff;
  return rows;
}

Echo::Range Echo::range(int expert, int source) const {
  const std::int64_t at = std::int64_t{expert} * case_.num_ranks + source;
  const std::int64_t range = ranges_.read_as<std::int64_t>()[static_cast<std::size_t>(at)];
  return {range >> 32, range & 0xffffffff};
}

std::vector<std::int64_t> Echo::expected_rows(const std::vector<bool>& lost) const {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(rank_.num_ranks));
  const SlotRouting routing = case_.routing(number_, lost);
  for (const int expert : routing.experts_of(rank_.rank)) {
    for (const SlotRow& row : routing.rows(expert)) ++rows[static_cast<std::size_t>(row.source)];
  }
  return rows;
}

}  // namespace xd::test
