// prepare between machines: what this rank has told remote owners of its rows, which lies in their
// stand-ins, goes to their relays, and they write it into the owners' memory.
//
//   memory                     written by                   read by
//   stand-ins of remote ranks: this rank's blocks, in       the last block that leaves, which
//   items, lists, listed,      steps 2 and 4 of prepare     sends them; counts: the first to meet
//   kept, counts
//   the same of near ranks,    this block, from chunks      near ranks, after the done flag of s
//   row s, s a source of this
//   rank
#pragma once

#include "ep/bulk/cuda/kernels.h"
#include "ep/bulk/cuda/remote/work.cuh"

namespace xd::ep::cuda {

// In shared memory.
struct WordsShared : RemoteShared {
  static constexpr int kMostPieces = 64;
  struct Piece {
    RemoteWords area;
    std::int32_t owner;
    std::uint32_t first, count;
  };
  enum Job : int { none, done, failed, send, take };

  int job, which;  // send: a remote machine; take: a source, by its place in RemoteDevice::sources
  int pieces;      // of the chunk that is being filled
  std::uint32_t bytes;                        // of these
  int next[kMaxRemoteMachines];               // the area that the machine's next chunk begins in
  std::uint32_t begun[kMaxRemoteMachines];    // words of it that have been sent
  std::uint32_t filled[kMaxRemoteMachines];   // chunks
  std::uint32_t taken[kMaxDeviceRanks];       // chunks, by source
  std::uint8_t sent_all[kMaxRemoteMachines];  // the last chunk is filled
  std::uint8_t taken_all[kMaxDeviceRanks];
  Piece piece[kMostPieces];
};

// The last block that leaves does one job at a time, with all its threads, as words are few.
// Thread 0 looks for the next one: whatever can be done at once is done, and taking goes before
// sending, so nobody waits for this rank while it waits. A source's chunks are read in the order in
// which they were filled, and the last one says so.
class RemotePrepare : public RemoteWork<RemotePrepare> {
 public:
  using Shared = WordsShared;

  __device__ RemotePrepare(const PrepareParams& params, Turn& turn, TurnShared& turn_shared,
                           Shared& shared)
      : RemoteWork(params.turn, turn, turn_shared, shared),
        p_(params),
        g_(params.turn.group),
        s_(shared) {}

  // Behind enter(), and behind this rank's counts. All threads of all blocks call both.
  __device__ void meet() const {
    if (meets_remote()) remote_turn_.send_entry(turn_.own_record());
  }
  __device__ void exchange_counts() const {
    if (!meets_remote()) return;
    remote_turn_.send_counts();
    static_cast<void>(remote_turn_.forward());
  }
  // Where nothing else is told: in the place of leave(). False after a fatal error.
  __device__ bool rest() const { return !meets_remote() || remote_turn_.rest(); }
  // Whether rows are dropped.
  __device__ void set_drops(bool drops) { drops_ = drops; }

  // ---- Of RemoteWork ----

  __device__ void clear() const {
    for (int i = thread_in_block(); i < kMaxDeviceRanks; i += threads_per_block()) {
      s_.taken[i] = s_.taken_all[i] = 0;
      if (i < kMaxRemoteMachines) s_.next[i] = s_.begun[i] = s_.filled[i] = s_.sent_all[i] = 0;
    }
  }
  __device__ bool do_all() const {
    for (;;) {
      if (thread_in_block() == 0) {
        s_.job = WordsShared::none;
        const std::uint64_t epoch = turn_.epoch();
        if (!device::wait_until(
                turn_.group().comm, turn_.site(XD_PHASE_ROWS), first_awaited(),
                [this] { return find_job(); }, [=] { return epoch - 1; })) {
          s_.job = WordsShared::failed;
        }
      }
      __syncthreads();
      const int job = s_.job, which = s_.which;
      if (job == WordsShared::failed) return false;
      if (job == WordsShared::done) return true;
      if (job == WordsShared::send) send(which);
      if (job == WordsShared::take) take(which);
      __syncthreads();
    }
  }

 private:
  static constexpr int kAreas = 4;
  using Piece = WordsShared::Piece;

  __device__ int frame_in(int source) const {
    return remote().frame(remote().sources[source], Direction::to_relay, s_.taken[source]);
  }
  __device__ int frame_out(int machine) const {
    return remote().frame(remote().relays[machine], Direction::to_relay, s_.filled[machine]);
  }

  // Thread 0.
  __device__ bool find_job() const {
    const RemoteDevice& r = remote();
    bool all = true;
    for (int s = 0; s < r.num_sources; ++s) {
      if (s_.taken_all[s] != 0) continue;
      all = false;
      if (!directions().landed(frame_in(s))) continue;
      const bool good = remote_turn_.is_in_step(r.sources[s], frame_in(s), RemoteKind::words);
      if (!good) remote_turn_.refuse(r.sources[s]);
      s_.job = good ? WordsShared::take : WordsShared::failed;
      s_.which = s;
      return true;
    }
    for (int m = 0; m < r.num_machines; ++m) {
      if (s_.sent_all[m] != 0) continue;
      all = false;
      if (!directions().may_fill(frame_out(m))) continue;
      s_.job = WordsShared::send;
      s_.which = m;
      return true;
    }
    if (all) s_.job = WordsShared::done;
    return all;
  }
  // Thread 0: the rank that a timeout names.
  __device__ int first_awaited() const {
    const RemoteDevice& r = remote();
    for (int s = 0; s < r.num_sources; ++s)
      if (s_.taken_all[s] == 0) return r.rank_of[r.sources[s]];
    for (int m = 0; m < r.num_machines; ++m)
      if (s_.sent_all[m] == 0) return r.rank_of[r.relays[m]];
    return -1;
  }

  __device__ void send(int machine) const {
    const int frame = frame_out(machine);
    RemoteHeader* chunk = directions().chunk_out(frame);
    const bool last = fill(machine, chunk);
    __syncthreads();
    if (thread_in_block() != 0) return;
    remote_turn_.write_header(chunk, RemoteKind::words, static_cast<std::uint32_t>(s_.pieces));
    chunk->chunks = last ? 1 : 0;
    chunk->found_missing = turn_.some_blank() ? 1 : 0;
    directions().send(frame, s_.bytes);
    ++s_.filled[machine];
    if (last) s_.sent_all[machine] = 1;
  }
  // True = there are no more words for the machine.
  __device__ bool fill(int machine, RemoteHeader* chunk) const {
    if (thread_in_block() == 0) list_pieces(machine);
    __syncthreads();
    std::byte* to = items_of(chunk);
#pragma unroll 1
    for (int i = 0; i < s_.pieces; ++i) {
      const Piece& piece = s_.piece[i];
      const volatile std::uint32_t* from =
          words_at(piece.owner, turn_.rank(), piece.area) + piece.first;
      if (thread_in_block() == 0) {
        *reinterpret_cast<WordsItem*>(to) = {
            .area = piece.area, .owner = piece.owner, .first = piece.first, .count = piece.count};
      }
      auto* words = reinterpret_cast<std::uint32_t*>(to + sizeof(WordsItem));
#pragma unroll 1
      for (auto w = static_cast<std::uint32_t>(thread_in_block()); w < piece.count;
           w += static_cast<std::uint32_t>(threads_per_block())) {
        words[w] = from[w];
      }
      to += item_bytes(piece.count);
    }
    return s_.next[machine] >= end_of_pieces();
  }

  __device__ void take(int source) const {
    const int neighbour = remote().sources[source], frame = frame_in(source);
    const RemoteHeader* chunk = directions().chunk_in(frame);
    store_words(neighbour, frame, *chunk);
    __syncthreads();
    if (thread_in_block() != 0) return;
    if (chunk->chunks != 0) {
      s_.taken_all[source] = 1;
      missing_[neighbour] = chunk->found_missing != 0 ? 1 : 0;
    }
    directions().give_back(frame);
    ++s_.taken[source];
  }
  __device__ void store_words(int neighbour, int frame, const RemoteHeader& chunk) const {
    const std::byte* item = items_of(&chunk);
    const std::byte* const end = item + directions().bytes_in(frame);
#pragma unroll 1
    for (std::uint32_t i = 0; i < chunk.items; ++i) {
      if (item + item_bytes(0) > end) return refuse(neighbour);
      const auto* head = reinterpret_cast<const volatile WordsItem*>(item);
      const RemoteWords area = head->area;
      const int owner = head->owner;
      const std::uint32_t first = head->first, count = head->count;
      const bool good = owner >= 0 && owner < turn_.ranks() &&
                        remote().machine_of[owner] == kNear && is_told(area, owner) &&
                        std::uint64_t{first} + count <= stride_of(area) &&
                        item + item_bytes(count) <= end;
      if (!good) return refuse(neighbour);
      const auto* words = reinterpret_cast<const volatile std::uint32_t*>(item + sizeof(WordsItem));
      std::uint32_t* to = words_at(owner, remote().rank_of[neighbour], area) + first;
#pragma unroll 1
      for (auto w = static_cast<std::uint32_t>(thread_in_block()); w < count;
           w += static_cast<std::uint32_t>(threads_per_block())) {
        to[w] = words[w];
      }
      item += item_bytes(count);
    }
  }

  __device__ static std::uint64_t item_bytes(std::uint64_t words) {
    return sizeof(WordsItem) + net::item_size(words * sizeof(std::uint32_t));
  }
  // WordsShared::next counts the areas of all ranks.
  __device__ int end_of_pieces() const { return turn_.ranks() * kAreas; }

  // The row of a source in an area of a rank's memory, or its stand-in's.
  __device__ std::uint32_t* words_at(int owner, int source, RemoteWords area) const {
    const std::uint64_t offset = area == RemoteWords::list    ? g_.map.lists
                                 : area == RemoteWords::kept  ? g_.map.kept
                                 : area == RemoteWords::items ? g_.map.items
                                                              : g_.map.listed;
    return reinterpret_cast<std::uint32_t*>(turn_.area(owner).base + offset) +
           static_cast<std::uint64_t>(source) * stride_of(area);
  }
  // Words of such a row.
  __device__ std::uint64_t stride_of(RemoteWords area) const {
    return area == RemoteWords::list    ? g_.lists_stride
           : area == RemoteWords::kept  ? static_cast<std::uint64_t>(g_.kept_stride)
           : area == RemoteWords::items ? std::uint64_t{2} * g_.max_tokens
                                        : 2;
  }
  // True if sources tell the owner such words, so that it has memory for them.
  __device__ bool is_told(RemoteWords area, int owner) const {
    switch (area) {
      case RemoteWords::list:
        return g_.keeps_items_at(owner) && g_.layout.row_per_expert;
      case RemoteWords::items:
        return g_.keeps_items_at(owner);
      case RemoteWords::listed:
        return g_.some_keep_items();
      case RemoteWords::kept:
        return g_.drop && !g_.layout.row_per_expert;
    }
    return false;
  }
  // All threads come to it, or none.
  __device__ void refuse(int neighbour) const {
    if (thread_in_block() == 0) remote_turn_.refuse(neighbour);
  }
  // The words that an owner is to get.
  __device__ std::uint32_t words_for(int owner, RemoteWords area) const {
    const bool listed = g_.some_keep_items(), items = g_.keeps_items_at(owner);
    const volatile std::uint32_t* told = words_at(owner, turn_.rank(), RemoteWords::listed);
    switch (area) {
      case RemoteWords::list:  // behind its length, which is not used here
        return items && g_.layout.row_per_expert ? 1 + told[1] : 0;
      case RemoteWords::items:
        return items ? 2 * told[0] : 0;
      case RemoteWords::listed:
        return listed ? 2 : 0;
      default:
        return drops_ && !g_.layout.row_per_expert
                   ? static_cast<std::uint32_t>(p_.experts.first(owner + 1) -
                                                p_.experts.first(owner))
                   : 0;
    }
  }

  // Thread 0: the pieces of the machine's next chunk. A piece may be a part of an area.
  __device__ void list_pieces(int machine) const {
    int& next = s_.next[machine];
    std::uint32_t& begun = s_.begun[machine];
    std::uint64_t used = 0;
    s_.pieces = 0;
    for (; next < end_of_pieces(); ++next, begun = 0) {
      const int owner = next / kAreas;
      if (remote().machine_of[owner] != machine || !moves()) continue;
      const auto area = static_cast<RemoteWords>(next % kAreas);
      const std::uint32_t words = words_for(owner, area);
      while (begun < words) {
        const std::uint64_t region = remote().chunk_room - used;
        if (s_.pieces == WordsShared::kMostPieces || region < item_bytes(kLeastWords)) break;
        const auto fits =
            static_cast<std::uint32_t>((region - sizeof(WordsItem)) / net::kItemAlignment *
                                       net::kItemAlignment / sizeof(std::uint32_t));
        const std::uint32_t count = min(words - begun, fits);
        s_.piece[s_.pieces++] = {.area = area, .owner = owner, .first = begun, .count = count};
        used += item_bytes(count);
        begun += count;
      }
      if (begun < words) break;
    }
    s_.bytes = static_cast<std::uint32_t>(used);
  }
  static constexpr std::uint32_t kLeastWords = 4;

  const PrepareParams& p_;
  const GroupDevice& g_;
  WordsShared& s_;
  bool drops_ = false;
};

}  // namespace xd::ep::cuda
