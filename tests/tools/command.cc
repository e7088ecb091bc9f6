#include "command.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "base/deadline.h"

namespace xd::test {
namespace {

std::string content(const UniqueFd& fd) {
  std::string text;
  std::array<char, 65536> chunk;
  for (off_t at = 0;;) {
    const ssize_t bytes = ::pread(fd.get(), chunk.data(), chunk.size(), at);
    if (bytes <= 0) return text;
    text.append(chunk.data(), static_cast<std::size_t>(bytes));
    at += bytes;
  }
}

bool until(const Deadline& deadline, const std::function<bool()>& condition) {
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

struct ProcessState {
  char state = 'X';  // the state after the end of a process
  pid_t parent = -1;
};

ProcessState state_of(const std::string& pid) {
  std::ifstream stat("/proc/" + pid + "/stat");
  std::string line;
  std::getline(stat, line);
  // "<pid> (<name>) <state> <parent> ...", and a name may contain anything.
  ProcessState result;
  const auto name_end = line.rfind(')');
  if (name_end == std::string::npos) return result;
  std::istringstream(line.substr(name_end + 1)) >> result.state >> result.parent;
  return result;
}

}  // namespace

Command::Command(const std::vector<std::string>& arguments)
    : start_(std::chrono::steady_clock::now()),
      out_(::memfd_create("out", MFD_CLOEXEC)),
      err_(::memfd_create("err", MFD_CLOEXEC)) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  std::fflush(nullptr);
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ == 0) {
    ::dup2(out_.get(), STDOUT_FILENO);
    ::dup2(err_.get(), STDERR_FILENO);
    ::execvp(argv[0], argv.data());
    ::_exit(99);
  }
}

Command::~Command() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Command::signal(int number) const { ::kill(pid_, number); }

std::string Command::out() const { return content(out_); }

std::vector<pid_t> Command::children() const {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    const bool process = std::all_of(name.begin(), name.end(), ::isdigit);
    if (process && state_of(name).parent == pid_) found.push_back(std::stoi(name));
  }
  return found;
}

Finished Command::wait() {
  int status = 0;
  const bool ended =
      until(Deadline::after_ms(60'000), [&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; });
  Finished result{.code = -1, .out = content(out_), .err = content(err_)};
  result.time = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start_);
  if (ended) {
    pid_ = -1;
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  return result;
}

bool eventually(const std::function<bool()>& condition) {
  return until(Deadline::after_ms(20'000), condition);
}

bool alive(pid_t pid) {
  const char state = state_of(std::to_string(pid)).state;
  return state != 'Z' && state != 'X';
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace xd::test
