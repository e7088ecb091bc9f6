#include "net/links.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/math.h"

namespace xd::net {
namespace {

// Of the offer, in front of the engine's address.
struct Terms {
  std::uint64_t from, to;  // ranks
  std::uint64_t slots, slot_bytes;
  RemoteRoom room;
  std::uint64_t first_slot, channel;
};

}  // namespace

Links::Links(Engine& engine, const LinkConfig& config, std::vector<LinkPartner> partners)
    : engine_(engine),
      config_(config),
      map_{
          .partners = partners.size(), .slots = at(config.slots), .slot_bytes = config.slot_bytes} {
  XD_REQUIRE(config.slots >= 1 && config.slots <= kMaxLinkSlots, "slots = ", config.slots,
             ", expected 1 to ", kMaxLinkSlots);
  XD_REQUIRE(config.slot_bytes >= 1 && config.slot_bytes < UINT32_MAX,
             "slot_bytes = ", config.slot_bytes, ", expected 1 to ", UINT32_MAX - 1);
  XD_REQUIRE(sizeof(Header) + config.slot_bytes <= engine.max_put(),
             "slot_bytes = ", config.slot_bytes, ", expected ", sizeof(Header),
             " less than the engine's longest put of ", engine.max_put(), " bytes");
  XD_REQUIRE(partners.size() <= kMaxLinkPartners, partners.size(), " partners, expected at most ",
             kMaxLinkPartners);
  const std::size_t slots = map_.num_slots();
  for (LinkPartner& name : partners) {
    Partner& partner = partners_.emplace_back();
    partner.name = std::move(name);
    partner.sending.resize(at(config.slots));
    partner.receiving.resize(at(config.slots));
  }
  if (config.memory.empty()) own_memory_.resize(map_.bytes());
  memory_ = config.memory.empty() ? std::span(own_memory_) : config.memory;
  XD_CHECK(memory_.size() == map_.bytes());
  room_ = engine.expose(memory_);
  // A chunk or its credit, of each slot of either direction; greetings come before these.
  outbox_.reserve(2 * slots);
  events_.arrived.reserve(2 * slots);
  events_.sent.reserve(2 * slots);
}

Links::~Links() { engine_.close(); }

Bytes Links::offer(int partner) const {
  WireWriter writer;
  writer.put(Terms{.from = at(config_.rank),
                   .to = at(partners_.at(at(partner)).name.rank),
                   .slots = at(config_.slots),
                   .slot_bytes = config_.slot_bytes,
                   .room = room_->remote(),
                   .first_slot = map_.place(true, partner, 0),
                   .channel = at(partner)});
  writer.put_bytes(engine_.address());
  return writer.take();
}

void Links::accept(int partner, std::span<const std::byte> offer) {
  check();
  Partner& whom = partners_.at(at(partner));
  XD_CHECK(!whom.accepted);
  const auto refuse = [&](const auto&... why) {
    fail(XD_ERROR_MISMATCH, name_of(partner), why...);
  };
  WireReader reader(offer);
  const auto terms = reader.take<Terms>();
  if (!reader.ok()) {
    refuse(": its offer has ", offer.size(), " bytes, expected at least ", sizeof(Terms));
  }
  if (terms.from != at(whom.name.rank) || terms.to != at(config_.rank)) {
    refuse(": the offer is that of rank ", terms.from, " to rank ", terms.to, ", expected of rank ",
           whom.name.rank, " to rank ", config_.rank);
  }
  if (terms.slots != at(config_.slots) || terms.slot_bytes != config_.slot_bytes) {
    refuse(" offers ", terms.slots, " slots of ", terms.slot_bytes, " bytes; expected ",
           config_.slots, " of ", config_.slot_bytes);
  }
  if (terms.channel >= kMaxLinkPartners || terms.first_slot > terms.room.bytes ||
      at(config_.slots) * map_.pitch() > terms.room.bytes - terms.first_slot) {
    refuse(" offers channel ", terms.channel, " and slots from byte ", terms.first_slot,
           " of a room of ", terms.room.bytes, " bytes, expected a channel below ",
           kMaxLinkPartners, " and ", at(config_.slots) * map_.pitch(),
           " bytes of slots in the room");
  }
  engine_.connect(whom.name.rank, reader.rest());
  whom.room = terms.room;
  whom.first_slot = terms.first_slot;
  whom.channel = static_cast<unsigned>(terms.channel);
  whom.accepted = true;
}

void Links::greet() {
  check();
  for (int p = 0; p < static_cast<int>(partners_.size()); ++p)
    if (partners_[at(p)].name.rank > config_.rank) post_empty(p, TagKind::greeting, 0, 0);
}

int Links::first_ungreeted() const {
  const auto found = std::ranges::find(partners_, false, &Partner::greeted);
  return found == partners_.end() ? -1 : static_cast<int>(found - partners_.begin());
}

std::optional<Links::Slot> Links::take(int partner, Range range) {
  check();
  auto& sending = partners_.at(at(partner)).sending;
  const auto first = sending.begin() + range.first;
  const auto end = sending.begin() + std::min(range.end, config_.slots);
  const auto free = std::ranges::find(first, end, false, &Sending::taken);
  if (free == end) return std::nullopt;
  *free = {.generation = free->generation + 1, .taken = true};
  ++slots_in_use_;
  const auto slot = static_cast<unsigned>(free - sending.begin());
  std::byte* const begin = memory_.data() + map_.place(false, partner, slot) + sizeof(Header);
  return Slot{partner, slot, free->generation, {begin, config_.slot_bytes}};
}

void Links::send(const Slot& slot, std::size_t bytes) {
  check();
  const Partner& to = partners_.at(at(slot.partner));
  Sending& sending = slot_of(slot.partner, slot.slot);
  XD_CHECK(to.accepted && bytes <= config_.slot_bytes);
  XD_CHECK(sending.taken && !sending.posted && sending.generation == slot.generation);
  sending.posted = true;
  const Header header{
      .generation = sending.generation, .bytes = static_cast<std::uint32_t>(bytes), .zero = 0};
  const std::size_t from = map_.place(false, slot.partner, slot.slot);
  std::memcpy(memory_.data() + from, &header, sizeof(header));
  post({.peer = to.name.rank,
        .from = room_.get(),
        .from_offset = from,
        .to = to.room,
        .to_offset = to.first_slot + slot.slot * map_.pitch(),
        .bytes = sizeof(Header) + bytes,
        .tag = LinkTag{TagKind::chunk, slot.slot, sending.generation, to.channel}.word(),
        .id = ChunkId{static_cast<unsigned>(slot.partner), slot.slot, sending.generation}.word()});
}

std::optional<Links::Chunk> Links::next(int partner) {
  check();
  auto& receiving = partners_.at(at(partner)).receiving;
  const auto arrived = std::ranges::find(receiving, Receiving::State::arrived, &Receiving::state);
  if (arrived == receiving.end()) return std::nullopt;
  const auto slot = static_cast<unsigned>(arrived - receiving.begin());
  const Chunk chunk{partner, slot, arrived->generation, open(partner, slot)};
  arrived->state = Receiving::State::held;
  return chunk;
}

void Links::give_back(const Chunk& chunk) {
  check();
  Receiving& receiving = partners_.at(at(chunk.partner)).receiving.at(chunk.slot);
  XD_CHECK(receiving.state == Receiving::State::held && receiving.generation == chunk.generation);
  receiving.state = Receiving::State::empty;
  post_empty(chunk.partner, TagKind::credit, chunk.slot, receiving.generation);
}

bool Links::poll() {
  check();
  flush();
  poll_engine();
  const bool news = !events_.arrived.empty() || !events_.sent.empty();
  for (const std::uint32_t tag : events_.arrived) on_arrival(LinkTag::of(tag));
  for (const std::uint64_t id : events_.sent) on_sent(id);
  events_.arrived.clear();
  events_.sent.clear();
  if (!events_.failed.empty()) {
    const PeerFailure& failed = events_.failed.front();
    const auto partner =
        std::ranges::find(partners_, failed.peer, [](const Partner& p) { return p.name.rank; });
    break_off(XD_ERROR_SYSTEM,
              partner == partners_.end() ? -1 : static_cast<int>(partner - partners_.begin()),
              concat("network: ", failed.text));
  }
  flush();
  return news;
}

// While the engine refuses puts, only asking it again tells when it has room.
int Links::sleep_on() { return outbox_.empty() ? engine_.sleep_on() : -1; }

void Links::lose(int partner, const std::string& why) {
  if (failure_) return;
  failure_.emplace(XD_ERROR_PEER_LOST, concat(name_of(partner), ": ", why),
                   partners_.at(at(partner)).name.rank);
}

std::string Links::name_of(int partner) const {
  const LinkPartner& name = partners_.at(at(partner)).name;
  return concat("rank ", name.rank, " on host ", name.host);
}

std::string Links::place_of(int partner) const {
  return engine_.place_of(partners_.at(at(partner)).name.rank);
}

Links::Sending& Links::slot_of(int partner, unsigned slot) {
  return partners_.at(at(partner)).sending.at(slot);
}

void Links::check() const {
  if (failure_) throw Error(*failure_);
}

void Links::break_off(xd_status status, int partner, const std::string& text) {
  failure_.emplace(status, partner < 0 ? text : concat(name_of(partner), ": ", text),
                   partner < 0 ? -1 : partners_.at(at(partner)).name.rank);
  throw Error(*failure_);
}

// Of a tag that a partner cannot have sent, if it keeps its promises.
void Links::refuse_tag(int partner, const std::string& text) {
  if (engine_.vouches_for_tags()) break_off(XD_ERROR_INTERNAL, partner, text);
  refused_.warn(concat("refused, of an unknown sender, or damaged: ",
                       partner < 0 ? text : concat("as if of ", name_of(partner), ": ", text)));
}

std::ptrdiff_t Links::unread(int partner) const {
  return std::ranges::count_if(partners_.at(at(partner)).sending,
                               [](const Sending& slot) { return slot.posted && !slot.credited; });
}

int Links::first_unread() const {
  for (int p = 0; p < static_cast<int>(partners_.size()); ++p)
    if (unread(p) > 0) return p;
  return -1;
}

void Links::fail_for_time(int partner, const char* what) const {
  if (partner < 0) partner = first_unread();
  if (partner < 0) fail(XD_ERROR_TIMEOUT, "timed out waiting for ", what);
  throw Error(XD_ERROR_TIMEOUT,
              concat("timed out waiting for ", what, " of ", name_of(partner), "; it has not read ",
                     unread(partner), " of the ", config_.slots, " slots to it"),
              partners_.at(at(partner)).name.rank);
}

void Links::sleep_until(const Deadline& deadline) {
  pollfd one{.fd = sleep_on(), .events = POLLIN, .revents = 0};
  if (one.fd >= 0) ::poll(&one, 1, deadline.remaining_ms());
}

void Links::post(const Put& put) {
  ++sent_.puts;
  sent_.bytes += put.bytes;
  outbox_.push_back(put);
  flush();
}

// Puts that the engine refuses do not keep back others: they may be to other partners.
void Links::flush() {
  try {
    std::erase_if(outbox_, [&](const Put& put) { return engine_.put(put); });
  } catch (...) {
    keep_failure();  // nobody knows which puts are left in the outbox
    throw;
  }
}

void Links::poll_engine() {
  try {
    engine_.poll(events_);
  } catch (...) {
    keep_failure();
    throw;
  }
}

// Of the engine, inside a catch block.
void Links::keep_failure() {
  std::array<char, 512> text;
  const Caught error = caught(text);
  failure_.emplace(error.status, error_text(text.data()), -1, error.error_number);
}

void Links::post_empty(int partner, TagKind kind, unsigned slot, unsigned generation) {
  const Partner& to = partners_.at(at(partner));
  XD_CHECK(to.accepted);
  ++empty_unsent_;
  post({.peer = to.name.rank,
        .from = room_.get(),
        .to = to.room,
        .tag = LinkTag{kind, slot, generation, to.channel}.word(),
        .id = kEmptyId});
}

void Links::on_arrival(const LinkTag& tag) {
  const bool known =
      tag.kind == TagKind::chunk || tag.kind == TagKind::credit || tag.kind == TagKind::greeting;
  const int partner = tag.channel < partners_.size() ? static_cast<int>(tag.channel) : -1;
  if (!known || partner < 0 || tag.slot >= at(config_.slots))
    return refuse_tag(partner, concat("a put arrived with the tag ", tag.word()));
  if (tag.kind == TagKind::greeting) return on_greeting(partner);
  if (tag.kind == TagKind::credit) return on_credit(partner, tag.slot, tag.generation);
  on_chunk(partner, tag.slot, tag.generation);
}

void Links::on_chunk(int partner, unsigned slot, unsigned generation) {
  Receiving& receiving = partners_[at(partner)].receiving[slot];
  const unsigned expected = receiving.generation + 1;
  if (receiving.state != Receiving::State::empty || (generation & 0xff) != (expected & 0xff)) {
    return refuse_tag(partner,
                      concat("use ", generation & 0xff, " (mod 256) of its slot ", slot,
                             " arrived; expected use ", expected & 0xff,
                             receiving.state == Receiving::State::empty ? "" : ", and not yet"));
  }
  receiving = {.generation = expected, .state = Receiving::State::arrived};
}

void Links::on_greeting(int partner) {
  Partner& from = partners_[at(partner)];
  if (!from.accepted || from.greeted)
    return refuse_tag(partner, from.greeted ? "it greets twice" : "it greets too early");
  from.greeted = true;
  if (from.name.rank < config_.rank) post_empty(partner, TagKind::greeting, 0, 0);
}

void Links::on_credit(int partner, unsigned slot, unsigned generation) {
  Sending& sending = slot_of(partner, slot);
  if (!sending.posted || sending.credited || (sending.generation & 0xff) != generation) {
    return refuse_tag(
        partner, concat("it gave back use ", generation, " (mod 256) of slot ", slot,
                        ", which is in use ", sending.generation & 0xff,
                        sending.posted && !sending.credited ? "" : " and not to be given back"));
  }
  sending.credited = true;
  free_if_done(sending);
}

void Links::on_sent(std::uint64_t id) {
  if (id == kEmptyId && empty_unsent_ > 0) {
    --empty_unsent_;
    return;
  }
  const auto [partner, slot, generation] = ChunkId::of(id);
  Sending* const sending = partner < partners_.size() && slot < at(config_.slots)
                               ? &partners_[partner].sending[slot]
                               : nullptr;
  if (sending == nullptr || !sending->posted || sending->sent ||
      sending->generation != generation) {
    break_off(XD_ERROR_INTERNAL, -1,
              concat("network: the engine says that put ", id, " is sent, which is not under way"));
  }
  sending->sent = true;
  free_if_done(*sending);
}

// Both must have come: the credit may overtake the engine's word that the source is free.
void Links::free_if_done(Sending& slot) {
  if (!slot.taken || !slot.sent || !slot.credited) return;
  slot.taken = slot.posted = false;
  --slots_in_use_;
}

// The bytes of a chunk that has arrived.
std::span<const std::byte> Links::open(int partner, unsigned slot) {
  const unsigned generation = partners_[at(partner)].receiving[slot].generation;
  const std::byte* const begin = memory_.data() + map_.place(true, partner, slot);
  Header header;
  std::memcpy(&header, begin, sizeof(header));
  if (header.generation != generation || header.bytes > config_.slot_bytes) {
    break_off(XD_ERROR_INTERNAL, partner,
              concat("slot ", slot, " has ", header.bytes, " bytes of use ", header.generation,
                     ", expected use ", generation, " and at most ", config_.slot_bytes));
  }
  return {begin + sizeof(header), header.bytes};
}

}  // namespace xd::net
