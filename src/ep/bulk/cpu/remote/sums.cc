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
      longest_{
          .topk = wish.gradients ? topk_ : 0,
          .row_bytes = std::max(wish.sums.row_bytes(),
                                wish.wire.row_bytes(at(wish.sums.cols), wish.sums.row_bytes()))},
      requests_(side_, RemoteKind::request),
      arrivals_(side_.routes()),
      store_(store_for(wish.sums.bytes())),
      sums_(side_.sums(room_for_sums(context, plan, longest_.row_bytes))),
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
  forms_.resize(first_place + at(places.count));
  for (int i = 0; i < places.count; ++i) {
    const int host = places.list[at(i)];
    const auto first = std::ranges::find(hosts.host_of(), host) - hosts.host_of().begin();
    const int machine = routes.machine_of(static_cast<int>(first));
    const RequestItem request{.token = static_cast<std::uint32_t>(token),
                              .place = first_place + static_cast<std::uint32_t>(i),
                              .host = host,
                              .form = 0};
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
  while (chunk.done < items) {
    const auto frame = side_.take_frame(chunk.neighbour(), RemoteSide::Direction::to_source);
    if (!frame) return false;
    std::byte* const begin = RemoteSide::items_of(*frame);
    std::size_t used = 0;
    std::uint32_t count = 0;
    for (; chunk.done < items && used + longest_.item_bytes() <= side_.chunk_room(); ++chunk.done) {
      used += answer_item(chunk.items().data() + chunk.done * size, begin + used);
      ++count;
    }
    side_.send(*frame, RemoteKind::answer, count, 0, used);
  }
  return true;
}

AnswerLayout RemoteSums::layout_of(AnswerForm form) const {
  const std::uint64_t payload = wish_.sums.row_bytes();
  return {.topk = longest_.topk,
          .row_bytes = form == AnswerForm::payload
                           ? payload
                           : wish_.wire.row_bytes(at(wish_.sums.cols), payload)};
}

// Returns the bytes of the answer. A host's sum is rounded to the payload type, and has its form.
// Where one rank alone holds rows there, its sum comes in the wire's form: the source decodes and
// rounds it to the same bits, and codes are half as long.
std::size_t RemoteSums::answer_item(const std::byte* request, std::byte* item) const {
  RequestItem asked;
  std::memcpy(&asked, request, sizeof(asked));
  const auto* codes = reinterpret_cast<const std::uint32_t*>(request + sizeof(asked));
  TokenTerms terms;
  if (wish_.sums) {
    terms.collect(context_,
                  {.codes = codes,
                   .topk = topk_,
                   .row_bytes = wish_.sums.row_bytes(),
                   .weighted = wish_.weighted,
                   .coded = static_cast<bool>(wish_.wire)},
                  asked.host);
  }
  const bool as_wire = wish_.wire && (wish_.wire.is_float() || terms.num_partials == 1);
  const AnswerForm form = as_wire ? AnswerForm::wire : AnswerForm::payload;
  asked.form = static_cast<std::uint32_t>(form);
  std::memcpy(item, &asked, sizeof(asked));
  if (wish_.gradients) {
    auto* gradients = reinterpret_cast<float*>(item + sizeof(asked));
    for (int k = 0; k < topk_; ++k) gradients[k] = weight_gradient(context_, codes, topk_, k);
  }
  const AnswerLayout layout = layout_of(form);
  if (wish_.sums && as_wire) {
    terms.encode(wish_.shape(), item + layout.row_at());
  } else if (wish_.sums) {
    terms.sum(wish_.shape(), item + layout.row_at(), rows::Store::cached, {});
  }
  return layout.item_bytes();
}

// Answers have different lengths where the wire has another form than the payload.
void RemoteSums::receive(const RemoteChunk& chunk) {
  std::uint32_t& awaited = awaited_[at(chunk.neighbour())];
  const auto refuse = [&](const char* why) {
    refuse_chunk(chunk.header, chunk.items().size(), why);
  };
  if (chunk.header.items > awaited) refuse("nobody asked for it");
  std::span<const std::byte> rest = chunk.items();
  for (std::uint32_t i = 0; i < chunk.header.items; ++i) {
    RequestItem request{};
    if (rest.size() >= sizeof(request)) std::memcpy(&request, rest.data(), sizeof(request));
    const auto form = static_cast<AnswerForm>(request.form);
    const bool known = form == AnswerForm::payload || (form == AnswerForm::wire && wish_.wire);
    const std::size_t size = known ? layout_of(form).item_bytes() : 0;
    if (!known || rest.size() < size) refuse("its items have other sizes here");
    if (!answers_.take(request) || host_at(request) != request.host)
      refuse("an answer to no request");
    receive_item(request, rest.data());
    rest = rest.subspan(size);
  }
  if (!rest.empty()) refuse("its items have other sizes here");
  awaited -= chunk.header.items;
}

void RemoteSums::receive_item(const RequestItem& request, const std::byte* item) {
  if (wish_.gradients) {
    keep_gradients(request, reinterpret_cast<const float*>(item + sizeof(request)));
  }
  if (!wish_.sums) return;
  const auto form = static_cast<AnswerForm>(request.form);
  const AnswerLayout layout = layout_of(form);
  forms_[request.place] = form;
  if (answers_.has_all(request.token)) {
    add_up(request.token, request.place, item + layout.row_at());
  } else {
    std::memcpy(sum_at(request.place), item + layout.row_at(), layout.row_bytes);
  }
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
    remote.forms[at(i)] =
        forms_[place] == AnswerForm::wire ? rows::PartialForm::wire : rows::PartialForm::payload;
  }
  TokenTerms terms;
  terms.collect(context_,
                {.codes = plan_.codes(token),
                 .topk = topk_,
                 .row_bytes = wish_.sums.row_bytes(),
                 .weighted = wish_.weighted,
                 .coded = static_cast<bool>(wish_.wire)},
                TokenTerms::kAllHosts, &remote);
  terms.sum(wish_.shape(), wish_.sums.data + at(token) * wish_.sums.row_bytes(), store_, {});
}

}  // namespace xd::ep::cpu
