#include "ep/bulk/cpu/remote/relay.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "ep/bulk/cpu/lockstep.h"

namespace xd::ep::cpu {
namespace {

constexpr int kToRelay = kRemoteFrames / 2;  // the other frames are for answers

}  // namespace

RemoteSide::RemoteSide(const Group& group, Lockstep& lockstep)
    : group_(group),
      lockstep_(lockstep),
      comm_(group.comm()),
      frame_bytes_(remote_frame_bytes(group.config(), comm_.machines().num_hosts())),
      routes_(comm_.machines()),
      links_(comm_, Family::kCreate,
             {.neighbours = routes_.neighbours(),
              .frames = kRemoteFrames,
              .frame_bytes = frame_bytes_}),
      lists_(at(group.config().ranks)) {
  comm_.collective().agree(Family::kCreate, [this] {
    chunks_.reserve(at(kRemoteFrames) * routes().neighbours().size());
    counts_seen_.resize(routes().neighbours().size());
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

void RemoteSide::enter(const Record& record) {
  announce(RemoteKind::entry, 1, std::as_bytes(std::span(&record, 1)));
}

void RemoteSide::send_counts(std::span<const std::uint32_t> counts) {
  announce(RemoteKind::counts, static_cast<std::uint32_t>(counts.size()), std::as_bytes(counts));
}

// An operation's announcements find their frames free, since this rank has ended the operation
// before, where it was at rest.
void RemoteSide::announce(RemoteKind kind, std::uint32_t items, std::span<const std::byte> bytes) {
  with_links([&] {
    for (const int machine : routes().remote_machines()) {
      const auto frame = take_frame(routes().relay(machine), Direction::to_relay);
      XD_CHECK(frame.has_value());
      std::memcpy(items_of(*frame), bytes.data(), bytes.size());
      send(*frame, kind, items, 0, bytes.size());
    }
  });
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

std::optional<net::Links::Frame> RemoteSide::take_frame(int neighbour, Direction direction) {
  std::optional<net::Links::Frame> frame;
  with_links([&] {
    frame = direction == Direction::to_relay
                ? links_.links().take(neighbour, {.first = 0, .end = kToRelay})
                : links_.links().take(neighbour, {.first = kToRelay, .end = kRemoteFrames});
  });
  return frame;
}

void RemoteSide::send(const net::Links::Frame& frame, RemoteKind kind, std::uint32_t items,
                      std::uint32_t chunks, std::size_t used) {
  const RemoteHeader header{.epoch = lockstep_.epoch(),
                            .kind = kind,
                            .source = comm_.rank(),
                            .items = items,
                            .chunks = chunks,
                            .tokens = 0,
                            .found_missing = 0};
  std::memcpy(frame.bytes.data(), &header, sizeof(header));
  with_links([&] { links_.links().send(frame, sizeof(header) + used); });
}

void RemoteSide::begin(ChunkSink& work) {
  site_ = lockstep_.site(XD_PHASE_ROWS);
  work_ = &work;
}

bool RemoteSide::poll() {
  bool news = false;
  with_links([&] {
    net::Links& links = links_.links();
    news = links.poll();
    for (int p = 0; p < static_cast<int>(routes().neighbours().size()); ++p)
      while (const auto chunk = links.next(p)) take_in(*chunk);
    if (work_ != nullptr) serve();
    // Nothing is put between the last look of an operation and its end.
    group_.subject().counters().net_puts.set(links.sent().puts);
    group_.subject().counters().net_bytes.set(links.sent().bytes);
  });
  return news;
}

bool RemoteSide::is_busy() {
  bool busy = false;
  with_links([&] { busy = links_.links().sleep_on() < 0; });
  return busy;
}

// Entries and counts go into frames of their epoch, which near ranks have done with: their rank
// entered this operation after it had seen the entries of all ranks to the one before.
void RemoteSide::take_in(const net::Links::Chunk& chunk) {
  const RemoteHeader header =
      read_header(chunk.bytes, routes().neighbours()[at(chunk.neighbour)], lockstep_.epoch());
  const auto items = chunk.bytes.subspan(sizeof(header));
  if (header.kind == RemoteKind::entry) {
    Record record;
    if (items.size() != sizeof(record)) refuse_chunk(header, items.size(), "it is no entry");
    std::memcpy(&record, items.data(), sizeof(record));
    lockstep_.bring_entry(header.source, header.epoch, record);
  } else if (header.kind == RemoteKind::counts) {
    const CountLayout layout{group_.config().experts, group_.config().ranks};
    if (items.size() != layout.size() * sizeof(std::uint32_t))
      refuse_chunk(header, items.size(), "it is no row of counts");
    lockstep_.bring_counts(header.source, header.epoch,
                           {reinterpret_cast<const std::uint32_t*>(items.data()), layout.size()});
    counts_seen_[at(chunk.neighbour)] = header.epoch;
  } else {
    chunks_.push_back({.chunk = chunk, .header = header});
    return;
  }
  links_.links().give_back(chunk);
}

void RemoteSide::serve() {
  for (std::size_t i = 0; i < chunks_.size();) {
    RemoteChunk& chunk = chunks_[i];
    if (chunk.header.epoch != lockstep_.epoch())
      refuse_chunk(chunk.header, chunk.items().size(), "an operation has ended without it");
    if (!work_->take(chunk)) {
      ++i;
      continue;
    }
    links_.links().give_back(chunk.chunk);
    chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

template <class Body>
void RemoteSide::with_links(Body&& body) {
  RemoteLinks::use(
      comm_, [this] { return lockstep_.site(XD_PHASE_ROWS); }, std::forward<Body>(body));
}

}  // namespace xd::ep::cpu
