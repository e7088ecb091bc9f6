#include "ep/bulk/cpu/transfer.h"

#include <algorithm>
#include <tuple>

#include "base/error.h"
#include "base/math.h"
#include "ep/bulk/family.h"
#include "ep/plan/cpu/strided.h"
#include "ep/plan/plan_check.h"

namespace xd::ep::cpu {
void Scratch::reserve(const Config& config) {
  for_each_vector(config, [](auto& vector, std::size_t size) { vector.resize(size); });
}

std::size_t Scratch::bytes(const Config& config) {
  std::size_t bytes = 0;
  Scratch{}.for_each_vector(
      config, [&](auto& vector, std::size_t size) { bytes += size * sizeof(vector[0]); });
  return bytes;
}

ReceiveTensor::ReceiveTensor(const Context& context, const PlanView& plan, const Tensor& tensor,
                             const Staging& staging)
    : tensor_(tensor) {
  if (!tensor) return;
  require_none(tensor_fault(plan.header(), {Check::recv_rows, tensor.name, tensor.rows}));
  const Reach reach = context.group.reach(tensor, staging);
  place_ = reach.address;
  if (reach.staged) {
    staged_ = context.lockstep.area_of(context.group.self(), staging.offset).address();
  }
}

void ReceiveTensor::copy_in(const PlanView& plan, const Config& config, const Scope& scope) const {
  if (staged_ == nullptr || plan.refused()) return;
  const std::uint64_t bytes = tensor_.row_bytes();
  for_each_run(plan, config, scope, [&](std::int64_t first, std::int64_t count) {
    const std::uint64_t begin = at(first) * bytes, size = at(count) * bytes;
    rows::copy(staged_ + begin, tensor_.data + begin, size, store_for(size));
  });
  rows::flush();
}

void ReceiveTensor::copy_out(const PlanView& plan, const Config& config, const Scope& scope) const {
  if (staged_ == nullptr) return;
  const std::uint64_t bytes = tensor_.row_bytes();
  for_each_run(plan, config, scope, [&](std::int64_t first, std::int64_t count) {
    const std::uint64_t begin = at(first) * bytes, size = at(count) * bytes;
    if (!tensor_.packed()) {
      for (std::int64_t i = 0; i < count; ++i) {
        scatter_row(tensor_, first + i, staged_ + begin + at(i) * bytes);
      }
      return;
    }
    rows::copy(tensor_.data + begin, staged_ + begin, size, store_for(size));
  });
  rows::flush();
}

void ListedRows::take(const PlanView& plan, std::size_t& position) {
  const std::span<const std::uint32_t> list_of_all = plan.list();
  count = 0;
  while (position < list_of_all.size()) {
    const bool first = (list_of_all[position] & PlanHeader::kFirstOfToken) != 0;
    if (first && count > 0) return;
    const std::uint32_t row = list_of_all[position++] & ~PlanHeader::kFirstOfToken;
    if (row < plan.header().recv_rows && count < list.size()) list[count++] = row;
  }
}

PartSpan ListedRows::parts(const PlanView& plan) const {
  PartSpan span;
  for (const std::uint32_t row : rows()) span.add(plan.part_of(plan.header().rank, row));
  return span;
}

void ReceiveTensor::fan_out(const PlanView& plan, const Config& config, const Scope& scope) const {
  if (!config.keeps.lists) return copy_out(plan, config, scope);
  if (staged_ == nullptr) return;
  const std::uint64_t bytes = tensor_.row_bytes();
  const rows::Store store = store_for(at(plan.header().recv_rows) * bytes);
  std::array<void*, kMaxTopk> places;
  for_each_token(plan, scope, &PartSpan::first, [&](std::span<const std::uint32_t> rows, auto) {
    if (!tensor_.packed()) {
      for (const std::uint32_t row : rows) scatter_row(tensor_, row, crossed(rows[0]));
      return;
    }
    for (std::size_t i = 0; i < rows.size(); ++i) places[i] = tensor_.data + rows[i] * bytes;
    rows::copy_to_many(places.data(), static_cast<int>(rows.size()), crossed(rows[0]), bytes,
                       store);
  });
  rows::flush();
}

void ReceiveTensor::add_up(const PlanView& plan, const Config& config, const Scope& scope,
                           const float* weights, const WireFormat& wire) const {
  if (!config.keeps.lists || !adds_up(wire)) return copy_in(plan, config, scope);
  if (staged_ == nullptr || plan.refused()) return;
  const std::uint64_t bytes = tensor_.row_bytes();
  const rows::Store store = store_for(at(plan.header().recv_rows) * bytes);
  std::array<const void*, kMaxTopk> terms;
  std::array<float, kMaxTopk> factors;
  std::array<const void*, kMaxTopk> coming;
  for_each_token(plan, scope, &PartSpan::last,
                 [&](std::span<const std::uint32_t> rows, std::span<const std::uint32_t> next) {
                   const auto count = static_cast<int>(rows.size());
                   for (std::size_t i = 0; i < rows.size(); ++i) {
                     terms[i] = tensor_.data + rows[i] * bytes;
                     if (weights != nullptr) factors[i] = weights[rows[i]];
                   }
                   for (std::size_t i = 0; i < next.size(); ++i)
                     coming[i] = tensor_.data + next[i] * bytes;
                   const rows::Terms sum{.rows = terms.data(),
                                         .weights = weights != nullptr ? factors.data() : nullptr,
                                         .partial_ends = &count,
                                         .num_partials = 1,
                                         .next_rows = {coming.data(), next.size()}};
                   const rows::Type type = rows::type_of(tensor_.type);
                   std::byte* const to = staged_ + rows[0] * bytes;
                   if (wire) {
                     constexpr auto kForm = rows::PartialForm::rows;
                     rows::encode_wire(type, wire, to, {sum, &kForm}, at(tensor_.cols));
                   } else {
                     rows::sum(type, to, sum, at(tensor_.cols), store);
                   }
                 });
  rows::flush();
}

void ReceiveTensor::zero_gaps(const PlanView& plan, const Config& config,
                              const Scope& scope) const {
  if (!tensor_) return;
  const std::uint64_t bytes = tensor_.row_bytes();
  for_each_gap(plan, config, scope, tensor_.rows, [&](std::int64_t first, std::int64_t count) {
    if (!tensor_.packed()) {
      for (std::int64_t i = 0; i < count; ++i) scatter_row(tensor_, first + i, nullptr);
      return;
    }
    rows::zero(tensor_.data + at(first) * bytes, at(count) * bytes, rows::Store::cached);
  });
}

PlanView open_plan(const Context& context, PlanBytes bytes) {
  const PlanView plan = PlanView::open(bytes.data, bytes.bytes);
  plan.require_binding(context.group.plan_binding());
  return plan;
}

CallPart call_part(const PlanView& plan, const Portion& portion) {
  require_none(part_fault(plan.header(), portion.part));
  return call_part(plan.header(), portion.part);
}

void require_tokens(const Tensor& tensor, const PlanView& plan) {
  if (tensor) require_none(tensor_fault(plan.header(), {Check::tokens, tensor.name, tensor.rows}));
}

void require_topk(const Tensor& tensor, const PlanView& plan) {
  if (tensor) require_none(tensor_fault(plan.header(), {Check::topk, tensor.name, tensor.cols}));
}

OperationError overflow_of(const PlanView& plan) {
  const PlanHeader& h = plan.header();
  if (!plan.refused()) return {};
  return overflow({.rank = h.overflow_rank,
                   .needed_rows = h.overflow_needed,
                   .capacity_rows = h.overflow_capacity});
}

void resolve_tensors(const Context& context, const RowSizes& sizes) {
  for (const NearRank r : context.group.near()) {
    if (!context.lockstep.takes_part(r)) {
      context.scratch.ranks[at(r)] = {};
      continue;
    }
    const Record& record = context.lockstep.record_of(r);
    const bool wide = (record.flags & kWideIndices) != 0;
    const bool lists = context.group.config_of(r).keeps.lists;
    const auto staged = [&](turn::PeerAddress place) { return lists && place.is_shared(); };
    const auto find = [&](turn::PeerAddress place, std::uint64_t bytes, std::uint64_t alignment) {
      return bytes > 0 ? context.lockstep.tensor_of(r, place, record.rows * bytes, alignment)
                       : NearMemory();
    };
    constexpr std::uint64_t kNarrow = sizeof(std::int32_t), kWide = sizeof(std::int64_t);
    context.scratch.ranks[at(r)] = {
        .rows = find(record.rows_in, sizes.row, kRowAlignment),
        .scales = find(record.scales_in, sizes.scales, sizes.scale_alignment),
        .weights = find(record.weights_in, sizes.weights, sizeof(float)),
        .extra =
            find(record.extra_in, wide ? 2 * sizes.extra : sizes.extra, wide ? kWide : kNarrow),
        .one_row_per_token = sizes.added_up && staged(record.rows_in),
        .one_scale_per_token = staged(record.scales_in),
        .num_rows = record.rows,
        .wide_indices = wide};
  }
}

void TokenRows::gather(const Context& context, const std::uint32_t* codes, int topk) {
  count = 0;
  const bool one_per_rank = !context.group.config().layout.row_per_expert;
  for (int k = 0; k < topk; ++k) {
    Row row{.ref = {}, .k = k};
    if (!context.group.codec().decode(codes[k], row.ref)) continue;
    if (row.ref.row >= context.scratch.ranks[at(row.ref.rank)].num_rows) continue;
    int place = count;
    while (place > 0 && list[at(place - 1)].ref.rank > row.ref.rank) --place;
    if (one_per_rank && place > 0 && list[at(place - 1)].ref.rank == row.ref.rank) continue;
    for (int i = count; i > place; --i) list[at(i)] = list[at(i - 1)];
    list[at(place)] = row;
    ++count;
  }
}

void TokenRows::find_parts(const PlanView& plan) {
  for (int i = 0; i < count;) {
    const int rank = list[at(i)].ref.rank, first = i;
    PartSpan span;
    for (; i < count && list[at(i)].ref.rank == rank; ++i) {
      list[at(i)].part = plan.part_of(rank, list[at(i)].ref.row);
      span.add(list[at(i)].part);
    }
    list[at(first)].first_part = span.first;
  }
}

void TokenRows::order_by_host(const HostMap& hosts) {
  std::ranges::sort(std::span(list).first(at(count)), {}, [&](const Row& row) {
    return std::tuple(hosts.host_of(row.ref.rank), row.ref.rank, row.k);
  });
}

}  // namespace xd::ep::cpu
