#include "conformance/wanderer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "conformance/dimensions.h"
#include "conformance/numeric.h"
#include "conformance/reference.h"
#include "support/random.h"

namespace xd::test {
namespace {

constexpr int kLocalExperts = 8;
constexpr int kTopk = 5;
constexpr int kHidden = 128;  // a block of a wire's codes

using Codes = std::vector<std::uint32_t>;

// A finite float32 of either sign between 2^-7 and 2, in all of its bits: sums of three depend on
// their order, which a shorter type would hide.
std::uint32_t any_number(std::uint64_t random) {
  const std::uint64_t sign = random >> 63, exponent = 120 + random % 8, fraction = random >> 8;
  return static_cast<std::uint32_t>(sign << 31 | exponent << 23 | (fraction & 0x7FFFFF));
}
float any_weight(std::uint64_t random) { return 0.01f + static_cast<float>(random % 997) / 997; }
float value_of(std::uint32_t code) { return decode(code, kFormatF32); }

// The result of an expert: it depends on all of the row and on nothing else.
Codes result_of(std::span<const std::uint32_t> row, std::int64_t expert) {
  std::uint64_t seed = static_cast<std::uint64_t>(expert);
  for (const std::uint32_t code : row) seed = mix(seed ^ code);
  Codes result(row.size());
  for (std::size_t c = 0; c < row.size(); ++c) result[c] = any_number(mix(seed + c));
  return result;
}

// The caller's sum where a row stands for several experts: its results by ascending
// choice, rounded once.
void add_weighted(std::vector<float>& sum, const Codes& result, float weight) {
  const bool first = sum.empty();
  sum.resize(result.size());
  for (std::size_t c = 0; c < result.size(); ++c) {
    const float term = weight * value_of(result[c]);
    sum[c] = first ? term : sum[c] + term;
  }
}
Codes rounded(const std::vector<float>& sum) {
  Codes codes;
  for (const float value : sum) {
    codes.push_back(encode(value, kFormatF32));
  }
  return codes;
}

// Three of the choices are of one rank, and not next to one another; three ranks have some.
std::vector<std::int64_t> its_experts(std::int64_t experts) {
  return {experts - 1, 0, experts - 2, experts / 2, experts - 3};
}

struct Drawn {
  Codes rows;                     // [T,H]
  std::vector<std::int64_t> ids;  // [T,K]
  std::vector<float> weights;     // [T,K]
};

Drawn draw(std::int64_t tokens, std::int64_t experts, std::uint64_t seed) {
  Random random(seed);
  Drawn drawn;
  for (std::int64_t i = 0; i < tokens * kHidden; ++i) {
    drawn.rows.push_back(any_number(random.next()));
  }
  for (std::int64_t token = 0; token < tokens; ++token) {
    const auto first = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(experts)));
    for (int k = 0; k < kTopk; ++k) {
      drawn.ids.push_back(random.one_in(8) ? -1 : (first + k) % experts);
      drawn.weights.push_back(any_weight(random.next()));
    }
  }
  return drawn;
}

// The token itself.
Drawn itself(std::int64_t experts) {
  Drawn it = draw(1, experts, mix(test_seed(), 0x70));
  it.ids = its_experts(experts);
  return it;
}

}  // namespace

// Tensors of one batch.
struct Wanderer::Batch {
  Batch(const Wanderer& of, const Drawn& mine)
      : tokens(of.rank_, kF32, {count(mine), kHidden}),
        topk_idx(of.rank_, kI64, {count(mine), kTopk}),
        topk_weights(of.rank_, kF32, {count(mine), kTopk}),
        rows(of.rank_, kF32, rows_shape(of)),
        row_weights(of.rank_, kF32,
                    of.per_rank() ? std::vector<std::int64_t>{of.rows_, kTopk}
                                  : std::vector<std::int64_t>{of.rows_}),
        row_choices(of.rank_, kI64, {of.rows_, of.per_rank() ? kTopk : 1}),
        row_experts(of.rank_, kI64, {of.rows_}),
        counts(of.rank_, kI32, {kLocalExperts}),
        offsets(of.rank_, kI64, {(of.per_rank() ? of.rank_.num_ranks : kLocalExperts) + 1}),
        total(of.rank_, kI64, {1}),
        out(of.rank_, kF32, {count(mine), kHidden}) {
    tokens.write(mine.rows);
    topk_idx.write(mine.ids);
    topk_weights.write(mine.weights);
  }
  static std::int64_t count(const Drawn& mine) {
    return static_cast<std::int64_t>(mine.rows.size()) / kHidden;
  }
  static std::vector<std::int64_t> rows_shape(const Wanderer& of) {
    if (of.way_ != Way::slots) return {of.rows_, kHidden};
    return {kLocalExperts, of.rows_ / kLocalExperts, kHidden};
  }

  Tensor tokens, topk_idx, topk_weights;
  Tensor rows, row_weights, row_choices, row_experts, counts, offsets, total;
  Tensor out;
};

Wanderer::Wanderer(const Rank& rank, Way way, Settings settings)
    : rank_(rank), way_(way), settings_(settings), num_experts_(rank.num_ranks * kLocalExperts) {
  if (bulk()) {
    const xd_ep_config config = bulk_config();
    ok(xd_ep_recv_bound(&config, &rows_));
    plan_ = make_plan(rank, config);
    bulk_ = make_group(rank.comm, config);
    return;
  }
  const xd_ll_config config = slot_config();
  rows_ = rows_of(config);
  plan_ = make_plan(rank, config);
  slots_ = make_group(rank.comm, config);
}

template <class Config>
void Wanderer::fill(Config& config) const {
  config.num_ranks = rank_.num_ranks;
  config.num_experts = num_experts_;
  config.max_topk = kTopk;
  config.max_tokens_per_rank = kMostTokens;
  config.hidden = kHidden;
  config.dtype = kF32;
  config.num_sms = settings_.num_sms;
  if (settings_.wire != XD_EP_WIRE_SAME) config.wire_formats = XD_EP_WIRE_BIT(settings_.wire);
}

xd_ep_config Wanderer::bulk_config() const {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  fill(config);
  config.layout = way_ == Way::expert_major ? XD_EP_EXPERT_MAJOR : XD_EP_RANK_MAJOR;
  return config;
}

xd_ll_config Wanderer::slot_config() const {
  xd_ll_config config = XD_LL_CONFIG_INIT;
  fill(config);
  if (way_ == Way::by_expert) config.receive = XD_LL_BY_EXPERT;
  if (way_ == Way::by_rank) config.receive = XD_LL_BY_RANK;
  return config;
}

std::int64_t Wanderer::rows_of(const xd_ll_config& config) const {
  if (way_ == Way::slots) return std::int64_t{kLocalExperts} * rank_.num_ranks * kMostTokens;
  std::int64_t rows = 0;
  ok(xd_ll_recv_bound(&config, 0, &rows));
  return rows;
}

void Wanderer::dispatch(Batch& batch) {
  if (!bulk()) {
    xd_ll_dispatch_args args = XD_LL_DISPATCH_ARGS_INIT;
    set_plan(args, plan_);
    args.tokens = batch.tokens.dl();
    args.topk_idx = batch.topk_idx.dl();
    args.recv_tokens = batch.rows.dl();
    args.counts = batch.counts.dl();
    if (way_ != Way::slots) args.row_offsets = batch.offsets.dl();
    if (way_ == Way::by_rank) {
      args.topk_weights = batch.topk_weights.dl();
      args.recv_weights = batch.row_weights.dl();
      args.recv_topk_idx = batch.row_choices.dl();
    }
    return ok(xd_ll_dispatch(slots_.get(), &args, rank_.stream()));
  }
  xd_ep_prepare_args prepare = XD_EP_PREPARE_ARGS_INIT;
  set_plan(prepare, plan_);
  prepare.topk_idx = batch.topk_idx.dl();
  prepare.total = batch.total.dl();
  ok(xd_ep_prepare(bulk_.get(), &prepare, rank_.stream()));
  xd_ep_dispatch_args args = XD_EP_DISPATCH_ARGS_INIT;
  set_plan(args, plan_);
  args.tokens = batch.tokens.dl();
  args.topk_weights = batch.topk_weights.dl();
  args.recv_tokens = batch.rows.dl();
  args.recv_weights = batch.row_weights.dl();
  if (per_rank()) args.recv_topk_idx = batch.row_choices.dl();
  ok(xd_ep_dispatch(bulk_.get(), &args, rank_.stream()));
  if (per_rank()) return;
  xd_ep_plan_row_experts_args experts = XD_EP_PLAN_ROW_EXPERTS_ARGS_INIT;
  set_plan(experts, plan_);
  experts.row_experts = batch.row_experts.dl();
  ok(xd_ep_plan_row_experts(bulk_.get(), &experts, rank_.stream()));
}

// The local experts of each row, -1 = none: [rows], or [rows,K] where a row stands for several.
std::vector<std::int64_t> Wanderer::local_experts(const Batch& batch) const {
  if (way_ == Way::expert_major) return batch.row_experts.read_as<std::int64_t>();
  if (per_rank()) {
    std::vector<std::int64_t> experts = batch.row_choices.read_as<std::int64_t>();
    const std::vector<std::int64_t> ends = way_ == Way::rank_major
                                               ? batch.total.read_as<std::int64_t>()
                                               : batch.offsets.read_as<std::int64_t>();
    std::fill(experts.begin() + ends.back() * kTopk, experts.end(), -1);
    return experts;
  }
  std::vector<std::int64_t> experts(static_cast<std::size_t>(rows_), -1);
  const std::vector<std::int32_t> counts = batch.counts.read_as<std::int32_t>();
  const std::vector<std::int64_t> offsets = batch.offsets.read_as<std::int64_t>();
  for (std::int64_t e = 0; e < kLocalExperts; ++e) {
    const auto expert = static_cast<std::size_t>(e);
    const std::int64_t first = way_ == Way::slots ? e * (rows_ / kLocalExperts) : offsets[expert];
    std::fill_n(experts.begin() + first, counts[expert], e);
  }
  return experts;
}

// The experts, on the host; rows of no expert keep what they had.
void Wanderer::compute(Batch& batch) const {
  Codes rows = batch.rows.read_as<std::uint32_t>();
  const std::vector<std::int64_t> experts = local_experts(batch);
  const std::vector<float> weights = batch.row_weights.read_as<float>();
  const std::size_t choices = per_rank() ? kTopk : 1;
  for (std::size_t row = 0; row < static_cast<std::size_t>(rows_); ++row) {
    const std::span<std::uint32_t> codes = std::span(rows).subspan(row * kHidden, kHidden);
    std::vector<float> sum;
    Codes result;
    for (std::size_t i = row * choices; i < (row + 1) * choices; ++i) {
      if (experts[i] < 0) continue;
      result = result_of(codes, std::int64_t{rank_.rank} * kLocalExperts + experts[i]);
      if (!per_rank()) break;
      add_weighted(sum, result, weights[i]);
    }
    if (per_rank()) result = rounded(sum);
    std::ranges::copy(result, codes.begin());
  }
  batch.rows.write(rows);
}

void Wanderer::combine(Batch& batch) {
  if (!bulk()) {
    xd_ll_combine_args args = XD_LL_COMBINE_ARGS_INIT;
    set_plan(args, plan_);
    args.expert_out = batch.rows.dl();
    args.topk_weights = per_rank() ? nullptr : batch.topk_weights.dl();
    args.out = batch.out.dl();
    args.wire = settings_.wire;
    return ok(xd_ll_combine(slots_.get(), &args, rank_.stream()));
  }
  xd_ep_combine_args args = XD_EP_COMBINE_ARGS_INIT;
  set_plan(args, plan_);
  args.expert_out = batch.rows.dl();
  args.weights = per_rank() ? nullptr : batch.row_weights.dl();
  args.out = batch.out.dl();
  args.wire = settings_.wire;
  ok(xd_ep_combine(bulk_.get(), &args, rank_.stream()));
}

void Wanderer::travel(const Among& among, const Enqueue& enqueue) {
  const auto me = static_cast<std::uint64_t>(rank_.rank);
  const bool home = rank_.rank == among.home;
  const std::uint64_t seed = mix(test_seed(), among.others, me);
  const auto tokens = home ? among.tokens : static_cast<int>(mix(seed) % kMostTokens);
  Drawn mine = draw(tokens, num_experts_, seed);
  if (home) {
    const Drawn it = itself(num_experts_);
    std::ranges::copy(it.rows, mine.rows.begin() + std::ptrdiff_t{among.place} * kHidden);
    std::ranges::copy(it.ids, mine.ids.begin() + std::ptrdiff_t{among.place} * kTopk);
    std::ranges::copy(it.weights, mine.weights.begin() + std::ptrdiff_t{among.place} * kTopk);
  }
  Batch batch(*this, mine);
  enqueue([&] { dispatch(batch); });
  compute(batch);
  enqueue([&] { combine(batch); });
  if (bulk()) ok(finish(rank_, bulk_.get(), XD_SUCCESS));
  if (!bulk()) ok(finish(rank_, slots_.get(), XD_SUCCESS));
  if (!home) return;
  const Codes out = batch.out.read_as<std::uint32_t>();
  const auto first = out.begin() + std::ptrdiff_t{among.place} * kHidden;
  EXPECT_EQ(Codes(first, first + kHidden), expected())
      << "way " << static_cast<int>(way_) << ", place " << among.place << " of " << among.tokens
      << " tokens of rank " << among.home;
}

void Wanderer::wander(const Enqueue& enqueue) {
  constexpr std::pair<int, int> kPlaces[] = {
      {1, 0}, {2, 1}, {65, 31}, {kMostTokens, kMostTokens - 1}};
  std::uint64_t others = 0;
  for (int home = 0; home < rank_.num_ranks; ++home) {
    for (const auto& [tokens, place] : kPlaces) travel({home, tokens, place, ++others}, enqueue);
  }
}

Codes Wanderer::expected(bool backwards) const {
  Drawn it = itself(num_experts_);
  if (backwards) {
    std::ranges::reverse(it.ids);
    std::ranges::reverse(it.weights);
  }
  const std::int64_t bound = kTopk;
  Choices alone{.tokens = 1, .topk = kTopk, .ids = it.ids};
  std::vector<Choices> all(static_cast<std::size_t>(rank_.num_ranks), Choices{0, kTopk, {}});
  all[0] = alone;
  const Routed routed({.num_ranks = rank_.num_ranks,
                       .local_experts = kLocalExperts,
                       .layout = per_rank() ? XD_EP_RANK_MAJOR : XD_EP_EXPERT_MAJOR,
                       .capacity = std::vector(static_cast<std::size_t>(rank_.num_ranks), bound)},
                      std::move(all));
  const auto weight_of = [&](int k) { return it.weights[static_cast<std::size_t>(k)]; };
  const auto term = [&](std::int64_t k, std::int64_t column) {
    return value_of(
        result_of(it.rows, it.ids[static_cast<std::size_t>(k)])[static_cast<std::size_t>(column)]);
  };
  const ElementAt element = [&](int rank, std::int64_t row, std::int64_t column) {
    const Row& of = routed.received(rank).rows[static_cast<std::size_t>(row)];
    if (!per_rank()) return term(of.k, column);
    std::vector<float> sum;
    for (int k = 0; k < kTopk; ++k) {
      if (routed.owner(it.ids[static_cast<std::size_t>(k)]) != rank) continue;
      add_weighted(sum, result_of(it.rows, it.ids[static_cast<std::size_t>(k)]), weight_of(k));
    }
    return value_of(rounded(sum)[static_cast<std::size_t>(column)]);
  };
  const WeightAt weight = [&](int rank, std::int64_t row) {
    return weight_of(routed.received(rank).rows[static_cast<std::size_t>(row)].k);
  };
  const HostRanks hosts = ranks_by_host(rank_.hosts, rank_.num_ranks);
  if (settings_.wire != XD_EP_WIRE_SAME) {
    return combined_under(settings_.wire, hosts, kHidden, kFormatF32, [&](int rank) {
      return partial_sum(routed, {0, 0}, rank, kHidden, element, per_rank() ? nullptr : &weight);
    });
  }
  Codes codes;
  for (std::int64_t column = 0; column < kHidden; ++column) {
    codes.push_back(static_cast<std::uint32_t>(combined(routed, hosts, {0, 0}, column, kFormatF32,
                                                        element, per_rank() ? nullptr : &weight)));
  }
  return codes;
}

}  // namespace xd::test
