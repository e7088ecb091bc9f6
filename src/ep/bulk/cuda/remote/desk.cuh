// The desk of an operation's hands: the first warp of the last block that leaves. It does rounds,
// each with all lanes: it looks at the words of links, a frame for each lane, finishes units whose
// shares are done, and hands on those that can be done. It waits for nothing in a round.
#pragma once

#include "ep/bulk/cuda/remote/hands.cuh"

namespace xd::ep::cuda {

// A wait of a whole warp that looks for news itself, as device::wait_until() does for a thread.
class IdleDesk {
 public:
  __device__ void begin() { start_ = 0; }
  // One lane calls it after a round without news. True = a fatal error, which has been raised.
  __device__ bool gives_up(const DeviceComm& comm, const device::KernelWait& site, int peer) {
    if (device::failed(comm)) return end(comm);
    const std::uint64_t now = ptx::global_timer_ns();
    if (start_ == 0) {
      start_ = now;
      next_look_ = now + device::kHostWordNs / 4;
      last_look_ = false;
    }
    if (now < next_look_) return false;
    next_look_ = now + device::kHostWordNs / 4;
    const std::uint64_t timeout = static_cast<std::uint64_t>(comm.timeout_ms) * 1000000;
    const device::Around around =
        device::look_around(comm, site, peer, now, start_ + timeout * site.timeouts);
    if (around.what == device::Around::nothing) return false;
    if (around.what == device::Around::host_calls) return end(comm);
    // A rank's end comes after its last word, so there is one more round.
    if (!last_look_) {
      last_look_ = true;
      next_look_ = now;
      return false;
    }
    device::give_up(comm, site, around, site.epoch - 1);
    return end(comm);
  }

 private:
  __device__ static bool end(const DeviceComm& comm) {
    device::tell_host(comm);
    return true;
  }
  std::uint64_t start_ = 0, next_look_ = 0;
  bool last_look_ = false;
};

template <class Derived>
__device__ inline bool RemoteHandsWork<Derived>::do_all() {
  self().begin();
  self().begin_hands();
  if (thread_in_block() == 0) {
    s_.good = 1;
    const RemoteDevice& r = remote();
    const Desk desk(partners_, r.num_neighbours, r.frames, Derived::kAnswers);
    for (int m = 0; m < r.num_machines; ++m) desk.send(r.relays[m], chunks_for(m));
    for (int s = 0; s < r.num_sources; ++s) desk.expect(r.sources[s], kUnknownChunks);
  }
  __syncthreads();
  if (warp_in_block() == 0) {
    const bool good = run_desk();
    if (lane_id() == 0 && !good) s_.good = 0;
  } else {
    be_hand();
  }
  __syncthreads();
  // Nobody looks at these words any more.
  if (s_.good != 0) {
    for (int i = thread_in_block(); i < static_cast<int>(Units::kPlaces); i += threads_per_block())
      state_.units[i].number = 0;
    if (thread_in_block() == 0) {
      state_.over = 0;
      state_.tickets = state_.gone = 0;
    }
  }
  return s_.good != 0;
}

template <class Derived>
__device__ inline bool RemoteHandsWork<Derived>::run_desk() {
  IdleDesk idle;
  for (;;) {
    const Round result = round();
    if (result == over) break;
    if (result == failed) return false;
    if (result == news) {
      idle.begin();
      continue;
    }
    int ends = 0;
    if (lane_id() == 0) {
      const int partner = desk().first_awaited();
      ends = idle.gives_up(turn_.group().comm, turn_.site(XD_PHASE_ROWS),
                           partner < 0 ? -1 : remote().rank_of[partner])
                 ? 1
                 : 0;
    }
    if (__shfl_sync(kAllLanes, ends, 0) != 0) return false;
  }
  if (lane_id() == 0) {
    __threadfence();
    ptx::st_relaxed_gpu(&state_.over, 1);
  }
  return await_hands();
}

// Blocks of this launch that have no share any more, and so wait for nothing.
template <class Derived>
__device__ inline bool RemoteHandsWork<Derived>::await_hands() const {
  const std::uint32_t others = self().helping_blocks() - (self().helps() ? 1 : 0);
  const std::uint64_t epoch = turn_.epoch();
  int good = 1;
  if (lane_id() == 0) {
    good = device::wait_until(
               turn_.group().comm, turn_.site(XD_PHASE_ROWS), -1,
               [=, this] { return ptx::ld_acquire_gpu(&state_.gone) == others; },
               [=] { return epoch - 1; })
               ? 1
               : 0;
  }
  return __shfl_sync(kAllLanes, good, 0) != 0;
}

template <class Derived>
__device__ inline typename RemoteHandsWork<Derived>::Round RemoteHandsWork<Derived>::round() {
  bool some = finish();
  if (Derived::kAnswers && s_.near_ready == 0 && self().near_ready()) {
    __syncwarp();
    if (lane_id() == 0) s_.near_ready = 1;
    some = true;
  }
  __syncwarp();
#pragma unroll 1
  for (int p = 0; p < remote().num_neighbours; ++p) {
    const Round looked = look(p);
    if (looked == failed) return failed;
    some |= looked == news;
  }
  some |= hand_on();
  if (is_alone()) {
    if (ticket_ == UINT32_MAX) {
      if (lane_id() == 0) ticket_ = ptx::add_relaxed_gpu(&state_.tickets, 1);
      ticket_ = __shfl_sync(kAllLanes, ticket_, 0);
    }
    if (Units::unit_of(ticket_) < s_.handed_on) {
      do_share(ticket_);
      ticket_ = UINT32_MAX;
      some = true;
    }
  }
  if (some) return news;
  int done = 0;
  if (lane_id() == 0) done = desk().is_done() ? 1 : 0;
  return __shfl_sync(kAllLanes, done, 0) != 0 ? over : nothing;
}

// Looks at a neighbour's frames, one for each lane: chunks that are expected, and frames of this
// rank that a chunk waits for.
template <class Derived>
__device__ inline typename RemoteHandsWork<Derived>::Round RemoteHandsWork<Derived>::look(
    int neighbour) {
  const int frames = remote().frames, lane = lane_id();
  const auto direction = lane < frames ? Direction::to_relay : Direction::to_source;
  const bool is_frame = lane < kDirections * frames;
  const int frame = remote().frame(neighbour, Direction::to_relay, 0) + lane;
  const DeskPartner& partner = partners_[neighbour];
  bool expects = false, fills = false;
  std::uint32_t chunk = 0;  // the next one that comes in this frame
  if (is_frame) {
    const int d = static_cast<int>(direction), place = lane % frames;
    const auto count = static_cast<std::uint32_t>(frames);
    const DeskPartner::Incoming& in = partner.in[d];
    chunk = in.begun + (place + count - in.begun % count) % count;
    expects = chunk < in.total && (s_.held[neighbour] >> lane & 1) == 0 &&
              (direction != Direction::to_relay || !Derived::kAnswers || s_.near_ready != 0);
    const DeskPartner::Outgoing& out = partner.out[d];
    fills = out.begun < out.total && (out.free >> place & 1) == 0 &&
            (s_.filling[neighbour] >> lane & 1) == 0;
  }
  if (!__any_sync(kAllLanes, expects || fills)) return nothing;
  const unsigned come = __ballot_sync(kAllLanes, expects && directions().landed(frame));
  const unsigned freed = __ballot_sync(kAllLanes, fills && directions().may_fill(frame));
  if (lane == 0) {
#pragma unroll 1
    for (unsigned left = freed; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      desk().freed(neighbour, i < frames ? Direction::to_relay : Direction::to_source, i % frames);
    }
  }
  __syncwarp();
  if (come != 0 && !take_in(neighbour, come, frame, chunk)) return failed;
  return (come | freed) != 0 ? news : nothing;
}

// Chunks that have come, one for each lane of `come`. False = one of them cannot be.
template <class Derived>
__device__ inline bool RemoteHandsWork<Derived>::take_in(int neighbour, unsigned come, int frame,
                                                         std::uint32_t chunk) {
  const int frames = remote().frames, lane = lane_id();
  const RemoteKind kind = lane < frames ? Derived::kKind : RemoteKind::answer;
  std::uint32_t chunks = 0;
  bool good = true, misses = false;
  if ((come >> lane & 1) != 0) {
    const auto& header = *static_cast<const volatile RemoteHeader*>(directions().chunk_in(frame));
    const std::uint32_t items = header.items;
    chunks = header.chunks;
    misses = lane < frames && header.found_missing != 0;
    good = remote_turn_.is_in_step(neighbour, frame, kind) && chunks != kUnknownChunks &&
           items * std::uint64_t{self().bytes_of_item(kind)} == directions().bytes_in(frame) &&
           (kind == RemoteKind::answer ? items == items_for(neighbour, chunk)
                                       : items <= self().in_chunk());
    state_.items_in[frame] = items;
    state_.tokens_in[frame] = header.tokens;
  }
  misses = __any_sync(kAllLanes, misses);
  good = __all_sync(kAllLanes, good);
#pragma unroll 1
  for (unsigned left = come; left != 0 && good; left &= left - 1) {
    const int i = __ffs(static_cast<int>(left)) - 1;
    const std::uint32_t all = __shfl_sync(kAllLanes, chunks, i);
    int known = 1;
    if (lane == 0) {
      const auto d = i < frames ? Direction::to_relay : Direction::to_source;
      known = desk().landed(neighbour, d, i % frames, all) ? 1 : 0;
    }
    good = __shfl_sync(kAllLanes, known, 0) != 0;
  }
  if (lane == 0) {
    s_.held[neighbour] |= come;
    if (misses) this->missing_[neighbour] = 1;
    if (!good) remote_turn_.refuse(neighbour);
  }
  __syncwarp();
  return good;
}

// Finishes units whose shares are done, one for each lane. True = there were some.
template <class Derived>
__device__ inline bool RemoteHandsWork<Derived>::finish() {
  const int lane = lane_id();
  const bool done =
      (s_.open >> lane & 1) != 0 && ptx::ld_acquire_gpu(&state_.units[lane].done) == Units::kShares;
  const unsigned all = __ballot_sync(kAllLanes, done);
  if (all == 0) return false;
  const DeskUnit unit = s_.unit[lane];
  if (done && unit.fills()) send_header(unit, s_.items[lane]);
  __syncwarp();
  unsigned sources = 0;  // of lanes: those whose units have read a source's chunk
  if (lane == 0) {
#pragma unroll 1
    for (unsigned left = all; left != 0; left &= left - 1)
      desk().finished(s_.unit[__ffs(static_cast<int>(left)) - 1]);
  }
  __syncwarp();
  sources = __ballot_sync(kAllLanes, done && unit.work == DeskUnit::take);
#pragma unroll 1
  for (unsigned left = sources; left != 0; left &= left - 1) {
    const int neighbour = s_.unit[__ffs(static_cast<int>(left)) - 1].partner;
    const DeskPartner::Incoming& in =
        partners_[neighbour].in[static_cast<int>(Direction::to_relay)];
    // The frame of chunk done - 1 still has that chunk's words where `done` has moved just now: a
    // later chunk in it comes behind one in the frame of the chunk that was missing, which goes
    // back below. Where it has not moved, the frame may have a later chunk's.
    if (in.done == s_.taken[neighbour]) continue;
    self().took(neighbour, in.done == in.total ? kUnknownChunks : in.done);
    __syncwarp();
    if (lane == 0) s_.taken[neighbour] = in.done;
    __syncwarp();
  }
  // The source may leave now: what near ranks wait for from it, flags of chunks, is there.
  __syncwarp();
  if (done && unit.reads()) {
    directions().give_back(remote().frame(unit.partner, unit.read_from(), unit.chunk));
  }
  __syncwarp();
  if (lane == 0) {
    const auto bit = [this](const DeskUnit& u, Direction direction) {
      return 1u << (remote().frame(u.partner, direction, u.chunk) -
                    remote().frame(u.partner, Direction::to_relay, 0));
    };
#pragma unroll 1
    for (unsigned left = all; left != 0; left &= left - 1) {
      const DeskUnit& u = s_.unit[__ffs(static_cast<int>(left)) - 1];
      if (u.fills()) s_.filling[u.partner] &= ~bit(u, u.fills_for());
      if (u.reads()) s_.held[u.partner] &= ~bit(u, u.read_from());
    }
    s_.open &= ~all;
  }
  __syncwarp();
  return true;
}

// One lane. Hands have written where the last token of a chunk to a relay is.
template <class Derived>
__device__ inline void RemoteHandsWork<Derived>::send_header(const DeskUnit& unit,
                                                             std::uint32_t items) const {
  const RemoteKind kind = unit.work == DeskUnit::fill ? Derived::kKind : RemoteKind::answer;
  const int frame = remote().frame(unit.partner, unit.fills_for(), unit.chunk);
  RemoteHeader* chunk = directions().chunk_out(frame);
  chunk->epoch = turn_.epoch();
  chunk->kind = kind;
  chunk->source = turn_.rank();
  chunk->items = items;
  chunk->chunks = partners_[unit.partner].out[static_cast<int>(unit.fills_for())].total;
  chunk->found_missing = turn_.some_blank() ? 1 : 0;
  directions().send(frame, static_cast<std::uint32_t>(items * self().bytes_of_item(kind)));
}

// Gives hands all units that can be done, while there are places. True = there were some.
template <class Derived>
__device__ inline bool RemoteHandsWork<Derived>::hand_on() {
  const int lane = lane_id();
  if (lane == 0) {
    s_.fresh = 0;
    const auto bit = [this](const DeskUnit& u, Direction direction) {
      return 1u << (remote().frame(u.partner, direction, u.chunk) -
                    remote().frame(u.partner, Direction::to_relay, 0));
    };
#pragma unroll 1
    while ((s_.open >> Units::place_of(s_.handed_on) & 1) == 0) {
      const DeskUnit u = desk().next();
      if (u.work == DeskUnit::nothing) break;
      const std::uint32_t place = Units::place_of(s_.handed_on++);
      s_.unit[place] = u;
      s_.items[place] = u.reads()
                            ? state_.items_in[remote().frame(u.partner, u.read_from(), u.chunk)]
                            : items_for(u.partner, u.chunk);
      if (u.fills()) s_.filling[u.partner] |= bit(u, u.fills_for());
      s_.fresh |= 1u << place;
      s_.open |= 1u << place;
    }
  }
  __syncwarp();
  const unsigned fresh = s_.fresh, handed_on = s_.handed_on;
  if ((fresh >> lane & 1) != 0) {
    HandUnit& to = state_.units[lane];
    to.unit = s_.unit[lane];
    to.items = s_.items[lane];
    to.moves = moves() && !turn_.some_blank() ? 1 : 0;
    to.done = 0;
    __threadfence();  // with the store: release
    ptx::st_relaxed_gpu(&to.number,
                        Units::number_of(Units::last_in(static_cast<unsigned>(lane), handed_on)));
  }
  __syncwarp();
  return fresh != 0;
}

}  // namespace xd::ep::cuda
