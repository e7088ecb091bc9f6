// Chunks that many blocks fill and read: rows, requests and answers. The first warp of the last
// block that leaves is the rank's desk (ep/bulk/desk.h), all other warps of that block and of those
// that help are its hands.
//
//   memory                       written by                  read by
//   RemoteState::picks,          the block that meets        hands, and the desk
//   items_before
//   words of links, headers      the desk                    the proxy; the neighbour's desk
//   HandUnit but `done`          the desk, before `number`   hands, after `number`
//   items of chunks              hands, before `done`        hands; the proxy, after `filled`
//
// The desk is in desk.cuh. A unit is handed on when all that it needs is there, so hands wait for
// nothing while they have a share: between shares they wait for the desk alone.
//
// Order. `landed` is loaded with acquire (sys) by a lane of the desk, and `number` stored with
// release behind it; a hand's lane acquires that for its warp. The stores and loads of a share come
// before its `done` (acq_rel), which a lane of the desk acquires; the release (sys) of `filled`,
// `read` and chunk flags covers them, as causality order is transitive over all of these.
#pragma once

#include "ep/bulk/cuda/remote/work.cuh"

namespace xd::ep::cuda {

static_assert(Units::kPlaces == 32);  // one for each lane of the desk

// In shared memory of the desk's block.
struct DeskShared : RemoteShared {
  std::uint32_t held[kMaxDeviceRanks];     // by neighbour: frames with a chunk that has landed
  std::uint32_t filling[kMaxDeviceRanks];  // likewise: frames that hands fill
  std::uint32_t taken[kMaxDeviceRanks];    // likewise: chunks, from the first, that it was told of
  std::uint32_t flagged[kMaxDeviceRanks];  // likewise: chunk flags of it that are raised
  DeskUnit unit[Units::kPlaces];
  std::uint32_t items[Units::kPlaces];
  std::uint32_t handed_on;  // units so far
  std::uint32_t open;       // places of those that are not finished, as bits
  std::uint32_t fresh;      // likewise: not told to hands yet
  int near_ready;           // 1 = near ranks have done what answers need
  int good;
};

// `Derived` has:
//   kKind, kAnswers            the kind of chunks to relays, and whether they are answered
//   in_chunk()                 the most items of one
//   bytes_of_item(kind)
//   codes()                    of this rank's tokens
//   helps()                    whether this block has hands
//   helping_blocks()           how many of them have some
//   begin()                    all threads of the desk's block, before anything else
//   begin_hands()              all threads of a block, before its hands begin
// and for all lanes of a hand, where the operation moves; all of these must not wait:
//   fill(machine, token, item)
//   take(item)
//   answer(request, item, moves)
//   keep(machine, item)
// and for all lanes of the desk:
//   near_ready()               whether answers have what they need
//   took(neighbour, chunks)    so many of its chunks, from the first, have been taken;
//                              kUnknownChunks = all
template <class Derived>
class RemoteHandsWork : public RemoteWork<Derived> {
  using Base = RemoteWork<Derived>;

 public:
  using Base::directions;
  using Base::moves;
  using Base::remote;
  using Base::remote_turn_;
  using Base::turn_;

  __device__ RemoteHandsWork(const TurnParams& params, Turn& turn, TurnShared& turn_shared,
                             DeskShared& shared, DeskPartner* partners)
      : Base(params, turn, turn_shared, shared),
        s_(shared),
        partners_(partners),
        state_(*remote().state) {}

  // Behind enter(). All threads of all blocks call it; where it fails, await() ends.
  __device__ void meet() const {
    if (!meets_remote()) return;
    remote_turn_.send_entry(turn_.own_record());
    list_items();
    static_cast<void>(remote_turn_.forward());
  }

  // Behind leave(), all threads of all blocks.
  __device__ void help() {
    if (turn_.left_last() || !Base::takes_part() || !self().helps()) return;
    self().begin_hands();
    __syncthreads();
    be_hand();
    __syncthreads();
    if (thread_in_block() == 0) ptx::add_acq_rel_gpu(&state_.gone, 1);
  }

  // ---- Of RemoteWork ----

  __device__ void clear() {
    for (int i = thread_in_block(); i < kMaxDeviceRanks; i += threads_per_block())
      s_.held[i] = s_.filling[i] = s_.taken[i] = s_.flagged[i] = 0;
    if (thread_in_block() == 0) s_.handed_on = s_.open = s_.fresh = s_.near_ready = 0;
  }
  __device__ bool do_all();

 protected:
  __device__ Desk desk() const {
    return Desk(partners_, remote().num_neighbours, remote().frames, Derived::kAnswers, false);
  }
  __device__ int machine_of_neighbour(int neighbour) const {
    return remote().machine_of[remote().rank_of[neighbour]];
  }

  DeskShared& s_;

 private:
  __device__ Derived& self() { return static_cast<Derived&>(*this); }
  __device__ const Derived& self() const { return static_cast<const Derived&>(*this); }

  __device__ void list_items() const;
  __device__ std::uint32_t pick(int machine, std::uint32_t item) const;
  __device__ std::uint32_t items_for(int neighbour, std::uint32_t chunk) const;
  __device__ std::uint32_t chunks_for(int machine) const;

  // The desk. All lanes of its warp.
  __device__ bool run_desk();
  __device__ bool await_hands() const;
  enum Round : int { nothing, news, over, failed };
  __device__ Round round();
  __device__ Round look(int neighbour);
  __device__ bool take_in(int neighbour, unsigned come, int frame, std::uint32_t chunk);
  __device__ bool finish();
  __device__ void send_header(const DeskUnit& unit, std::uint32_t items) const;
  __device__ bool hand_on();

  // Hands.
  __device__ void be_hand();
  __device__ bool await_unit(std::uint32_t ticket) const;
  __device__ void do_share(std::uint32_t ticket);
  __device__ void do_item(const HandUnit& work, std::uint32_t item);

  // Where there is one warp alone, its desk does the shares, too.
  __device__ static bool is_alone() { return warps_per_block() == 1; }

  DeskPartner* const partners_;
  RemoteState& state_;
  std::uint32_t ticket_ = UINT32_MAX;  // of the desk that is alone; UINT32_MAX = none
};

// ---- Items -------------------------------------------------------------------------------------

// All threads of the block. A warp has runs of 32 tokens, and writes those with rows on a machine
// where its tokens begin; what lies in front of them is counted behind.
template <class Derived>
__device__ inline void RemoteHandsWork<Derived>::list_items() const {
  const int tokens = moves() ? turn_.plan().tokens : 0, topk = turn_.plan().topk;
  const int machines = remote().num_machines, warps = warps_per_block(), lane = lane_id();
  const int runs = (tokens + 31) / 32, warp = warp_in_block();
  const int first = runs * warp / warps, last = runs * (warp + 1) / warps;
  const std::uint32_t* codes = self().codes();
  std::uint32_t low = 0, high = 0;  // found for machines `lane` and `lane` + 32
#pragma unroll 1
  for (int run = first; run < last; ++run) {
    const int token = run * 32 + lane;
    std::uint64_t mine = 0;
#pragma unroll 1
    for (int k = 0; token < tokens && k < topk; ++k) {
      const int m = Base::machine_of_code(codes[static_cast<std::uint64_t>(token) * topk + k]);
      if (m != kNear) mine |= std::uint64_t{1} << m;
    }
#pragma unroll 1
    for (int m = 0; m < machines; ++m) {
      const bool goes = (mine >> m & 1) != 0;
      const unsigned going = __ballot_sync(kAllLanes, goes);
      const std::uint32_t found = __shfl_sync(kAllLanes, m < 32 ? low : high, m % 32);
      if (goes) {
        remote().picks[static_cast<std::uint64_t>(m) * turn_.group().max_tokens + first * 32 +
                       found + __popc(going & lower_lanes())] = static_cast<std::uint32_t>(token);
      }
      if (lane == m % 32) (m < 32 ? low : high) += __popc(going);
    }
  }
  if (lane < machines) state_.items_before[lane][warp] = low;
  if (lane + 32 < machines) state_.items_before[lane + 32][warp] = high;
  __syncthreads();
#pragma unroll 1
  for (int m = thread_in_block(); m < machines; m += threads_per_block()) {
    std::uint32_t before = 0;
#pragma unroll 1
    for (int w = 0; w <= RemoteState::kSegments; ++w) {
      const std::uint32_t found = w < warps ? state_.items_before[m][w] : 0;
      state_.items_before[m][w] = before;
      before += found;
    }
  }
  __syncthreads();
}

// The token of an item for a machine, of which there are more. All lanes.
template <class Derived>
__device__ inline std::uint32_t RemoteHandsWork<Derived>::pick(int machine,
                                                               std::uint32_t item) const {
  const std::uint32_t before = state_.items_before[machine][lane_id()];
  const int warp = __popc(__ballot_sync(kAllLanes, before <= item)) - 1;
  const int runs = (turn_.plan().tokens + 31) / 32;
  const std::uint32_t place =
      runs * warp / warps_per_block() * 32 + item - __shfl_sync(kAllLanes, before, warp);
  return remote().picks[static_cast<std::uint64_t>(machine) * turn_.group().max_tokens + place];
}

template <class Derived>
__device__ inline std::uint32_t RemoteHandsWork<Derived>::chunks_for(int machine) const {
  if (!moves() || turn_.some_blank()) return 1;  // without items
  const std::uint32_t all = state_.items_before[machine][RemoteState::kSegments];
  return max(1u, (all + self().in_chunk() - 1) / self().in_chunk());
}

// The items of a chunk to a relay.
template <class Derived>
__device__ inline std::uint32_t RemoteHandsWork<Derived>::items_for(int neighbour,
                                                                    std::uint32_t chunk) const {
  if (!moves() || turn_.some_blank()) return 0;
  const int machine = machine_of_neighbour(neighbour);
  const std::uint32_t all = state_.items_before[machine][RemoteState::kSegments];
  const std::uint32_t first = chunk * self().in_chunk();
  return first < all ? min(self().in_chunk(), all - first) : 0;
}

// ---- Hands -------------------------------------------------------------------------------------

// All lanes of a warp; returns when there is no more to do, or after a fatal error.
template <class Derived>
__device__ inline void RemoteHandsWork<Derived>::be_hand() {
  for (;;) {
    std::uint32_t ticket = 0;
    if (lane_id() == 0) ticket = ptx::add_relaxed_gpu(&state_.tickets, 1);
    ticket = __shfl_sync(kAllLanes, ticket, 0);
    if (!await_unit(ticket)) return;
    do_share(ticket);
  }
}

// The desk has a deadline of its own, from its last news on, and one of blocks that have not left
// yet is in what they wait for: these end a hand's wait by the board.
template <class Derived>
__device__ inline bool RemoteHandsWork<Derived>::await_unit(std::uint32_t ticket) const {
  constexpr int kPatience = 1000, kNapNs = 100;
  int here = 0;
  if (lane_id() == 0) {
    const HandUnit& work = state_.units[Units::place_of(Units::unit_of(ticket))];
    const std::uint64_t number = Units::number_of(Units::unit_of(ticket));
    device::KernelWait site = turn_.site(XD_PHASE_ROWS);
    site.timeouts = kPatience;
    const std::uint64_t epoch = turn_.epoch();
    device::wait_until(
        turn_.group().comm, site, -1,
        [&] {
          here = ptx::ld_acquire_sys(&work.number) == number ? 1 : 0;
          if (here != 0 || ptx::ld_acquire_sys(&state_.over) != 0) return true;
          __nanosleep(kNapNs);
          return false;
        },
        [=] { return epoch - 1; });
  }
  here = __shfl_sync(kAllLanes, here, 0);  // passes the acquire on to all lanes
  __syncwarp();
  return here != 0;
}

template <class Derived>
__device__ inline void RemoteHandsWork<Derived>::do_share(std::uint32_t ticket) {
  HandUnit& work = state_.units[Units::place_of(Units::unit_of(ticket))];
#pragma unroll 1
  for (std::uint32_t item = Units::share_of(ticket); item < work.items; item += Units::kShares)
    do_item(work, item);
  __syncwarp();
  if (lane_id() == 0) ptx::add_acq_rel_gpu(&work.done, 1);
  __syncwarp();
}

template <class Derived>
__device__ inline void RemoteHandsWork<Derived>::do_item(const HandUnit& work, std::uint32_t item) {
  const DeskUnit unit = work.unit;
  const int machine = machine_of_neighbour(unit.partner);
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  if (unit.reads()) {
    const RemoteKind kind = unit.work == DeskUnit::keep ? RemoteKind::answer : Derived::kKind;
    const int frame = remote().frame(unit.partner, unit.read_from(), unit.chunk);
    from = items_of(directions().chunk_in(frame)) + item * self().bytes_of_item(kind);
  }
  if (unit.fills()) {
    const RemoteKind kind = unit.work == DeskUnit::fill ? Derived::kKind : RemoteKind::answer;
    RemoteHeader* chunk =
        directions().chunk_out(remote().frame(unit.partner, unit.fills_for(), unit.chunk));
    to = items_of(chunk) + item * self().bytes_of_item(kind);
    if (unit.work == DeskUnit::fill) {
      const std::uint32_t token = pick(machine, unit.chunk * self().in_chunk() + item);
      if (item + 1 == work.items && lane_id() == 0) chunk->tokens = token + 1;
      return self().fill(machine, token, to);
    }
  }
  if (Derived::kAnswers && unit.work == DeskUnit::answer)
    return self().answer(from, to, work.moves != 0);
  if (work.moves == 0) return;
  if (Derived::kAnswers && unit.work == DeskUnit::keep) return self().keep(machine, from);
  if (!Derived::kAnswers) self().take(from);
}

}  // namespace xd::ep::cuda
