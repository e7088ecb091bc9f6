// The work of an operation for other machines, which the last block that leaves does: it sends
// chunks to this rank's gateways, and takes those of the ranks whose gateway this rank is, as they
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
struct FarShared {
  static constexpr int kMostItems = 256;  // of a chunk

  enum Job : int { none, done, failed, send, take, answer };
  int job, which;       // send: a far machine; take: a source, by its place in FarDevice::sources
  int items;            // of the chunk that is being filled
  std::uint32_t bytes;  // of these items
  int next[kMaxFarMachines];               // first item of the machine's next chunk
  std::uint32_t begun[kMaxFarMachines];    // prepare: words of it that have been sent
  std::uint8_t sent_all[kMaxFarMachines];  // the last chunk is filled
  std::uint8_t taken_all[kMaxDeviceRanks];
  std::uint8_t missing[kMaxDeviceRanks];  // by source: it has not found memory
  int unanswered[kMaxFarMachines];        // chunks
  int owed[kMaxFarMachines];              // answers of all of them
  int partials_here;                      // 1 = near ranks have added up their rows
  std::uint32_t picks[kMostItems];        // tokens
};

// `Derived` has for all threads of the block:
//   kKind                  of its chunks to gateways
//   fill(machine, chunk)   fills items of the next chunk: sets next[], items and bytes; true = it
//                          is the last
//   take(partner, chunk)   takes all of a chunk
// and, if it wants, the functions of "What a work may hide".
template <class Derived>
class FarWork {
 public:
  __device__ FarWork(const TurnParams& params, Turn& turn, TurnShared& turn_shared,
                     FarShared& shared)
      : turn_(turn), shared_(turn_shared), far_turn_(params, turn), s_(shared) {}

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
    far_turn_.raise_done(s_.missing);
  }
  __device__ void after_done() {
    if (turn_.verdict() != Verdict::fatal) far_turn_.rest();
  }
  __device__ bool raises_done(int rank) const { return far().machine_of[rank] == kNear; }
  // A near rank raises its flag behind its work for other machines, where it may wait, too.
  static constexpr int kDoneTimeouts = 2;

  // ---- Functions that a work may hide ----

  __device__ void start() {}
  // Of items of chunks of this kind; 0 = they differ, and take() looks at their lengths.
  __device__ std::uint64_t bytes_of_item(FarKind) const { return 0; }
  __device__ bool may_take(int) { return true; }  // thread 0
  __device__ void take_answer(int, const FarHeader&) {}
  __device__ void took_all(int, const FarHeader&) {}  // the last chunk of a source has been taken
  static constexpr bool kAnswers = false;

 protected:
  __device__ const FarDevice& far() const { return far_turn_.far(); }
  __device__ const FarLanes& lanes() const { return far_turn_.lanes(); }
  __device__ bool moves() const { return turn_.verdict() == Verdict::go; }
  // The far machine of a choice's row, or kNear, also if it has none. Any thread.
  __device__ int machine_of_code(std::uint32_t code) const {
    const GroupDevice& g = turn_.group();
    const std::uint32_t row = g.layout.row_per_expert ? code : code / g.codec_experts;
    if (code == RowCodec::kNone || row >= shared_.base[turn_.ranks()]) return kNear;
    return far().machine_of[rank_of_row(shared_, turn_.ranks(), row)];
  }
  __device__ bool pick_tokens(int machine, const std::uint32_t* codes, std::uint64_t item_bytes,
                              std::uint64_t answer_bytes = 0) const;

  Turn& turn_;
  TurnShared& shared_;
  const FarTurn far_turn_;
  FarShared& s_;

 private:
  __device__ Derived& self() { return static_cast<Derived&>(*this); }
  __device__ void clear();
  __device__ bool do_all();
  __device__ bool find_job();
  __device__ bool found(int job, int which, int partner, FarLane lane, FarKind kind);
  __device__ int first_awaited() const;
  __device__ void send(int machine);
  __device__ void take(int source);
  __device__ void answer(int machine);
};

template <class Derived>
__device__ inline void FarWork<Derived>::clear() {
  for (int i = thread_in_block(); i < kMaxDeviceRanks; i += threads_per_block()) {
    s_.taken_all[i] = s_.missing[i] = 0;
    if (i < kMaxFarMachines)
      s_.next[i] = s_.unanswered[i] = s_.owed[i] = s_.begun[i] = s_.sent_all[i] = 0;
  }
  if (thread_in_block() == 0) s_.partials_here = 0;
  __syncthreads();
}

template <class Derived>
__device__ inline bool FarWork<Derived>::do_all() {
  for (;;) {
    if (thread_in_block() == 0) {
      s_.job = FarShared::none;
      const std::uint64_t epoch = turn_.epoch();
      if (!device::wait_until(
              turn_.group().comm, turn_.site(XD_PHASE_ROWS), first_awaited(),
              [this] { return find_job(); }, [=] { return epoch - 1; })) {
        s_.job = FarShared::failed;
      }
    }
    __syncthreads();
    const int job = s_.job, which = s_.which;
    if (job == FarShared::failed) return false;
    if (job == FarShared::done) return true;
    if (job == FarShared::send) send(which);
    if (job == FarShared::take) take(which);
    if (job == FarShared::answer) answer(which);
    __syncthreads();
  }
}

// Thread 0: a chunk that is here is a job, if it is the one that is expected, and as long as its
// items are.
template <class Derived>
__device__ inline bool FarWork<Derived>::found(int job, int which, int partner, FarLane lane,
                                               FarKind kind) {
  const std::uint64_t items = lanes().next_in(partner, lane)->items;
  const std::uint64_t each = self().bytes_of_item(kind);
  const bool good = far_turn_.is_in_step(partner, lane, kind) &&
                    (each == 0 || items * each == lanes().bytes_in(partner, lane));
  if (!good) far_turn_.refuse(partner);
  s_.job = good ? job : FarShared::failed;
  s_.which = which;
  return true;
}

// Thread 0.
template <class Derived>
__device__ inline bool FarWork<Derived>::find_job() {
  const FarDevice& f = far();
  bool all = true;
  for (int s = 0; s < f.num_sources; ++s) {
    if (s_.taken_all[s] != 0) continue;
    all = false;
    const int partner = f.sources[s];
    if (lanes().landed(partner, FarLane::to_gateway) && self().may_take(partner)) {
      return found(FarShared::take, s, partner, FarLane::to_gateway, Derived::kKind);
    }
  }
  for (int m = 0; Derived::kAnswers && m < f.num_machines; ++m) {
    if (s_.unanswered[m] == 0) continue;
    all = false;
    if (lanes().landed(f.gateways[m], FarLane::to_source)) {
      return found(FarShared::answer, m, f.gateways[m], FarLane::to_source, FarKind::answer);
    }
  }
  for (int m = 0; m < f.num_machines; ++m) {
    if (s_.sent_all[m] != 0) continue;
    all = false;
    if (!lanes().may_fill(f.gateways[m], FarLane::to_gateway)) continue;
    s_.job = FarShared::send;
    s_.which = m;
    return true;
  }
  if (all) s_.job = FarShared::done;
  return all;
}

// Thread 0: the rank that a timeout names.
template <class Derived>
__device__ inline int FarWork<Derived>::first_awaited() const {
  const FarDevice& f = far();
  for (int s = 0; s < f.num_sources; ++s)
    if (s_.taken_all[s] == 0) return f.rank_of[f.sources[s]];
  for (int m = 0; m < f.num_machines; ++m)
    if (s_.unanswered[m] != 0 || s_.sent_all[m] == 0) return f.rank_of[f.gateways[m]];
  return -1;
}

template <class Derived>
__device__ inline void FarWork<Derived>::send(int machine) {
  const bool last =
      self().fill(machine, lanes().next_out(far().gateways[machine], FarLane::to_gateway));
  __syncthreads();
  if (thread_in_block() != 0) return;
  const int gateway = far().gateways[machine];
  FarHeader* chunk = lanes().next_out(gateway, FarLane::to_gateway);
  far_turn_.write_header(chunk, Derived::kKind, static_cast<std::uint32_t>(s_.items));
  chunk->chunks = last ? 1 : 0;
  chunk->tokens = static_cast<std::uint32_t>(turn_.plan().tokens);
  chunk->found_missing = turn_.some_blank() ? 1 : 0;
  lanes().fill(gateway, FarLane::to_gateway, s_.bytes);
  if (last) s_.sent_all[machine] = 1;
  if (!Derived::kAnswers || s_.items == 0) return;
  ++s_.unanswered[machine];  // each chunk of requests is answered by one chunk
  s_.owed[machine] += s_.items;
}

template <class Derived>
__device__ inline void FarWork<Derived>::take(int source) {
  const int partner = far().sources[source];
  const FarHeader* chunk = lanes().next_in(partner, FarLane::to_gateway);
  self().take(partner, *chunk);
  __syncthreads();
  const bool last = chunk->chunks != 0;
  if (last) self().took_all(partner, *chunk);
  __syncthreads();
  if (thread_in_block() != 0) return;
  if (last) {
    s_.taken_all[source] = 1;
    s_.missing[source] = chunk->found_missing != 0 ? 1 : 0;
  }
  // The source may leave now: what near ranks wait for from it, flags of chunks, is there.
  lanes().give_back(partner, FarLane::to_gateway);
}

template <class Derived>
__device__ inline void FarWork<Derived>::answer(int machine) {
  const int gateway = far().gateways[machine];
  self().take_answer(machine, *lanes().next_in(gateway, FarLane::to_source));
  __syncthreads();
  if (thread_in_block() != 0) return;
  s_.owed[machine] -= static_cast<int>(lanes().next_in(gateway, FarLane::to_source)->items);
  if (--s_.unanswered[machine] == 0 && s_.owed[machine] != 0) far_turn_.refuse(gateway);
  lanes().give_back(gateway, FarLane::to_source);
}

// Picks the next tokens that have rows on a machine, as many as chunks have room for. True = there
// are no more. All threads call it; it ends with a barrier.
template <class Derived>
__device__ inline bool FarWork<Derived>::pick_tokens(int machine, const std::uint32_t* codes,
                                                     std::uint64_t item_bytes,
                                                     std::uint64_t answer_bytes) const {
  const int tokens = moves() ? turn_.plan().tokens : 0, topk = turn_.plan().topk;
  const auto most = static_cast<int>(
      min(far().chunk_room / max(item_bytes, answer_bytes), std::uint64_t{FarShared::kMostItems}));
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
template <bool kFar, class Work, class Params, class... Rest>
__device__ auto make_far_work(const Params& params, Turn& turn, TurnShared& turn_shared,
                              Rest&&... rest) {
  if constexpr (kFar) {
    __shared__ FarShared shared;
    return Work(params, turn, turn_shared, shared, rest...);
  } else {
    return turn::NoWork{};
  }
}

}  // namespace xd::ep::cuda
