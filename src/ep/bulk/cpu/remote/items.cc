#include "ep/bulk/cpu/remote/items.h"

#include "ep/bulk/cpu/remote/relay.h"
#include "ep/bulk/cpu/transfer.h"

namespace xd::ep::cpu {

void RemotePlaces::add(int place, int rank) {
  int i = count;
  while (i > 0 && list[at(i - 1)] > place) --i;
  if (i > 0 && list[at(i - 1)] == place) return;
  std::copy_backward(list.begin() + i, list.begin() + count, list.begin() + count + 1);
  std::copy_backward(ranks.begin() + i, ranks.begin() + count, ranks.begin() + count + 1);
  list[at(i)] = place;
  ranks[at(i)] = rank;
  ++count;
}

RemotePlaces remote_places(const Context& context, std::span<const std::uint32_t> codes,
                           RemotePlace kind) {
  const HostMap& hosts = context.group.comm().hosts();
  const RemoteRoutes& routes = context.lockstep.remote()->routes();
  RemotePlaces places;
  for (const std::uint32_t code : codes) {
    RowRef ref{};
    if (!context.group.codec().decode(code, ref) || hosts.is_near(ref.rank)) continue;
    places.add(kind == RemotePlace::host ? hosts.host_of(ref.rank) : routes.machine_of(ref.rank),
               ref.rank);
  }
  return places;
}

void RemoteItems::list(const Context& context, const PlanView& plan, RemotePlace kind,
                       std::size_t most_in_chunk) {
  RemoteSide& side = *context.lockstep.remote();
  const std::int64_t tokens = plan.header().tokens;
  in_chunk = most_in_chunk;
  for (auto& items : of_relay) items.clear();
  if (kind == RemotePlace::host) answers = RemoteAnswers(tokens);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const RemotePlaces places =
        remote_places(context, {plan.codes(t), at(plan.header().topk)}, kind);
    const std::uint32_t first =
        kind == RemotePlace::host ? answers.expect(t, places.count) : std::uint32_t{0};
    for (int i = 0; i < places.count; ++i) {
      of_relay[at(side.relay_for(places.ranks[at(i)]))].push_back(
          {.token = static_cast<std::uint32_t>(t),
           .place = first + static_cast<std::uint32_t>(i),
           .host = places.list[at(i)],
           .form = 0});
    }
  }
  std::ranges::transform(of_relay, chunks.begin(), [&](const auto& items) {
    return static_cast<std::uint32_t>((items.size() + in_chunk - 1) / in_chunk);
  });
  side.announce(chunks);
}

}  // namespace xd::ep::cpu
