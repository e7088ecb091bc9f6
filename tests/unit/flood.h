// Strangers that connect to a port in great numbers. They are separate processes, so that they use
// neither the descriptors nor the cores' time of the ranks under test. They connect on loopback
// only, and are bounded in number and time.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <tuple>
#include <vector>

#include "base/fd.h"

namespace xd::test {

struct FloodPlan {
  int port = 0;                       // port on 127.0.0.1
  int processes = 1;                  // number of processes, each with at most 1000 connections
  int connections = 1000;             // connections of each process, all held until the flood ends
  std::chrono::microseconds every{};  // pause between two connections of a process
  std::string says = {};              // bytes that are sent on each connection
};

class Flood {
 public:
  explicit Flood(const FloodPlan& plan) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return;
    opened_.reset(ends[0]);
    const UniqueFd tell(ends[1]);
    for (int i = 0; i < plan.processes; ++i) {
      const pid_t child = ::fork();
      if (child == 0) connect_and_wait(plan, tell.get());
      if (child > 0) children_.push_back(child);
    }
  }
  Flood(const Flood&) = delete;
  Flood& operator=(const Flood&) = delete;
  ~Flood() {
    for (const pid_t child : children_) ::kill(child, SIGKILL);
    for (const pid_t child : children_) ::waitpid(child, nullptr, 0);
  }

  // True once every process has opened its connections.
  bool wait_until_open(int within_ms) {
    for (std::size_t told = 0; told < children_.size(); ++told) {
      pollfd item{opened_.get(), POLLIN, 0};
      char byte = 0;
      if (::poll(&item, 1, within_ms) <= 0 || ::read(opened_.get(), &byte, 1) != 1) return false;
    }
    return !children_.empty();
  }

 private:
  // Runs in a fork of a program with threads, so it makes system calls only.
  [[noreturn]] static void connect_and_wait(const FloodPlan& plan, int tell) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::alarm(60);
    for (int fd = 3; fd < 1024; ++fd) {
      if (fd != tell) ::close(fd);  // this may be the listener
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(plan.port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timespec pause{0, static_cast<long>(plan.every.count()) * 1000};
    for (int i = 0; i < plan.connections; ++i) {
      const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
      // The connection is in progress, or the listener's queue is full. Either is a flood.
      std::ignore = ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
      if (!plan.says.empty()) {
        pollfd item{fd, POLLOUT, 0};
        ::poll(&item, 1, 100);
        ::send(fd, plan.says.data(), plan.says.size(), MSG_NOSIGNAL);
      }
      if (plan.every.count() > 0) ::nanosleep(&pause, nullptr);
    }
    [[maybe_unused]] const auto told = ::write(tell, "o", 1);
    for (;;) ::pause();
  }

  UniqueFd opened_;
  std::vector<pid_t> children_;
};

}  // namespace xd::test
