#include "meet/mesh.h"

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
#include "base/interfaces.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/math.h"
#include "base/thread.h"
#include "meet/connector.h"
#include "meet/inbox.h"
#include "meet/introduction.h"
#include "meet/packet.h"
#include "meet/several_hosts.h"
#include "meet/watch.h"

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
  Preparation(int num_ranks, const MeshOptions& options)
      : num_ranks_(num_ranks), options_(options) {
    try {
      own_ = make_introduction(num_ranks, options.host_name, options.job_secret);
      own_.host.part = options.part_of_host;
      wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
      if (!wake_) fail_errno("eventfd", errno);
      if (num_ranks == 1) return;
      // Listening comes first, so that every rank that knows this one can connect to it.
      listeners_.near = listen_for_links(own_.socket_name, num_ranks);
      // The reserve has descriptors for a connection to each peer, and one to the meeting point.
      reserve_ = DescriptorReserve(wake_.get(), at(num_ranks));
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
      const auto introduce = [this](const TcpAddress* here) {
        // A rank that meets others on its loopback interface meets none of another host.
        if (here != nullptr && (!here->is_loopback() || !options_.net_interface.text.empty()))
          listen_to_other_hosts(here);
        return encode(own_);
      };
      blobs = bootstrap.all_gather(introduce, deadline);
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

  std::unique_ptr<Mesh> connect(Bootstrap& bootstrap, std::span<const Bytes> blobs,
                                const Deadline& deadline) {
    const int rank = bootstrap.rank();
    std::vector<Introduction> introductions = decode(rank, blobs);
    // All ranks see alike whether there are several hosts.
    if (std::ranges::max(number_hosts(introductions)) == 0) {
      listeners_.remote.reset();
    } else if (bootstrap.can_repeat()) {
      const auto again = [this](const TcpAddress*) {
        listen_to_other_hosts(nullptr);
        return encode(own_);
      };
      introductions = decode(rank, bootstrap.all_gather(again, deadline));
    }
    auto ranks = std::make_unique<MetRanks>(
        MetRanks::of(rank, std::move(introductions), options_.job_secret, options_.global_ranks));
    MeshConnector connector(*ranks, std::move(listeners_), std::move(reserve_),
                            options_.silence_ms);
    connects_ = true;
    Mesh::Parts parts{.wake = std::move(wake_),
                      .ranks = nullptr,
                      .links = connector.run(deadline),
                      .silence_ms = options_.silence_ms};
    try {
      if (ranks->processes.shortage != 0) fail_errno("pidfd_open", ranks->processes.shortage);
      ranks->introductions = {};
      parts.ranks = std::move(ranks);
      return std::make_unique<Mesh>(std::move(parts));
    } catch (...) {
      FailureWords().tell(parts.links, rank);
      finish_saying(parts.links, Deadline::after_ms(kFarewellMs));
      throw;
    }
  }

  // Called when connect() has found no memory to begin with: the peers wait for this rank's calls.
  void give_up_calls(int rank, std::span<const Bytes> blobs) noexcept {
    if (connects_) return;
    try {
      const MetRanks ranks =
          MetRanks::of(rank, decode(rank, blobs), options_.job_secret, options_.global_ranks);
      MeshConnector(ranks, {}).give_up();
    } catch (...) {
    }
  }

 private:
  // Listens where other hosts reach this rank, and introduces the place. If there is none, that is
  // no mistake before it turns out that there are several hosts.
  void listen_to_other_hosts(const TcpAddress* towards_meeting) {
    if (mistake_) return;
    try {
      const TcpAddress address =
          choose_address(interface_addresses(), options_.net_interface, towards_meeting);
      listeners_.remote = tcp_listen(address.with_port(0), kStreamRoom);
      if (!listeners_.remote) fail_errno(concat("listen on ", address.host()), errno);
      introduce_address(own_, local_address(listeners_.remote.get()));
    } catch (...) {
      introduce_no_address(own_);
    }
  }

  // Called inside a catch block.
  void give_up() noexcept {
    mistake_ = std::current_exception();
    own_ = introduce_failure(num_ranks_);
    reserve_.shrink_to(0);
    listeners_ = {};
    wake_.reset();
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

  const int num_ranks_;
  const MeshOptions options_;
  UniqueFd wake_;
  MeshListeners listeners_;
  DescriptorReserve reserve_;
  Introduction own_{};
  std::exception_ptr mistake_;
  bool connects_ = false;
};

}  // namespace

std::unique_ptr<Mesh> Mesh::connect(Bootstrap& bootstrap, const Deadline& deadline,
                                    const MeshOptions& options) {
  Preparation mine(bootstrap.num_ranks(), options);
  const std::vector<Bytes> blobs = mine.meet(bootstrap, deadline);
  try {
    return mine.connect(bootstrap, blobs, deadline);
  } catch (const std::bad_alloc&) {
    mine.give_up_calls(bootstrap.rank(), blobs);
    throw;
  }
}

Mesh::Mesh(Parts&& parts)
    : inbox_(parts.ranks->rails, parts.ranks->names),
      creator_(::getpid()),
      parts_(std::move(parts)) {}

Mesh::~Mesh() {
  if (::getpid() != creator_) {
    // A forked child: the connections are the parent's, and the thread does not exist here.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  // Without its goodbye this rank would be taken for lost.
  const Deadline deadline = Deadline::after_ms(kGoodbyeMs);
  // Posts that this rank passes on come before its goodbye, after which nothing of it counts.
  while (watch_ && watch_->has_posts() && !deadline.passed()) ::poll(nullptr, 0, 1);
  tell_all(parts_.links, {MeshMessageType::goodbye, 0, 0, rank()}, {}, deadline);
  leaving_.store(true, std::memory_order_release);
  call_watch();
  if (thread_.joinable()) thread_.join();
  finish_saying(parts_.links, deadline);
}

void Mesh::call_watch() noexcept { ::eventfd_write(parts_.wake.get(), 1); }

// The watch thread sends bytes that a connection has not taken yet when there is room.
void Mesh::look_after_unsent() noexcept {
  const auto unsent = [](const MeshLink& link) { return link.has_unsent(); };
  if (std::ranges::any_of(parts_.links, unsent)) call_watch();
}

void Mesh::start(MeshEvents& events) {
  XD_CHECK(!watch_);
  try {
    watch_.emplace(MeshWatch::Sources{.links = parts_.links,
                                      .ranks = ranks(),
                                      .silence_ms = parts_.silence_ms,
                                      .inbox = inbox_,
                                      .events = events});
    if (num_ranks() > 1) thread_ = start_thread("xd-watch", [this, &events] { watch(events); });
  } catch (...) {
    send_failure();
    throw;
  }
}

void Mesh::all_gather(std::span<const std::byte> blob, int fd, const Deadline& deadline,
                      std::span<Item> items, const Look& look) {
  XD_CHECK(watch_ && blob.size() <= kMaxBlob);
  const std::uint64_t round = inbox_.begin_round();
  Interruption interruption;
  for (int step = 1; step < num_ranks(); ++step) {
    const int peer = (rank() + step) % num_ranks();
    const MeshLink& link = parts_.links[at(peer)];
    if (!link) continue;  // it hears this rank through a relay
    const int passed = link.is_tcp() ? -1 : fd;
    const MeshHeader header{MeshMessageType::exchange, passed >= 0 ? 1U : 0U, round, rank()};
    // A closed link is no error here: the watch thread reports whether its peer died or left.
    Sent sent = Sent::full;
    while ((sent = link.send(bytes_of(header), blob, passed)) == Sent::full) {
      interruption.check();
      wait_for_room(peer, round, deadline);
    }
    if (sent == Sent::refused) fail_errno("sendmsg to a peer", errno);
  }
  look_after_unsent();
  inbox_.wait_for(round, deadline, items, look);
}

void Mesh::send_abort() noexcept {
  tell_deafness();  // the cause comes first
  tell_all(parts_.links, {MeshMessageType::abort, 0, 0, rank()});
  look_after_unsent();
}

void Mesh::send_report(std::span<const std::byte> report) noexcept {
  const MeshHeader header{MeshMessageType::report, 0, 0, rank()};
  for (const MeshLink& link : parts_.links)
    if (link.is_tcp()) link.send(bytes_of(header), report);
  look_after_unsent();
}

bool Mesh::send_report_to(int rank, std::span<const std::byte> report) noexcept {
  const MeshHeader header{MeshMessageType::report, 0, 0, this->rank()};
  const bool is_done = parts_.links[at(rank)].send(bytes_of(header), report) == Sent::done;
  look_after_unsent();
  return is_done;
}

void Mesh::send_failure() noexcept {
  FailureWords().tell(parts_.links, rank());
  look_after_unsent();
}

// A rank that would not notice its peers any more must not go on as if nothing had happened: calls
// that wait here, and peers that wait for this rank, are told at once. This allocates nothing.
void Mesh::watch(MeshEvents& events) noexcept {
  try {
    watch_->run(parts_.wake.get(), leaving_);
  } catch (...) {
    deaf_by_.emplace();
    const char* text = deaf_by_->text();
    deaf_.store(true, std::memory_order_release);
    events.on_end(deaf_by_->status(), deaf_by_->error_number());
    inbox_.close(deaf_by_->status(), text);
    tell_deafness();
    std::array<char, kMaxFailureText + 128> line;
    const int size =
        std::snprintf(line.data(), line.size(),
                      "warning: rank %d notices nothing of its peers any more: %s", rank(), text);
    log_line({line.data(), at(size)});
  }
}

std::string Mesh::own_address() const {
  return control_address(ranks().introductions[at(rank())]).host();
}

void Mesh::tell_deafness() noexcept {
  if (deaf_.load(std::memory_order_acquire)) deaf_by_->tell(parts_.links, rank());
}

void Mesh::wait_for_room(int peer, std::uint64_t round, const Deadline& deadline) {
  inbox_.check(round);
  if (deadline.passed())
    throw Error(XD_ERROR_TIMEOUT,
                error_text(names().of(rank()), " could not send to ", names().of(peer),
                           " in time: it does not read"),
                peer);
  pollfd item{parts_.links[at(peer)].get(), POLLOUT, 0};
  ::poll(&item, 1, std::min(kSendSliceMs, deadline.remaining_ms()));
}

}  // namespace xd
