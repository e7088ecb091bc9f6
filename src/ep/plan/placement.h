// Computes places from counts. It is pure arithmetic that every rank does on the same numbers, so
// all ranks agree on every row's final place, and on every rank's overflow, without another
// message.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "ep/plan/config.h"

namespace xd::ep {

// The number of the `count` rows from `first` on that lie below `limit`.
template <class Rows>
constexpr Rows kept_rows(Rows first, std::type_identity_t<Rows> count,
                         std::type_identity_t<Rows> limit) {
  return first >= limit ? 0 : count < limit - first ? count : limit - first;
}

// The counts of one rank's batch, as 32-bit values: choices per expert, by physical number [E]
// (ExpertMap), rows per destination if each token is sent there once [W], tokens [1], bad ids [1].
struct CountLayout {
  int experts, ranks;

  constexpr std::size_t size() const { return static_cast<std::size_t>(experts) + ranks + 2; }
  constexpr std::size_t expert(int physical_expert) const {
    return static_cast<std::size_t>(physical_expert);
  }
  constexpr std::size_t rank(int d) const { return static_cast<std::size_t>(experts) + d; }
  constexpr std::size_t tokens() const { return size() - 2; }
  constexpr std::size_t bad_ids() const { return size() - 1; }
};

// The counts of all ranks: row s has the counts of rank s.
struct CountTable {
  CountLayout layout;
  std::span<const std::uint32_t> values;

  std::span<const std::uint32_t> of(int source) const {
    return values.subspan(static_cast<std::size_t>(source) * layout.size(), layout.size());
  }
  std::int64_t choices(int source, int physical_expert) const {
    return of(source)[layout.expert(physical_expert)];
  }
  std::int64_t rows(int source, int rank) const { return of(source)[layout.rank(rank)]; }
  std::int64_t bad_ids(int source) const { return of(source)[layout.bad_ids()]; }
};

// Everything that follows from the counts. reserve() sizes it once; place() allocates nothing.
struct Placement {
  struct View {
    int rank;                // the rank that computes
    std::int64_t alignment;  // the plan's
    int parts = 1;           // the plan's
  };

  // The receive side of this rank. Under DROP the zones are cut at the capacity; under ERROR they
  // are whole, also where they do not fit. In RANK_MAJOR they describe (token, expert) pairs, which
  // the counts alone cannot cut: see cut_pairs().
  std::vector<std::int64_t> count;   // [L]
  std::vector<std::int64_t> offset;  // [L+1]; offset[e+1] - offset[e] is the padded count
  std::int64_t recv_rows = 0;        // min(total, capacity)
  std::int64_t dropped_rows = 0;

  // The send side of this rank: the first row for its tokens, by physical number [E] or by
  // destination [W].
  std::vector<std::int64_t> first_row;

  // The following hold for all ranks.
  std::vector<std::int64_t> total;      // [W] padded rows each would need
  std::vector<std::int64_t> rank_rows;  // [W*W] rows that source s puts into destination d
  std::vector<std::int64_t> part_end;   // [W*(P-1)] first row behind each part, after drops
  std::int64_t bad_ids = 0;
  int bad_id_rank = -1;    // lowest rank that has some
  int overflow_rank = -1;  // lowest rank whose capacity is exceeded

  // Calls visit(vector, size) for every vector.
  template <class Visit>
  void for_each_vector(const Config& config, Visit&& visit) {
    const auto ranks = static_cast<std::size_t>(config.ranks);
    const auto local = static_cast<std::size_t>(config.local_experts);
    visit(count, local);
    visit(offset, local + 1);
    visit(first_row,
          config.layout.row_per_expert ? static_cast<std::size_t>(config.experts) : ranks);
    visit(total, ranks);
    visit(rank_rows, ranks * ranks);
    visit(part_end, ranks * static_cast<std::size_t>(config.most_parts() - 1));
  }

  void reserve(const Config& config) {
    for_each_vector(config, [](auto& vector, std::size_t size) { vector.resize(size); });
  }
  void place(const CountTable& counts, const Config& config,
             std::span<const std::int64_t> capacities, const View& view);

  // RANK_MAJOR under DROP: replaces the pairs per local expert by those that the sources kept.
  void cut_pairs(std::span<const std::int64_t> kept, std::int64_t alignment);

 private:
  struct Target;
  void place_zones(const CountTable& counts, const Config& config, const Target& target);
  void place_rows(const CountTable& counts, const Config& config, const Target& target);
  void lay_out_pairs(std::int64_t alignment);
};

}  // namespace xd::ep
