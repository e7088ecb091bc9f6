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

FarSums::FarSums(const Context& context, const PlanView& plan, const Wish& wish)
    : context_(context),
      plan_(plan),
      wish_(wish),
      side_(*context.lockstep.far()),
      topk_(plan.header().topk),
      answer_{.topk = wish.gradients ? topk_ : 0, .row_bytes = wish.sums.row_bytes()},
      requests_(side_, FarKind::request),
      arrivals_(side_.routes()),
      store_(store_for(wish.sums.bytes())),
      sums_(side_.sums(room_for_sums(context, plan, answer_.row_bytes))),
      answers_(plan.header().tokens),
      awaited_(side_.routes().partners().size()) {
  side_.begin(*this);
}

FarPlaces FarSums::hosts_of(std::int64_t token) const {
  FarPlaces hosts;
  hosts.find(context_, plan_.codes(token), topk_,
             [&](int r) { return context_.group.comm().hosts().host_of(r); });
  return hosts;
}

void FarSums::run() {
  const FarRoutes& routes = side_.routes();
  for (std::int64_t t = 0; t < plan_.header().tokens; ++t) ask(t);
  requests_.finish();
  // Meanwhile the requests travel.
  for (std::int64_t t = 0; wish_.sums && t < plan_.header().tokens; ++t)
    if (hosts_of(t).count == 0) add_up(t, 0, nullptr);
  for (const int machine : routes.far_machines()) {
    const int gateway = routes.gateway(machine);
    side_.wait(gateway, [&] { return awaited_[at(gateway)] == 0; });
  }
  rows::flush();
  await_sources(side_, arrivals_);
}

// Waits for slots, and answers others: what this rank asks for is counted before.
void FarSums::ask(std::int64_t token) {
  const FarRoutes& routes = side_.routes();
  const HostMap& hosts = context_.group.comm().hosts();
  const FarPlaces places = hosts_of(token);
  const std::uint32_t first_place = answers_.expect(token, places.count);
  for (int i = 0; i < places.count; ++i) {
    const int host = places.list[at(i)];
    const auto first = std::ranges::find(hosts.host_of(), host) - hosts.host_of().begin();
    const int machine = routes.machine_of(static_cast<int>(first));
    const RequestItem request{.token = static_cast<std::uint32_t>(token),
                              .place = first_place + static_cast<std::uint32_t>(i),
                              .host = host,
                              .unused = 0};
    ++awaited_[at(routes.gateway(machine))];
    std::byte* const item = requests_.add(machine, request_bytes(topk_));
    std::memcpy(item, &request, sizeof(request));
    std::memcpy(item + sizeof(request), plan_.codes(token), at(topk_) * sizeof(std::uint32_t));
  }
}

bool FarSums::take(FarChunk& chunk) {
  if (chunk.header.kind == FarKind::answer) {
    receive(chunk);
    return true;
  }
  if (chunk.header.kind != FarKind::request)
    refuse_chunk(chunk.header, chunk.items().size(), "this operation has no such kind");
  if (!answer(chunk)) return false;
  arrivals_.count(chunk);
  return true;
}

// As many items as there are slots for. False = some are left.
bool FarSums::answer(FarChunk& chunk) {
  const std::size_t size = request_bytes(topk_), items = chunk.header.items;
  require_items(chunk.header, chunk.items(), size);
  const std::size_t room = side_.chunk_room() / answer_.item_bytes();
  while (chunk.done < items) {
    const auto slot = side_.take_slot(chunk.partner(), FarSide::Lane::to_source);
    if (!slot) return false;
    const std::size_t count = std::min(room, items - chunk.done);
    std::byte* to = FarSide::items_of(*slot);
    for (std::size_t i = 0; i < count; ++i, to += answer_.item_bytes())
      answer_item(chunk.items().data() + (chunk.done + i) * size, to);
    chunk.done += static_cast<std::uint32_t>(count);
    side_.send(*slot, FarKind::answer, static_cast<std::uint32_t>(count), 0,
               count * answer_.item_bytes());
  }
  return true;
}

void FarSums::answer_item(const std::byte* request, std::byte* item) const {
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

void FarSums::receive(const FarChunk& chunk) {
  const std::size_t size = answer_.item_bytes();
  const std::uint32_t items = chunk.header.items;
  std::uint32_t& awaited = awaited_[at(chunk.partner())];
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
int FarSums::host_at(const RequestItem& request) const {
  return hosts_of(request.token).list[request.place - answers_.first_place(request.token)];
}

void FarSums::keep_gradients(const RequestItem& request, const float* gradients) {
  const std::uint32_t* const codes = plan_.codes(request.token);
  float* const out = wish_.gradients.as<float>() + at(request.token) * at(topk_);
  for (int k = 0; k < topk_; ++k) {
    RowRef ref{};
    if (!context_.group.codec().decode(codes[k], ref)) continue;
    if (context_.group.comm().hosts().host_of(ref.rank) == request.host) out[k] = gradients[k];
  }
}

void FarSums::add_up(std::int64_t token, std::uint32_t last_place, const std::byte* last) const {
  const FarPlaces hosts = hosts_of(token);
  FarTerms far;
  far.count = hosts.count;
  for (int i = 0; i < hosts.count; ++i) {
    const std::uint32_t place = answers_.first_place(token) + static_cast<std::uint32_t>(i);
    far.hosts[at(i)] = hosts.list[at(i)];
    far.rows[at(i)] = place == last_place ? last : sum_at(place);
  }
  TokenTerms terms;
  terms.collect(context_,
                {.codes = plan_.codes(token),
                 .topk = topk_,
                 .row_bytes = answer_.row_bytes,
                 .weighted = wish_.weighted},
                TokenTerms::kAllHosts, &far);
  terms.sum(wish_.sums, wish_.weighted, wish_.sums.data + at(token) * answer_.row_bytes, store_,
            {});
}

}  // namespace xd::ep::cpu
