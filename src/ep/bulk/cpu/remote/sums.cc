#include "ep/bulk/cpu/remote/sums.h"

#include <algorithm>
#include <cstring>

#include "base/math.h"
#include "ep/bulk/cpu/operations.h"

namespace xd::ep::cpu {
namespace {

// Places for sums that come before a token's last one, if there are sums.
std::size_t room_for_sums(const Context& context, const PlanView& plan, std::size_t row_bytes) {
  const HostMap& hosts = context.group.comm().hosts();
  const int most = std::min(plan.header().topk, hosts.num_hosts() - 1);
  return most > 1 ? at(plan.header().tokens) * at(most) * row_bytes : 0;
}

}  // namespace

RemoteSums::RemoteSums(const Context& context, const PlanView& plan, const Wish& wish)
    : context_(context),
      plan_(plan),
      wish_(wish),
      side_(*context.lockstep.remote()),
      topk_(plan.header().topk),
      answer_{.topk = wish.gradients ? topk_ : 0, .row_bytes = wish.sums.row_bytes()},
      requests_(side_, RemoteKind::request),
      arrivals_(side_.routes()),
      store_(store_for(wish.sums.bytes())),
      sums_(side_.sums(room_for_sums(context, plan, answer_.row_bytes))),
      answers_(plan.header().tokens),
      awaited_(side_.routes().neighbours().size()) {
  side_.begin(*this);
}

RemotePlaces RemoteSums::hosts_of(std::int64_t token) const {
  RemotePlaces hosts;
  hosts.find(context_, plan_.codes(token), topk_,
             [&](int r) { return context_.group.comm().hosts().host_of(r); });
  return hosts;
}

void RemoteSums::run() {
  const RemoteRoutes& routes = side_.routes();
  for (std::int64_t t = 0; t < plan_.header().tokens; ++t) ask(t);
  requests_.finish();
  // Meanwhile the requests travel.
  for (std::int64_t t = 0; wish_.sums && t < plan_.header().tokens; ++t)
    if (hosts_of(t).count == 0) add_up(t, 0, nullptr);
  for (const int machine : routes.remote_machines()) {
    const int relay = routes.relay(machine);
    side_.wait(relay, [&] { return awaited_[at(relay)] == 0; });
  }
  rows::flush();
  await_sources(side_, arrivals_);
}

// Waits for frames, and answers others: what this rank asks for is counted before.
void RemoteSums::ask(std::int64_t token) {
  const RemoteRoutes& routes = side_.routes();
  const HostMap& hosts = context_.group.comm().hosts();
  const RemotePlaces places = hosts_of(token);
  const std::uint32_t first_place = answers_.expect(token, places.count);
  for (int i = 0; i < places.count; ++i) {
    const int host = places.list[at(i)];
    const auto first = std::ranges::find(hosts.host_of(), host) - hosts.host_of().begin();
    const int machine = routes.machine_of(static_cast<int>(first));
    const RequestItem request{.token = static_cast<std::uint32_t>(token),
                              .place = first_place + static_cast<std::uint32_t>(i),
                              .host = host,
                              .unused = 0};
    ++awaited_[at(routes.relay(machine))];
    std::byte* const item = requests_.add(machine, request_bytes(topk_));
    std::memcpy(item, &request, sizeof(request));
    std::memcpy(item + sizeof(request), plan_.codes(token), at(topk_) * sizeof(std::uint32_t));
  }
}

bool RemoteSums::take(RemoteChunk& chunk) {
  if (chunk.header.kind == RemoteKind::answer) {
    receive(chunk);
    return true;
  }
  if (chunk.header.kind != RemoteKind::request)
    refuse_chunk(chunk.header, chunk.items().size(), "this operation has no such kind");
  if (!answer(chunk)) return false;
  arrivals_.count(chunk);
  return true;
}

// As many items as there are frames for. False = some are left.
bool RemoteSums::answer(RemoteChunk& chunk) {
  const std::size_t size = request_bytes(topk_), items = chunk.header.items;
  require_items(chunk.header, chunk.items(), size);
  const std::size_t region = side_.chunk_room() / answer_.item_bytes();
  while (chunk.done < items) {
    const auto frame = side_.take_frame(chunk.neighbour(), RemoteSide::Direction::to_source);
    if (!frame) return false;
    const std::size_t count = std::min(region, items - chunk.done);
    std::byte* to = RemoteSide::items_of(*frame);
    for (std::size_t i = 0; i < count; ++i, to += answer_.item_bytes())
      answer_item(chunk.items().data() + (chunk.done + i) * size, to);
    chunk.done += static_cast<std::uint32_t>(count);
    side_.send(*frame, RemoteKind::answer, static_cast<std::uint32_t>(count), 0,
               count * answer_.item_bytes());
  }
  return true;
}

void RemoteSums::answer_item(const std::byte* request, std::byte* item) const {
  RequestItem asked;
  std::memcpy(&asked, request, sizeof(asked));
  std::memcpy(item, &asked, sizeof(asked));
  const auto* codes = reinterpret_cast<const std::uint32_t*>(request + sizeof(asked));
  if (wish_.gradients) {
    auto* gradients = reinterpret_cast<float*>(item + sizeof(asked));
    for (int k = 0; k < topk_; ++k) gradients[k] = weight_gradient(context_, codes, topk_, k);
  }
  if (!wish_.sums) return;
  TokenTerms terms;
  terms.collect(
      context_,
      {.codes = codes, .topk = topk_, .row_bytes = answer_.row_bytes, .weighted = wish_.weighted},
      asked.host);
  terms.sum(wish_.sums, wish_.weighted, item + answer_.row_at(), rows::Store::cached, {});
}

void RemoteSums::receive(const RemoteChunk& chunk) {
  const std::size_t size = answer_.item_bytes();
  const std::uint32_t items = chunk.header.items;
  std::uint32_t& awaited = awaited_[at(chunk.neighbour())];
  require_items(chunk.header, chunk.items(), size);
  if (items > awaited) refuse_chunk(chunk.header, chunk.items().size(), "nobody asked for it");
  for (std::uint32_t i = 0; i < items; ++i) {
    const std::byte* const item = chunk.items().data() + i * size;
    RequestItem request;
    std::memcpy(&request, item, sizeof(request));
    const bool asked = answers_.take(request);
    if (!asked || host_at(request) != request.host)
      refuse_chunk(chunk.header, chunk.items().size(), "an answer to no request");
    if (wish_.gradients) {
      keep_gradients(request, reinterpret_cast<const float*>(item + sizeof(request)));
    }
    if (!wish_.sums) continue;
    if (answers_.has_all(request.token)) {
      add_up(request.token, request.place, item + answer_.row_at());
    } else {
      std::memcpy(sum_at(request.place), item + answer_.row_at(), answer_.row_bytes);
    }
  }
  awaited -= items;
}

// The host that an answer in this place is of.
int RemoteSums::host_at(const RequestItem& request) const {
  return hosts_of(request.token).list[request.place - answers_.first_place(request.token)];
}

void RemoteSums::keep_gradients(const RequestItem& request, const float* gradients) {
  const std::uint32_t* const codes = plan_.codes(request.token);
  float* const out = wish_.gradients.as<float>() + at(request.token) * at(topk_);
  for (int k = 0; k < topk_; ++k) {
    RowRef ref{};
    if (!context_.group.codec().decode(codes[k], ref)) continue;
    if (context_.group.comm().hosts().host_of(ref.rank) == request.host) out[k] = gradients[k];
  }
}

void RemoteSums::add_up(std::int64_t token, std::uint32_t last_place, const std::byte* last) const {
  const RemotePlaces hosts = hosts_of(token);
  RemoteTerms remote;
  remote.count = hosts.count;
  for (int i = 0; i < hosts.count; ++i) {
    const std::uint32_t place = answers_.first_place(token) + static_cast<std::uint32_t>(i);
    remote.hosts[at(i)] = hosts.list[at(i)];
    remote.rows[at(i)] = place == last_place ? last : sum_at(place);
  }
  TokenTerms terms;
  terms.collect(context_,
                {.codes = plan_.codes(token),
                 .topk = topk_,
                 .row_bytes = answer_.row_bytes,
                 .weighted = wish_.weighted},
                TokenTerms::kAllHosts, &remote);
  terms.sum(wish_.sums, wish_.weighted, wish_.sums.data + at(token) * answer_.row_bytes, store_,
            {});
}

}  // namespace xd::ep::cpu
