#include "ep/slots/cpu/remote/pipelines.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/remote/routes.h"

namespace xd::ep::cpu {
namespace {

constexpr std::uint64_t kNever = UINT64_MAX;

int first_reset_frame(const LlConfig& config) { return kLlRemoteKinds * config.in_flight; }

}  // namespace

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
  LlRemoteHeader header{.epoch = pipeline_.sent(),
                        .kind = kind_of(part),
                        .source = remote_.comm_.rank(),
                        .items = static_cast<std::uint32_t>(items),
                        .item_bytes = 0,
                        .record = pipeline_.sent_record()};
  header.record.mask = header.record.mask | remote_.masks_.left_out();
  std::memcpy(frame.bytes.data(), &header, sizeof(header));
  remote_.with_links([&] { remote_.links_.links().send(frame, sizeof(header) + bytes); });
}

void LlRemotePipeline::send_record() {
  for_company([this](int rank) {
    open(rank, Part::entry);
    send(rank, Part::entry, 0, 0);
  });
}

void LlRemotePipeline::tell_outsider(int rank) {
  Outsider& outsider = outsiders_[at(rank)];
  if (outsider.since == 0) outsider = {.since = pipeline_.sent(), .frame = kUntold};
  try_to_tell(rank);
}

// Once is enough, until both are in a reset. Such a message has the operations in a row that go
// without the rank in the place of its items.
void LlRemotePipeline::try_to_tell(int rank) {
  Outsider& outsider = outsiders_[at(rank)];
  if (outsider.since == 0 || outsider.frame != kUntold) return;
  const unsigned frame = frame_of(Part::entry, pipeline_.sent());
  if (pipeline_.company().has(rank)) return;  // which has been unmasked without a reset
  if (!remote_.links_.links().is_free(remote_.neighbour_of(rank), frame)) return;
  open(rank, Part::entry);
  send(rank, Part::entry, pipeline_.sent() - outsider.since + 1, 0);
  outsider.frame = frame;
}

bool LlRemotePipeline::is_telling(int rank, std::uint64_t epoch) const {
  const Outsider& outsider = outsiders_[at(rank)];
  const net::Links& links = remote_.links_.links();
  const int neighbour = remote_.neighbour_of(rank);
  if (outsider.since != epoch || links.is_lost(neighbour)) return false;
  return outsider.frame == kUntold || !links.is_sent(neighbour, outsider.frame);
}

// The message's sender leaves this rank out, or is out of step with it. A message of try_to_tell()
// says since when; senders of others have not been in a reset since.
void LlRemotePipeline::note_left_out(const LlRemoteMessage& message) {
  const LlRemoteHeader& header = message.header;
  const std::uint64_t operations = message.body.empty() && header.items > 0 ? header.items : 1;
  std::uint64_t& from = left_out_from_[at(header.source)];
  from = std::min(from, header.epoch - std::min(operations, header.epoch) + 1);
  remote_.masks_.note_masked_by(header.source);
}

const LlRemoteMessage* LlRemotePipeline::find(int rank, Part part, std::uint64_t epoch) const {
  const std::size_t place = turn::stage_of(epoch, stages()) * ranks().size();
  const Arrived& found =
      arrived_[static_cast<std::size_t>(part)][place + at(remote_.neighbour_of(rank))];
  return found.here && found.message.header.epoch == epoch ? &found.message : nullptr;
}

// Takes note of what a message says of its sender, and returns whether it is of use. It is not if
// this rank has left its operation without it, as its own call had failed; nor, in groups that
// mask, if its sender is left out, or leaves this rank out.
bool LlRemotePipeline::hear(const LlRemoteMessage& message) {
  const std::uint64_t epoch = message.header.epoch;
  const bool is_past = epoch <= pipeline_.taken();
  if (!remote_.masks_.masks_lost_peers() || resetting_ || epoch <= base_) return !is_past;
  const bool leaves_out = message.header.record.mask.has(remote_.comm_.rank());
  const bool too_early = epoch > pipeline_.taken() + stages();
  if (leaves_out || too_early) note_left_out(message);
  return !is_past && !leaves_out && pipeline_.expects(message.header.source, epoch);
}

void LlRemotePipeline::take_in(const net::Links::Chunk& chunk, const LlRemoteMessage& message) {
  const std::uint64_t epoch = message.header.epoch;
  const Part part = message.header.kind == LlRemoteKind::sums ? Part::sums : Part::entry;
  if (chunk.frame != frame_of(part, epoch)) message.refuse("its frame is another operation's");
  if (part == Part::entry && epoch > base_) ++entries_[at(chunk.neighbour)];
  if (!hear(message)) return remote_.links_.links().give_back(chunk);
  Arrived& place = arrived(static_cast<std::size_t>(part), epoch, chunk.neighbour);
  // Its place is free when this rank has taken the operation that was there.
  const bool too_early = epoch > pipeline_.taken() + stages() && !resetting_;
  if (too_early || place.here) message.refuse("it is not expected yet");
  place = {.here = true, .chunk = chunk, .message = message};
  if (!resetting_) bring_entry(message);
}

void LlRemotePipeline::bring_entry(const LlRemoteMessage& message) const {
  const LlRemoteHeader& header = message.header;
  if (header.kind != LlRemoteKind::sums)
    pipeline_.bring_entry(header.source, header.epoch, header.record);
}

void LlRemotePipeline::begin_reset() {
  for (std::uint64_t stage = 0; stage < stages(); ++stage) leave(stage);
  resetting_ = true;
}

// Messages of operations behind the reset stay.
void LlRemotePipeline::restart(std::uint64_t epoch) {
  resetting_ = false;
  base_ = epoch;
  const RankBits masked = remote_.masks_.masked();
  for (const int rank : ranks()) {
    Outsider& outsider = outsiders_[at(rank)];
    outsider.frame = kUntold;  // it may never have been told, and is out since the same operation
    if (masked.has(rank)) continue;
    left_out_from_[at(rank)] = kNever;
    outsider.since = 0;
  }
  std::ranges::fill(entries_, epoch);
  remote_.with_links([&] {
    for (std::size_t part = 0; part < parts(); ++part) {
      for (Arrived& place : arrived_[part]) {
        if (!place.here) continue;
        const bool counts = part == 0 && place.message.header.epoch > epoch;
        if (counts) ++entries_[at(place.chunk.neighbour)];
        if (hear(place.message)) {
          bring_entry(place.message);
          continue;
        }
        place.here = false;
        remote_.links_.links().give_back(place.chunk);
      }
    }
  });
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

LlRemote::LlRemote(const LlGroup& group, const Turns& turns)
    : group_(group),
      comm_(group.comm()),
      masks_(turns.masks),
      ranks_(RemoteRoutes(comm_.machines()).remote_ranks()),
      links_(comm_, LlFamily::kCreate,
             {.neighbours = ranks_,
              .frames = first_reset_frame(group.config()) + LlRemoteReset::frames(group.config()),
              .frame_bytes = std::max(longest_ll_message(group.config()), sizeof(ResetMessage))}),
      pipelines_{LlRemotePipeline(*this, turns.dispatches, LlKind::dispatch),
                 LlRemotePipeline(*this, turns.combines, LlKind::combine)},
      reset_(links_.links(), ranks_, neighbour_of_, first_reset_frame(group.config())) {
  comm_.collective().agree(LlFamily::kCreate, [&] {
    neighbour_of_.resize(at(comm_.num_ranks()), -1);
    for (std::size_t p = 0; p < ranks_.size(); ++p)
      neighbour_of_[at(ranks_[p])] = static_cast<int>(p);
    for (LlRemotePipeline& pipeline : pipelines_) {
      pipeline.entries_.resize(ranks_.size());
      pipeline.left_out_from_.resize(at(comm_.num_ranks()), kNever);
      pipeline.outsiders_.resize(at(comm_.num_ranks()));
      for (std::size_t part = 0; part < pipeline.parts(); ++part) {
        pipeline.open_[part].resize(ranks_.size());
        pipeline.arrived_[part].resize(pipeline.stages() * ranks_.size());
      }
    }
    turns.dispatches.reach(pipelines_[0]);
    turns.combines.reach(pipelines_[1]);
    if (masks_.masks_lost_peers()) {
      turns.reset.reach(reset_);
      reset_.bring_to(turns.reset);
      links_.links().outlive_neighbours();
    }
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
  const auto all_have_ended = [this](int p) { return is_outside(p) || has_ended(p); };
  const auto is_outsider = [this](int p) { return is_outside(p); };
  linger(kForPeersMs, [&] { return for_all(all_have_ended); });
  linger(kForCreditsMs, [&] { return links.at_rest() || (for_any(is_outsider) && !holds_back()); });
  // libfabric's providers for TCP may crash where they are closed while a long message arrives.
  if (!links.at_rest() || !for_all(all_have_ended) || for_any(is_outsider)) links_.keep_for_good();
}

template <class Of>
bool LlRemote::for_any(Of&& of_neighbour) const {
  for (int p = 0; p < static_cast<int>(ranks_.size()); ++p)
    if (of_neighbour(p)) return true;
  return false;
}

template <class Of>
bool LlRemote::for_all(Of&& of_neighbour) const {
  return !for_any([&](int p) { return !of_neighbour(p); });
}

// A rank that is left out, or leaves this one out: nobody knows what it has yet to send or to read.
bool LlRemote::is_outside(int neighbour) const {
  return links_.links().is_lost(neighbour) || masks_.is_out_of_step(ranks_[at(neighbour)]);
}

// Puts to ranks that are in step wait for the engine.
bool LlRemote::holds_back() const {
  const net::Links& links = links_.links();
  return links.holds_back() &&
         for_any([&](int p) { return !is_outside(p) && links.holds_back(p); });
}

bool LlRemote::has_ended(int neighbour) const {
  return links_.links().unread(neighbour) == 0 && pipelines_[0].has_all(neighbour) &&
         pipelines_[1].has_all(neighbour);
}

template <class Done>
void LlRemote::linger(int longest_ms, Done&& done) noexcept {
  try {
    net::Links& links = links_.links();
    const auto deadline = Deadline::after_ms(std::min(longest_ms, comm_.timeout_ms()));
    links.wait_for(deadline, -1, "its last operation", [&] {
      take_in_all();
      const auto is_awaited = [this](int p) { return !is_outside(p) && !has_ended(p); };
      const auto is_here = [&](int p) {
        return is_awaited(p) && !comm_.errors().lost(ranks_[at(p)]);
      };
      const bool in_vain = for_any(is_awaited) && !for_any(is_here);
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
    if (masks_.masks_lost_peers()) tell_outsiders();
    group_.subject().counters().net_puts.set(links.sent().puts);
    group_.subject().counters().net_bytes.set(links.sent().bytes);
  });
  if (masks_.masks_lost_peers()) notice_losses();
  return news;
}

void LlRemote::tell_outsiders() {
  reset_.send();
  for (LlRemotePipeline& pipeline : pipelines_)
    for (const int rank : ranks_) pipeline.try_to_tell(rank);
}

// The engine may notice before the watch that a rank has ended.
void LlRemote::notice_losses() {
  for (int p = 0; p < static_cast<int>(ranks_.size()); ++p)
    if (links_.links().is_lost(p)) masks_.cut_off(ranks_[at(p)]);
}

bool LlRemote::is_busy() {
  bool busy = false;
  with_links([&] {
    const net::Links& links = links_.links();
    busy = links_.links().sleep_on() < 0 && (!links.holds_back() || holds_back());
  });
  return busy;
}

void LlRemote::take_in_all() {
  for (int p = 0; p < static_cast<int>(ranks_.size()); ++p) {
    while (const auto chunk = links_.links().next(p)) {
      if (reset_.owns(*chunk)) {
        reset_.take_in(*chunk);
        continue;
      }
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
  comm_.wait(comm_.rank(), site, [this] { return !holds_back(); });
}

void LlRemote::begin_reset() {
  for (LlRemotePipeline& pipeline : pipelines_) pipeline.begin_reset();
}

}  // namespace xd::ep::cpu
