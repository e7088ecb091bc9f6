#include "ep/bulk/cpu/remote/relay.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "ep/bulk/cpu/lockstep.h"

namespace xd::ep::cpu {

RemoteSide::RemoteSide(const Group& group, Lockstep& lockstep, std::unique_ptr<net::Engine> engine)
    : group_(group),
      lockstep_(lockstep),
      comm_(group.comm()),
      window_(
          remote_window(group.config(), most_neighbours(comm_.machines()),
                        engine->buffers_puts() ? kFewestDirectionFrames : kMostDirectionFrames)),
      routes_(comm_.machines()),
      links_(comm_, Family::kCreate,
             {.neighbours = routes_.neighbours(),
              .frames = kDirections * window_.frames,
              .frame_bytes = window_.frame_bytes},
             std::move(engine)),
      lists_(at(group.config().ranks)) {
  comm_.collective().agree(Family::kCreate, [this] {
    const std::size_t neighbours = routes().neighbours().size();
    chunks_.resize(neighbours * kDirections * at(window_.frames));
    partners_.resize(neighbours);
    next_chunks_.resize(neighbours);
    announced_.resize(neighbours);
    counts_seen_.resize(neighbours);
    items_.of_relay.resize(neighbours);
    items_.chunks.resize(neighbours);
    for (const int rank : ranks()) {
      if (!group_.config_of(rank).keeps.lists) continue;
      lists_[at(rank)].resize(GroupMap::list_words(group_.config()));
    }
    return Collective::Contribution{};
  });
}

RemoteSide::~RemoteSide() {
  if (comm_.errors().in_fork()) links_.leave_behind();
}

// The last frames, so that the operation's first chunks need not wait for them.
void RemoteSide::enter(const Record& record) {
  tell_relays(RemoteKind::entry, window_.frames - 1, 1, std::as_bytes(std::span(&record, 1)));
  std::ranges::fill(next_chunks_, 0U);
}

void RemoteSide::send_counts(std::span<const std::uint32_t> counts) {
  tell_relays(RemoteKind::counts, window_.frames - 2, static_cast<std::uint32_t>(counts.size()),
              std::as_bytes(counts));
}

// An operation's announcements find their frames free, since this rank has ended the operation
// before, where it was at rest.
void RemoteSide::tell_relays(RemoteKind kind, int frame, std::uint32_t items,
                             std::span<const std::byte> bytes) {
  with_links([&] {
    for (const int machine : routes().remote_machines()) {
      const int relay = routes().relay(machine);
      const net::Links::Frame to = take_frame(relay, Direction::to_relay, frame);
      std::memcpy(to.bytes.data() + sizeof(RemoteHeader), bytes.data(), bytes.size());
      send(to, kind, {items, bytes.size()}, next_chunks_[at(relay)]);
    }
  });
}

void RemoteSide::announce(std::span<const std::uint32_t> chunks) {
  std::ranges::copy(chunks, next_chunks_.begin());
}

// A rank whose prepare is good sends its counts, whether or not others agree.
bool RemoteSide::lacks_counts(int source) const {
  const turn::Call& call = lockstep_.record_of(routes().neighbours()[at(source)]).call;
  const bool sends = call.operation == XD_EP_PREPARE && call.status == XD_SUCCESS;
  return sends && counts_seen_[at(source)] < lockstep_.epoch();
}

bool RemoteSide::at_rest() const {
  return links_.links().at_rest() && std::ranges::none_of(routes().sources(), [this](int source) {
           return lacks_counts(source);
         });
}

int RemoteSide::late() const {
  int neighbour = links_.links().first_unread();
  for (const int source : routes().sources())
    if (neighbour < 0 && lacks_counts(source)) neighbour = source;
  return neighbour < 0 ? -1 : routes().neighbours()[at(neighbour)];
}

net::Links::Frame RemoteSide::take_frame(int neighbour, Direction direction, int frame) {
  const int place = static_cast<int>(place_of(direction, frame));
  const auto taken = links_.links().take(neighbour, {.first = place, .end = place + 1});
  XD_CHECK(taken.has_value());
  return *taken;
}

void RemoteSide::send(const net::Links::Frame& frame, RemoteKind kind, RemoteHands::Filled filled,
                      std::uint32_t chunks) {
  const RemoteHeader header{.epoch = lockstep_.epoch(),
                            .kind = kind,
                            .source = comm_.rank(),
                            .items = filled.items,
                            .chunks = chunks,
                            .tokens = 0,
                            .found_missing = 0};
  std::memcpy(frame.bytes.data(), &header, sizeof(header));
  links_.links().send(frame, sizeof(header) + filled.bytes);
}

void RemoteSide::begin(RemoteHands& hands, RemoteKind kind, std::span<const std::uint32_t> chunks) {
  site_ = lockstep_.site(XD_PHASE_ROWS);
  kind_ = kind;
  const int neighbours = static_cast<int>(partners_.size());
  desk_.emplace(partners_.data(), neighbours, window_.frames, kind == RemoteKind::request);
  for (int p = 0; p < neighbours; ++p) desk_->send(p, chunks[at(p)]);
  with_links([this] {
    for (const int source : routes().sources()) desk_->expect(source, announced_by(source));
    for (const auto& chunk : chunks_)
      if (chunk) land(*chunk);
  });
  hands_ = &hands;
}

// The chunks of this operation; only of words their number may be unknown.
std::uint32_t RemoteSide::announced_by(int source) const {
  const std::uint32_t chunks = announced_[at(source)][turn::stage_of(lockstep_.epoch())];
  if (chunks != kUnknownChunks || kind_ == RemoteKind::words) return chunks;
  refuse_chunk({.epoch = lockstep_.epoch(),
                .kind = RemoteKind::entry,
                .source = routes().neighbours()[at(source)],
                .items = 1,
                .chunks = chunks,
                .tokens = 0,
                .found_missing = 0},
               sizeof(Record), "its operation knows how many chunks follow");
}

void RemoteSide::finish() {
  comm_.wait_for(
      comm_.rank(), *site_, [&] { return desk_->is_done(); }, [&] { return site_->epoch - 1; },
      [&] {
        const int partner = desk_->first_awaited();
        return partner < 0 ? -1 : routes().neighbours()[at(partner)];
      });
  finished_epoch_ = lockstep_.epoch();
}

// Between two units the network goes on, but chunks may come as fast as units are done: the caller
// is to see its deadline, and whatever else ends its wait.
bool RemoteSide::poll() {
  constexpr int kMostUnits = 16;
  bool news = false;
  with_links([&] {
    net::Links& links = links_.links();
    bool worked = true;
    for (int units = 0; worked && units < kMostUnits; ++units) {
      news |= links.poll();
      for (int p = 0; p < static_cast<int>(routes().neighbours().size()); ++p)
        while (const auto chunk = links.next(p)) take_in(*chunk);
      worked = hands_ != nullptr && do_unit();
      news |= worked;
    }
    // Nothing is put between the last look of an operation and its end.
    group_.subject().counters().net_puts.set(links.sent().puts);
    group_.subject().counters().net_bytes.set(links.sent().bytes);
  });
  return news;
}

bool RemoteSide::do_unit() {
  net::Links& links = links_.links();
  for (int p = 0; p < static_cast<int>(partners_.size()); ++p) {
    for (const Direction direction : {Direction::to_relay, Direction::to_source}) {
      const int frame = desk_->awaited_frame(p, direction);
      if (frame < 0) continue;
      if (links.is_free(p, place_of(direction, frame))) desk_->freed(p, direction, frame);
    }
  }
  const DeskUnit unit = desk_->next();
  if (unit.work == DeskUnit::nothing) return false;
  const int frame = desk_->frame_of(unit.chunk);
  std::optional<RemoteChunk> come;
  if (unit.reads()) come.swap(chunk_in(unit.partner, place_of(unit.read_from(), frame)));
  std::optional<net::Links::Frame> out;
  if (unit.fills()) out = take_frame(unit.partner, unit.fills_for(), frame);
  const RemoteHands::Filled filled = hands_->work(
      unit, come ? &*come : nullptr, out ? out->bytes.data() + sizeof(RemoteHeader) : nullptr);
  if (out) {
    send(*out, unit.work == DeskUnit::fill ? kind_ : RemoteKind::answer, filled,
         desk_->chunks(unit.partner, unit.fills_for()));
  }
  if (come) links.give_back(come->chunk);
  desk_->finished(unit);
  return true;
}

bool RemoteSide::is_busy() {
  bool busy = false;
  with_links([&] { busy = links_.links().sleep_on() < 0; });
  return busy;
}

// Entries and counts go into memory of their epoch, which near ranks have done with: their rank
// entered this operation after it had seen the entries of all ranks to the one before.
void RemoteSide::take_in(const net::Links::Chunk& chunk) {
  const RemoteHeader header =
      read_header(chunk.bytes, routes().neighbours()[at(chunk.neighbour)], lockstep_.epoch());
  const auto items = chunk.bytes.subspan(sizeof(header));
  if (header.kind == RemoteKind::entry) {
    Record record;
    if (items.size() != sizeof(record)) refuse_chunk(header, items.size(), "it is no entry");
    std::memcpy(&record, items.data(), sizeof(record));
    announced_[at(chunk.neighbour)][turn::stage_of(header.epoch)] = header.chunks;
    lockstep_.bring_entry(header.source, header.epoch, record);
  } else if (header.kind == RemoteKind::counts) {
    const CountLayout layout{group_.config().experts, group_.config().ranks};
    if (items.size() != layout.size() * sizeof(std::uint32_t))
      refuse_chunk(header, items.size(), "it is no row of counts");
    lockstep_.bring_counts(header.source, header.epoch,
                           {reinterpret_cast<const std::uint32_t*>(items.data()), layout.size()});
    counts_seen_[at(chunk.neighbour)] = header.epoch;
  } else {
    if (header.epoch == finished_epoch_) refuse_chunk(header, items.size(), "all have been read");
    auto& come = chunk_in(chunk.neighbour, chunk.frame);
    come = {.chunk = chunk, .header = header};
    if (hands_ != nullptr) land(*come);
    return;
  }
  links_.links().give_back(chunk);
}

void RemoteSide::land(const RemoteChunk& chunk) {
  const RemoteHeader& header = chunk.header;
  const auto refuse = [&](const char* why) { refuse_chunk(header, chunk.items().size(), why); };
  if (header.epoch != lockstep_.epoch()) refuse("an operation has ended without it");
  const auto frames = static_cast<unsigned>(window_.frames);
  const auto direction = static_cast<Direction>(chunk.chunk.frame / frames);
  if (header.kind != (direction == Direction::to_relay ? kind_ : RemoteKind::answer))
    refuse("this operation has no such kind");
  const int frame = static_cast<int>(chunk.chunk.frame % frames);
  if (!desk_->landed(chunk.chunk.neighbour, direction, frame, header.chunks))
    refuse("its sender has announced others");
}

template <class Body>
void RemoteSide::with_links(Body&& body) {
  RemoteLinks::use(
      comm_, [this] { return lockstep_.site(XD_PHASE_ROWS); }, std::forward<Body>(body));
}

}  // namespace xd::ep::cpu
