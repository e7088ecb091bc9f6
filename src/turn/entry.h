// Taking turns: the words that the ranks of one sequence of operations write into one another's
// memory, so that none touches another's memory before it may, or after it should have stopped.
//
// All ranks run the same operations in the same order; an epoch counts them. Host and device take a
// turn with the same verbs (turn/host/turn.h, turn/device/turn.cuh):
//
//   begin()  the next epoch; on the device also: this launch owns the sequence
//   enter()  tells every peer what this rank is about to do; from here on they may touch its memory
//   await()  returns when every peer has entered: from here on this rank may touch theirs (earlier
//            only words in stages by epoch that carry their epoch, as a family's counts do)
//   leave()  tells every peer that this rank touches its memory no more; waits for nobody
//   end()    returns when every peer has left: this rank's memory is its own again
//
// Every rank goes through all five in every operation, also when its call has failed or moves
// nothing, so the epochs of all ranks stay together. No wait goes in a circle: a rank announces
// before it waits, both times, and its announcement depends on no peer.
//
//   area of rank r     written by        means
//   entry[stage][src]  src, once per op  src has entered operation `epoch`: what it is about to do
//   done[stage][src]   src, once per op  src touches r's memory no more in operation `epoch`
//
// Nothing is ever cleared: each word holds the epoch that it belongs to. A stage is free again when
// it comes round: a rank enters operation n + 2 only when it has ended n + 1, where it has seen the
// entries of all peers, and a peer entered n + 1 only after it had read everything of operation n.
//
// So operations need their done flags for nothing but their own end. Where a rank waits for each
// word that peers store into its memory, nothing is stored there any more when all have come, and
// the operation ends without done flags: prepare on CUDA where counts are all that peers store,
// and products that push their words. (A record may still be stored once more over an equal one, in
// a cell that one rank alone writes. So this memory lives as long as the sequence.)
//
// Operations whose halves are calls of their own take these words in pipelines
// (turn/host/pipeline.h): a pipeline has more stages, and its done flags are looked at when a stage
// comes round, not at the end.
//
// The order is the same for both: the writer stores its announcement, then the epoch with release;
// a reader loads the epoch with acquire, then reads the announcement.
//
// The family decides what an operation means (turn/family.h): this folder knows no token, no expert
// and no matrix.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/layout.h"

namespace xd::turn {

inline constexpr std::uint64_t kStages = 2;
constexpr std::uint64_t stage_of(std::uint64_t epoch, std::uint64_t stages = kStages) {
  return epoch % stages;
}

// The cell in which `source` writes in operation `epoch`, in an array [stages][ranks].
constexpr std::uint64_t cell_of(std::uint64_t epoch, int source, int ranks,
                                std::uint64_t stages = kStages) {
  return stage_of(epoch, stages) * static_cast<std::uint64_t>(ranks) +
         static_cast<std::uint64_t>(source);
}

// The beginning of every family's record.
struct Call {
  std::uint8_t status = 0;     // an xd_status: what is wrong with this rank's call
  std::uint8_t operation = 0;  // the family's number of the operation
};

// A record describes a rank's call when it enters. The device sends and hashes it as words, so it
// has no padding.
inline constexpr int kRecordWords = 7;
template <class Record>
inline constexpr bool is_record =
    sizeof(Record) == kRecordWords * sizeof(std::uint64_t) &&
    alignof(Record) == alignof(std::uint64_t) &&
    std::is_trivially_copyable_v<Record>&& std::has_unique_object_representations_v<
        Record>&& std::is_same_v<decltype(Record::call), Call>&& offsetof(Record, call) == 0;

template <class Record>
struct Entry {
  static_assert(is_record<Record>);
  Record record;
  std::atomic<std::uint64_t> epoch;  // on the device: plus a hash of the record
};

struct alignas(64) DoneFlag {
  std::atomic<std::uint64_t> epoch;
};
// A bit in a done flag beside the epoch, on the device: the flag's rank has not found memory that
// some rank offers, and has moved nothing, so the operation is a mismatch for all.
inline constexpr std::uint64_t kFoundMissing = std::uint64_t{1} << 63;

// Likewise on the host: the flag's rank has ended the operation because of a loss, and has moved
// nothing, or not all (turn/host/turn.h).
inline constexpr std::uint64_t kBroken = std::uint64_t{1} << 62;

// A rank has come to enter a view of the communicator. Of sequences on the host that outlive the
// loss of ranks.
struct alignas(64) ViewCell {
  std::uint64_t number;  // of the view, plus one
  std::uint64_t epoch;   // of the rank's last operation; written before the number
};

// Byte offsets inside the memory that a rank shares.
struct TurnMap {
  std::uint64_t entry, done;

  template <class Record>
  static constexpr TurnMap add(LayoutCursor& cursor, int ranks, std::uint64_t stages = kStages) {
    const std::uint64_t cells = stages * static_cast<std::uint64_t>(ranks);
    static_assert(sizeof(Entry<Record>) == 64);
    TurnMap map{};
    map.entry = cursor.add<Entry<Record>>(cells, 64);
    map.done = cursor.add<DoneFlag>(cells);
    return map;
  }
};

}  // namespace xd::turn
