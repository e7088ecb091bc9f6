#include "peer.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <sstream>
#include <stdexcept>

extern char** environ;

namespace bench {
namespace {

std::filesystem::path peer_program() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "crossdock-bench-mpi";
}

// The environment without the variables that describe this launch, since MPI starts the peer's
// ranks.
std::vector<char*> environment() {
  std::vector<char*> kept;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const bool launch = text.starts_with("RANK=") || text.starts_with("WORLD_SIZE=") ||
                        text.starts_with("LOCAL_") || text.starts_with("MASTER_") ||
                        text.starts_with("XD_");
    if (!launch) kept.push_back(*entry);
  }
  kept.push_back(nullptr);
  return kept;
}

std::vector<std::string> command_line(int ranks, const std::vector<std::string>& arguments) {
  std::vector<std::string> command{"mpirun", "-n", std::to_string(ranks), "--oversubscribe",
                                   "--bind-to", "none",
                                   // This host and its shared memory only.
                                   "--mca", "btl", "self,vader", "--mca", "plm", "isolated",
                                   // Without it a spinning rank keeps the rank it waits for from
                                   // running, wherever a core is shared: tens of milliseconds.
                                   "--mca", "mpi_yield_when_idle", "1", "--timeout", "300"};
  if (::geteuid() == 0) command.push_back("--allow-run-as-root");
  command.push_back(peer_program().string());
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

// Runs a command and returns its standard output; *status as waitpid gives it, -1 if the program
// cannot be started.
std::string output_of(const std::vector<std::string>& command, int* status) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  pid_t child = -1;
  const int error =
      ::posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environment().data());
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::fdopen(ends[0], "r"), std::fclose);
  std::string text;
  char buffer[4096];
  while (const std::size_t n = std::fread(buffer, 1, sizeof(buffer), pipe.get())) {
    text.append(buffer, n);
  }
  if (error != 0) {
    *status = -1;
  } else {
    ::waitpid(child, status, 0);
  }
  return text;
}

std::vector<double> numbers(std::istringstream& line) {
  std::vector<double> result;
  for (double number = 0; line >> number;) result.push_back(number);
  return result;
}

PeerResults parse(const std::string& text) {
  PeerResults results;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string key, name;
    words >> key;
    if (key == "time") {
      words >> name;
      (name == "dispatch" ? results.dispatch : results.combine).push_back(numbers(words));
    } else if (key == "version") {
      std::getline(words >> std::ws, results.version);
    } else if (key == "rank") {
      int rank = 0;
      std::uint64_t recv = 0, out = 0;
      std::int64_t sent = 0;
      words >> rank >> recv >> out >> sent;
      results.recv_checksums.push_back(recv);
      results.out_checksums.push_back(out);
      results.sent_rows.push_back(sent);
    }
  }
  return results;
}

}  // namespace

PeerResults run_peer(int ranks, const std::vector<std::string>& arguments) {
  PeerResults results;
  if (!std::filesystem::exists(peer_program())) {
    results.unavailable = "crossdock-bench-mpi was not built (it needs libopenmpi-dev)";
    return results;
  }
  int status = 0;
  const std::string output = output_of(command_line(ranks, arguments), &status);
  if (status == -1) {
    results.unavailable = "mpirun cannot be started (it comes with openmpi-bin)";
    return results;
  }
  results = parse(output);
  const bool whole = results.dispatch.size() == 2 && results.combine.size() == 2 &&
                     results.sent_rows.size() == static_cast<std::size_t>(ranks);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || !whole) {
    throw std::runtime_error("the MPI peer failed (wait status " + std::to_string(status) + ")");
  }
  return results;
}

}  // namespace bench
