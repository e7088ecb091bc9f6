// The work of an operation for other machines, which the last block that leaves does: it sends
// chunks to this rank's relays, and takes those of the ranks whose relay this rank is, as they
// come. docs/internals/machines_cuda.md shows why no wait goes in a circle.
//
// The block does one job at a time, with all its threads. Thread 0 looks for the next one: whatever
// can be done at once is done, and taking goes before sending, so nobody waits for this rank while
// it waits.
#pragma once

#include "ep/bulk/cuda/remote/turn.cuh"
#include "ep/bulk/cuda/rows.cuh"

namespace xd::ep::cuda {

// In shared memory.
struct RemoteShared {
  static constexpr int kMostItems = 256;  // of a chunk

  enum Job : int { none, done, failed, send, take, answer };
  int job, which;  // send: a remote machine; take: a source, by its place in RemoteDevice::sources
  int items;       // of the chunk that is being filled
  std::uint32_t bytes;                        // of these items
  int next[kMaxRemoteMachines];               // first item of the machine's next chunk
  std::uint32_t begun[kMaxRemoteMachines];    // prepare: words of it that have been sent
  std::uint8_t sent_all[kMaxRemoteMachines];  // the last chunk is filled
  std::uint8_t taken_all[kMaxDeviceRanks];
  std::uint8_t missing[kMaxDeviceRanks];  // by source: it has not found memory
  int unanswered[kMaxRemoteMachines];     // chunks
  int owed[kMaxRemoteMachines];           // answers of all of them
  int partials_here;                      // 1 = near ranks have added up their rows
  std::uint32_t picks[kMostItems];        // tokens
};

// `Derived` has for all threads of the block:
//   kKind                    of its chunks to relays
//   fill(machine, chunk)     fills items of the next chunk: sets next[], items and bytes; true = it
//                            is the last
//   take(neighbour, chunk)   takes all of a chunk
// and, if it wants, the functions of "What a work may hide".
template <class Derived>
class RemoteWork {
 public:
  __device__ RemoteWork(const TurnParams& params, Turn& turn, TurnShared& turn_shared,
                        RemoteShared& shared)
      : turn_(turn), shared_(turn_shared), remote_turn_(params, turn), s_(shared) {}

  // ---- Of turn::DeviceTurn::leave() ----

  __device__ void before_done() {
    clear();
    // Another block may have skipped rows that this one would send.
    if (turn_.any_failed(turn_.met_fatal())) return;
    const Verdict verdict = turn_.verdict();
    if (verdict == Verdict::go || verdict == Verdict::blank) {
      self().start();
      // A thread that refuses something ends the work of others by the board alone.
      if (turn_.any_failed(!do_all() || device::failed(turn_.group().comm))) return;
    }
    remote_turn_.raise_done(s_.missing);
  }
  __device__ void after_done() {
    if (turn_.verdict() != Verdict::fatal) remote_turn_.rest();
  }
  __device__ bool raises_done(int rank) const { return remote().machine_of[rank] == kNear; }
  // A near rank raises its flag behind its work for other machines, where it may wait, too.
  static constexpr int kDoneTimeouts = 2;

  // ---- Functions that a work may hide ----

  __device__ void start() {}
  // Of items of chunks of this kind; 0 = they differ, and take() looks at their lengths.
  __device__ std::uint64_t bytes_of_item(RemoteKind) const { return 0; }
  __device__ bool may_take(int) { return true; }  // thread 0
  __device__ void take_answer(int, const RemoteHeader&) {}
  __device__ void took_all(int, const RemoteHeader&) {
  }  // the last chunk of a source has been taken
  static constexpr bool kAnswers = false;

 protected:
  __device__ const RemoteDevice& remote() const { return remote_turn_.remote(); }
  __device__ const Directions& directions() const { return remote_turn_.directions(); }
  __device__ bool moves() const { return turn_.moves(); }
  // The remote machine of a choice's row, or kNear, also if it has none. Any thread.
  __device__ int machine_of_code(std::uint32_t code) const {
    const GroupDevice& g = turn_.group();
    const std::uint32_t row = g.layout.row_per_expert ? code : code / g.codec_experts;
    if (code == RowCodec::kNone || row >= shared_.base[turn_.ranks()]) return kNear;
    return remote().machine_of[rank_of_row(shared_, turn_.ranks(), row)];
  }
  __device__ bool pick_tokens(int machine, const std::uint32_t* codes, std::uint64_t item_bytes,
                              std::uint64_t answer_bytes = 0) const;

  Turn& turn_;
  TurnShared& shared_;
  const RemoteTurn remote_turn_;
  RemoteShared& s_;

 private:
  __device__ Derived& self() { return static_cast<Derived&>(*this); }
  __device__ void clear();
  __device__ bool do_all();
  __device__ bool find_job();
  __device__ bool found(int job, int which, int neighbour, Direction direction, RemoteKind kind);
  __device__ int first_awaited() const;
  __device__ void send(int machine);
  __device__ void take(int source);
  __device__ void answer(int machine);
};

template <class Derived>
__device__ inline void RemoteWork<Derived>::clear() {
  for (int i = thread_in_block(); i < kMaxDeviceRanks; i += threads_per_block()) {
    s_.taken_all[i] = s_.missing[i] = 0;
    if (i < kMaxRemoteMachines)
      s_.next[i] = s_.unanswered[i] = s_.owed[i] = s_.begun[i] = s_.sent_all[i] = 0;
  }
  if (thread_in_block() == 0) s_.partials_here = 0;
  __syncthreads();
}

template <class Derived>
__device__ inline bool RemoteWork<Derived>::do_all() {
  for (;;) {
    if (thread_in_block() == 0) {
      s_.job = RemoteShared::none;
      const std::uint64_t epoch = turn_.epoch();
      if (!device::wait_until(
              turn_.group().comm, turn_.site(XD_PHASE_ROWS), first_awaited(),
              [this] { return find_job(); }, [=] { return epoch - 1; })) {
        s_.job = RemoteShared::failed;
      }
    }
    __syncthreads();
    const int job = s_.job, which = s_.which;
    if (job == RemoteShared::failed) return false;
    if (job == RemoteShared::done) return true;
    if (job == RemoteShared::send) send(which);
    if (job == RemoteShared::take) take(which);
    if (job == RemoteShared::answer) answer(which);
    __syncthreads();
  }
}

// Thread 0: a chunk that is here is a job, if it is the one that is expected, and as long as its
// items are.
template <class Derived>
__device__ inline bool RemoteWork<Derived>::found(int job, int which, int neighbour,
                                                  Direction direction, RemoteKind kind) {
  const std::uint64_t items = directions().next_in(neighbour, direction)->items;
  const std::uint64_t each = self().bytes_of_item(kind);
  const bool good = remote_turn_.is_in_step(neighbour, direction, kind) &&
                    (each == 0 || items * each == directions().bytes_in(neighbour, direction));
  if (!good) remote_turn_.refuse(neighbour);
  s_.job = good ? job : RemoteShared::failed;
  s_.which = which;
  return true;
}

// Thread 0.
template <class Derived>
__device__ inline bool RemoteWork<Derived>::find_job() {
  const RemoteDevice& f = remote();
  bool all = true;
  for (int s = 0; s < f.num_sources; ++s) {
    if (s_.taken_all[s] != 0) continue;
    all = false;
    const int neighbour = f.sources[s];
    if (directions().landed(neighbour, Direction::to_relay) && self().may_take(neighbour)) {
      return found(RemoteShared::take, s, neighbour, Direction::to_relay, Derived::kKind);
    }
  }
  for (int m = 0; Derived::kAnswers && m < f.num_machines; ++m) {
    if (s_.unanswered[m] == 0) continue;
    all = false;
    if (directions().landed(f.relays[m], Direction::to_source)) {
      return found(RemoteShared::answer, m, f.relays[m], Direction::to_source, RemoteKind::answer);
    }
  }
  for (int m = 0; m < f.num_machines; ++m) {
    if (s_.sent_all[m] != 0) continue;
    all = false;
    if (!directions().may_fill(f.relays[m], Direction::to_relay)) continue;
    s_.job = RemoteShared::send;
    s_.which = m;
    return true;
  }
  if (all) s_.job = RemoteShared::done;
  return all;
}

// Thread 0: the rank that a timeout names.
template <class Derived>
__device__ inline int RemoteWork<Derived>::first_awaited() const {
  const RemoteDevice& f = remote();
  for (int s = 0; s < f.num_sources; ++s)
    if (s_.taken_all[s] == 0) return f.rank_of[f.sources[s]];
  for (int m = 0; m < f.num_machines; ++m)
    if (s_.unanswered[m] != 0 || s_.sent_all[m] == 0) return f.rank_of[f.relays[m]];
  return -1;
}

template <class Derived>
__device__ inline void RemoteWork<Derived>::send(int machine) {
  const bool last =
      self().fill(machine, directions().next_out(remote().relays[machine], Direction::to_relay));
  __syncthreads();
  if (thread_in_block() != 0) return;
  const int relay = remote().relays[machine];
  RemoteHeader* chunk = directions().next_out(relay, Direction::to_relay);
  remote_turn_.write_header(chunk, Derived::kKind, static_cast<std::uint32_t>(s_.items));
  chunk->chunks = last ? 1 : 0;
  chunk->tokens = static_cast<std::uint32_t>(turn_.plan().tokens);
  chunk->found_missing = turn_.some_blank() ? 1 : 0;
  directions().fill(relay, Direction::to_relay, s_.bytes);
  if (last) s_.sent_all[machine] = 1;
  if (!Derived::kAnswers || s_.items == 0) return;
  ++s_.unanswered[machine];  // each chunk of requests is answered by one chunk
  s_.owed[machine] += s_.items;
}

template <class Derived>
__device__ inline void RemoteWork<Derived>::take(int source) {
  const int neighbour = remote().sources[source];
  const RemoteHeader* chunk = directions().next_in(neighbour, Direction::to_relay);
  self().take(neighbour, *chunk);
  __syncthreads();
  const bool last = chunk->chunks != 0;
  if (last) self().took_all(neighbour, *chunk);
  __syncthreads();
  if (thread_in_block() != 0) return;
  if (last) {
    s_.taken_all[source] = 1;
    s_.missing[source] = chunk->found_missing != 0 ? 1 : 0;
  }
  // The source may leave now: what near ranks wait for from it, flags of chunks, is there.
  directions().give_back(neighbour, Direction::to_relay);
}

template <class Derived>
__device__ inline void RemoteWork<Derived>::answer(int machine) {
  const int relay = remote().relays[machine];
  self().take_answer(machine, *directions().next_in(relay, Direction::to_source));
  __syncthreads();
  if (thread_in_block() != 0) return;
  s_.owed[machine] -= static_cast<int>(directions().next_in(relay, Direction::to_source)->items);
  if (--s_.unanswered[machine] == 0 && s_.owed[machine] != 0) remote_turn_.refuse(relay);
  directions().give_back(relay, Direction::to_source);
}

// Picks the next tokens that have rows on a machine, as many as chunks have room for. True = there
// are no more. All threads call it; it ends with a barrier.
template <class Derived>
__device__ inline bool RemoteWork<Derived>::pick_tokens(int machine, const std::uint32_t* codes,
                                                        std::uint64_t item_bytes,
                                                        std::uint64_t answer_bytes) const {
  const int tokens = moves() ? turn_.plan().tokens : 0, topk = turn_.plan().topk;
  const auto most = static_cast<int>(min(remote().chunk_room / max(item_bytes, answer_bytes),
                                         std::uint64_t{RemoteShared::kMostItems}));
  if (warp_in_block() == 0) {
    int next = s_.next[machine], count = 0;
    __syncwarp();  // all lanes have read it
#pragma unroll 1
    while (next < tokens && count < most) {
      const int token = next + lane_id();
      bool goes = false;
#pragma unroll 1
      for (int k = 0; token < tokens && k < topk && !goes; ++k) {
        goes = machine_of_code(codes[static_cast<std::uint64_t>(token) * topk + k]) == machine;
      }
      const unsigned going = __ballot_sync(kAllLanes, goes);
      const int place = count + __popc(going & lower_lanes());
      if (goes && place < most) s_.picks[place] = static_cast<std::uint32_t>(token);
      const unsigned left = __ballot_sync(kAllLanes, goes && place >= most);
      count = min(count + __popc(going), most);
      next += left != 0 ? __ffs(static_cast<int>(left)) - 1 : 32;
    }
    if (lane_id() == 0) {
      s_.next[machine] = next;
      s_.items = count;
      s_.bytes = static_cast<std::uint32_t>(count * item_bytes);
    }
  }
  __syncthreads();
  return s_.next[machine] >= tokens;
}

// The work of a kernel for other machines; where there are none, it is nothing.
template <bool kRemote, class Work, class Params, class... Rest>
__device__ auto make_remote_work(const Params& params, Turn& turn, TurnShared& turn_shared,
                                 Rest&&... rest) {
  if constexpr (kRemote) {
    __shared__ RemoteShared shared;
    return Work(params, turn, turn_shared, shared, rest...);
  } else {
    return turn::NoWork{};
  }
}

}  // namespace xd::ep::cuda
