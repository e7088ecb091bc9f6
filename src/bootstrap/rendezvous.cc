#include "bootstrap/rendezvous.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "base/error.h"
#include "bootstrap/meeting.h"
#include "bootstrap/meeting_client.h"
#include "bootstrap/meeting_search.h"
#include "bootstrap/tcp.h"
#include "bootstrap/thread.h"

namespace xd {
namespace {

class UniqueIdBootstrap final : public Bootstrap {
 public:
  UniqueIdBootstrap(const MeetingPoint& point, int rank, int num_ranks)
      : Bootstrap(rank, num_ranks), point_(point) {}

  std::vector<Bytes> all_gather(std::span<const std::byte> blob,
                                const Deadline& deadline) override {
    const TcpAddress address =
        resolve(point_.address, "config.unique_id: address").front().with_port(point_.port);
    return join_meeting(enter_meeting(address, point_.secret, deadline),
                        {.rank = rank(), .num_ranks = num_ranks(), .blob = blob}, deadline);
  }
  bool can_come_again() const override { return true; }

 private:
  MeetingPoint point_;
};

// The meeting that rank 0 serves, for as long as this object lives: its destructor waits until
// every rank that came has its answer, which takes at most Meeting::kGuestLimitMs.
class ServedMeeting {
 public:
  ServedMeeting(UniqueFd listener, const Key& key, const Deadline& deadline)
      : stop_(::eventfd(0, EFD_CLOEXEC)) {
    if (!stop_) fail_errno("eventfd", errno);
    const MeetingOptions options{
        .key = key, .deadline = deadline, .expects_strangers = true, .stop_fd = stop_.get()};
    auto meeting = std::make_unique<Meeting>(std::move(listener), options);
    thread_ = start_thread("xd-meeting", [meeting = std::move(meeting)] { meeting->run(); });
  }
  ServedMeeting(const ServedMeeting&) = delete;
  ServedMeeting& operator=(const ServedMeeting&) = delete;
  ~ServedMeeting() {
    // This has no effect on a complete meeting; otherwise this rank has given up waiting.
    ::eventfd_write(stop_.get(), 1);
    thread_.join();
  }

 private:
  UniqueFd stop_;
  std::thread thread_;
};

class EnvironmentBootstrap final : public Bootstrap {
 public:
  explicit EnvironmentBootstrap(RankEnvironment environment)
      : Bootstrap(environment.rank, environment.num_ranks), env_(std::move(environment)) {}

  std::vector<Bytes> all_gather(std::span<const std::byte> blob,
                                const Deadline& deadline) override {
    const std::vector<TcpAddress> addresses = resolve(env_.master_address, "MASTER_ADDR");
    const JoinRequest request{.rank = rank(), .num_ranks = num_ranks(), .blob = blob};
    if (rank() != 0) return find_meeting(addresses, request, deadline);
    UniqueFd listener = listen(addresses);
    const TcpAddress here = local_address(listener.get());
    const ServedMeeting meeting(std::move(listener), env_.key, deadline);
    return join_meeting(enter_meeting(here, env_.key, deadline), request, deadline);
  }
  bool can_come_again() const override { return true; }

 private:
  UniqueFd listen(const std::vector<TcpAddress>& addresses) const {
    int error = 0;
    for (int port = env_.first_port; port <= env_.last_port; ++port) {
      for (const TcpAddress& address : addresses) {
        UniqueFd fd = tcp_listen(address.with_port(static_cast<std::uint16_t>(port)));
        if (fd) return fd;
        error = errno;
      }
    }
    fail_errno(concat("rank 0: listen on ", env_.master_address, " (MASTER_ADDR), ports ",
                      env_.first_port, " to ", env_.last_port),
               error);
  }

  std::vector<Bytes> find_meeting(const std::vector<TcpAddress>& addresses,
                                  const JoinRequest& request, const Deadline& deadline) const {
    std::vector<TcpAddress> doors;
    for (int port = env_.first_port; port <= env_.last_port; ++port) {
      for (const TcpAddress& address : addresses)
        doors.push_back(address.with_port(static_cast<std::uint16_t>(port)));
    }
    MeetingSearch search(doors, env_.key, MeetingSearch::Place::one_of_several);
    while (auto entered = search.enter(deadline)) {
      try {
        return join_meeting(std::move(*entered), request, deadline);
      } catch (const MeetingGone& gone) {
        // This may have been an earlier meeting of the same ranks, and the next one will open.
        search.ended(gone.text());
      }
    }
    fail(XD_ERROR_TIMEOUT, "rank ", rank(), " of ", num_ranks(), " did not find rank 0 on ",
         env_.master_address, " (MASTER_ADDR), ports ", env_.first_port, " to ", env_.last_port,
         ", in time: rank 0 did not come, or refuses this rank; ", search.obstacles());
  }

  RankEnvironment env_;
};

}  // namespace

std::unique_ptr<Bootstrap> meet_at(const MeetingPoint& point, int rank, int num_ranks) {
  return std::make_unique<UniqueIdBootstrap>(point, rank, num_ranks);
}

std::unique_ptr<Bootstrap> meet_by_environment(RankEnvironment environment) {
  return std::make_unique<EnvironmentBootstrap>(std::move(environment));
}

xd_unique_id create_unique_id(const xd_unique_id_config& config, int timeout_ms) {
  const std::string host = config.address != nullptr ? config.address : "127.0.0.1";
  XD_REQUIRE(config.port >= 0 && config.port <= 65535, "config.port = ", config.port,
             ", expected 0 to 65535");
  XD_REQUIRE(timeout_ms > 0, "config.timeout_ms = ", timeout_ms, ", expected at least 1");
  UniqueFd listener;
  int error = 0;
  for (const TcpAddress& address : resolve(host, "config.address")) {
    listener = tcp_listen(address.with_port(static_cast<std::uint16_t>(config.port)));
    if (listener) break;
    error = errno;
  }
  if (!listener) fail_errno(concat("listen on ", host, " port ", config.port), error);

  const TcpAddress here = local_address(listener.get());
  const MeetingPoint point{here.host(), here.port(), make_random<Secret>()};
  auto meeting = std::make_unique<Meeting>(
      std::move(listener),
      MeetingOptions{.key = point.secret, .deadline = Deadline::after_ms(timeout_ms)});
  // The thread owns all that it uses, and ends with the meeting or its timeout, so no thread has to
  // join it.
  start_thread("xd-meeting", [meeting = std::move(meeting)] { meeting->run(); }).detach();
  return encode_unique_id(point);
}

}  // namespace xd
