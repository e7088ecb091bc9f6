#include "ep/bulk/cpu/token_terms.h"

#include <limits>

#include "base/math.h"

namespace xd::ep::cpu {

void TokenTerms::collect(const Context& context, const Source& source, int only_host,
                         const RemoteTerms* remote) {
  TokenRows places;
  places.gather(context, source.codes, source.topk);
  const bool by_host = context.group.sums_by_host();
  const HostMap& hosts = context.group.comm().hosts();
  if (by_host) places.order_by_host(hosts);
  num_rows = 0;
  num_partials = 0;
  num_hosts = 0;
  int next_remote = 0, last_host = -1;
  for (int i = 0; i < places.count; ++i) {
    const RowRef& ref = places.list[at(i)].ref;
    const int host = by_host ? hosts.host_of(ref.rank) : 0;
    if (only_host != kAllHosts && host != only_host) continue;
    if (remote != nullptr) add_remote(*remote, next_remote, host);
    const RankTensors& from = context.scratch.ranks[at(ref.rank)];
    const bool first = places.first_of_rank(i);
    // The owner has added up the token's rows, weighted, in the place of the first.
    if (from.one_row_per_token && !first) continue;
    rows[at(num_rows)] = from.rows.address(at(ref.row) * source.row_bytes);
    if (source.weighted) {
      weights[at(num_rows)] = from.one_row_per_token ? 1.0f : from.weights.array<float>()[ref.row];
    }
    // A rank's rows follow one another and form one partial sum.
    if (!first) --num_partials;
    forms[at(num_partials)] =
        from.one_row_per_token && source.coded ? rows::PartialForm::wire : rows::PartialForm::rows;
    ++num_rows;
    ends[at(num_partials++)] = num_rows;
    if (!by_host) continue;
    if (host == last_host) --num_hosts;
    last_host = host;
    host_ends[at(num_hosts++)] = num_partials;
  }
  if (remote != nullptr) add_remote(*remote, next_remote, std::numeric_limits<int>::max());
}

// Sums of hosts in front of another one. Each is a host's only partial sum, and is not rounded
// again by being added up by itself.
void TokenTerms::add_remote(const RemoteTerms& remote, int& next, int before_host) {
  for (; next < remote.count && remote.hosts[at(next)] < before_host; ++next) {
    rows[at(num_rows)] = remote.rows[at(next)];
    weights[at(num_rows)] = 1.0f;
    forms[at(num_partials)] = remote.forms[at(next)];
    ends[at(num_partials++)] = ++num_rows;
    host_ends[at(num_hosts++)] = num_partials;
  }
}

rows::Terms TokenTerms::terms(bool weighted, std::span<const void* const> next) const {
  return {.rows = rows.data(),
          .weights = weighted ? weights.data() : nullptr,
          .partial_ends = ends.data(),
          .num_partials = num_partials,
          .host_ends = num_hosts > 0 ? host_ends.data() : nullptr,
          .num_hosts = num_hosts,
          .next_rows = next};
}

void TokenTerms::sum(const Shape& shape, std::byte* to, rows::Store store,
                     std::span<const void* const> next) const {
  const Tensor& out = shape.rows;
  if (num_partials == 0) return rows::zero(to, out.row_bytes(), store);
  const rows::Type type = rows::type_of(out.type);
  const rows::Terms terms = this->terms(shape.weighted, next);
  if (shape.wire) return rows::sum_wire(type, shape.wire, to, {terms, forms.data()}, at(out.cols));
  rows::sum(type, to, terms, at(out.cols), store);
}

void TokenTerms::encode(const Shape& shape, std::byte* to) const {
  const Tensor& out = shape.rows;
  if (num_partials == 0) {
    return rows::zero(to, shape.wire.row_bytes(at(out.cols), out.row_bytes()), rows::Store::cached);
  }
  rows::encode_wire(rows::type_of(out.type), shape.wire, to,
                    {terms(shape.weighted, {}), forms.data()}, at(out.cols));
}

}  // namespace xd::ep::cpu
