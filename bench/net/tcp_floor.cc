#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/tcp.h"
#include "net/floor.h"

namespace bench::net {
namespace {

constexpr int kPatienceMs = 60000;
constexpr std::uint16_t kPort = 29600;  // and those behind it, by rank
constexpr std::size_t kPiece = std::size_t{256} << 10;

class TcpFloor final : public Floor {
 public:
  TcpFloor(RankResults& rank_results, const FloorConfig& config)
      : rank_results_(rank_results), config_(config), out_(kPiece), in_(kPiece) {
    const int low = std::min(rank_results.rank(), other_rank(rank_results));
    const bool listens = rank_results.rank() == low;
    const auto port = static_cast<std::uint16_t>(kPort + low);
    const auto address = xd::numeric_address(listens ? config.address : config.peer);
    XD_REQUIRE(address, "expected numeric addresses of both hosts");
    xd::UniqueFd listener;
    if (listens) {
      listener = xd::tcp_listen(address->with_port(port));
      if (!listener) xd::fail(XD_ERROR_SYSTEM, "cannot listen at port ", port);
    }
    rank_results.barrier();
    if (listens) {
      accept(listener.get());
    } else {
      connection_ = xd::tcp_connect(address->with_port(port), deadline());
    }
    xd::set_silence(connection_.get(), 0);  // and no delays
    rank_results.barrier();
  }

  void stream() override { move(config_.bytes, config_.coming, /*spins=*/false); }

  void ping(int turns) override {
    const bool begins = rank_results_.rank() < other_rank(rank_results_);
    for (int turn = 0; turn < turns; ++turn) {
      if (begins) move(8, 0, /*spins=*/true);
      move(0, 8, /*spins=*/true);
      if (!begins) move(8, 0, /*spins=*/true);
    }
  }

 private:
  static xd::Deadline deadline() { return xd::Deadline::after_ms(kPatienceMs); }

  void accept(int listener) {
    pollfd one{.fd = listener, .events = POLLIN, .revents = 0};
    ::poll(&one, 1, kPatienceMs);
    xd::TcpAddress from;
    connection_ = xd::tcp_accept(listener, from);
    if (!connection_)
      xd::fail(XD_ERROR_TIMEOUT, "rank ", other_rank(rank_results_), " does not call");
  }

  void move(std::size_t left, std::size_t expected, bool spins) {
    const xd::Deadline limit = deadline();
    const int fd = connection_.get();
    while (left > 0 || expected > 0) {
      bool moved = false;
      if (left > 0) {
        const auto sent = ::send(fd, out_.data(), std::min(left, kPiece), MSG_NOSIGNAL);
        if (sent > 0) left -= static_cast<std::size_t>(sent);
        moved = check(sent) || moved;
      }
      if (expected > 0) {
        const auto came = ::recv(fd, in_.data(), std::min(expected, kPiece), 0);
        if (came == 0) xd::fail(XD_ERROR_SYSTEM, "rank ", other_rank(rank_results_), " has gone");
        if (came > 0) expected -= static_cast<std::size_t>(came);
        moved = check(came) || moved;
      }
      if (limit.passed())
        xd::fail(XD_ERROR_TIMEOUT, "rank ", other_rank(rank_results_), " is late");
      if (moved || spins) continue;
      pollfd one{
          .fd = fd,
          .events = static_cast<short>((left > 0 ? POLLOUT : 0) | (expected > 0 ? POLLIN : 0)),
          .revents = 0};
      ::poll(&one, 1, limit.remaining_ms());
    }
  }
  // True = something has moved.
  static bool check(ssize_t result) {
    if (result >= 0) return true;
    if (errno != EAGAIN && errno != EINTR) xd::fail_errno("TCP", errno);
    return false;
  }

  RankResults& rank_results_;
  const FloorConfig config_;
  xd::UniqueFd connection_;
  std::vector<std::byte> out_, in_;
};

}  // namespace

std::unique_ptr<Floor> make_tcp_floor(RankResults& rank_results, const FloorConfig& config) {
  return std::make_unique<TcpFloor>(rank_results, config);
}

}  // namespace bench::net
