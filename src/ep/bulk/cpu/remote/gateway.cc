#include "ep/bulk/cpu/remote/gateway.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "ep/bulk/cpu/lockstep.h"

namespace xd::ep::cpu {
namespace {

constexpr int kToGateway = kFarSlots / 2;  // the other slots are for answers

}  // namespace

FarSide::FarSide(const Group& group, Lockstep& lockstep)
    : group_(group),
      lockstep_(lockstep),
      comm_(group.comm()),
      slot_bytes_(far_slot_bytes(group.config(), comm_.machines().num_hosts())),
      routes_(comm_.machines()),
      links_(comm_, Family::kCreate,
             {.partners = routes_.partners(), .slots = kFarSlots, .slot_bytes = slot_bytes_}),
      lists_(at(group.config().ranks)) {
  comm_.collective().agree(Family::kCreate, [this] {
    chunks_.reserve(at(kFarSlots) * routes().partners().size());
    counts_seen_.resize(routes().partners().size());
    for (const int rank : ranks()) {
      if (!group_.config_of(rank).keeps.lists) continue;
      lists_[at(rank)].resize(GroupMap::list_words(group_.config()));
    }
    return Collective::Contribution{};
  });
}

FarSide::~FarSide() {
  if (comm_.errors().in_fork()) links_.leave_behind();
}

void FarSide::enter(const Record& record) {
  announce(FarKind::entry, 1, std::as_bytes(std::span(&record, 1)));
}

void FarSide::send_counts(std::span<const std::uint32_t> counts) {
  announce(FarKind::counts, static_cast<std::uint32_t>(counts.size()), std::as_bytes(counts));
}

// What an operation announces finds its slots free, since this rank has ended the operation before,
// where it was at rest.
void FarSide::announce(FarKind kind, std::uint32_t items, std::span<const std::byte> bytes) {
  with_links([&] {
    for (const int machine : routes().far_machines()) {
      const auto slot = take_slot(routes().gateway(machine), Lane::to_gateway);
      XD_CHECK(slot.has_value());
      std::memcpy(items_of(*slot), bytes.data(), bytes.size());
      send(*slot, kind, items, 0, bytes.size());
    }
  });
}

// A rank whose prepare is good sends its counts, whether or not others agree.
bool FarSide::lacks_counts(int source) const {
  const turn::Call& call = lockstep_.record_of(routes().partners()[at(source)]).call;
  const bool sends = call.operation == XD_EP_PREPARE && call.status == XD_SUCCESS;
  return sends && counts_seen_[at(source)] < lockstep_.epoch();
}

bool FarSide::at_rest() const {
  return links_.links().at_rest() && std::ranges::none_of(routes().sources(), [this](int source) {
           return lacks_counts(source);
         });
}

int FarSide::late() const {
  int partner = links_.links().first_unread();
  for (const int source : routes().sources())
    if (partner < 0 && lacks_counts(source)) partner = source;
  return partner < 0 ? -1 : routes().partners()[at(partner)];
}

std::optional<net::Links::Slot> FarSide::take_slot(int partner, Lane lane) {
  std::optional<net::Links::Slot> slot;
  with_links([&] {
    slot = lane == Lane::to_gateway
               ? links_.links().take(partner, {.first = 0, .end = kToGateway})
               : links_.links().take(partner, {.first = kToGateway, .end = kFarSlots});
  });
  return slot;
}

void FarSide::send(const net::Links::Slot& slot, FarKind kind, std::uint32_t items,
                   std::uint32_t chunks, std::size_t used) {
  const FarHeader header{.epoch = lockstep_.epoch(),
                         .kind = kind,
                         .source = comm_.rank(),
                         .items = items,
                         .chunks = chunks,
                         .tokens = 0,
                         .found_missing = 0};
  std::memcpy(slot.bytes.data(), &header, sizeof(header));
  with_links([&] { links_.links().send(slot, sizeof(header) + used); });
}

void FarSide::begin(FarWork& work) {
  site_ = lockstep_.site(XD_PHASE_ROWS);
  work_ = &work;
}

bool FarSide::poll() {
  bool news = false;
  with_links([&] {
    net::Links& links = links_.links();
    news = links.poll();
    for (int p = 0; p < static_cast<int>(routes().partners().size()); ++p)
      while (const auto chunk = links.next(p)) take_in(*chunk);
    if (work_ != nullptr) serve();
    // Nothing is put between the last look of an operation and its end.
    group_.subject().counters().net_puts.set(links.sent().puts);
    group_.subject().counters().net_bytes.set(links.sent().bytes);
  });
  return news;
}

bool FarSide::is_busy() {
  bool busy = false;
  with_links([&] { busy = links_.links().sleep_on() < 0; });
  return busy;
}

// Entries and counts go into slots of their epoch, which near ranks have done with: their rank
// entered this operation after it had seen the entries of all ranks to the one before.
void FarSide::take_in(const net::Links::Chunk& chunk) {
  const FarHeader header =
      read_header(chunk.bytes, routes().partners()[at(chunk.partner)], lockstep_.epoch());
  const auto items = chunk.bytes.subspan(sizeof(header));
  if (header.kind == FarKind::entry) {
    Record record;
    if (items.size() != sizeof(record)) refuse_chunk(header, items.size(), "it is no entry");
    std::memcpy(&record, items.data(), sizeof(record));
    lockstep_.bring_entry(header.source, header.epoch, record);
  } else if (header.kind == FarKind::counts) {
    const CountLayout layout{group_.config().experts, group_.config().ranks};
    if (items.size() != layout.size() * sizeof(std::uint32_t))
      refuse_chunk(header, items.size(), "it is no row of counts");
    lockstep_.bring_counts(header.source, header.epoch,
                           {reinterpret_cast<const std::uint32_t*>(items.data()), layout.size()});
    counts_seen_[at(chunk.partner)] = header.epoch;
  } else {
    chunks_.push_back({.chunk = chunk, .header = header});
    return;
  }
  links_.links().give_back(chunk);
}

void FarSide::serve() {
  for (std::size_t i = 0; i < chunks_.size();) {
    FarChunk& chunk = chunks_[i];
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
void FarSide::with_links(Body&& body) {
  FarLinks::use(
      comm_, [this] { return lockstep_.site(XD_PHASE_ROWS); }, std::forward<Body>(body));
}

}  // namespace xd::ep::cpu
