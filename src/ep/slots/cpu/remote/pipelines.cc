#include "ep/slots/cpu/remote/pipelines.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/remote/routes.h"

namespace xd::ep::cpu {

LlRemotePipeline::LlRemotePipeline(LlRemote& remote, Pipeline& pipeline, LlKind kind)
    : remote_(remote), pipeline_(pipeline), kind_(kind) {}

const std::vector<int>& LlRemotePipeline::ranks() const { return remote_.ranks_; }
Progress& LlRemotePipeline::progress() { return remote_; }
std::uint64_t LlRemotePipeline::stages() const { return at(remote_.group_.config().in_flight); }

LlRemoteKind LlRemotePipeline::kind_of(Part part) const {
  if (kind_ == LlKind::dispatch) return LlRemoteKind::dispatch;
  return part == Part::entry ? LlRemoteKind::combine : LlRemoteKind::sums;
}

// Each kind of message has as many frames as operations may be in flight.
unsigned LlRemotePipeline::frame_of(Part part, std::uint64_t epoch) const {
  const auto kind = static_cast<std::uint64_t>(kind_of(part)) - 1;
  return static_cast<unsigned>(kind * stages() + turn::stage_of(epoch, stages()));
}

bool LlRemotePipeline::has_place(int rank, std::uint64_t epoch) const {
  const net::Links& links = remote_.links_.links();
  for (std::size_t part = 0; part < parts(); ++part)
    if (!links.is_free(remote_.neighbour_of(rank), frame_of(static_cast<Part>(part), epoch)))
      return false;
  return true;
}

bool LlRemotePipeline::has_sent(int rank, std::uint64_t epoch) const {
  const net::Links& links = remote_.links_.links();
  for (std::size_t part = 0; part < parts(); ++part)
    if (!links.is_sent(remote_.neighbour_of(rank), frame_of(static_cast<Part>(part), epoch)))
      return false;
  return true;
}

std::byte* LlRemotePipeline::open(int rank, Part part) {
  const int neighbour = remote_.neighbour_of(rank);
  const auto frame = static_cast<int>(frame_of(part, pipeline_.sent()));
  net::Links::Frame& opened = open_[static_cast<std::size_t>(part)][at(neighbour)];
  remote_.with_links([&] {
    const auto taken = remote_.links_.links().take(neighbour, {.first = frame, .end = frame + 1});
    XD_CHECK(taken.has_value());
    opened = *taken;
  });
  return opened.bytes.data() + sizeof(LlRemoteHeader);
}

void LlRemotePipeline::send(int rank, Part part, std::uint64_t items, std::size_t bytes) {
  const net::Links::Frame& frame =
      open_[static_cast<std::size_t>(part)][at(remote_.neighbour_of(rank))];
  const LlRemoteHeader header{.epoch = pipeline_.sent(),
                              .kind = kind_of(part),
                              .source = remote_.comm_.rank(),
                              .items = static_cast<std::uint32_t>(items),
                              .item_bytes = 0,
                              .record = pipeline_.sent_record()};
  std::memcpy(frame.bytes.data(), &header, sizeof(header));
  remote_.with_links([&] { remote_.links_.links().send(frame, sizeof(header) + bytes); });
}

void LlRemotePipeline::send_record() {
  for (const int rank : ranks()) {
    open(rank, Part::entry);
    send(rank, Part::entry, 0, 0);
  }
}

const LlRemoteMessage* LlRemotePipeline::find(int rank, Part part, std::uint64_t epoch) const {
  const std::size_t place = turn::stage_of(epoch, stages()) * ranks().size();
  const Arrived& found =
      arrived_[static_cast<std::size_t>(part)][place + at(remote_.neighbour_of(rank))];
  return found.here && found.message.header.epoch == epoch ? &found.message : nullptr;
}

// An operation that this rank has left without its peers' messages, as its own call had failed: it
// has no use for them.
void LlRemotePipeline::take_in(const net::Links::Chunk& chunk, const LlRemoteMessage& message) {
  const std::uint64_t epoch = message.header.epoch;
  const Part part = message.header.kind == LlRemoteKind::sums ? Part::sums : Part::entry;
  if (chunk.frame != frame_of(part, epoch)) message.refuse("its frame is another operation's");
  if (part == Part::entry) ++entries_[at(chunk.neighbour)];
  if (epoch <= pipeline_.taken()) return remote_.links_.links().give_back(chunk);
  Arrived& place = arrived(static_cast<std::size_t>(part), epoch, chunk.neighbour);
  // Its place is free when this rank has taken the operation that was there.
  if (epoch > pipeline_.taken() + stages() || place.here) message.refuse("it is not expected yet");
  place = {.here = true, .chunk = chunk, .message = message};
  if (part == Part::entry)
    pipeline_.bring_entry(message.header.source, epoch, message.header.record);
}

bool LlRemotePipeline::has_all() const {
  return std::ranges::all_of(entries_, [&](std::uint64_t n) { return n >= pipeline_.sent(); });
}

void LlRemotePipeline::leave(std::uint64_t epoch) {
  remote_.with_links([&] {
    for (int p = 0; p < static_cast<int>(ranks().size()); ++p) {
      for (std::size_t part = 0; part < parts(); ++part) {
        Arrived& place = arrived(part, epoch, p);
        if (!std::exchange(place.here, false)) continue;
        remote_.links_.links().give_back(place.chunk);
      }
    }
  });
}

LlRemote::LlRemote(const LlGroup& group, Pipeline& dispatches, Pipeline& combines)
    : group_(group),
      comm_(group.comm()),
      ranks_(RemoteRoutes(comm_.machines()).remote_ranks()),
      links_(comm_, LlFamily::kCreate,
             {.neighbours = ranks_,
              .frames = kLlRemoteKinds * group.config().in_flight,
              .frame_bytes = longest_ll_message(group.config())}),
      pipelines_{LlRemotePipeline(*this, dispatches, LlKind::dispatch),
                 LlRemotePipeline(*this, combines, LlKind::combine)} {
  comm_.collective().agree(LlFamily::kCreate, [&] {
    neighbour_of_.resize(at(comm_.num_ranks()), -1);
    for (std::size_t p = 0; p < ranks_.size(); ++p)
      neighbour_of_[at(ranks_[p])] = static_cast<int>(p);
    for (LlRemotePipeline& pipeline : pipelines_) {
      pipeline.entries_.resize(ranks_.size());
      for (std::size_t part = 0; part < pipeline.parts(); ++part) {
        pipeline.open_[part].resize(ranks_.size());
        pipeline.arrived_[part].resize(pipeline.stages() * ranks_.size());
      }
    }
    dispatches.reach(pipelines_[0]);
    combines.reach(pipelines_[1]);
    return Collective::Contribution{};
  });
}

// Peers may still be in the last operation, with messages or credits for this rank, so it stays a
// while: an engine may report a rank that has gone as failed. It stays a moment more for its own
// credits, which peers may take in much later.
LlRemote::~LlRemote() {
  constexpr int kForPeersMs = 5000, kForCreditsMs = 1000;
  if (comm_.errors().in_fork()) {
    links_.leave_behind();
    return;
  }
  net::Links& links = links_.links();
  linger(kForPeersMs,
         [&] { return links.all_read() && pipelines_[0].has_all() && pipelines_[1].has_all(); });
  linger(kForCreditsMs, [&] { return links.at_rest(); });
  // libfabric's providers for TCP may crash where they are closed while a long message arrives.
  if (!links.at_rest() || !pipelines_[0].has_all() || !pipelines_[1].has_all())
    links_.keep_for_good();
}

template <class Done>
void LlRemote::linger(int longest_ms, Done&& done) noexcept {
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

bool LlRemote::poll() {
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

bool LlRemote::is_busy() {
  bool busy = false;
  with_links([&] { busy = links_.links().sleep_on() < 0; });
  return busy;
}

void LlRemote::take_in_all() {
  for (int p = 0; p < static_cast<int>(ranks_.size()); ++p) {
    while (const auto chunk = links_.links().next(p)) {
      const LlRemoteMessage message = LlRemoteMessage::read(chunk->bytes, ranks_[at(p)]);
      const LlKind kind =
          message.header.kind == LlRemoteKind::dispatch ? LlKind::dispatch : LlKind::combine;
      pipeline(kind).take_in(*chunk, message);
    }
  }
}

void LlRemote::push() {
  constexpr int kMomentMs = 1;
  HostWait site = *site_;
  site.deadline = Deadline::after_ms(kMomentMs);
  site.progress = this;
  comm_.wait(comm_.rank(), site, [this] { return !links_.links().holds_back(); });
}

}  // namespace xd::ep::cpu
