#include "ep/plan/placement.h"

#include <algorithm>
#include <limits>

#include "base/math.h"

namespace xd::ep {
namespace {

std::int64_t pad(std::int64_t count, std::int64_t alignment) {
  return static_cast<std::int64_t>(
      round_up(static_cast<std::uint64_t>(count), static_cast<std::uint64_t>(alignment)));
}

}  // namespace

// One destination, as place() goes through all of them.
struct Placement::Target {
  int rank;  // the destination
  int self;  // the rank that computes
  std::int64_t alignment;
  int parts;
  std::int64_t limit;  // rows from here on are dropped; no limit under ERROR
};

void Placement::place(const CountTable& counts, const Config& config,
                      std::span<const std::int64_t> capacities, const View& view) {
  bad_ids = 0;
  bad_id_rank = -1;
  overflow_rank = -1;
  std::ranges::fill(rank_rows, 0);
  for (int d = config.ranks - 1; d >= 0; --d) {
    const std::int64_t capacity = whole_rows(capacities[at(d)], view.alignment);
    const bool drop = config.overflow == XD_EP_OVERFLOW_DROP;
    const Target target{.rank = d,
                        .self = view.rank,
                        .alignment = view.alignment,
                        .parts = view.parts,
                        .limit = drop ? capacity : std::numeric_limits<std::int64_t>::max()};
    if (config.layout.row_per_expert) {
      place_zones(counts, config, target);
    } else {
      place_rows(counts, config, target);
    }
    if (total[at(d)] > capacity) overflow_rank = d;
    if (d == view.rank) recv_rows = std::min(total[at(d)], capacity);
    if (counts.bad_ids(d) > 0) bad_id_rank = d;
    bad_ids += counts.bad_ids(d);
  }
}

// EXPERT_MAJOR: zones of the destination's experts follow one another, each padded; in a zone the
// sources follow one another.
void Placement::place_zones(const CountTable& counts, const Config& config, const Target& target) {
  std::int64_t zone = 0;
  if (target.rank == target.self) dropped_rows = 0;
  int next_part = 2;
  const int first = config.map().first(target.rank), end = config.map().first(target.rank + 1);
  for (int physical_expert = first; physical_expert < end; ++physical_expert) {
    if (next_part <= target.parts &&
        physical_expert - first == first_expert_of_part(next_part, target.parts, end - first)) {
      part_end[at(target.rank) * at(target.parts - 1) + at(next_part - 2)] =
          std::min(zone, target.limit);
      ++next_part;
    }
    std::int64_t row = zone;
    for (int s = 0; s < config.ranks; ++s) {
      if (s == target.self) first_row[at(physical_expert)] = row;
      const std::int64_t rows = counts.choices(s, physical_expert);
      rank_rows[at(s) * at(config.ranks) + at(target.rank)] += kept_rows(row, rows, target.limit);
      row += rows;
    }
    if (target.rank == target.self) {
      const std::size_t e = at(physical_expert - first);
      count[e] = kept_rows(zone, row - zone, target.limit);
      offset[e] = std::min(zone, target.limit);
      dropped_rows += row - zone - count[e];
    }
    zone += pad(row - zone, target.alignment);
  }
  total[at(target.rank)] = zone;
  if (target.rank == target.self) offset[at(end - first)] = std::min(zone, target.limit);
}

// RANK_MAJOR: the sources follow one another.
void Placement::place_rows(const CountTable& counts, const Config& config, const Target& target) {
  std::int64_t row = 0;
  for (int s = 0; s < config.ranks; ++s) {
    if (s == target.self) first_row[at(target.rank)] = row;
    const std::int64_t rows = counts.rows(s, target.rank);
    rank_rows[at(s) * at(config.ranks) + at(target.rank)] = kept_rows(row, rows, target.limit);
    row += rows;
  }
  total[at(target.rank)] = row;
  if (target.rank != target.self) return;
  dropped_rows = row - kept_rows<std::int64_t>(0, row, target.limit);
  for (int e = 0; e < config.local_experts; ++e) {
    count[at(e)] = 0;
    for (int s = 0; s < config.ranks; ++s) {
      count[at(e)] += counts.choices(s, config.map().first(target.rank) + e);
    }
  }
  lay_out_pairs(target.alignment);
}

void Placement::cut_pairs(std::span<const std::int64_t> kept, std::int64_t alignment) {
  std::ranges::copy(kept, count.begin());
  lay_out_pairs(alignment);
}

void Placement::lay_out_pairs(std::int64_t alignment) {
  offset[0] = 0;
  for (std::size_t e = 0; e < count.size(); ++e) {
    offset[e + 1] = offset[e] + pad(count[e], alignment);
  }
}

}  // namespace xd::ep
