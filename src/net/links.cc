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
  std::uint64_t frames, frame_bytes;
  RegionHandle region;
  std::uint64_t first_frame, channel;
};

}  // namespace

Links::Links(Engine& engine, const LinkConfig& config, std::vector<LinkNeighbour> neighbours)
    : engine_(engine),
      config_(config),
      map_{.neighbours = neighbours.size(),
           .frames = at(config.frames),
           .frame_bytes = config.frame_bytes} {
  XD_REQUIRE(config.frames >= 1 && config.frames <= kMaxLinkFrames, "frames = ", config.frames,
             ", expected 1 to ", kMaxLinkFrames);
  XD_REQUIRE(config.frame_bytes >= 1 && config.frame_bytes < UINT32_MAX,
             "frame_bytes = ", config.frame_bytes, ", expected 1 to ", UINT32_MAX - 1);
  XD_REQUIRE(sizeof(Header) + config.frame_bytes <= engine.max_put(),
             "frame_bytes = ", config.frame_bytes, ", expected ", sizeof(Header),
             " less than the engine's longest put of ", engine.max_put(), " bytes");
  XD_REQUIRE(neighbours.size() <= kMaxLinkNeighbours, neighbours.size(),
             " neighbours, expected at most ", kMaxLinkNeighbours);
  const std::size_t frames = map_.num_frames();
  for (LinkNeighbour& name : neighbours) {
    Neighbour& neighbour = neighbours_.emplace_back();
    neighbour.name = std::move(name);
    neighbour.sending.resize(at(config.frames));
    neighbour.receiving.resize(at(config.frames));
  }
  // Zeros: no header is taken for one that was filled, and gaps between items go to other machines.
  if (config.memory.empty()) own_memory_.resize(map_.bytes());
  memory_ = config.memory.empty() ? std::span(own_memory_) : config.memory;
  XD_CHECK(memory_.size() == map_.bytes());
  region_ = engine.expose(memory_);
  // A chunk or its credit, of each frame of either direction; greetings come before these.
  outbox_.reserve(2 * frames);
  events_.arrived.reserve(2 * frames);
  events_.sent.reserve(2 * frames);
}

Links::~Links() { engine_.close(); }

Bytes Links::offer(int neighbour) const {
  WireWriter writer;
  writer.put(Terms{.from = at(config_.rank),
                   .to = at(neighbours_.at(at(neighbour)).name.rank),
                   .frames = at(config_.frames),
                   .frame_bytes = config_.frame_bytes,
                   .region = region_->remote(),
                   .first_frame = map_.place(true, neighbour, 0),
                   .channel = at(neighbour)});
  writer.put_bytes(engine_.address());
  return writer.take();
}

void Links::accept(int neighbour, std::span<const std::byte> offer) {
  check();
  Neighbour& whom = neighbours_.at(at(neighbour));
  XD_CHECK(!whom.accepted);
  const auto refuse = [&](const auto&... why) {
    fail(XD_ERROR_MISMATCH, name_of(neighbour), why...);
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
  if (terms.frames != at(config_.frames) || terms.frame_bytes != config_.frame_bytes) {
    refuse(" offers ", terms.frames, " frames of ", terms.frame_bytes, " bytes; expected ",
           config_.frames, " of ", config_.frame_bytes);
  }
  if (terms.channel >= kMaxLinkNeighbours || terms.first_frame > terms.region.bytes ||
      at(config_.frames) * map_.pitch() > terms.region.bytes - terms.first_frame) {
    refuse(" offers channel ", terms.channel, " and frames from byte ", terms.first_frame,
           " of a region of ", terms.region.bytes, " bytes, expected a channel below ",
           kMaxLinkNeighbours, " and ", at(config_.frames) * map_.pitch(),
           " bytes of frames in the region");
  }
  engine_.connect(whom.name.rank, reader.rest());
  whom.region = terms.region;
  whom.first_frame = terms.first_frame;
  whom.channel = static_cast<unsigned>(terms.channel);
  whom.accepted = true;
}

void Links::greet() {
  check();
  for (int p = 0; p < static_cast<int>(neighbours_.size()); ++p)
    if (neighbours_[at(p)].name.rank > config_.rank) post_empty(p, TagKind::greeting, 0, 0);
}

int Links::first_ungreeted() const {
  const auto found = std::ranges::find(neighbours_, false, &Neighbour::greeted);
  return found == neighbours_.end() ? -1 : static_cast<int>(found - neighbours_.begin());
}

std::optional<Links::Frame> Links::take(int neighbour, Range range) {
  check();
  auto& sending = neighbours_.at(at(neighbour)).sending;
  const auto first = sending.begin() + range.first;
  const auto end = sending.begin() + std::min(range.end, config_.frames);
  const auto free = std::ranges::find(first, end, false, &Sending::taken);
  if (free == end) return std::nullopt;
  *free = {.generation = free->generation + 1, .taken = true};
  ++frames_in_use_;
  const auto frame = static_cast<unsigned>(free - sending.begin());
  std::byte* const begin = memory_.data() + map_.place(false, neighbour, frame) + sizeof(Header);
  return Frame{neighbour, frame, free->generation, {begin, config_.frame_bytes}};
}

void Links::send(const Frame& frame, std::size_t bytes) {
  check();
  const Neighbour& to = neighbours_.at(at(frame.neighbour));
  Sending& sending = frame_of(frame.neighbour, frame.frame);
  XD_CHECK(to.accepted && bytes <= config_.frame_bytes);
  XD_CHECK(sending.taken && !sending.posted && sending.generation == frame.generation);
  if (to.lost) return set_free(sending);
  sending.posted = true;
  const Header header{
      .generation = sending.generation, .bytes = static_cast<std::uint32_t>(bytes), .zero = 0};
  const std::size_t from = map_.place(false, frame.neighbour, frame.frame);
  std::memcpy(memory_.data() + from, &header, sizeof(header));
  post({.peer = to.name.rank,
        .from = region_.get(),
        .from_offset = from,
        .to = to.region,
        .to_offset = to.first_frame + frame.frame * map_.pitch(),
        .bytes = sizeof(Header) + bytes,
        .tag = LinkTag{TagKind::chunk, frame.frame, sending.generation, to.channel}.word(),
        .id = ChunkId{static_cast<unsigned>(frame.neighbour), frame.frame, sending.generation}
                  .word()});
}

std::optional<Links::Chunk> Links::next(int neighbour) {
  check();
  auto& receiving = neighbours_.at(at(neighbour)).receiving;
  const auto arrived = std::ranges::find(receiving, Receiving::State::arrived, &Receiving::state);
  if (arrived == receiving.end()) return std::nullopt;
  const auto frame = static_cast<unsigned>(arrived - receiving.begin());
  const Chunk chunk{neighbour, frame, arrived->generation, open(neighbour, frame)};
  arrived->state = Receiving::State::held;
  return chunk;
}

void Links::give_back(const Chunk& chunk) {
  check();
  Receiving& receiving = neighbours_.at(at(chunk.neighbour)).receiving.at(chunk.frame);
  XD_CHECK(receiving.state == Receiving::State::held && receiving.generation == chunk.generation);
  receiving.state = Receiving::State::empty;
  post_empty(chunk.neighbour, TagKind::credit, chunk.frame, receiving.generation);
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
  const bool loses = !events_.failed.empty();
  for (const PeerFailure& failure : events_.failed) on_failure(failure);
  events_.failed.clear();
  flush();
  return news || loses;
}

void Links::on_failure(const PeerFailure& failure) {
  const auto found =
      std::ranges::find(neighbours_, failure.peer, [](const Neighbour& p) { return p.name.rank; });
  const bool known = found != neighbours_.end();
  if (!known || !outlives_neighbours_) {
    break_off(XD_ERROR_SYSTEM, known ? static_cast<int>(found - neighbours_.begin()) : -1,
              concat("network: ", failure.text));
  }
  found->lost = true;
  std::erase_if(outbox_, [&](const Put& put) {
    if (put.peer != failure.peer) return false;
    if (put.id == kEmptyId) --empty_unsent_;
    return true;
  });
}

bool Links::holds_back(int neighbour) const {
  const int rank = neighbours_.at(at(neighbour)).name.rank;
  return std::ranges::any_of(outbox_, [rank](const Put& put) { return put.peer == rank; });
}

// While the engine refuses puts, only asking it again tells when it has room.
int Links::sleep_on() { return outbox_.empty() ? engine_.sleep_on() : -1; }

void Links::lose(int neighbour, const std::string& why) {
  if (failure_) return;
  failure_.emplace(XD_ERROR_PEER_LOST, concat(name_of(neighbour), ": ", why),
                   neighbours_.at(at(neighbour)).name.rank);
}

std::string Links::name_of(int neighbour) const {
  const LinkNeighbour& name = neighbours_.at(at(neighbour)).name;
  return concat("rank ", name.rank, " on host ", name.host);
}

std::string Links::place_of(int neighbour) const {
  return engine_.place_of(neighbours_.at(at(neighbour)).name.rank);
}

Links::Sending& Links::frame_of(int neighbour, unsigned frame) {
  return neighbours_.at(at(neighbour)).sending.at(frame);
}

void Links::check() const {
  if (failure_) throw Error(*failure_);
}

void Links::break_off(xd_status status, int neighbour, const std::string& text) {
  failure_.emplace(status, neighbour < 0 ? text : concat(name_of(neighbour), ": ", text),
                   neighbour < 0 ? -1 : neighbours_.at(at(neighbour)).name.rank);
  throw Error(*failure_);
}

// Of a tag that a neighbour cannot have sent, if it keeps its promises.
void Links::refuse_tag(int neighbour, const std::string& text) {
  if (engine_.vouches_for_tags()) break_off(XD_ERROR_INTERNAL, neighbour, text);
  refused_.warn(concat("refused, of an unknown sender, or damaged: ",
                       neighbour < 0 ? text : concat("as if of ", name_of(neighbour), ": ", text)));
}

std::ptrdiff_t Links::unread(int neighbour) const {
  return std::ranges::count_if(neighbours_.at(at(neighbour)).sending, [](const Sending& frame) {
    return frame.posted && !frame.credited;
  });
}

int Links::first_unread() const {
  for (int p = 0; p < static_cast<int>(neighbours_.size()); ++p)
    if (!neighbours_[at(p)].lost && unread(p) > 0) return p;
  return -1;
}

void Links::fail_for_time(int neighbour, const char* what) const {
  if (neighbour < 0) neighbour = first_unread();
  if (neighbour < 0) fail(XD_ERROR_TIMEOUT, "timed out waiting for ", what);
  throw Error(
      XD_ERROR_TIMEOUT,
      concat("timed out waiting for ", what, " of ", name_of(neighbour), "; it has not read ",
             unread(neighbour), " of the ", config_.frames, " frames to it"),
      neighbours_.at(at(neighbour)).name.rank);
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

// Puts that the engine refuses do not keep back others: they may be to other neighbours.
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

void Links::post_empty(int neighbour, TagKind kind, unsigned frame, unsigned generation) {
  const Neighbour& to = neighbours_.at(at(neighbour));
  XD_CHECK(to.accepted);
  if (to.lost) return;
  ++empty_unsent_;
  post({.peer = to.name.rank,
        .from = region_.get(),
        .to = to.region,
        .tag = LinkTag{kind, frame, generation, to.channel}.word(),
        .id = kEmptyId});
}

void Links::on_arrival(const LinkTag& tag) {
  const bool known =
      tag.kind == TagKind::chunk || tag.kind == TagKind::credit || tag.kind == TagKind::greeting;
  const int neighbour = tag.channel < neighbours_.size() ? static_cast<int>(tag.channel) : -1;
  if (!known || neighbour < 0 || tag.frame >= at(config_.frames))
    return refuse_tag(neighbour, concat("a put arrived with the tag ", tag.word()));
  if (tag.kind == TagKind::greeting) return on_greeting(neighbour);
  if (tag.kind == TagKind::credit) return on_credit(neighbour, tag.frame, tag.generation);
  on_chunk(neighbour, tag.frame, tag.generation);
}

void Links::on_chunk(int neighbour, unsigned frame, unsigned generation) {
  Receiving& receiving = neighbours_[at(neighbour)].receiving[frame];
  const unsigned expected = receiving.generation + 1;
  if (receiving.state != Receiving::State::empty || (generation & 0xff) != (expected & 0xff)) {
    return refuse_tag(neighbour,
                      concat("use ", generation & 0xff, " (mod 256) of its frame ", frame,
                             " arrived; expected use ", expected & 0xff,
                             receiving.state == Receiving::State::empty ? "" : ", and not yet"));
  }
  receiving = {.generation = expected, .state = Receiving::State::arrived};
}

void Links::on_greeting(int neighbour) {
  Neighbour& from = neighbours_[at(neighbour)];
  if (!from.accepted || from.greeted)
    return refuse_tag(neighbour, from.greeted ? "it greets twice" : "it greets too early");
  from.greeted = true;
  if (from.name.rank < config_.rank) post_empty(neighbour, TagKind::greeting, 0, 0);
}

void Links::on_credit(int neighbour, unsigned frame, unsigned generation) {
  Sending& sending = frame_of(neighbour, frame);
  if (!sending.posted || sending.credited || (sending.generation & 0xff) != generation) {
    return refuse_tag(
        neighbour, concat("it gave back use ", generation, " (mod 256) of frame ", frame,
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
  const auto [neighbour, frame, generation] = ChunkId::of(id);
  Sending* const sending = neighbour < neighbours_.size() && frame < at(config_.frames)
                               ? &neighbours_[neighbour].sending[frame]
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
void Links::free_if_done(Sending& frame) {
  if (frame.taken && frame.sent && frame.credited) set_free(frame);
}

void Links::set_free(Sending& frame) {
  frame.taken = frame.posted = false;
  --frames_in_use_;
}

// The bytes of a chunk that has arrived.
std::span<const std::byte> Links::open(int neighbour, unsigned frame) {
  const unsigned generation = neighbours_[at(neighbour)].receiving[frame].generation;
  const std::byte* const begin = memory_.data() + map_.place(true, neighbour, frame);
  Header header;
  std::memcpy(&header, begin, sizeof(header));
  if (header.generation != generation || header.bytes > config_.frame_bytes) {
    break_off(XD_ERROR_INTERNAL, neighbour,
              concat("frame ", frame, " has ", header.bytes, " bytes of use ", header.generation,
                     ", expected use ", generation, " and at most ", config_.frame_bytes));
  }
  return {begin + sizeof(header), header.bytes};
}

}  // namespace xd::net
