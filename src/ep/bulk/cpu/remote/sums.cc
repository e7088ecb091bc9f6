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

// The longest answer.
AnswerLayout longest_answer(const PlanView& plan, const RemoteSums::Wish& wish) {
  const std::uint64_t payload = wish.sums.row_bytes();
  return {.topk = wish.gradients ? plan.header().topk : 0,
          .row_bytes = std::max(payload, wish.wire.row_bytes(at(wish.sums.cols), payload))};
}

}  // namespace

RemoteSums::RemoteSums(const Context& context, const PlanView& plan, const Wish& wish)
    : context_(context),
      plan_(plan),
      wish_(wish),
      side_(*context.lockstep.remote()),
      topk_(plan.header().topk),
      longest_(longest_answer(plan, wish)),
      store_(store_for(wish.sums.bytes())),
      sums_(side_.sums(room_for_sums(context, plan, longest_.row_bytes))),
      forms_(side_.items().answers.places()),
      answers_(side_.items().answers) {
  side_.begin(*this, RemoteKind::request, side_.items().chunks);
}

std::size_t RemoteSums::requests_in_chunk(const RemoteSide& side, const PlanView& plan,
                                          const Wish& wish) {
  return side.chunk_room() /
         std::max(request_bytes(plan.header().topk), longest_answer(plan, wish).item_bytes());
}

void RemoteSums::run() {
  side_.poll();
  // Meanwhile the requests travel.
  std::size_t near = 0;  // bytes since other machines were served
  for (std::int64_t t = 0; wish_.sums && t < plan_.header().tokens; ++t) {
    if (hosts_of(t).count > 0) continue;
    add_up(t, 0, nullptr);
    near += longest_.row_bytes;
    if (near < side_.chunk_room()) continue;
    side_.poll();
    near = 0;
  }
  side_.finish();
  rows::flush();
}

RemoteHands::Filled RemoteSums::work(const DeskUnit& unit, const RemoteChunk* come,
                                     std::byte* room) {
  if (unit.work == DeskUnit::fill) return ask(unit.partner, unit.chunk, room);
  if (unit.work == DeskUnit::answer) return answer(*come, room);
  receive(*come, side_.items().of(unit.partner, unit.chunk).size());
  return {};
}

RemoteHands::Filled RemoteSums::ask(int relay, std::uint32_t chunk, std::byte* room) const {
  Filled filled;
  for (const RequestItem& request : side_.items().of(relay, chunk)) {
    std::byte* const item = room + filled.bytes;
    std::memcpy(item, &request, sizeof(request));
    std::memcpy(item + sizeof(request), plan_.codes(request.token),
                at(topk_) * sizeof(std::uint32_t));
    filled.bytes += request_bytes(topk_);
    ++filled.items;
  }
  return filled;
}

RemoteHands::Filled RemoteSums::answer(const RemoteChunk& requests, std::byte* room) const {
  const std::size_t size = request_bytes(topk_);
  const auto items = requests.items();
  require_items(requests.header, items, size);
  if (requests.header.items * longest_.item_bytes() > side_.chunk_room())
    refuse_chunk(requests.header, items.size(), "its answers are longer than a chunk");
  Filled filled{.items = requests.header.items, .bytes = 0};
  for (std::size_t i = 0; i < items.size(); i += size)
    filled.bytes += answer_item(items.data() + i, room + filled.bytes);
  return filled;
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
void RemoteSums::receive(const RemoteChunk& chunk, std::size_t asked) {
  const auto refuse = [&](const char* why) {
    refuse_chunk(chunk.header, chunk.items().size(), why);
  };
  if (chunk.header.items != asked) refuse("it answers another number of requests");
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
