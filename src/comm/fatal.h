// Fatal errors, which finish a communicator, and the boards that they are written to.
//
// Every rank has one error board in shared memory. A rank that meets a fatal error (timeout, abort,
// busy group) writes it to its own board and to every peer's; errors that every rank notices by
// itself (a lost peer, a group's error that its config makes fatal) are written to the own board
// only. The first writer of a board wins:
//   writer s: fill record[s] -> first: compare-and-swap 0 -> s + 1 (release)
//   reader:   first (acquire) != 0 -> record[first - 1] is complete and never changes again
// Record s of a board has one writer, rank s, which writes it at most once.
#pragma once

#include <crossdock/comm.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/layout.h"
#include "comm/doorbell.h"
#include "comm/near_memory.h"
#include "comm/operations.h"
#include "comm/wait_note.h"

namespace xd {

class RankNames;

struct FatalError {
  std::int32_t status = XD_SUCCESS;
  std::int32_t phase = XD_PHASE_NONE;
  std::int32_t rank = -1;  // the rank that raised it
  std::int32_t peer = -1;  // the rank that it is about
  std::int32_t group = -1;
  std::int32_t operation = -1;
  std::int32_t left = 0;  // PEER_LOST: 1 = said goodbye, 0 = its process ended
  // TIMEOUT; PEER_LOST by the silence of a host: its length, 0 = another reason.
  std::int32_t timeout_ms = 0;
  std::uint64_t expected_epoch = 0;
  std::uint64_t seen_epoch = 0;
  // PEER_LOST: the ranks of the process that ended, ascending, as many as there is room for.
  std::int32_t num_lost = 0;
  std::array<std::int32_t, 16> lost{};
  // 1 = every rank meets the error by itself: it belongs to a group whose errors are fatal.
  std::int32_t met_by_all = 0;
  std::int32_t error_number = 0;  // errno of the system call that failed, if one did
  std::int32_t deaf = 0;          // 1 = the rank's watch thread met it and hears no peer any more
};

// An error as hosts tell it one another.
struct ToldError : FatalError {
  ToldError() = default;
  // `words`: of a MISMATCH, all of its sentence; of a TIMEOUT, for whom its peer waits.
  ToldError(const FatalError& error, std::string_view text = {}) : FatalError(error) {
    text.copy(words.data(), words.size() - 1);
  }
  void set_call(std::string_view text) { text.copy(call.data(), call.size() - 1); }

  // TIMEOUT: the rank for which the peer waits in the end, if that waits itself; -1 = none.
  std::int32_t about = -1;
  std::int32_t unused = 0;
  std::array<char, 96> call{};  // the host call, if it is one
  std::array<char, 224> words{};
};

// The boards that get an error: only that of the rank that meets it, or all.
enum class Spread { here, everywhere };

// Errors travel to other hosts as they are.
static_assert(std::has_unique_object_representations_v<FatalError> &&
              std::is_trivially_copyable_v<ToldError>);

// The error as one sentence. `operations`: those of the error's group.
std::string describe(const ToldError& error, const Operations* operations, const RankNames& names);

// The call in which a rank waits: of an operation, or of the host where that is -1. `operations`:
// those of the operation.
std::string call_text(int group, int operation, std::uint64_t epoch, const Operations* operations);

// The error's status; INTERNAL if the number is no status, as on a damaged board.
xd_status status_of(const FatalError& error);

// Offsets inside a rank's control segment: bell, note, then error board.
struct RankBoardMap {
  std::uint64_t bell, note, first, records, end;

  static constexpr RankBoardMap make(int num_ranks) {
    LayoutCursor cursor;
    RankBoardMap map{};
    map.bell = cursor.add<Doorbell>(1);
    map.note = cursor.add<WaitNotePlace>(1, 64);
    map.first = cursor.add<std::atomic<std::uint32_t>>(1, 64);
    map.records = cursor.add<ToldError>(static_cast<std::uint64_t>(num_ranks), 64);
    map.end = cursor.at;
    return map;
  }
};

// A near rank's control segment.
class RankBoard {
 public:
  RankBoard() = default;
  RankBoard(NearMemory memory, int num_ranks)
      : memory_(memory),
        map_(RankBoardMap::make(num_ranks)),
        num_ranks_(static_cast<std::uint32_t>(num_ranks)) {}

  Doorbell& bell() const { return *at<Doorbell>(map_.bell); }
  WaitNotePlace& note() const { return *at<WaitNotePlace>(map_.note); }

  // Writes the error as rank `writer`, and rings the bell; false if another error came first.
  bool post(int writer, const ToldError& error) const {
    at<ToldError>(map_.records)[writer] = error;
    std::uint32_t none = 0;
    const bool won = first().compare_exchange_strong(none, static_cast<std::uint32_t>(writer) + 1,
                                                     std::memory_order_acq_rel);
    bell().ring();
    return won;
  }

  bool post(int writer, const FatalError& error) const { return post(writer, ToldError(error)); }

  // Forgets the error and the note of a process that had this board before.
  void clear() const {
    first().store(0, std::memory_order_release);
    note().write(WaitNote{});
  }

  // The error of this board, or nullptr. If the board names a writer that does not exist, it is
  // damaged, and the first record, which may be empty, is as good as any.
  const ToldError* error() const {
    const std::uint32_t writer = first().load(std::memory_order_acquire);
    if (writer == 0) return nullptr;
    return &at<ToldError>(map_.records)[writer <= num_ranks_ ? writer - 1 : 0];
  }

 private:
  template <class T>
  T* at(std::uint64_t offset) const {
    return memory_.from(offset).array<T>();
  }
  std::atomic<std::uint32_t>& first() const { return *at<std::atomic<std::uint32_t>>(map_.first); }

  NearMemory memory_;
  RankBoardMap map_{};
  std::uint32_t num_ranks_ = 0;
};

}  // namespace xd
