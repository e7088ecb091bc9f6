#include "mesh/mesh.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <optional>
#include <thread>

#include "base/descriptor_reserve.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/math.h"
#include "base/thread.h"
#include "mesh/connector.h"
#include "mesh/inbox.h"
#include "mesh/introduction.h"
#include "mesh/packet.h"
#include "mesh/watch.h"

namespace xd {
namespace {

// The time that a send waits for room before it looks whether it is still wanted.
constexpr int kSendSliceMs = 20;
// The time that a rank that leaves waits for peers that have not read its earlier messages.
constexpr int kGoodbyeMs = 1000;

// The resources that a rank takes before it meets the others. A rank that could not get them all
// meets the others nevertheless, to say so.
class Preparation {
 public:
  Preparation(int num_ranks, std::string_view host_name) : num_ranks_(num_ranks) {
    try {
      own_ = make_introduction(num_ranks, host_name);
      stop_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
      if (!stop_) fail_errno("eventfd", errno);
      if (num_ranks == 1) return;
      // Listening comes first, so that every rank that knows this one can connect to it.
      listener_ = listen_for_links(own_.socket_name, num_ranks);
      // The reserve has descriptors for a connection to each peer, and one to the meeting point.
      reserve_ = DescriptorReserve(stop_.get(), at(num_ranks));
    } catch (...) {
      give_up();
    }
  }

  // Returns the introductions of all ranks. Throws this rank's own error, after its peers have
  // heard of it.
  std::vector<Bytes> meet(Bootstrap& bootstrap, const Deadline& deadline) {
    std::vector<Bytes> blobs;
    try {
      reserve_.shrink_to(at(num_ranks_) - 1);
      blobs = bootstrap.all_gather(encode(own_), deadline);
    } catch (const std::bad_alloc&) {
      // The others still wait for this rank.
      if (mistake_ || !bootstrap.can_come_again()) throw;
      give_up();
      return meet(bootstrap, deadline);
    } catch (...) {
      if (mistake_) std::rethrow_exception(mistake_);
      throw;
    }
    if (mistake_) std::rethrow_exception(mistake_);
    return blobs;
  }

  std::unique_ptr<Mesh> connect(int rank, std::span<const Bytes> blobs, const Deadline& deadline) {
    const std::vector<Introduction> introductions = decode(rank, blobs);
    Mesh::Parts parts{.rank = rank,
                      .stop = std::move(stop_),
                      .processes = find_processes(rank, introductions),
                      .host_names = host_names(introductions),
                      .links = {}};
    MeshConnector connector(rank, introductions, parts.processes, std::move(listener_),
                            std::move(reserve_));
    connects_ = true;
    parts.links = connector.run(deadline);
    try {
      if (parts.processes.shortage != 0) fail_errno("pidfd_open", parts.processes.shortage);
      return std::make_unique<Mesh>(std::move(parts));
    } catch (...) {
      tell_failure(parts.links);
      throw;
    }
  }

  // Called when connect() has found no memory to begin with: the peers wait for this rank's calls.
  void give_up_calls(int rank, std::span<const Bytes> blobs) noexcept {
    if (connects_) return;
    try {
      const std::vector<Introduction> introductions = decode(rank, blobs);
      MeshConnector(rank, introductions, {}, {}).give_up();
    } catch (...) {
    }
  }

 private:
  // Called inside a catch block.
  void give_up() noexcept {
    mistake_ = std::current_exception();
    own_ = introduce_failure(num_ranks_);
    reserve_.shrink_to(0);
    listener_.reset();
    stop_.reset();
  }

  std::vector<Introduction> decode(int rank, std::span<const Bytes> blobs) const {
    std::vector<Introduction> introductions;
    for (int r = 0; r < num_ranks_; ++r) {
      const auto introduction = decode_introduction(blobs[at(r)]);
      if (!introduction)
        fail(XD_ERROR_MISMATCH, "rank ", r, " introduced itself with ", blobs[at(r)].size(),
             " bytes that make no sense to rank ", rank);
      check_peer(rank, own_, r, *introduction);
      introductions.push_back(*introduction);
    }
    return introductions;
  }

  int num_ranks_;
  UniqueFd stop_, listener_;
  DescriptorReserve reserve_;
  Introduction own_{};
  std::exception_ptr mistake_;
  bool connects_ = false;
};

}  // namespace

std::unique_ptr<Mesh> Mesh::connect(Bootstrap& bootstrap, const Deadline& deadline,
                                    std::string_view host_name) {
  Preparation mine(bootstrap.num_ranks(), host_name);
  const std::vector<Bytes> blobs = mine.meet(bootstrap, deadline);
  try {
    return mine.connect(bootstrap.rank(), blobs, deadline);
  } catch (const std::bad_alloc&) {
    mine.give_up_calls(bootstrap.rank(), blobs);
    throw;
  }
}

Mesh::Mesh(Parts&& parts)
    : inbox_(parts.rank, static_cast<int>(parts.links.size())),
      creator_(::getpid()),
      parts_(std::move(parts)) {}

Mesh::~Mesh() {
  if (::getpid() != creator_) {
    // A forked child: the connections are the parent's, and the thread does not exist here.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  // Without its goodbye this rank would be taken for lost.
  tell_all(parts_.links, MeshMessageType::goodbye, {}, Deadline::after_ms(kGoodbyeMs));
  ::eventfd_write(parts_.stop.get(), 1);
  if (thread_.joinable()) thread_.join();
}

void Mesh::start(MeshEvents& events) {
  XD_CHECK(!watch_);
  try {
    watch_.emplace(MeshWatch::Sources{.rank = parts_.rank,
                                      .links = parts_.links,
                                      .processes = parts_.processes,
                                      .inbox = inbox_,
                                      .events = events});
    if (num_ranks() > 1) thread_ = start_thread("xd-watch", [this, &events] { watch(events); });
  } catch (...) {
    send_failure();
    throw;
  }
}

void Mesh::all_gather(std::span<const std::byte> blob, int fd, const Deadline& deadline,
                      std::span<Item> items) {
  XD_CHECK(watch_ && blob.size() <= kMaxBlob);
  const std::uint64_t round = inbox_.begin_round();
  const MeshHeader header{MeshMessageType::exchange, fd >= 0 ? 1U : 0U, round};
  const auto head = std::as_bytes(std::span(&header, 1));
  Interruption interruption;
  for (int step = 1; step < num_ranks(); ++step) {
    const int peer = (parts_.rank + step) % num_ranks();
    const int link = parts_.links[at(peer)].get();
    // A closed link is no error here: the watch thread reports whether its peer died or left.
    Sent sent = Sent::full;
    while ((sent = send_packet(link, head, blob, fd)) == Sent::full) {
      interruption.check();
      wait_for_room(peer, round, deadline);
    }
    if (sent == Sent::refused) fail_errno("sendmsg to a peer", errno);
  }
  inbox_.wait_for(round, deadline, items);
}

void Mesh::send_abort() noexcept {
  tell_deafness();  // the cause comes first
  tell_all(parts_.links, MeshMessageType::abort);
}

// A rank that would not notice its peers any more must not go on as if nothing had happened: calls
// that wait here, and peers that wait for this rank, are told at once. This allocates nothing.
void Mesh::watch(MeshEvents& events) noexcept {
  try {
    watch_->run(parts_.stop.get());
  } catch (...) {
    const Caught error = caught(deaf_by_);
    const char* text = deaf_by_.data();
    deaf_.store(true, std::memory_order_release);
    events.on_end(error.status, error.error_number);
    inbox_.close(error.status, text);
    tell_deafness();
    std::array<char, kMaxFailureText + 128> line;
    const int size = std::snprintf(line.data(), line.size(),
                                   "warning: rank %d notices nothing of its peers any more: %s",
                                   parts_.rank, text);
    log_line({line.data(), at(size)});
  }
}

void Mesh::tell_deafness() noexcept {
  if (deaf_.load(std::memory_order_acquire))
    tell_all(parts_.links, MeshMessageType::failure, deaf_by_.data());
}

void Mesh::wait_for_room(int peer, std::uint64_t round, const Deadline& deadline) {
  inbox_.check(round);
  if (deadline.passed())
    throw Error(XD_ERROR_TIMEOUT,
                error_text("rank ", parts_.rank, " could not send to rank ", peer,
                           " in time: it does not read"),
                peer);
  pollfd item{parts_.links[at(peer)].get(), POLLOUT, 0};
  ::poll(&item, 1, std::min(kSendSliceMs, deadline.remaining_ms()));
}

}  // namespace xd
