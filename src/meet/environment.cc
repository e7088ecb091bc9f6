#include "meet/environment.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <thread>
#include <utility>

#include "base/env.h"
#include "base/error.h"
#include "base/tcp.h"
#include "base/thread.h"
#include "meet/meeting.h"
#include "meet/meeting_client.h"
#include "meet/messages.h"

namespace xd {
namespace {

constexpr int kPortsTried = 15;  // ports tried after the first

// These variables belong to the launcher, so they are read anew for each communicator.
std::string variable(const char* name) {
  const char* text = std::getenv(name);
  XD_REQUIRE(text != nullptr && *text != '\0', "environment variable ", name,
             " is not set: XD_BOOTSTRAP_ENVIRONMENT needs it, as torchrun sets it");
  return text;
}

std::string variable_or_empty(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : "";
}

int number(const char* name, int least, int most) {
  const std::string text = variable(name);
  int value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  XD_REQUIRE(
      error == std::errc() && stop == text.data() + text.size() && value >= least && value <= most,
      "environment variable ", name, " = ", text, ", expected a number from ", least, " to ", most);
  return value;
}

// The meeting that rank 0 serves, for as long as this object lives: its destructor waits until
// every rank that came has its answer, which takes at most MeetingOptions::guest_limit_ms.
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

  std::vector<Bytes> all_gather(const MakeBlob& make, const Deadline& deadline) override {
    const std::vector<TcpAddress> addresses = resolve(env_.master_address, "MASTER_ADDR");
    const JoinRequest request{.rank = rank(), .num_ranks = num_ranks(), .make = make};
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
    MeetingSearch search(doors, env_.key, MeetingSearch::Certainty::one_of_several);
    while (auto entered = search.enter(deadline)) {
      try {
        return join_meeting(std::move(*entered), request, deadline);
      } catch (const MeetingGone& gone) {
        // This may have been an earlier meeting of the same ranks, and the next one will open.
        search.ended(gone.text());
      }
    }
    const bool here_only = addresses.front().is_loopback();
    fail(XD_ERROR_TIMEOUT, "rank ", rank(), " of ", num_ranks(), " did not find rank 0 on ",
         env_.master_address, " (MASTER_ADDR), ports ", env_.first_port, " to ", env_.last_port,
         ", in time: rank 0 did not come, ", here_only ? "is on another host, " : "",
         "or refuses this rank; ", search.obstacles());
  }

  RankEnvironment env_;
};

}  // namespace

RankEnvironment read_rank_environment(const xd_comm_config& config) {
  RankEnvironment result;
  if (config.num_ranks > 0) {
    result.rank = config.rank;
    result.num_ranks = config.num_ranks;
  } else {
    result.num_ranks = number("WORLD_SIZE", 1, kMaxRanks);
    result.rank = number("RANK", 0, result.num_ranks - 1);
  }
  result.master_address = variable("MASTER_ADDR");
  const int port = number("MASTER_PORT", 1, 65535);
  // torchrun's own store listens on MASTER_PORT if this variable says so; then the port is not
  // tried.
  const bool taken = variable_or_empty("TORCHELASTIC_USE_AGENT_STORE") == "True";
  result.first_port = static_cast<std::uint16_t>(std::min(port + (taken ? 1 : 0), 65535));
  result.last_port = static_cast<std::uint16_t>(std::min(port + kPortsTried, 65535));

  const std::string run = variable_or_empty("TORCHELASTIC_RUN_ID");
  const std::string port_text = std::to_string(port);
  // A rank with another job secret has the same tag, so it reaches the meeting and is told that it
  // is refused. The number of ranks is neither in the tag nor in the secret, so that ranks that
  // disagree about it meet and are told.
  const std::array<std::string_view, 6> parts{
      "crossdock environment", env().job_secret, run,
      result.master_address,   port_text,        config.name != nullptr ? config.name : ""};
  std::array<std::string_view, 6> name = parts;
  name[1] = "";
  result.key = Key(derive_secret(parts), tag_of(derive_secret(name)));
  result.key.variable = "XD_JOB_SECRET";
  return result;
}

std::unique_ptr<Bootstrap> meet_by_environment(RankEnvironment environment) {
  return std::make_unique<EnvironmentBootstrap>(std::move(environment));
}

}  // namespace xd
