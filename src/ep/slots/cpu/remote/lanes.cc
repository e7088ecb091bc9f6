#include "ep/slots/cpu/remote/lanes.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/remote/routes.h"

namespace xd::ep::cpu {

LlFarLane::LlFarLane(LlFar& far, Lane& lane, LlKind kind) : far_(far), lane_(lane), kind_(kind) {}

const std::vector<int>& LlFarLane::ranks() const { return far_.ranks_; }
Progress& LlFarLane::progress() { return far_; }
std::uint64_t LlFarLane::slots() const { return at(far_.group_.config().in_flight); }

LlFarKind LlFarLane::kind_of(Part part) const {
  if (kind_ == LlKind::dispatch) return LlFarKind::dispatch;
  return part == Part::entry ? LlFarKind::combine : LlFarKind::sums;
}

// Each kind of message has as many slots as operations may be in flight.
unsigned LlFarLane::slot_of(Part part, std::uint64_t epoch) const {
  const auto kind = static_cast<std::uint64_t>(kind_of(part)) - 1;
  return static_cast<unsigned>(kind * slots() + turn::slot_of(epoch, slots()));
}

bool LlFarLane::has_place(int rank, std::uint64_t epoch) const {
  const net::Links& links = far_.links_.links();
  for (std::size_t part = 0; part < parts(); ++part)
    if (!links.is_free(far_.partner_of(rank), slot_of(static_cast<Part>(part), epoch)))
      return false;
  return true;
}

bool LlFarLane::has_sent(int rank, std::uint64_t epoch) const {
  const net::Links& links = far_.links_.links();
  for (std::size_t part = 0; part < parts(); ++part)
    if (!links.is_sent(far_.partner_of(rank), slot_of(static_cast<Part>(part), epoch)))
      return false;
  return true;
}

std::byte* LlFarLane::open(int rank, Part part) {
  const int partner = far_.partner_of(rank);
  const auto slot = static_cast<int>(slot_of(part, lane_.sent()));
  net::Links::Slot& opened = open_[static_cast<std::size_t>(part)][at(partner)];
  far_.with_links([&] {
    const auto taken = far_.links_.links().take(partner, {.first = slot, .end = slot + 1});
    XD_CHECK(taken.has_value());
    opened = *taken;
  });
  return opened.bytes.data() + sizeof(LlFarHeader);
}

void LlFarLane::send(int rank, Part part, std::uint64_t items, std::size_t bytes) {
  const net::Links::Slot& slot = open_[static_cast<std::size_t>(part)][at(far_.partner_of(rank))];
  const LlFarHeader header{.epoch = lane_.sent(),
                           .kind = kind_of(part),
                           .source = far_.comm_.rank(),
                           .items = static_cast<std::uint32_t>(items),
                           .unused = 0,
                           .record = lane_.sent_record()};
  std::memcpy(slot.bytes.data(), &header, sizeof(header));
  far_.with_links([&] { far_.links_.links().send(slot, sizeof(header) + bytes); });
}

void LlFarLane::send_record() {
  for (const int rank : ranks()) {
    open(rank, Part::entry);
    send(rank, Part::entry, 0, 0);
  }
}

const LlFarMessage* LlFarLane::find(int rank, Part part, std::uint64_t epoch) const {
  const std::size_t place = turn::slot_of(epoch, slots()) * ranks().size();
  const Arrived& found =
      arrived_[static_cast<std::size_t>(part)][place + at(far_.partner_of(rank))];
  return found.here && found.message.header.epoch == epoch ? &found.message : nullptr;
}

// An operation that this rank has left without its peers' messages, as its own call had failed: it
// has no use for them.
void LlFarLane::take_in(const net::Links::Chunk& chunk, const LlFarMessage& message) {
  const std::uint64_t epoch = message.header.epoch;
  const Part part = message.header.kind == LlFarKind::sums ? Part::sums : Part::entry;
  if (chunk.slot != slot_of(part, epoch)) message.refuse("its slot is another operation's");
  if (part == Part::entry) ++entries_[at(chunk.partner)];
  if (epoch <= lane_.taken()) return far_.links_.links().give_back(chunk);
  Arrived& place = arrived(static_cast<std::size_t>(part), epoch, chunk.partner);
  // Its place is free when this rank has taken the operation that was there.
  if (epoch > lane_.taken() + slots() || place.here) message.refuse("it is not expected yet");
  place = {.here = true, .chunk = chunk, .message = message};
  if (part == Part::entry) lane_.bring_entry(message.header.source, epoch, message.header.record);
}

bool LlFarLane::has_all() const {
  return std::ranges::all_of(entries_, [&](std::uint64_t n) { return n >= lane_.sent(); });
}

void LlFarLane::leave(std::uint64_t epoch) {
  far_.with_links([&] {
    for (int p = 0; p < static_cast<int>(ranks().size()); ++p) {
      for (std::size_t part = 0; part < parts(); ++part) {
        Arrived& place = arrived(part, epoch, p);
        if (!std::exchange(place.here, false)) continue;
        far_.links_.links().give_back(place.chunk);
      }
    }
  });
}

LlFar::LlFar(const LlGroup& group, Lane& dispatches, Lane& combines)
    : group_(group),
      comm_(group.comm()),
      ranks_(FarRoutes(comm_.machines()).far_ranks()),
      links_(comm_, LlFamily::kCreate,
             {.partners = ranks_,
              .slots = kLlFarKinds * group.config().in_flight,
              .slot_bytes = longest_ll_message(group.config())}),
      lanes_{LlFarLane(*this, dispatches, LlKind::dispatch),
             LlFarLane(*this, combines, LlKind::combine)} {
  comm_.collective().agree(LlFamily::kCreate, [&] {
    partner_of_.resize(at(comm_.num_ranks()), -1);
    for (std::size_t p = 0; p < ranks_.size(); ++p)
      partner_of_[at(ranks_[p])] = static_cast<int>(p);
    for (LlFarLane& lane : lanes_) {
      lane.entries_.resize(ranks_.size());
      for (std::size_t part = 0; part < lane.parts(); ++part) {
        lane.open_[part].resize(ranks_.size());
        lane.arrived_[part].resize(lane.slots() * ranks_.size());
      }
    }
    dispatches.reach(lanes_[0]);
    combines.reach(lanes_[1]);
    return Collective::Contribution{};
  });
}

// Peers may still be in the last operation, with messages or credits for this rank, so it stays a
// while: an engine may report a rank that has gone as failed. It stays a moment more for its own
// credits, which peers may take in much later.
LlFar::~LlFar() {
  constexpr int kForPeersMs = 5000, kForCreditsMs = 1000;
  if (comm_.errors().in_fork()) {
    links_.leave_behind();
    return;
  }
  net::Links& links = links_.links();
  linger(kForPeersMs,
         [&] { return links.all_read() && lanes_[0].has_all() && lanes_[1].has_all(); });
  linger(kForCreditsMs, [&] { return links.at_rest(); });
  // libfabric's providers for TCP may crash where they are closed while a long message arrives.
  if (!links.at_rest() || !lanes_[0].has_all() || !lanes_[1].has_all()) links_.keep_for_good();
}

template <class Done>
void LlFar::linger(int longest_ms, Done&& done) noexcept {
  try {
    net::Links& links = links_.links();
    const auto deadline = Deadline::after_ms(std::min(longest_ms, comm_.timeout_ms()));
    links.wait_for(deadline, -1, "its last operation", [&] {
      take_in_all();
      const int unread = links.first_unread();
      const bool in_vain = unread >= 0 && comm_.errors().lost(ranks_[at(unread)]);
      return done() || in_vain || comm_.errors().fatal_error() != nullptr;
    });
  } catch (...) {
    return;  // a peer takes in nothing any more, or later
  }
}

bool LlFar::poll() {
  bool news = false;
  with_links([&] {
    const net::Links& links = links_.links();
    news = links_.links().poll();
    take_in_all();
    group_.subject().counters().net_puts.set(links.sent().puts);
    group_.subject().counters().net_bytes.set(links.sent().bytes);
  });
  return news;
}

bool LlFar::is_busy() {
  bool busy = false;
  with_links([&] { busy = links_.links().sleep_on() < 0; });
  return busy;
}

void LlFar::take_in_all() {
  for (int p = 0; p < static_cast<int>(ranks_.size()); ++p) {
    while (const auto chunk = links_.links().next(p)) {
      const LlFarMessage message = LlFarMessage::read(chunk->bytes, ranks_[at(p)]);
      const LlKind kind =
          message.header.kind == LlFarKind::dispatch ? LlKind::dispatch : LlKind::combine;
      lane(kind).take_in(*chunk, message);
    }
  }
}

void LlFar::push() {
  constexpr int kMomentMs = 1;
  HostWait site = *site_;
  site.deadline = Deadline::after_ms(kMomentMs);
  site.progress = this;
  comm_.wait(comm_.rank(), site, [this] { return !links_.links().holds_back(); });
}

}  // namespace xd::ep::cpu
