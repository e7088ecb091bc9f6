#include "net/rank_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>
#include <vector>

#include "base/deadline.h"

namespace xd::test {
namespace {

struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    read = UniqueFd(ends[0]);
    write = UniqueFd(ends[1]);
  }
  UniqueFd read, write;
};

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

RankProcess::RankProcess(const NetHosts& hosts, int host, const Settings& settings) {
  Pipe input, output;
  const UniqueFd where(::open(("/run/netns/" + hosts.name(host)).c_str(), O_RDONLY | O_CLOEXEC));
  std::vector<std::string> environment{"XD_TEST_NET_RANK=1"};
  for (const auto& [name, value] : settings) environment.push_back(name + "=" + value);
  std::vector<std::string> arguments{"net-rank"};
  const std::vector<char*> envp = pointers(environment), argv = pointers(arguments);
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ == 0) {
    if (::setns(where.get(), CLONE_NEWNET) != 0) ::_exit(1);
    ::dup2(input.read.get(), STDIN_FILENO);
    ::dup2(output.write.get(), STDOUT_FILENO);
    ::execve("/proc/self/exe", argv.data(), envp.data());
    ::_exit(1);
  }
  input_ = std::move(input.write);
  output_ = std::move(output.read);
}

RankProcess::~RankProcess() { kill(); }

void RankProcess::tell(const std::string& order) const {
  const std::string line = order + "\n";
  if (::write(input_.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    throw std::runtime_error("the rank has ended");
}

std::string RankProcess::answer(int within_ms) {
  const Deadline deadline = Deadline::after_ms(within_ms);
  for (;;) {
    if (const auto end = received_.find('\n'); end != std::string::npos) {
      std::string line = received_.substr(0, end);
      received_.erase(0, end + 1);
      return line;
    }
    pollfd item{output_.get(), POLLIN, 0};
    if (::poll(&item, 1, deadline.remaining_ms()) <= 0)
      throw std::runtime_error("the rank did not answer in time");
    char buffer[4096];
    const ssize_t count = ::read(output_.get(), buffer, sizeof(buffer));
    if (count <= 0) throw std::runtime_error("the rank has ended");
    received_.append(buffer, static_cast<std::size_t>(count));
  }
}

void RankProcess::signal(int number) const { ::kill(pid_, number); }

void RankProcess::kill() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

}  // namespace xd::test
