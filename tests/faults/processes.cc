#include "faults/processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace xd::test {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);  // also under sanitizers

struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    read = UniqueFd(ends[0]);
    write = UniqueFd(ends[1]);
  }
  UniqueFd read, write;
};

xd_unique_id make_id(const RankProgram& program) {
  xd_unique_id id;
  xd_unique_id_config config = XD_UNIQUE_ID_CONFIG_INIT;
  config.timeout_ms = program.timeout_ms;
  if (xd_unique_id_create(&config, &id) != XD_SUCCESS) throw std::runtime_error(xd_last_error());
  return id;
}

}  // namespace

Processes::Processes(RankProgram program, const std::vector<std::vector<int>>& processes) {
  program.num_ranks = 0;
  for (const auto& ranks : processes) program.num_ranks += static_cast<int>(ranks.size());
  program.id = make_id(program);
  if (program.death.victim >= 0) program.death.id_of_rest = make_id(program);
  for (const std::vector<int>& ranks : processes) {
    program.ranks = ranks;
    start(program);
  }
}

void Processes::start(const RankProgram& program) {
  Pipe input, output;
  std::vector<std::string> arguments = to_arguments(program);
  arguments.insert(arguments.begin(), "faults");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input.read.get(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output.write.get(), STDOUT_FILENO);
  Process process;
  const int error =
      ::posix_spawn(&process.pid, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("posix_spawn failed");
  process.ranks = program.ranks;
  process.input = std::move(input.write);
  process.output = std::move(output.read);
  processes_.push_back(std::move(process));
}

Processes::~Processes() {
  for (Process& process : processes_) {
    if (process.pid < 0) continue;
    ::kill(process.pid, SIGKILL);
    ::waitpid(process.pid, nullptr, 0);
  }
}

Processes::Process& Processes::process_of(int rank) {
  const auto found = std::ranges::find_if(processes_, [&](const Process& process) {
    return std::ranges::find(process.ranks, rank) != process.ranks.end();
  });
  if (found == processes_.end()) throw std::logic_error("no rank " + std::to_string(rank));
  return *found;
}

void Processes::go(int rank) {
  if (::write(process_of(rank).input.get(), "go\n", 3) != 3) {
    throw std::runtime_error("rank " + std::to_string(rank) + " reads no more");
  }
}

std::vector<std::string> Processes::named_shared_memory(int rank) {
  std::ifstream maps("/proc/" + std::to_string(process_of(rank).pid) + "/maps");
  std::vector<std::string> named;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::string range, permissions, offset, device, inode, path;
    fields >> range >> permissions >> offset >> device >> inode >> path;
    const bool shared = permissions.size() == 4 && permissions[3] == 's';
    if (shared && !path.starts_with("/memfd:")) named.push_back(path);
  }
  return named;
}

Clock::time_point Processes::kill(int rank) {
  Process& process = process_of(rank);
  const auto when = Clock::now();
  ::kill(process.pid, SIGKILL);
  ::waitpid(process.pid, nullptr, 0);
  process.pid = -1;
  return when;
}

void Processes::stop(int rank) { ::kill(pid(rank), SIGSTOP); }

void Processes::resume(int rank) { ::kill(pid(rank), SIGCONT); }

int Processes::wait_for_death(int rank) {
  Process& process = process_of(rank);
  const auto deadline = Clock::now() + kPatience;
  int ended = 0;
  while (::waitpid(process.pid, &ended, WNOHANG) == 0) {
    if (Clock::now() > deadline)
      throw std::runtime_error("rank " + std::to_string(rank) + " lives");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  process.pid = -1;
  return ended;
}

bool Processes::lives(int rank) {
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(pid(rank)), &info, WEXITED | WNOHANG | WNOWAIT);
  return info.si_pid == 0;
}

void Processes::wait_until_ready(int rank) { wait_for(rank, "ready"); }

Losses Processes::wait_for_losses(int rank) {
  const Line line = wait_for(rank, "lost");
  std::istringstream fields(line.text);
  int status = 0;
  Losses losses{XD_SUCCESS, "", line.when};
  fields >> status >> losses.ranks;
  losses.finished_by = static_cast<xd_status>(status);
  return losses;
}

Result Processes::wait_for_result(int rank) {
  const Line line = wait_for(rank, "result");
  std::istringstream fields(line.text);
  int status = 0, phase = 0;
  Result result{};
  fields >> status >> result.peer >> phase >> result.outputs_written;
  std::getline(fields, result.text);
  result.status = static_cast<xd_status>(status);
  result.phase = static_cast<xd_phase>(phase);
  result.when = line.when;
  return result;
}

void Processes::wait_for_progress(int rank) { wait_for(rank, "progress"); }

std::string Processes::wait_for_after(int rank) { return wait_for(rank, "after").text; }

// The rest of the rank's next line, which must begin with `word`.
Processes::Line Processes::wait_for(int rank, const std::string& word) {
  const std::string who = "rank " + std::to_string(rank);
  const Process& process = process_of(rank);
  const auto deadline = Clock::now() + kPatience;
  while (lines_[rank].empty()) {
    if (!process.output) {
      throw std::runtime_error("a rank process has ended: '" + process.partial + "'");
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0 || !read_some(left)) {
      throw std::runtime_error(who + " did not say '" + word + "' in time");
    }
  }
  Line line = lines_[rank].front();
  lines_[rank].pop_front();
  if (!line.text.starts_with(word + " ") && line.text != word) {
    throw std::runtime_error(who + " said '" + line.text + "', expected '" + word + "'");
  }
  line.text.erase(0, std::min(line.text.size(), word.size() + 1));
  return line;
}

// Reads what the first processes say that say something; false if none does in time. It listens to
// all, whichever is awaited, so that the time of a line does not depend on which rank the test asks
// for first.
bool Processes::read_some(std::chrono::milliseconds patience) {
  std::vector<pollfd> waits;
  for (const Process& process : processes_) waits.push_back({process.output.get(), POLLIN, 0});
  if (::poll(waits.data(), waits.size(), static_cast<int>(patience.count())) <= 0) return false;
  for (std::size_t i = 0; i < waits.size(); ++i) {
    if (waits[i].revents != 0) read_from(processes_[i]);
  }
  return true;
}

void Processes::read_from(Process& process) {
  std::array<char, 4096> bytes;
  const ssize_t count = ::read(process.output.get(), bytes.data(), bytes.size());
  if (count <= 0) {
    process.output.reset();  // poll() passes over it from now on
    return;
  }
  process.partial.append(bytes.data(), static_cast<std::size_t>(count));
  for (std::size_t end; (end = process.partial.find('\n')) != std::string::npos;) {
    const std::string line = process.partial.substr(0, end);
    process.partial.erase(0, end + 1);
    std::size_t digits = 0;
    const int rank = std::stoi(line, &digits);
    lines_[rank].push_back({line.substr(digits + 1), Clock::now()});
  }
}

}  // namespace xd::test
