#include "process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

namespace xd::run {
namespace {

[[noreturn]] void fail_errno(const char* call) {
  throw std::system_error(errno, std::generic_category(), call);
}

struct Pipe {
  UniqueFd read, write;

  static Pipe make() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail_errno("pipe2");
    return {UniqueFd(ends[0]), UniqueFd(ends[1])};
  }
};

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

struct Child {
  char* const* arguments;
  char* const* environment;
  const sigset_t* signal_mask;
  const Guardian* guardian;
  pid_t launcher;
  int in, out, err;  // -1 = inherited
  int report;        // gets errno if the program cannot be started
};

// Runs between fork and exec, so it makes async-signal-safe calls only.
[[noreturn]] void become_program(const Child& child) {
  const auto replace = [](int from, int to) { return from < 0 || ::dup2(from, to) >= 0; };
  ::setsid();
  child.guardian->watch_this_process();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != child.launcher) ::_exit(125);  // the launcher died before the line above
  if (replace(child.in, STDIN_FILENO) && replace(child.out, STDOUT_FILENO) &&
      replace(child.err, STDERR_FILENO) &&
      ::sigprocmask(SIG_SETMASK, child.signal_mask, nullptr) == 0) {
    ::execvpe(child.arguments[0], child.arguments, child.environment);
  }
  const int error = errno;
  [[maybe_unused]] const auto written = ::write(child.report, &error, sizeof(error));
  ::_exit(127);
}

// The errno that the child reports; 0 when the program runs and the pipe was closed by that.
int read_report(const UniqueFd& report) {
  int error = 0;
  ssize_t bytes = 0;
  do {
    bytes = ::read(report.get(), &error, sizeof(error));
  } while (bytes < 0 && errno == EINTR);
  return bytes == sizeof(error) ? error : 0;
}

}  // namespace

Process::Process(const Start& start, const Guardian& guardian) : guardian_(guardian) {
  const auto arguments = pointers(start.command);
  const auto environment = pointers(start.environment);
  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!nothing) fail_errno("open /dev/null");
  Pipe stdout_pipe, stderr_pipe, report = Pipe::make();
  if (start.capture) {
    stdout_pipe = Pipe::make();
    stderr_pipe = Pipe::make();
  }
  const Child child{.arguments = arguments.data(),
                    .environment = environment.data(),
                    .signal_mask = &start.signal_mask,
                    .guardian = &guardian,
                    .launcher = ::getpid(),
                    .in = nothing.get(),
                    .out = stdout_pipe.write.get(),
                    .err = stderr_pipe.write.get(),
                    .report = report.write.get()};
  pid_ = ::fork();
  if (pid_ < 0) fail_errno("fork");
  if (pid_ == 0) become_program(child);

  report.write.reset();
  if (const int error = read_report(report.read); error != 0) {
    ::waitpid(pid_, nullptr, 0);
    guardian_.forget(pid_);
    throw StartError(error == ENOENT ? 127 : 126,
                     "cannot run '" + start.command.front() + "': " + std::strerror(error));
  }
  for (const UniqueFd* end : {&stdout_pipe.read, &stderr_pipe.read}) {
    if (*end) ::fcntl(end->get(), F_SETFL, O_NONBLOCK);
  }
  out = std::move(stdout_pipe.read);
  err = std::move(stderr_pipe.read);
}

Process::~Process() {
  if (!running()) return;
  signal(SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  guardian_.forget(pid_);
}

void Process::signal(int number) const noexcept {
  if (running()) ::kill(-pid_, number);
}

std::optional<Process::End> Process::reap() {
  if (!running()) return std::nullopt;
  siginfo_t info{};
  // At first this only looks: until the process is reaped, the system cannot give its number and
  // its group's to others.
  if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
    fail_errno("waitid");
  }
  if (info.si_pid == 0) return std::nullopt;
  signal(SIGKILL);
  guardian_.forget(pid_);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;

  const int value = info.si_status;
  if (info.si_code == CLD_EXITED) return End{value, false, "exit code " + std::to_string(value)};
  return End{128 + value, true,
             "killed by signal " + std::to_string(value) + " (" + ::strsignal(value) + ")"};
}

}  // namespace xd::run
