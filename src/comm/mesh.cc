#include "comm/mesh.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/math.h"
#include "bootstrap/thread.h"
#include "comm/mesh_connector.h"
#include "comm/mesh_inbox.h"
#include "comm/mesh_introduction.h"
#include "comm/mesh_message.h"
#include "comm/mesh_peers.h"
#include "comm/mesh_socket.h"
#include "comm/mesh_watch.h"

namespace xd {
namespace {

// How long a send waits for room before it looks whether it is still wanted.
constexpr int kSendSliceMs = 20;

struct MeshParts {
  int rank;
  PeerProcesses processes;
  std::vector<UniqueFd> links;  // by rank; never closed or replaced before the mesh ends
};

class UnixMesh final : public Mesh {
 public:
  explicit UnixMesh(MeshParts parts)
      : parts_(std::move(parts)),
        inbox_(parts_.rank, num_ranks()),
        stop_(::eventfd(0, EFD_CLOEXEC)),
        creator_(::getpid()) {
    if (!stop_) fail_errno("eventfd", errno);
  }

  ~UnixMesh() override {
    if (::getpid() != creator_) {
      // A forked child: the connections are the parent's, and the thread does not exist here.
      if (thread_.joinable()) thread_.detach();
      return;
    }
    tell_all(MeshMessageType::goodbye);
    ::eventfd_write(stop_.get(), 1);
    if (thread_.joinable()) thread_.join();
  }

  void start(MeshEvents& events) override {
    XD_CHECK(!watch_);
    watch_.emplace(MeshWatch::Sources{.rank = parts_.rank,
                                      .links = parts_.links,
                                      .processes = parts_.processes,
                                      .inbox = inbox_,
                                      .events = events});
    if (num_ranks() > 1) thread_ = start_thread("xd-watch", [this] { watch_->run(stop_.get()); });
  }

  std::vector<Item> all_gather(std::span<const std::byte> blob, int fd,
                               const Deadline& deadline) override {
    XD_CHECK(watch_ && blob.size() <= kMaxBlob);
    const std::uint64_t round = inbox_.begin_round();
    const MeshHeader header{MeshMessageType::exchange, fd >= 0 ? 1U : 0U, round};
    const auto head = std::as_bytes(std::span(&header, 1));
    Interruption interruption;
    for (int step = 1; step < num_ranks(); ++step) {
      const int peer = (parts_.rank + step) % num_ranks();
      const int link = parts_.links[at(peer)].get();
      // A closed link is no error here: the watch thread says whether its peer died or left.
      while (send_packet(link, head, blob, fd) == Sent::full) {
        interruption.check();
        wait_for_room(peer, round, deadline);
      }
    }
    std::vector<Item> items = inbox_.wait_for(round, deadline);
    items[at(parts_.rank)].blob.assign(blob.begin(), blob.end());
    return items;
  }

  void send_abort() noexcept override { tell_all(MeshMessageType::abort); }
  void cancel() noexcept override { inbox_.cancel(); }
  int local_ranks() const override { return parts_.processes.local_ranks; }

 private:
  int num_ranks() const { return static_cast<int>(parts_.links.size()); }

  void wait_for_room(int peer, std::uint64_t round, const Deadline& deadline) {
    inbox_.check(round);
    if (deadline.passed())
      throw Error(XD_ERROR_TIMEOUT,
                  concat("rank ", parts_.rank, " could not send to rank ", peer,
                         " in time: it does not read"),
                  peer);
    pollfd item{parts_.links[at(peer)].get(), POLLOUT, 0};
    ::poll(&item, 1, std::min(kSendSliceMs, deadline.remaining_ms()));
  }

  // Best effort: who is gone needs no news, and who has not read a whole socket full of messages
  // does not follow the protocol and gets the end of the connection instead.
  void tell_all(MeshMessageType type) noexcept {
    const MeshHeader header{type, 0, 0};
    for (const UniqueFd& link : parts_.links) {
      if (!link) continue;
      try {
        send_packet(link.get(), std::as_bytes(std::span(&header, 1)));
      } catch (const std::exception& error) {
        log_warning("rank ", parts_.rank, " could not tell a peer that it ends: ", error.what());
      }
    }
  }

  MeshParts parts_;
  MeshInbox inbox_;
  UniqueFd stop_;
  const pid_t creator_;
  std::optional<MeshWatch> watch_;
  std::thread thread_;
};

std::vector<Introduction> introduce(Bootstrap& bootstrap, const Introduction& own,
                                    const Deadline& deadline) {
  const std::vector<Bytes> blobs = bootstrap.all_gather(encode(own), deadline);
  std::vector<Introduction> introductions;
  for (int r = 0; r < bootstrap.num_ranks(); ++r) {
    const auto introduction = decode_introduction(blobs[at(r)]);
    if (!introduction)
      fail(XD_ERROR_MISMATCH, "rank ", r, " introduced itself with ", blobs[at(r)].size(),
           " bytes that make no sense to rank ", bootstrap.rank());
    check_peer(bootstrap.rank(), own, r, *introduction);
    introductions.push_back(*introduction);
  }
  return introductions;
}

}  // namespace

std::unique_ptr<Mesh> Mesh::connect(Bootstrap& bootstrap, const Deadline& deadline) {
  const int rank = bootstrap.rank();
  const Introduction own = make_introduction(bootstrap.num_ranks());
  // Listening comes first: whoever knows this rank can connect to it.
  UniqueFd listener;
  if (bootstrap.num_ranks() > 1)
    listener = listen_for_links(own.socket_name, bootstrap.num_ranks());
  const std::vector<Introduction> introductions = introduce(bootstrap, own, deadline);
  PeerProcesses processes = find_processes(rank, introductions);
  std::vector<UniqueFd> links =
      MeshConnector(rank, introductions, processes, std::move(listener)).run(deadline);
  return std::make_unique<UnixMesh>(MeshParts{rank, std::move(processes), std::move(links)});
}

}  // namespace xd
