#include "conformance/slots/reference.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <utility>

#include "conformance/reference.h"

namespace xd::test {
namespace {

// All values of a format of 16 bits, since a row has many elements.
std::vector<float> table_of(Format format) {
  std::vector<float> values;
  for (std::uint32_t code = 0; code < 0x10000; ++code) values.push_back(decode(code, format));
  return values;
}

float value_of(std::uint32_t code, Format format) {
  if (format.bytes == 4) return std::bit_cast<float>(code);
  static const std::vector<float> bf16 = table_of(kFormatBf16), f16 = table_of(kFormatF16);
  return (format.exponent_bits == kFormatBf16.exponent_bits ? bf16 : f16)[code];
}

std::uint32_t code_of(float value, Format format) {
  return format.bytes == 4 ? std::bit_cast<std::uint32_t>(value) : encode(value, format);
}

}  // namespace

SlotRouting::SlotRouting(int num_ranks, std::vector<std::int32_t> owners,
                         std::vector<Choices> choices, xd_ep_duplicate_ids duplicates,
                         const std::vector<bool>& absent)
    : num_ranks_(num_ranks),
      owners_(std::move(owners)),
      choices_(std::move(choices)),
      experts_of_(static_cast<std::size_t>(num_ranks)),
      rows_(owners_.size()) {
  const auto is_absent = [&](int rank) {
    return !absent.empty() && absent[static_cast<std::size_t>(rank)];
  };
  for (int rank = 0; rank < num_ranks_; ++rank) {
    Choices& source = choices_[static_cast<std::size_t>(rank)];
    if (!is_absent(rank)) continue;
    source.tokens = 0;
    source.ids.clear();
  }
  remove_bad_ids(duplicates);
  for (std::size_t e = 0; e < owners_.size(); ++e) {
    experts_of_[static_cast<std::size_t>(owners_[e])].push_back(static_cast<int>(e));
  }
  for (int rank = 0; rank < num_ranks_; ++rank) {
    Choices& source = choices_[static_cast<std::size_t>(rank)];
    std::vector<std::int64_t>& slots = slots_.emplace_back(source.ids.size(), -1);
    for (int token = 0; token < source.tokens; ++token) {
      for (int k = 0; k < source.topk; ++k) {
        std::int64_t& id = source.ids[source.index(token, k)];
        if (id >= 0 && is_absent(owner(id))) id = -1;
        if (id < 0) continue;
        std::vector<SlotRow>& rows = rows_[static_cast<std::size_t>(id)];
        slots[source.index(token, k)] = static_cast<std::int64_t>(rows.size());
        rows.push_back({rank, token, k});
      }
    }
  }
}

void SlotRouting::remove_bad_ids(xd_ep_duplicate_ids duplicates) {
  const auto experts = static_cast<std::int64_t>(owners_.size());
  for (std::size_t rank = 0; rank < choices_.size(); ++rank) {
    Choices& source = choices_[rank];
    for (int token = 0; token < source.tokens; ++token) {
      std::int64_t* row = source.ids.data() + std::ptrdiff_t{token} * source.topk;
      for (int k = 0; k < source.topk; ++k) {
        const bool outside = row[k] < -1 || row[k] >= experts;
        const bool repeated = row[k] != -1 && std::find(row, row + k, row[k]) != row + k;
        if (!outside && !repeated) continue;
        row[k] = -1;
        if (!outside && duplicates == XD_EP_DUPLICATE_IDS_COLLAPSE) continue;
        ++bad_ids_;
        if (bad_id_rank_ < 0) bad_id_rank_ = static_cast<int>(rank);
      }
    }
  }
}

std::int64_t SlotRouting::slot(int source, int token, int k) const {
  return slots_[static_cast<std::size_t>(source)][choices(source).index(token, k)];
}

std::int64_t SlotRouting::rows_of(int rank) const {
  std::int64_t total = 0;
  for (const int expert : experts_of(rank)) {
    total += static_cast<std::int64_t>(rows(expert).size());
  }
  return total;
}

ReceivedRows received_rows(const SlotRouting& routing, int rank, xd_ll_receive form,
                           int alignment) {
  ReceivedRows found;
  const auto end = [&] { return static_cast<std::int64_t>(found.rows.size()); };
  if (form == XD_LL_BY_EXPERT) {
    for (const int expert : routing.experts_of(rank)) {
      found.offsets.push_back(end());
      for (const SlotRow& row : routing.rows(expert)) {
        found.rows.push_back({row.source, row.token, row.k, expert, end() - found.offsets.back()});
      }
      while (end() % alignment != 0) found.rows.emplace_back();
    }
  } else {
    for (int source = 0; source < routing.num_ranks(); ++source) {
      found.offsets.push_back(end());
      const Choices& choices = routing.choices(source);
      for (int token = 0; token < choices.tokens; ++token) {
        for (int k = 0; k < choices.topk; ++k) {
          const std::int64_t id = choices.id(token, k);
          if (id < 0 || routing.owner(id) != rank) continue;
          found.rows.push_back(
              {source, token, k, static_cast<int>(id), routing.slot(source, token, k)});
          break;
        }
      }
    }
  }
  found.offsets.push_back(end());
  return found;
}

std::vector<std::uint32_t> combined_row(const SlotRouting& routing, const Hosts& hosts, int source,
                                        int token, std::size_t columns, Format format,
                                        const Combined& how) {
  const auto& [result, weight, one_per_rank, wire] = how;
  const Choices& choices = routing.choices(source);
  // Sums are empty as long as nothing has been added.
  const auto sum_of_rank = [&](int rank) {
    std::vector<float> sum;
    for (int k = 0; k < choices.topk; ++k) {
      const std::int64_t id = choices.id(token, k);
      if (id < 0 || routing.owner(id) != rank || (one_per_rank && !sum.empty())) continue;
      const std::vector<std::uint32_t> codes =
          result(static_cast<int>(id), routing.slot(source, token, k));
      const bool first = sum.empty();
      sum.resize(columns);
      for (std::size_t c = 0; c < columns; ++c) {
        float term = value_of(codes[c], format);
        if (weight) term = (*weight)(token, k) * term;
        sum[c] = first ? term : sum[c] + term;
      }
    }
    return sum;
  };
  const auto add_rounded = [&](std::vector<float>& sum, const std::vector<float>& part) {
    const bool first = sum.empty();
    if (!part.empty()) sum.resize(columns);
    for (std::size_t c = 0; c < part.size(); ++c) {
      const float rounded = value_of(code_of(part[c], format), format);
      sum[c] = first ? rounded : sum[c] + rounded;
    }
  };
  if (wire != XD_EP_WIRE_SAME) {
    return combined_under(wire, ranks_by_host(hosts, routing.num_ranks()),
                          static_cast<std::int64_t>(columns), format, sum_of_rank);
  }
  std::vector<float> sum;
  for (const std::vector<int>& ranks : ranks_by_host(hosts, routing.num_ranks())) {
    std::vector<float> of_host;
    for (const int rank : ranks) add_rounded(of_host, sum_of_rank(rank));
    add_rounded(sum, of_host);
  }
  std::vector<std::uint32_t> codes(columns, 0);
  for (std::size_t c = 0; c < sum.size(); ++c) codes[c] = code_of(sum[c], format);
  return codes;
}

}  // namespace xd::test
