#include "support/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <thread>

namespace xd::test {
namespace {

using std::chrono::milliseconds;

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

// This process's environment with other values of `settings`.
std::vector<std::string> environment_with(const std::map<std::string, std::string>& settings) {
  std::vector<std::string> result;
  for (char** item = environ; *item != nullptr; ++item) {
    const std::string_view text(*item);
    if (!settings.contains(std::string(text.substr(0, text.find('='))))) result.emplace_back(text);
  }
  for (const auto& [name, value] : settings) result.push_back(name + "=" + value);
  return result;
}

// Returns an errno. The process reads from `input` and writes to `output`.
int spawn(const ChildProcess::Program& program, int input, int output, pid_t& pid) {
  std::vector<std::string> arguments = program.arguments;
  arguments.insert(arguments.begin(), program_invocation_short_name);
  std::vector<std::string> environment = environment_with(program.settings);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  const int error = ::posix_spawn(&pid, "/proc/self/exe", &actions, nullptr,
                                  pointers(arguments).data(), pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  return error;
}

int spawn_in(const std::string& network, const ChildProcess::Program& program, int input,
             int output, pid_t& pid) {
  const int there = ::open(("/run/netns/" + network).c_str(), O_RDONLY | O_CLOEXEC);
  const bool is_there = there >= 0 && ::setns(there, CLONE_NEWNET) == 0;
  const int error = is_there ? 0 : errno;
  if (there >= 0) ::close(there);
  return is_there ? spawn(program, input, output, pid) : error;
}

}  // namespace

ChildProcess::ChildProcess(const Program& program) {
  int input[2], output[2];
  if (::pipe2(input, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  if (::pipe2(output, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  int error = 0;
  if (program.network.empty()) {
    error = spawn(program, input[0], output[1], pid_);
  } else {  // a thread may be in another namespace than its process, and hands it on
    std::thread([&] {
      error = spawn_in(program.network, program, input[0], output[1], pid_);
    }).join();
  }
  close(input[0]);
  close(output[1]);
  input_ = input[1];
  output_ = output[0];
  if (error == 0) return;
  close(input_);
  close(output_);
  throw std::runtime_error(std::string("cannot start a process: ") + std::strerror(error));
}

ChildProcess::~ChildProcess() {
  kill();
  close(input_);
  close(output_);
}

void ChildProcess::close(int& end) {
  if (end >= 0) ::close(end);
  end = -1;
}

void ChildProcess::signal(int number) const { ::kill(pid_, number); }

void ChildProcess::kill() {
  if (pid_ < 0) return;
  signal(SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

bool ChildProcess::has_ended() const {
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT);
  return info.si_pid != 0;
}

std::optional<int> ChildProcess::wait_for_end(milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  int status = 0;
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    if (Clock::now() > deadline) return std::nullopt;
    std::this_thread::sleep_for(milliseconds(1));
  }
  pid_ = -1;
  return status;
}

void ChildProcess::tell(const std::string& line) const {
  const std::string text = line + "\n";
  if (::write(input_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    throw std::runtime_error("the process reads no more");
}

void ChildProcess::read() {
  std::array<char, 4096> bytes;
  const ssize_t count = ::read(output_, bytes.data(), bytes.size());
  if (count <= 0) {
    close(output_);  // poll() passes over it from now on
    return;
  }
  partial_.append(bytes.data(), static_cast<std::size_t>(count));
  for (std::size_t end; (end = partial_.find('\n')) != std::string::npos;) {
    lines_.push_back({partial_.substr(0, end), Clock::now()});
    partial_.erase(0, end + 1);
  }
}

std::optional<ChildProcess::Line> ChildProcess::take_line() {
  if (lines_.empty()) return std::nullopt;
  Line line = std::move(lines_.front());
  lines_.pop_front();
  return line;
}

std::string ChildProcess::wait_for_line(milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  while (lines_.empty()) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    pollfd item{output(), POLLIN, 0};
    if (output_ < 0) throw std::runtime_error("the process has ended: '" + partial_ + "'");
    if (left.count() <= 0 || ::poll(&item, 1, static_cast<int>(left.count())) <= 0)
      throw std::runtime_error("the process said nothing in time");
    read();
  }
  return take_line()->text;
}

}  // namespace xd::test
