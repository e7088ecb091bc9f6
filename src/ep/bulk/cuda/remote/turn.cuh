// A turn's words to and from other machines: what a launch's blocks agree on with ranks that they
// cannot reach. One block does it, beside the turn's own steps:
//
//   send_entry()   behind enter(): this rank's record to its relays
//   send_counts()  prepare, behind its counts: likewise
//   forward()      before await(): takes the entries of this rank's sources, and counts if they
//                  announce some, and stores them into the memory of near ranks, as if it were they
//   leave()        of a RemoteLeave, for the last block: the operation's work for other machines,
//                  then the done flags of its sources, then the wait for this rank's frames
//
//   memory of a near rank       written by                 means
//   entry[stage][s], s remote   s's relay, before await    what s has sent, but for its tensors,
//                                                          which nobody here can reach
//   counts[stage][s]            likewise, in prepare       as sent
//   done[stage][s]              s's relay, before its      whether s has found memory
//                               own done flag
//
// Entries and counts of an operation are sent before anything of it is awaited. Where they are
// taken in, nothing is awaited but them.
#pragma once

#include "ep/bulk/cuda/remote/directions.cuh"
#include "ep/bulk/cuda/turn.cuh"

namespace xd::ep::cuda {

class RemoteTurn {
 public:
  __device__ RemoteTurn(const TurnParams& params, Turn& turn)
      : remote_(*params.group.control->remote), turn_(turn), directions_(remote_) {}

  // ---- All threads of the block call each ----

  __device__ void send_entry(const Record& own) const;
  __device__ void send_counts() const;
  // False after a fatal error.
  __device__ bool forward() const;
  // Raises the done flags of this rank's sources in near ranks' memory. `missing`: by neighbour.
  __device__ void raise_done(const std::uint8_t* missing) const;
  // Returns when all that this rank has sent was read. False after a fatal error.
  __device__ bool rest() const;

  // ---- Single threads ----

  // An entry and counts have the last two frames, so that chunks of the operation need not wait for
  // these.
  __device__ int entry_frame(int neighbour) const {
    return remote_.frame(neighbour, Direction::to_relay, remote_.frames - 1);
  }
  __device__ int counts_frame(int neighbour) const {
    return remote_.frame(neighbour, Direction::to_relay, remote_.frames - 2);
  }
  // True if the chunk that is here in a frame is of this operation, and of this kind.
  __device__ bool is_in_step(int neighbour, int frame, RemoteKind kind) const {
    const auto& header = *static_cast<const volatile RemoteHeader*>(directions_.chunk_in(frame));
    return header.epoch == turn_.epoch() && header.kind == kind &&
           header.source == remote_.rank_of[neighbour];
  }
  __device__ void refuse(int neighbour) const {
    const DeviceComm& comm = turn_.group().comm;
    device::raise(comm,
                  device::error_at(comm, turn_.site(XD_PHASE_ROWS), XD_ERROR_INTERNAL,
                                   remote_.rank_of[neighbour]),
                  device::Spread::everywhere);
  }
  // Waits for a neighbour's chunk in a frame, of a kind, with so many bytes of items. False after a
  // fatal error.
  __device__ bool wait_chunk(int neighbour, int frame, RemoteKind kind, std::uint64_t item_bytes,
                             int phase) const;
  __device__ void write_header(RemoteHeader* chunk, RemoteKind kind, std::uint32_t items) const {
    *chunk = {.epoch = turn_.epoch(),
              .kind = kind,
              .source = turn_.rank(),
              .items = items,
              .chunks = 0,
              .tokens = 0,
              .found_missing = 0};
  }

  __device__ const RemoteDevice& remote() const { return remote_; }
  __device__ const Directions& directions() const { return directions_; }

 private:
  __device__ bool take_entry(int source, bool& sends_counts) const;
  __device__ void bring_counts(int source) const;
  __device__ CountLayout count_layout() const {
    return CountLayout{turn_.group().experts, turn_.ranks()};
  }
  __device__ std::uint64_t* counts_at(int owner, int source) const {
    return turn_.words(owner, turn_.group().map.counts) +
           turn::cell_of(turn_.epoch(), source, turn_.ranks()) * count_layout().size();
  }

  const RemoteDevice& remote_;
  Turn& turn_;
  const Directions directions_;
};

// The block that exchanges entries: that of enter().
__device__ inline bool meets_remote() { return blockIdx.x == gridDim.x - 1; }

__device__ inline void RemoteTurn::send_entry(const Record& own) const {
  const auto* words = reinterpret_cast<const std::uint64_t*>(&own);
#pragma unroll 1
  for (int m = thread_in_block(); m < remote_.num_machines; m += threads_per_block()) {
    const int relay = remote_.relays[m];
    // The frame is free: the last operation ended at rest.
    const int frame = entry_frame(relay);
    RemoteHeader* chunk = directions_.chunk_out(frame);
    write_header(chunk, RemoteKind::entry, 1);
    auto* to = reinterpret_cast<std::uint64_t*>(items_of(chunk));
    for (int w = 0; w < turn::kRecordWords; ++w) to[w] = words[w];
    directions_.send(frame, sizeof(Record));
  }
  __syncthreads();
}

// The counts lie in every stand-in, as they are stored word by word.
__device__ inline void RemoteTurn::send_counts() const {
  const int words = static_cast<int>(count_layout().size());
  int stand_in = 0;
  while (remote_.machine_of[stand_in] == kNear) ++stand_in;
  const std::uint64_t* from = counts_at(stand_in, turn_.rank());
  const std::uint64_t epoch = turn_.epoch();
  device::KernelWait blocks = turn_.site(XD_PHASE_COUNTS);  // of this launch, as at a barrier
  blocks.timeouts = 2;
  bool good = true;
#pragma unroll 1
  for (int i = thread_in_block(); i < words && good; i += threads_per_block()) {
    std::uint64_t word = 0;
    good = device::wait_until(
        turn_.group().comm, blocks, -1,
        [&] {
          word = ptx::ld_relaxed_sys(from + i);
          return count_is_of(word, epoch);
        },
        [=] { return epoch - 1; });
#pragma unroll 1
    for (int m = 0; m < remote_.num_machines && good; ++m) {
      RemoteHeader* chunk = directions_.chunk_out(counts_frame(remote_.relays[m]));
      reinterpret_cast<std::uint32_t*>(items_of(chunk))[i] = count_of(word);
    }
  }
  if (__syncthreads_or(good ? 0 : 1) != 0) return;  // forward() finds the error
#pragma unroll 1
  for (int m = thread_in_block(); m < remote_.num_machines; m += threads_per_block()) {
    const int frame = counts_frame(remote_.relays[m]);
    write_header(directions_.chunk_out(frame), RemoteKind::counts,
                 static_cast<std::uint32_t>(words));
    directions_.send(frame, static_cast<std::uint32_t>(words * sizeof(std::uint32_t)));
  }
  __syncthreads();
}

__device__ inline bool RemoteTurn::wait_chunk(int neighbour, int frame, RemoteKind kind,
                                              std::uint64_t item_bytes, int phase) const {
  const std::uint64_t epoch = turn_.epoch();
  const bool here = device::wait_until(
      turn_.group().comm, turn_.site(phase), remote_.rank_of[neighbour],
      [=, this] { return directions_.landed(frame); }, [=] { return epoch - 1; });
  if (!here) return false;
  if (is_in_step(neighbour, frame, kind) && directions_.bytes_in(frame) == item_bytes) {
    return true;
  }
  refuse(neighbour);
  return false;
}

// One thread for each source.
__device__ inline bool RemoteTurn::take_entry(int source, bool& sends_counts) const {
  const int frame = entry_frame(source);
  if (!wait_chunk(source, frame, RemoteKind::entry, sizeof(Record), XD_PHASE_ENTRY)) return false;
  const auto* from =
      reinterpret_cast<const volatile std::uint64_t*>(items_of(directions_.chunk_in(frame)));
  struct Words {
    std::uint64_t word[turn::kRecordWords];
  } words;
  for (int w = 0; w < turn::kRecordWords; ++w) words.word[w] = from[w];
  auto record = std::bit_cast<Record>(words);
  sends_counts = record.call.operation == XD_EP_PREPARE && record.call.status == XD_SUCCESS;
  // Nobody here reaches its tensors: a tensor without rows is not looked for.
  record.rows = 0;
  record.rows_in = record.scales_in = record.weights_in = record.extra_in = {};
  words = std::bit_cast<Words>(record);
  const std::uint64_t seal = turn_.epoch() + turn::hash_of(words.word);
#pragma unroll 1
  for (int i = 0; i < remote_.num_near; ++i) {
    std::uint64_t* to = turn_.entry_at(remote_.near[i], remote_.rank_of[source], turn_.epoch());
    for (int w = 0; w < turn::kRecordWords; ++w) ptx::st_relaxed_sys(to + w, words.word[w]);
    ptx::st_relaxed_sys(to + turn::kRecordWords, seal);
  }
  directions_.give_back(frame);
  return true;
}

// All threads, when the chunk is here.
__device__ inline void RemoteTurn::bring_counts(int source) const {
  const auto* from = reinterpret_cast<const volatile std::uint32_t*>(
      items_of(directions_.chunk_in(counts_frame(source))));
  const int words = static_cast<int>(count_layout().size());
#pragma unroll 1
  for (int i = thread_in_block(); i < words; i += threads_per_block()) {
    const std::uint64_t word = count_word(from[i], turn_.epoch());
#pragma unroll 1
    for (int n = 0; n < remote_.num_near; ++n)
      ptx::st_relaxed_sys(counts_at(remote_.near[n], remote_.rank_of[source]) + i, word);
  }
}

__device__ inline bool RemoteTurn::forward() const {
  bool good = true;
  const int t = thread_in_block(), threads = threads_per_block();
  std::uint32_t counted = 0;  // of this thread's sources, those that send counts
#pragma unroll 1
  for (int i = 0; i * threads + t < remote_.num_sources && good; ++i) {
    bool sends_counts = false;
    good = take_entry(remote_.sources[i * threads + t], sends_counts);
    if (sends_counts) counted |= 1u << i;
  }
  if (turn_.any_failed(!good)) return false;
  const std::uint64_t count_bytes = count_layout().size() * sizeof(std::uint32_t);
#pragma unroll 1
  for (int s = 0; s < remote_.num_sources; ++s) {
    const int source = remote_.sources[s];
    const bool mine = t == s % threads && (counted >> (s / threads) & 1) != 0;
    const bool comes = __syncthreads_or(mine ? 1 : 0) != 0;
    if (!comes) continue;
    if (t == 0) {
      good = wait_chunk(source, counts_frame(source), RemoteKind::counts, count_bytes,
                        XD_PHASE_COUNTS);
    }
    if (turn_.any_failed(!good)) return false;
    bring_counts(source);
    __syncthreads();
    if (t == 0) directions_.give_back(counts_frame(source));
  }
  __syncthreads();
  return true;
}

__device__ inline void RemoteTurn::raise_done(const std::uint8_t* missing) const {
  if (turn_.verdict() == Verdict::fatal) return;
#pragma unroll 1
  for (int i = thread_in_block(); i < remote_.num_sources * remote_.num_near;
       i += threads_per_block()) {
    const int s = i / remote_.num_near, owner = remote_.near[i % remote_.num_near];
    // Release: as the done flags of near ranks (turn/device/turn.cuh).
    ptx::st_release_sys(
        turn_.done_at(owner, remote_.rank_of[remote_.sources[s]]),
        turn_.epoch() | (missing[remote_.sources[s]] != 0 ? turn::kFoundMissing : 0));
  }
}

__device__ inline bool RemoteTurn::rest() const {
  bool good = true;
  // A relay that has read everything may leave, and that becomes known over another connection
  // than its last words.
  device::KernelWait site = turn_.site(XD_PHASE_ROWS);
  site.leaving_ends = false;
  site.timeouts = 2;  // a relay may be late by a wait of its own
  const std::uint64_t epoch = turn_.epoch();
#pragma unroll 1
  for (int i = thread_in_block(); i < remote_.num_neighbours && good; i += threads_per_block()) {
    good = device::wait_until(
        turn_.group().comm, site, remote_.rank_of[i], [=, this] { return directions_.all_read(i); },
        [=] { return epoch - 1; });
  }
  return !turn_.any_failed(!good);
}

// Behind enter(), in an operation that sends nothing else before await(). All threads of all blocks
// call it; where it fails, await() ends.
__device__ inline void meet_remote(const RemoteTurn& remote, const Turn& turn) {
  if (!meets_remote()) return;
  remote.send_entry(turn.own_record());
  static_cast<void>(remote.forward());
}

}  // namespace xd::ep::cuda
