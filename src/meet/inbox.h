// The messages that the watch thread has received from the peers and its findings about them.
// all_gather waits here.
#pragma once

#include <crossdock/status.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/wire.h"
#include "meet/packet.h"
#include "meet/rails.h"
#include "meet/rank_names.h"

namespace xd {

// The message of a rank in one round of an all_gather.
struct MeshItem {
  Bytes blob;
  UniqueFd fd;                // empty if the rank sent none
  bool fd_discarded = false;  // it sent a descriptor for which this process had no room
};

// Ranks that are lost together.
struct Loss {
  std::span<const int> ranks;  // ascending
  // 0: their process has ended or broken the protocol; else their host has not answered for so many
  // milliseconds.
  int silence_ms = 0;
};

// The reason in words, to stand behind the ranks.
std::string reason_of(int silence_ms);

class MeshInbox {
 public:
  // Both outlive the object.
  MeshInbox(const Rails& rails, const RankNames& names);

  // ---- The watch thread ----

  // False = the peer cannot be at `round`. A peer is at most one round ahead: to finish a round it
  // needs this rank's message, which is sent after begin_round().
  bool deliver(int rank, std::uint64_t round, MeshItem item);
  bool expects(int rank, std::uint64_t round);  // says what deliver() would return
  void mark_lost(const Loss& loss);
  void mark_left(int rank);
  // The peer has left, and said why; `status` is for those who need it.
  void mark_failed(int rank, xd_status status, std::string_view text);
  void mark_aborted(int rank);
  // The watch thread itself cannot go on: every wait ends with this error from now on.
  void close(xd_status status, std::string_view text) noexcept;

  // ---- Callers of the mesh ----

  std::uint64_t begin_round();
  std::uint64_t rounds_begun();
  // Called every 100 ms in a wait that has become long, with its round and the lowest rank that is
  // missing. An exception of it ends the wait.
  using Look = std::function<void(std::uint64_t round, int missing)>;
  // Waits for every peer's message in `round`, and moves it to items[peer], or drops it if there
  // are no items. Throws TIMEOUT and what check() throws; allocates nothing else.
  void wait_for(std::uint64_t round, const Deadline& deadline, std::span<MeshItem> items,
                const Look& look);
  // Throws PEER_LOST, MISMATCH (a peer has failed), ABORTED or the error of close() if the round
  // cannot be completed any more.
  void check(std::uint64_t round);
  void cancel() noexcept;

 private:
  struct Letter {
    std::uint64_t round;
    MeshItem item;
  };
  struct Peer {
    std::deque<Letter> letters;
    std::uint64_t rounds_received = 0;
    std::optional<int> lost;  // Loss::silence_ms
    bool left = false;
    bool failed = false;  // has left, and said why
  };

  // The failure of the first rank that cannot go on, in a fixed buffer, since memory may have run
  // out.
  struct Failure {
    int rank = -1;  // -1 = no rank
    xd_status status = XD_SUCCESS;
    std::size_t size = 0;
    std::array<char, kMaxFailureText> text{};
    std::string_view view() const { return {text.data(), size}; }
  };

  void keep_failure(int rank, xd_status status, std::string_view text);
  bool expects_locked(int rank, std::uint64_t round) const {
    return round == peers_[static_cast<std::size_t>(rank)].rounds_received &&
           round <= rounds_begun_;
  }
  bool has_letter(const Peer& peer, std::uint64_t round) const;
  bool complete(std::uint64_t round) const { return first_missing(round) < 0; }
  int first_missing(std::uint64_t round) const;  // -1 = none
  std::vector<int> missing(std::uint64_t round) const;
  void throw_failure() const;
  void check_locked(std::uint64_t round) const;

  const Rails& rails_;
  const RankNames& names_;
  const int rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::uint64_t rounds_begun_ = 0;
  std::optional<int> aborted_by_;
  Failure failure_;
  bool cancelled_ = false;
};

}  // namespace xd
