#include "ep/slots/cpu/combine.h"

#include <algorithm>
#include <cstring>

#include "ep/plan/plan_check.h"
#include "ep/slots/cpu/remote/pipelines.h"
#include "ep/slots/family.h"
#include "ep/slots/placement.h"

namespace xd::ep::cpu {
namespace {

using Part = LlRemotePipeline::Part;

// Where a rank's sums are: behind its weights, if the call has some.
Part sums_part(bool has_weights) { return has_weights ? Part::sums : Part::entry; }

}  // namespace

// The terms of one sum: rows here and partial sums. A damaged plan may name more than a good one.
struct LlCombine::Terms {
  static constexpr std::size_t kMost = kMaxTopk + XD_LL_MAX_RANKS;
  std::array<const void*, kMost> rows;
  std::array<float, kMost> weights;
  std::array<int, XD_LL_MAX_RANKS> ends, host_ends;
  std::array<rows::PartialForm, XD_LL_MAX_RANKS> forms;  // of partials
  int num_rows = 0;
  int num_partials = 0;
  int num_hosts = 0;  // 0: the sum is not made by host
  int last_host = -1;

  void add(const void* row, float weight) {
    rows[at(num_rows)] = row;
    weights[at(num_rows++)] = weight;
  }
  void clear() {
    num_rows = num_partials = num_hosts = 0;
    last_host = -1;
  }
  void end_partial(rows::PartialForm form) {
    forms[at(num_partials)] = form;
    ends[at(num_partials++)] = num_rows;
  }
  // The partial that has ended last is one of `host`. Hosts come by number.
  void end_host(int host) {
    if (host != last_host) ++num_hosts;
    last_host = host;
    host_ends[at(num_hosts - 1)] = num_partials;
  }
  // Under a wire the sum of rows that go to another rank is put into its form.
  enum class Result { row, partial };
  struct Shape {
    DType type;
    std::uint64_t cols;
    WireFormat wire;
    bool weighted;
  };
  // Meanwhile the rows of the sum after it are fetched.
  void sum(const Shape& shape, Result result, std::byte* out, const Terms& next) const {
    const rows::Terms terms{.rows = rows.data(),
                            .weights = shape.weighted ? weights.data() : nullptr,
                            .partial_ends = ends.data(),
                            .num_partials = num_partials,
                            .host_ends = num_hosts > 0 ? host_ends.data() : nullptr,
                            .num_hosts = num_hosts,
                            .next_rows = {next.rows.data(), at(next.num_rows)}};
    const rows::Type type = rows::type_of(shape.type);
    if (!shape.wire) {
      const rows::Store store = result == Result::row ? rows::Store::cached : kForPeers;
      return rows::sum(type, out, terms, shape.cols, store);
    }
    const auto finish = result == Result::row ? rows::sum_wire : rows::encode_wire;
    finish(type, shape.wire, out, {terms, forms.data()}, shape.cols);
  }
};

// ---- Arguments ---------------------------------------------------------------------------------

LlPlanView LlCombine::open(const PlanBytes& bytes) const {
  const LlPlanView plan = LlPlanView::open(bytes.data, bytes.bytes);
  plan.require_binding(context_.group.plan_terms());
  return plan;
}

void LlCombine::check_send(const Args& args) {
  send_ = read_ll_send(args, context_.group.call_context());
  plan_ = open(send_.plan);
  if (!config().has_slots()) {
    const Check rows{Check::recv_rows, send_.expert_out.name, send_.expert_out.slots};
    require_none(tensor_fault(plan_.header(), rows));
  }
  if (!send_.topk_weights) return;
  const Tensor& weights = send_.topk_weights;
  require_none(tensor_fault(plan_.header(), {Check::tokens, weights.name, weights.rows}));
  require_none(tensor_fault(plan_.header(), {Check::topk, weights.name, weights.cols}));
}

void LlCombine::check_receive(const Args& args, const LlRecord& sent) {
  receive_ = read_ll_receive(args, context_.group.call_context());
  plan_ = open(receive_.plan);
  require_none(tensor_fault(plan_.header(), {Check::tokens, receive_.out.name, receive_.out.rows}));
  XD_REQUIRE(plan_.header().fingerprint == sent.fingerprint,
             "plan: is of another batch than that of the send half");
  require_fits(receive_, sent);
}

LlRecord LlCombine::record() const {
  LlRecord record = record_of(send_, plan_.topk(), plan_.tokens());
  record.fingerprint = plan_.header().fingerprint;
  return record;
}

// ---- Send --------------------------------------------------------------------------------------

void LlCombine::send(bool stage_own) {
  own_staged_ = stage_own;
  Pipeline& pipeline = context_.pipeline;
  LlRecord record = this->record();
  record.mask = context_.masks.masked();
  if (send_.topk_weights) send_weights();
  pipeline.enter(record);
  // The owners of this rank's rows wait for its weights.
  if (send_.topk_weights) pipeline.ring_peers();
  if (context_.remote != nullptr) {
    if (send_.topk_weights) send_remote_weights();
    open_remote_sums();
  }
  send_partials();
  context_.group.count_rows(plan_.header().recv_rows, send_.expert_out.row_bytes());
  for (const NearRank peer : pipeline.peers()) {
    if (!pipeline.company().has(peer)) continue;
    // A rank that sees this also sees the partial sums.
    context_.memory.landed({peer, context_.self(), pipeline.sent()}).signal(pipeline.sent());
  }
  pipeline.ring_peers();
  if (context_.remote != nullptr) send_remote_sums();
}

// A remote rank gets those of all tokens, as the record goes to every rank.
void LlCombine::send_remote_weights() const {
  const std::size_t bytes = at(plan_.tokens()) * at(plan_.topk()) * sizeof(float);
  context_.remote->for_company([&](int rank) {
    std::memcpy(context_.remote->open(rank, Part::entry), send_.topk_weights.data, bytes);
    context_.remote->send(rank, Part::entry, at(plan_.tokens()), bytes);
  });
}

void LlCombine::open_remote_sums() {
  context_.remote->for_company([this](int rank) {
    context_.scratch.listed[at(rank)] = 0;
    context_.scratch.bodies[at(rank)] =
        context_.remote->open(rank, sums_part(bool{send_.topk_weights}));
  });
}

void LlCombine::send_remote_sums() const {
  const LlRemoteSums layout{.row_bytes = send_.sum_bytes()};
  context_.remote->for_company([&](int rank) {
    const std::uint64_t items = context_.scratch.listed[at(rank)];
    context_.remote->send(rank, sums_part(bool{send_.topk_weights}), items,
                          items * layout.item_bytes());
  });
}

void LlCombine::send_weights() const {
  const int topk = plan_.topk();
  const float* weights = send_.topk_weights.as<float>();
  for (std::int64_t t = 0; t < plan_.tokens(); ++t) {
    for (const NearRank peer : context_.pipeline.peers()) {
      if (!plan_.home(t).has(peer) || !context_.pipeline.company().has(peer)) continue;
      std::copy_n(
          weights + t * topk, topk,
          context_.memory.weights({peer, context_.self(), context_.pipeline.sent()}, t, topk));
    }
  }
}

// Whether a source's weights are here, and its call agrees with this one. Waits for the source.
bool LlCombine::takes_part(int source) {
  Pipeline& pipeline = context_.pipeline;
  if (!pipeline.company().has(source)) return false;
  if (!pipeline.wait_entered(source, pipeline.sent())) return false;
  const LlRecord& theirs = pipeline.record_of(source, pipeline.sent());
  if (!turn::difference<LlFamily>(record(), theirs).empty()) return false;
  if (is_remote(source)) judge_weights(source);
  return true;
}

void LlCombine::judge_weights(int source) const {
  const LlRemoteMessage& weights =
      *context_.remote->find(source, Part::entry, context_.pipeline.sent());
  context_.remote->judge(
      [&] { weights.require_items(at(config().max_tokens), at(plan_.topk()) * sizeof(float)); });
}

// Where the partial sum of an item goes; null where none goes. May wait for the item's source.
std::byte* LlCombine::target_of(const LlItem& item) {
  if (item.source() >= config().ranks || item.token() >= config().max_tokens) return nullptr;
  if (item.place >= static_cast<std::uint32_t>(partial_places(config()))) return nullptr;
  if (item.source() != source_) {
    source_ = item.source();
    wanted_ = source_ == context_.self() ? own_staged_
              : send_.topk_weights       ? takes_part(source_)
                                         : context_.pipeline.company().has(source_);
  }
  if (!wanted_) return nullptr;
  if (const auto near = context_.group.comm().hosts().find_near(source_)) {
    return context_.memory.partial(*near, context_.pipeline.sent(), item.token(),
                                   static_cast<int>(item.place));
  }
  const LlRemoteSums layout{.row_bytes = send_.sum_bytes()};
  const std::uint64_t items = context_.scratch.listed[at(source_)];
  if (items >= at(config().max_tokens)) return nullptr;
  return context_.scratch.bodies[at(source_)] + items * layout.item_bytes() + layout.row_at();
}

// A sum goes where target_of() has said.
void LlCombine::keep_target(const LlItem& item) {
  if (!is_remote(source_)) return;
  const LlRemoteSums layout{.row_bytes = send_.sum_bytes()};
  const std::uint64_t number = context_.scratch.listed[at(source_)]++;
  const auto token = static_cast<std::uint32_t>(item.token());
  std::memcpy(context_.scratch.bodies[at(source_)] + number * layout.item_bytes(), &token,
              sizeof(token));
}

void LlCombine::send_partials() {
  struct Sum {
    Terms terms;
    std::byte* out = nullptr;
  };
  std::array<Sum, 2> sums;
  std::int64_t i = 0;
  const auto find_next = [&](Sum& sum) {
    sum.terms.clear();
    for (; i < plan_.items(); ++i) {
      const LlItem& item = plan_.item(i);
      sum.out = target_of(item);
      if (sum.out != nullptr && collect(item, sum.terms) > 0) {
        keep_target(item);
        ++i;
        return true;
      }
    }
    return false;
  };
  std::size_t now = 0;
  for (bool more = find_next(sums[now]); more; now = 1 - now) {
    Sum& next = sums[1 - now];
    more = find_next(next);
    sums[now].terms.sum({send_.expert_out.type, at(send_.expert_out.cols), send_.wire, weighted()},
                        Terms::Result::partial, sums[now].out, next.terms);
  }
  rows::flush();
}

// The weights of an item's choices; null = there are none.
const float* LlCombine::weights_of(const LlItem& item) const {
  const int topk = plan_.topk();
  if (!send_.topk_weights) {
    return plan_.facts().weighted != 0 ? item.weights(topk) : nullptr;
  }
  if (item.source() == context_.self()) {
    if (item.token() >= plan_.tokens()) return nullptr;
    return send_.topk_weights.as<float>() + std::int64_t{item.token()} * topk;
  }
  if (is_remote(item.source())) {
    const LlRemoteMessage& theirs =
        *context_.remote->find(item.source(), Part::entry, context_.pipeline.sent());
    if (at(item.token()) >= theirs.header.items) return nullptr;
    return reinterpret_cast<const float*>(theirs.item(at(item.token()), at(topk) * sizeof(float)));
  }
  return context_.memory.weights({context_.self(), item.source(), context_.pipeline.sent()},
                                 item.token(), topk);
}

// Makes a partial sum of the rows of an item; returns how many there are.
int LlCombine::collect(const LlItem& item, Terms& terms) const {
  const std::int64_t slots = send_.expert_out.slots;
  const float* weights = weights_of(item);
  const int before = terms.num_rows;
  for (int k = 0; k < plan_.topk(); ++k) {
    const std::int32_t row = item.rows()[k];
    if (row < 0 || row >= slots * send_.expert_out.experts) continue;
    terms.add(send_.expert_out.row(row / slots, row % slots),
              weights != nullptr ? weights[k] : 1.0f);
  }
  if (terms.num_rows > before) terms.end_partial(rows::PartialForm::rows);
  return terms.num_rows - before;
}

// ---- Receive -----------------------------------------------------------------------------------

LlOperationError LlCombine::receive(bool own_staged) {
  own_staged_ = own_staged;
  Pipeline& pipeline = context_.pipeline;
  observe::WaitTimes times = wait_times(context_, receive_.wait_ns);
  pipeline.await(times);
  if (context_.remote != nullptr) await_remote_sums();
  if (LlOperationError found = verdict(pipeline, context_.self())) return found;
  await_partials();
  if (context_.remote != nullptr) read_remote_sums();
  sum_tokens();
  return {};
}

void LlCombine::await_partials() {
  Pipeline& pipeline = context_.pipeline;
  RankBits holders{};
  for (std::int64_t t = 0; t < plan_.tokens(); ++t) holders = holders | plan_.home(t);
  for (const NearRank peer : pipeline.peers()) {
    if (!holders.has(peer) || !pipeline.here().has(peer)) continue;
    const NearMemory landed = context_.memory.landed({context_.self(), peer, pipeline.next()});
    const bool came = context_.masks.wait(
        peer, pipeline.site(XD_PHASE_ROWS, pipeline.next()),
        [&] { return landed.seen() == pipeline.next(); }, [&] { return landed.seen(); });
    if (!came) pipeline.lose(peer);
  }
}

// Also where ranks turn out to disagree: what a rank has sent takes place here until it has come.
void LlCombine::await_remote_sums() {
  Pipeline& pipeline = context_.pipeline;
  for (const int rank : context_.remote->ranks()) {
    if (!pipeline.here().has(rank)) continue;
    const LlRecord& record = pipeline.records()[at(rank)];
    const bool has_weights = (record.flags & kWeighted) != 0;
    if (record.call.status != XD_SUCCESS || !has_weights) continue;
    const bool came = pipeline.wait_for_message(rank, pipeline.next(), [&] {
      return context_.remote->find(rank, Part::sums, pipeline.next()) != nullptr;
    });
    if (!came) pipeline.lose(rank);
  }
}

void LlCombine::read_remote_sums() {
  const LlRemoteSums layout{.row_bytes = receive_.sum_bytes()};
  const Pipeline& pipeline = context_.pipeline;
  const Part part = sums_part((pipeline.own_record().flags & kWeighted) != 0);
  for (const int rank : context_.remote->ranks()) {
    context_.scratch.listed[at(rank)] = 0;
    if (!pipeline.here().has(rank)) continue;
    const LlRemoteMessage& sums = *context_.remote->find(rank, part, pipeline.next());
    context_.remote->judge(
        [&] { sums.require_items(at(config().max_tokens), layout.item_bytes()); });
  }
}

void LlCombine::sum_tokens() {
  const std::uint64_t bytes = receive_.out.row_bytes();
  std::array<Terms, 2> terms;
  std::array<bool, 2> weighs{};
  next_own_ = 0;
  if (plan_.tokens() > 0) weighs[0] = collect_token(0, terms[0]);
  for (std::int64_t t = 0; t < plan_.tokens(); ++t) {
    const std::size_t now = at(t % 2), next = 1 - now;
    terms[next].clear();
    if (t + 1 < plan_.tokens()) weighs[next] = collect_token(t + 1, terms[next]);
    std::byte* const out = receive_.out.data + at(t) * bytes;
    if (terms[now].num_partials == 0) {
      rows::zero(out, bytes, rows::Store::cached);
    } else {
      terms[now].sum({receive_.out.type, at(receive_.out.cols), receive_.wire, weighs[now]},
                     Terms::Result::row, out, terms[next]);
    }
  }
}

// Makes the terms of a token's sum; returns whether they have weights.
bool LlCombine::collect_token(std::int64_t token, Terms& terms) {
  const RankBits& home = plan_.home(token);
  const HostMap& hosts = context_.group.comm().hosts();
  bool weighs = false;
  for (const int rank : hosts.by_host()) {
    if (!home.has(rank) || !context_.pipeline.here().has(rank)) continue;
    const int before = terms.num_partials;
    if (is_remote(rank)) {
      add_remote_partial(rank, token, terms);
    } else if (rank != context_.self() || own_staged_) {
      add_partial(home, rank, token, terms);
    } else if (const LlItem* item = own_item(token)) {
      weighs = collect(*item, terms) > 0 && weighted();
    }
    const bool by_host = context_.group.sums_by_host();
    if (by_host && terms.num_partials > before) terms.end_host(hosts.host_of(rank));
  }
  return weighs;
}

// This rank's item of its own token. Tokens are asked for in their order.
const LlItem* LlCombine::own_item(std::int64_t token) {
  const std::uint32_t name = LlItem::name(context_.self(), token);
  while (next_own_ < plan_.items() && plan_.item(next_own_).source_token < name) ++next_own_;
  if (next_own_ == plan_.items() || plan_.item(next_own_).source_token != name) return nullptr;
  return &plan_.item(next_own_);
}

// A partial sum is already weighted: 1 changes nothing of it.
void LlCombine::add_partial(const RankBits& home, int rank, std::int64_t token,
                            Terms& terms) const {
  const int place = partial_place(rank, home, config());
  if (place >= partial_places(config())) return;
  terms.add(context_.memory.partial(context_.self(), context_.pipeline.next(), token, place), 1.0f);
  terms.end_partial(rows::PartialForm::wire);
}

// A remote rank's sums are by ascending token, as its plan has the items that it makes them of. A
// rank whose plan is damaged may have made fewer.
void LlCombine::add_remote_partial(int rank, std::int64_t token, Terms& terms) const {
  const LlRemoteSums layout{.row_bytes = receive_.sum_bytes()};
  const Part part = sums_part((context_.pipeline.own_record().flags & kWeighted) != 0);
  const LlRemoteMessage& sums = *context_.remote->find(rank, part, context_.pipeline.next());
  std::uint64_t& number = context_.scratch.listed[at(rank)];
  for (; number < sums.header.items; ++number) {
    const std::byte* const item = sums.item(number, layout.item_bytes());
    std::uint32_t their_token = 0;
    std::memcpy(&their_token, item, sizeof(their_token));
    if (their_token > token) return;
    if (their_token < token) continue;
    terms.add(item + layout.row_at(), 1.0f);
    return terms.end_partial(rows::PartialForm::wire);
  }
}

}  // namespace xd::ep::cpu
