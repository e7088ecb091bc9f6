#include "conformance/reference.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "conformance/quantised.h"

namespace xd::test {
namespace {

std::size_t round_up_to(std::size_t value, int multiple) {
  const auto step = static_cast<std::size_t>(multiple);
  return (value + step - 1) / step * step;
}

}  // namespace

std::int64_t Placement::num_experts() const {
  return expert_ranks.empty() ? std::int64_t{num_ranks} * local_experts
                              : static_cast<std::int64_t>(expert_ranks.size());
}

int Placement::owner(std::int64_t expert) const {
  return expert_ranks.empty() ? static_cast<int>(expert / local_experts)
                              : expert_ranks[static_cast<std::size_t>(expert)];
}

std::vector<std::int64_t> Placement::experts_of(int rank) const {
  std::vector<std::int64_t> experts;
  for (std::int64_t e = 0; e < num_experts(); ++e) {
    if (owner(e) == rank) experts.push_back(e);
  }
  return experts;
}

Routed::Routed(Placement placement, std::vector<Choices> choices)
    : placement_(std::move(placement)), choices_(std::move(choices)) {
  remove_bad_ids();
  for (const Choices& source : choices_) row_of_.emplace_back(source.ids.size(), -1);
  for (int rank = 0; rank < placement_.num_ranks; ++rank) {
    Received received = placement_.layout == XD_EP_EXPERT_MAJOR ? receive_expert_major(rank)
                                                                : receive_rank_major(rank);
    if (received.total > placement_.whole_capacity(rank)) {
      if (overflow_rank_ < 0) overflow_rank_ = rank;
      if (placement_.overflow == XD_EP_OVERFLOW_DROP) cut(received, rank);
    }
    describe(received, rank);
    received_.push_back(std::move(received));
    index_rows(rank);
  }
}

void Routed::remove_bad_ids() {
  const std::int64_t experts = placement_.num_experts();
  for (std::size_t rank = 0; rank < choices_.size(); ++rank) {
    Choices& source = choices_[rank];
    for (int token = 0; token < source.tokens; ++token) {
      std::int64_t* row = source.ids.data() + std::ptrdiff_t{token} * source.topk;
      for (int k = 0; k < source.topk; ++k) {
        const bool outside = row[k] < -1 || row[k] >= experts;
        const bool repeated = row[k] != -1 && std::find(row, row + k, row[k]) != row + k;
        if (!outside && !repeated) continue;
        row[k] = -1;
        if (!outside && placement_.duplicates == XD_EP_DUPLICATE_IDS_COLLAPSE) continue;
        ++bad_ids_;
        if (bad_id_rank_ < 0) bad_id_rank_ = static_cast<int>(rank);
      }
    }
  }
}

Received Routed::receive_expert_major(int rank) const {
  Received received;
  for (const std::int64_t id : placement_.experts_of(rank)) {
    received.offsets.push_back(static_cast<std::int64_t>(received.rows.size()));
    for (int source = 0; source < placement_.num_ranks; ++source) {
      for (int token = 0; token < choices(source).tokens; ++token) {
        for (int k = 0; k < choices(source).topk; ++k) {
          if (choices(source).id(token, k) == id) received.rows.push_back({source, token, k});
        }
      }
    }
    received.rows.resize(round_up_to(received.rows.size(), placement_.alignment));
  }
  received.total = static_cast<std::int64_t>(received.rows.size());
  received.offsets.push_back(received.total);
  return received;
}

Received Routed::receive_rank_major(int rank) const {
  Received received;
  for (int source = 0; source < placement_.num_ranks; ++source) {
    for (int token = 0; token < choices(source).tokens; ++token) {
      for (int k = 0; k < choices(source).topk; ++k) {
        const std::int64_t id = choices(source).id(token, k);
        if (id < 0 || owner(id) != rank) continue;
        received.rows.push_back({source, token, -1});
        break;
      }
    }
  }
  received.total = static_cast<std::int64_t>(received.rows.size());
  return received;
}

void Routed::cut(Received& received, int rank) const {
  const std::int64_t capacity = placement_.whole_capacity(rank);
  const auto last = received.rows.begin() + capacity;
  received.dropped =
      std::count_if(last, received.rows.end(), [](const Row& row) { return !row.padding(); });
  received.rows.erase(last, received.rows.end());
  for (std::int64_t& offset : received.offsets) offset = std::min(offset, capacity);
}

// Counts and zones as they are after drops.
void Routed::describe(Received& received, int rank) const {
  received.counts.assign(static_cast<std::size_t>(placement_.local_experts_of(rank)), 0);
  for (const Row& row : received.rows) {
    if (row.padding()) continue;
    for (int k = 0; k < choices(row.source).topk; ++k) {
      const std::int64_t id = choices(row.source).id(row.token, k);
      if (id < 0 || owner(id) != rank || (row.k >= 0 && row.k != k)) continue;
      ++received.counts[static_cast<std::size_t>(local_expert(id))];
    }
  }
  if (placement_.layout == XD_EP_RANK_MAJOR) {
    received.offsets.assign(1, 0);
    for (const std::int64_t count : received.counts) {
      received.offsets.push_back(received.offsets.back() +
                                 static_cast<std::int64_t>(round_up_to(
                                     static_cast<std::size_t>(count), placement_.alignment)));
    }
  }
  for (std::size_t e = 0; e < received.counts.size(); ++e) {
    received.padded.push_back(received.offsets[e + 1] - received.offsets[e]);
  }
}

void Routed::index_rows(int rank) {
  const std::vector<Row>& rows = received(rank).rows;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const Row& row = rows[r];
    if (row.padding()) continue;
    const Choices& source = choices(row.source);
    for (int k = 0; k < source.topk; ++k) {
      const std::int64_t id = source.id(row.token, k);
      if (id < 0 || owner(id) != rank || (row.k >= 0 && row.k != k)) continue;
      row_of_[static_cast<std::size_t>(row.source)][source.index(row.token, k)] =
          static_cast<std::int64_t>(r);
    }
  }
}

std::optional<std::int64_t> Routed::row_of(int source, int token, int k) const {
  const std::int64_t row =
      row_of_[static_cast<std::size_t>(source)][choices(source).index(token, k)];
  return row < 0 ? std::nullopt : std::optional(row);
}

std::int64_t Routed::local_expert(std::int64_t expert) const {
  const std::vector<std::int64_t> experts = placement_.experts_of(owner(expert));
  return std::ranges::find(experts, expert) - experts.begin();
}

std::int64_t Routed::rows_between(int source, int destination) const {
  return std::ranges::count_if(received(destination).rows,
                               [&](const Row& row) { return row.source == source; });
}

std::uint32_t combined(const Routed& routed, const HostRanks& hosts, const TokenOf& of,
                       std::int64_t column, Format format, const ElementAt& element,
                       const WeightAt* weight) {
  const Choices& choices = routed.choices(of.source);
  const auto sum_of_rank = [&](int rank) {
    std::optional<float> sum;
    std::optional<std::int64_t> last;  // RANK_MAJOR: one row stands for several choices
    for (int k = 0; k < choices.topk; ++k) {
      const std::int64_t id = choices.id(of.token, k);
      if (id < 0 || routed.owner(id) != rank) continue;
      const std::optional<std::int64_t> row = routed.row_of(of.source, of.token, k);
      if (!row || row == last) continue;
      last = row;
      float term = element(rank, *row, column);
      if (weight) term = (*weight)(rank, *row) * term;
      sum = sum ? *sum + term : term;
    }
    return sum;
  };
  const auto add_rounded = [&](std::optional<float>& sum, const std::optional<float>& part) {
    if (!part) return;
    const float rounded = decode(encode(*part, format), format);
    sum = sum ? *sum + rounded : rounded;
  };
  std::optional<float> sum;
  for (const std::vector<int>& ranks : hosts) {
    std::optional<float> of_host;
    for (const int rank : ranks) add_rounded(of_host, sum_of_rank(rank));
    add_rounded(sum, of_host);
  }
  return sum ? encode(*sum, format) : 0;
}

std::vector<float> partial_sum(const Routed& routed, const TokenOf& of, int rank,
                               std::int64_t columns, const ElementAt& element,
                               const WeightAt* weight) {
  const Choices& choices = routed.choices(of.source);
  std::vector<float> sum;
  std::optional<std::int64_t> last;  // RANK_MAJOR: one row stands for several choices
  for (int k = 0; k < choices.topk; ++k) {
    const std::int64_t id = choices.id(of.token, k);
    if (id < 0 || routed.owner(id) != rank) continue;
    const std::optional<std::int64_t> row = routed.row_of(of.source, of.token, k);
    if (!row || row == last) continue;
    last = row;
    const bool first = sum.empty();
    sum.resize(static_cast<std::size_t>(columns));
    for (std::int64_t column = 0; column < columns; ++column) {
      float term = element(rank, *row, column);
      if (weight) term = (*weight)(rank, *row) * term;
      float& at = sum[static_cast<std::size_t>(column)];
      at = first ? term : at + term;
    }
  }
  return sum;
}

std::vector<std::uint32_t> combined_under(xd_ep_wire wire, const HostRanks& hosts,
                                          std::int64_t columns, Format format,
                                          const PartialSum& sum_of_rank) {
  const auto code_of = [&](float value) {
    const std::uint32_t infinity = format.max_finite() + 1;
    return std::isnan(value) ? infinity | 1u << (format.mantissa_bits - 1) : encode(value, format);
  };
  const auto add = [](std::vector<float>& sum, const std::vector<float>& part) {
    if (sum.empty()) {
      sum = part;
      return;
    }
    for (std::size_t c = 0; c < part.size(); ++c) sum[c] += part[c];
  };
  std::vector<float> sum;
  for (const std::vector<int>& ranks : hosts) {
    std::vector<float> of_host;
    for (const int rank : ranks) add(of_host, through_wire(wire, sum_of_rank(rank)));
    if (wire != XD_EP_WIRE_FLOAT32) {
      for (float& value : of_host)
        value = std::isnan(value) ? value : decode(code_of(value), format);
    }
    add(sum, of_host);
  }
  std::vector<std::uint32_t> codes(static_cast<std::size_t>(columns), 0);
  for (std::size_t c = 0; c < sum.size(); ++c) codes[c] = code_of(sum[c]);
  return codes;
}

}  // namespace xd::test
