// Chunks of bytes between this rank and each of its neighbours, through frames of memory that both
// sides own in turn: a frame is filled again only after its credit has come back. Stands on any
// engine, and on nothing but the contract of Engine. docs/internals/net.md proves that no frame is
// written while it is read.
#pragma once

#include <crossdock/status.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/warning_limit.h"
#include "base/wire.h"
#include "net/engine.h"
#include "net/link_map.h"
#include "net/link_tag.h"

namespace xd::net {

struct LinkConfig {
  int rank = 0;                 // this one, as its neighbours name it
  int frames = 4;               // per neighbour and direction, from 1 to kMaxLinkFrames
  std::size_t frame_bytes = 0;  // the longest chunk; same on all ranks
  // The caller's memory for frames, LinkMap::bytes() of it. Outlives the links; empty = their own.
  std::span<std::byte> memory{};
};

// A neighbour is named by its place in the list that the links are made with.
struct LinkNeighbour {
  int rank;  // also the engine's name for it
  std::string host;
};

// One thread at a time. Links that have failed are of no use any more: accept(), take(), send(),
// next(), give_back(), poll() and wait_for() throw the failure from then on. It is that of a
// neighbour (PEER_LOST from lose(), SYSTEM from the engine), INTERNAL where a neighbour or the
// engine broke its promises, or what the engine threw; the text names rank and host where they are
// known. A tag that breaks one may be a stranger's where the engine does not vouch for tags: then
// it is refused with a warning, and the links go on. Steps allocate nothing but what the engine
// does, unless its `sent` lag behind by many uses.
class Links final {
 public:
  // The engine outlives the links and reports to nobody else.
  Links(Engine& engine, const LinkConfig& config, std::vector<LinkNeighbour> neighbours);
  // Closes the engine: nobody writes to this rank's memory behind it.
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // The bytes that a neighbour needs to reach this rank. The caller carries it over while ranks
  // meet.
  Bytes offer(int neighbour) const;
  const LinkMap& map() const { return map_; }
  int rank() const { return config_.rank; }
  // Connects to a neighbour by its offer; once for each, before anything is sent to it. Nobody
  // sends before all of its neighbours have connected to it. Throws MISMATCH if the offer is not
  // that of the neighbour to this rank, or of other frames; the links are as before then.
  void accept(int neighbour, std::span<const std::byte> offer);

  // ---- Connections ----
  // Many engines connect with the first put, which takes long, or finds out that no data come
  // through. So neighbours greet one another before they rely on it, in an order in which no two
  // connects cross: of two ranks the lower one greets, and the other answers inside poll(). Once,
  // after all neighbours have accepted this rank's offers.
  void greet();
  // The first neighbour whose greeting has not come; -1 = all have.
  int first_ungreeted() const;
  // All have, and this rank's were sent.
  bool all_connected() const {
    return first_ungreeted() < 0 && empty_unsent_ == 0 && outbox_.empty();
  }
  // Rank and host, and where the engine reaches it, for texts.
  std::string name_of(int neighbour) const;
  std::string place_of(int neighbour) const;

  // ---- Neighbours that are lost ----
  // From now on a neighbour that the engine has lost is no failure of the links: what is sent to it
  // goes nowhere, and its frames that were under way stay taken, as the engine may yet read them.
  void outlive_neighbours() { outlives_neighbours_ = true; }
  bool is_lost(int neighbour) const { return neighbours_.at(at(neighbour)).lost; }

  // ---- Sender ----
  struct Frame {
    int neighbour;
    unsigned frame, generation;
    std::span<std::byte> bytes;  // frame_bytes of them, to be filled; multiples of 16 in address
  };
  // A frame that may be filled; none = all are under way. Users that must never wait for one kind
  // of chunk because of another take them out of disjoint ranges.
  struct Range {
    int first = 0, end = kMaxLinkFrames;
  };
  std::optional<Frame> take(int neighbour) { return take(neighbour, Range{}); }
  std::optional<Frame> take(int neighbour, Range range);
  // Whether take() would find this frame.
  bool is_free(int neighbour, unsigned frame) const {
    return !neighbours_.at(at(neighbour)).sending.at(frame).taken;
  }
  // Whether the engine needs this rank no longer for the frame's last chunk, if it had one: it
  // arrives at a neighbour that polls, though this rank does nothing more. The neighbour may have
  // to poll until it has arrived.
  bool is_sent(int neighbour, unsigned frame) const {
    const Sending& sending = neighbours_.at(at(neighbour)).sending.at(frame);
    return !sending.posted || sending.sent;
  }
  // Sends the first `bytes` of a frame that take() has returned; once.
  void send(const Frame& frame, std::size_t bytes);

  // ---- Receiver ----
  struct Chunk {
    int neighbour;
    unsigned frame, generation;
    std::span<const std::byte> bytes;  // stay as they are until give_back()
  };
  // A chunk that has arrived; the order is not that of send().
  std::optional<Chunk> next(int neighbour);
  // The chunk has been read; once. In any order.
  void give_back(const Chunk& chunk);

  // ---- Both ----
  // Takes in what has happened. True = something has.
  bool poll();
  // As Engine::sleep_on(), for whoever sleeps on more than this.
  int sleep_on();
  // Some puts wait here, as the engine did not take them: they leave with a later poll().
  bool holds_back() const { return !outbox_.empty(); }
  bool holds_back(int neighbour) const;
  // All frames of this rank are free again and the engine holds nothing of it: everything that it
  // has sent was read, and its memory may go once its neighbours are at rest, too.
  bool at_rest() const { return frames_in_use_ == 0 && empty_unsent_ == 0 && outbox_.empty(); }
  // The frames that a neighbour has not read.
  std::ptrdiff_t unread(int neighbour) const;
  // The first neighbour that is there and has not read everything; -1 = there is none.
  int first_unread() const;
  // The puts that this rank has sent since the links were made: chunks with their headers, and
  // credits, which have no bytes.
  struct Sent {
    std::uint64_t puts = 0, bytes = 0;
  };
  const Sent& sent() const { return sent_; }
  // Polls, and sleeps where there is nothing to do, until done() returns true. Throws TIMEOUT with
  // `what` and whom it was expected of, and ABORTED if the caller's thread is interrupted; neither
  // is a failure of the links. Neighbour -1 = of nobody in particular: the text names the first
  // that has not read everything, if there is one.
  template <class Done>
  void wait_for(const Deadline& deadline, int neighbour, const char* what, Done&& done) {
    Interruption interruption;
    while (!done()) {
      // News of others must not keep the deadline from being looked at.
      const bool news = poll();
      interruption.check();
      if (deadline.passed()) {
        if (done()) return;
        fail_for_time(neighbour, what);
      }
      if (!news) sleep_until(interruption.next(deadline));
    }
  }
  // The watch has found that a neighbour is gone: from here on every call fails. Called by the
  // thread that uses the links; a wait that sleeps does not hear of it before its next turn.
  void lose(int neighbour, const std::string& why);

 private:
  using Header = LinkHeader;
  struct Sending {
    unsigned generation = 0;
    bool taken = false;     // by take(), until it is free again
    bool posted = false;    // by send(), once in each use
    bool sent = false;      // its source is free
    bool credited = false;  // the receiver has read it
  };
  struct Receiving {
    enum class State : std::uint8_t { empty, arrived, held };
    unsigned generation = 0;
    State state = State::empty;
  };
  struct Neighbour {
    LinkNeighbour name;
    RegionHandle region;
    unsigned channel = 0;           // this rank, as the neighbour numbers its own
    std::uint64_t first_frame = 0;  // where its frames for this rank begin in its region
    bool accepted = false;
    bool greeted = false;  // its greeting has come
    bool lost = false;
    std::vector<Sending> sending;
    std::vector<Receiving> receiving;
  };

  Sending& frame_of(int neighbour, unsigned frame);
  void check() const;
  [[noreturn]] void break_off(xd_status status, int neighbour, const std::string& text);
  void refuse_tag(int neighbour, const std::string& text);
  void on_failure(const PeerFailure& failure);
  [[noreturn]] void fail_for_time(int neighbour, const char* what) const;
  void sleep_until(const Deadline& deadline);
  void post(const Put& put);
  void flush();
  void poll_engine();
  void keep_failure();
  void post_empty(int neighbour, TagKind kind, unsigned frame, unsigned generation);
  void on_arrival(const LinkTag& tag);
  void on_chunk(int neighbour, unsigned frame, unsigned generation);
  void on_credit(int neighbour, unsigned frame, unsigned generation);
  void on_greeting(int neighbour);
  void on_sent(std::uint64_t id);
  void free_if_done(Sending& frame);
  void set_free(Sending& frame);
  std::span<const std::byte> open(int neighbour, unsigned frame);

  Engine& engine_;
  const LinkConfig config_;
  std::vector<Neighbour> neighbours_;
  const LinkMap map_;
  std::vector<std::byte> own_memory_;
  std::span<std::byte> memory_;
  std::unique_ptr<Region> region_;                    // of memory_
  std::vector<Put> outbox_;                           // puts that the engine has not taken yet
  std::size_t frames_in_use_ = 0, empty_unsent_ = 0;  // puts without bytes: credits, greetings
  Sent sent_;
  bool outlives_neighbours_ = false;
  std::optional<Error> failure_;
  Events events_;
  WarningLimit refused_{"puts of unknown senders, or damaged ones"};
};

}  // namespace xd::net
