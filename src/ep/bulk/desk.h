// The protocol of chunks between machines in one operation, as an automaton: which chunk may be
// filled, taken or answered now, and which ones are missing. It knows no bytes, no clock and no
// memory but its own; nothing of it waits. docs/internals/machines.md has the protocol, and shows
// why no wait goes in a circle.
#pragma once

#include <cstdint>

namespace xd::ep {

// Two, so that answers never wait for requests.
enum class Direction : int { to_relay = 0, to_source = 1 };
inline constexpr int kDirections = 2;

// Frames of a partner and direction. An entry and counts are sent before anything is awaited.
inline constexpr int kFewestDirectionFrames = 2, kMostDirectionFrames = 16;

// A number that entries do not have, as that of prepare's words, and all numbers of kernels: each
// of the chunks' headers says it, and there is one chunk at least.
inline constexpr std::uint32_t kUnknownChunks = UINT32_MAX;

// Chunks of a direction are numbered from 0; chunk c has frame c mod S.
struct DeskUnit {
  enum Work : std::uint32_t { nothing, keep, take, answer, fill };
  Work work;
  int partner;
  std::uint32_t chunk;  // an answer has the number of its request

  // A chunk that has come, and one that goes.
  constexpr bool reads() const { return work == keep || work == take || work == answer; }
  constexpr bool fills() const { return work == answer || work == fill; }
  constexpr Direction read_from() const {
    return work == keep ? Direction::to_source : Direction::to_relay;
  }
  constexpr Direction fills_for() const {
    return work == answer ? Direction::to_source : Direction::to_relay;
  }
};

// The chunks of a neighbour; all zeros before an operation.
struct DeskPartner {
  struct Outgoing {
    std::uint32_t total, begun, finished;
    std::uint32_t free;  // a bit for each frame
  };
  struct Incoming {
    std::uint32_t total, begun;
    std::uint32_t done;      // all chunks before this one are finished
    std::uint32_t landed;    // a bit for each frame: its chunk is not begun
    std::uint32_t finished;  // likewise: its chunk is finished, and one before it is not
  };
  Outgoing out[kDirections];
  Incoming in[kDirections];
};

class Desk {
 public:
  // `partners`: outlive the desk. `answered`: chunks to relays are requests, each of which is
  // answered by one chunk. `anew` = false: another object has had these partners, and ends.
  constexpr Desk(DeskPartner* partners, int num_partners, int frames, bool answered,
                 bool anew = true)
      : partners_(partners),
        num_partners_(num_partners),
        frames_(static_cast<std::uint32_t>(frames)),
        answered_(answered) {
    for (int p = 0; anew && p < num_partners; ++p) partners[p] = {};
  }

  // ---- Events ----

  // This rank has chunks for a relay.
  constexpr void send(int partner, std::uint32_t chunks) const {
    out(partner, Direction::to_relay).total = chunks;
    if (answered_) in(partner, Direction::to_source).total = chunks;
  }
  // A source has chunks for this rank, as its entry says.
  constexpr void expect(int partner, std::uint32_t chunks) const {
    in(partner, Direction::to_relay).total = chunks;
    if (answered_) out(partner, Direction::to_source).total = chunks;
  }
  // A chunk is in a frame; `chunks`: how many there are, as its header says. False = it cannot be.
  constexpr bool landed(int partner, Direction direction, int frame, std::uint32_t chunks) const {
    DeskPartner::Incoming& from = in(partner, direction);
    const auto place = static_cast<std::uint32_t>(frame);
    // Its sender has filled all chunks before it, and had back all those a round of frames before.
    const std::uint32_t chunk = from.done + (place + frames_ - from.done % frames_) % frames_;
    if (from.total == kUnknownChunks) {
      from.total = chunks;
      if (answered_) out(partner, Direction::to_source).total = chunks;
    }
    if (chunks != from.total || chunk >= from.total || chunk < from.begun) return false;
    if ((from.landed & bit(chunk)) != 0) return false;
    from.landed |= bit(chunk);
    return true;
  }
  // A frame of this rank may be filled: at the beginning, and whenever its chunk has been read.
  constexpr void freed(int partner, Direction direction, int frame) const {
    out(partner, direction).free |= std::uint32_t{1} << frame;
  }

  // ---- Work ----

  // A unit that can be finished without a wait, if there is one. Taking goes before filling, which
  // goes to the relay that has had the fewest chunks.
  constexpr DeskUnit next() const {
    for (int p = 0; p < num_partners_; ++p)
      if (may_read(p, Direction::to_source)) return begin({DeskUnit::keep, p, 0});
    for (int p = 0; p < num_partners_; ++p) {
      if (!may_read(p, Direction::to_relay)) continue;
      if (!answered_) return begin({DeskUnit::take, p, 0});
      if (may_fill(p, Direction::to_source)) return begin({DeskUnit::answer, p, 0});
    }
    int to = -1;
    for (int p = 0; p < num_partners_; ++p) {
      if (!may_fill(p, Direction::to_relay)) continue;
      const bool fewer =
          to < 0 || out(p, Direction::to_relay).begun < out(to, Direction::to_relay).begun;
      if (fewer) to = p;
    }
    return to < 0 ? DeskUnit{} : begin({DeskUnit::fill, to, 0});
  }
  // The chunk that a unit has read: its frame goes back. The chunk that it has filled: it is sent.
  constexpr void finished(const DeskUnit& unit) const {
    if (unit.fills()) ++out(unit.partner, unit.fills_for()).finished;
    if (!unit.reads()) return;
    DeskPartner::Incoming& from = in(unit.partner, unit.read_from());
    from.finished |= bit(unit.chunk);
    for (; (from.finished & bit(from.done)) != 0; ++from.done) from.finished &= ~bit(from.done);
  }

  // ---- State ----

  constexpr int frame_of(std::uint32_t chunk) const { return static_cast<int>(chunk % frames_); }
  // Chunks that this rank sends in a direction.
  constexpr std::uint32_t chunks(int partner, Direction direction) const {
    return out(partner, direction).total;
  }
  // The frame that the next chunk of a direction needs, which is not known to be free; -1 = none.
  constexpr int awaited_frame(int partner, Direction direction) const {
    const DeskPartner::Outgoing& to = out(partner, direction);
    const bool waits = to.begun < to.total && (to.free & bit(to.begun)) == 0;
    return waits ? frame_of(to.begun) : -1;
  }
  // All chunks of a source before this one have been taken.
  constexpr std::uint32_t watermark(int source) const {
    return in(source, Direction::to_relay).done;
  }
  constexpr bool is_done() const { return first_awaited() < 0; }
  // A partner that something is missing from, sources first; -1 = there is none.
  constexpr int first_awaited() const {
    for (int d = 0; d < kDirections; ++d)
      for (int p = 0; p < num_partners_; ++p)
        if (partners_[p].in[d].done != partners_[p].in[d].total) return p;
    for (int d = 0; d < kDirections; ++d)
      for (int p = 0; p < num_partners_; ++p)
        if (partners_[p].out[d].finished != partners_[p].out[d].total) return p;
    return -1;
  }

 private:
  constexpr DeskPartner::Outgoing& out(int partner, Direction direction) const {
    return partners_[partner].out[static_cast<int>(direction)];
  }
  constexpr DeskPartner::Incoming& in(int partner, Direction direction) const {
    return partners_[partner].in[static_cast<int>(direction)];
  }
  constexpr std::uint32_t bit(std::uint32_t chunk) const {
    return std::uint32_t{1} << chunk % frames_;
  }
  constexpr bool may_read(int partner, Direction direction) const {
    const DeskPartner::Incoming& from = in(partner, direction);
    return from.begun < from.total && (from.landed & bit(from.begun)) != 0;
  }
  constexpr bool may_fill(int partner, Direction direction) const {
    const DeskPartner::Outgoing& to = out(partner, direction);
    return to.begun < to.total && (to.free & bit(to.begun)) != 0;
  }
  constexpr DeskUnit begin(DeskUnit unit) const {
    if (unit.reads()) {
      DeskPartner::Incoming& from = in(unit.partner, unit.read_from());
      unit.chunk = from.begun++;
      from.landed &= ~bit(unit.chunk);
    }
    if (unit.fills()) {
      DeskPartner::Outgoing& to = out(unit.partner, unit.fills_for());
      unit.chunk = to.begun++;
      to.free &= ~bit(unit.chunk);
    }
    return unit;
  }

  DeskPartner* partners_;
  int num_partners_;
  std::uint32_t frames_;
  bool answered_;
};

}  // namespace xd::ep
