#include "faults/processes.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "faults/meeting.h"

namespace xd::test {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);  // also under sanitizers

}  // namespace

Processes::Processes(RankProgram program, const std::vector<std::vector<int>>& processes) {
  program.num_ranks = 0;
  for (const auto& ranks : processes) program.num_ranks += static_cast<int>(ranks.size());
  program.id = new_id(program.timeout_ms);
  if (program.death.victim >= 0) program.death.id_of_rest = new_id(program.timeout_ms);
  std::map<std::string, std::string> settings;
  if (program.apart) {
    settings = {{"XD_NET_TEST", "apart"},
                {"XD_NET_IFACE", "127.0.0.1"},
                {"XD_JOB_SECRET", "of this test's ranks"}};
  }
  for (const std::vector<int>& ranks : processes) {
    program.ranks = ranks;
    processes_.push_back({ranks, std::make_unique<ChildProcess>(
                                     ChildProcess::Program{to_arguments(program), settings, {}})});
  }
}

ChildProcess& Processes::child_of(int rank) {
  const auto found = std::ranges::find_if(processes_, [&](const Process& process) {
    return std::ranges::find(process.ranks, rank) != process.ranks.end();
  });
  if (found == processes_.end()) throw std::logic_error("no rank " + std::to_string(rank));
  return *found->child;
}

void Processes::go(int rank) { child_of(rank).tell("go"); }

void Processes::start() {
  wait_until_all_are_ready();
  for (const Process& process : processes_) {
    for (const int rank : process.ranks) go(rank);
  }
}

std::vector<std::string> Processes::named_shared_memory(int rank) {
  std::ifstream maps("/proc/" + std::to_string(pid(rank)) + "/maps");
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
  const auto when = Clock::now();
  child_of(rank).kill();
  return when;
}

void Processes::restart(const RankProgram& program) {
  for (Process& process : processes_) {
    if (process.ranks != program.ranks) continue;
    for (const int rank : process.ranks) lines_[rank].clear();
    process.child.reset();
    process.child =
        std::make_unique<ChildProcess>(ChildProcess::Program{to_arguments(program), {}, {}});
  }
}

void Processes::tell(int rank, const std::string& line) { child_of(rank).tell(line); }

void Processes::stop(int rank) { child_of(rank).signal(SIGSTOP); }

void Processes::resume(int rank) { child_of(rank).signal(SIGCONT); }

int Processes::wait_for_death(int rank) {
  const auto status = child_of(rank).wait_for_end(kPatience);
  if (!status) throw std::runtime_error("rank " + std::to_string(rank) + " lives");
  return *status;
}

bool Processes::lives(int rank) { return !child_of(rank).has_ended(); }

void Processes::wait_until_ready(int rank) { wait_for(rank, "ready"); }

void Processes::wait_until_it_joins(int rank) { wait_for(rank, "joins"); }

Result Processes::wait_until_ready_or_refused(int rank) {
  Line line = wait_for_line(rank, "ready");
  if (line.text == "ready") return {XD_SUCCESS, -1, {}, false, "", line.when};
  const std::string word = "result ";
  if (!line.text.starts_with(word)) {
    throw std::runtime_error("rank " + std::to_string(rank) + " said '" + line.text + "'");
  }
  line.text.erase(0, word.size());
  return result_of(line);
}

void Processes::wait_until_all_are_ready() {
  for (const Process& process : processes_) {
    for (const int rank : process.ranks) wait_until_ready(rank);
  }
}

Losses Processes::wait_for_losses(int rank) {
  const Line line = wait_for(rank, "lost");
  std::istringstream fields(line.text);
  int status = 0;
  Losses losses{XD_SUCCESS, "", line.when};
  fields >> status >> losses.ranks;
  losses.finished_by = static_cast<xd_status>(status);
  return losses;
}

Result Processes::wait_for_result(int rank) { return result_of(wait_for(rank, "result")); }

Result Processes::result_of(const Line& line) {
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

Result Processes::expect_loss(int rank, int peer, Clock::time_point since,
                              std::chrono::milliseconds limit) {
  SCOPED_TRACE("rank " + std::to_string(rank));
  Result result = wait_for_result(rank);
  EXPECT_EQ(result.status, XD_ERROR_PEER_LOST) << result.text;
  EXPECT_EQ(result.peer, peer) << result.text;
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(result.when - since);
  EXPECT_LT(result.when - since, limit) << took.count() << " ms";
  return result;
}

void Processes::wait_until_done(int rank) { wait_for(rank, "done"); }

void Processes::wait_for_progress(int rank) { wait_for(rank, "progress"); }

std::string Processes::wait_for_after(int rank) { return wait_for(rank, "after").text; }

// The rest of the rank's next line, which must begin with `word`.
Processes::Line Processes::wait_for(int rank, const std::string& word) {
  Line line = wait_for_line(rank, word);
  if (!line.text.starts_with(word + " ") && line.text != word) {
    throw std::runtime_error("rank " + std::to_string(rank) + " said '" + line.text +
                             "', expected '" + word + "'");
  }
  line.text.erase(0, std::min(line.text.size(), word.size() + 1));
  return line;
}

// The rank's next line.
Processes::Line Processes::wait_for_line(int rank, const std::string& wanted) {
  const ChildProcess& child = child_of(rank);
  const auto deadline = Clock::now() + kPatience;
  while (lines_[rank].empty()) {
    if (child.output() < 0) {
      throw std::runtime_error("a rank process has ended: '" + child.partial() + "'");
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0 || !read_some(left)) {
      throw std::runtime_error("rank " + std::to_string(rank) + " did not say '" + wanted +
                               "' in time");
    }
  }
  Line line = lines_[rank].front();
  lines_[rank].pop_front();
  return line;
}

// Reads what the first processes say that say something; false if none does in time. It listens to
// all, whichever is awaited, so that the time of a line does not depend on which rank the test asks
// for first.
bool Processes::read_some(std::chrono::milliseconds patience) {
  std::vector<pollfd> waits;
  for (const Process& process : processes_) waits.push_back({process.child->output(), POLLIN, 0});
  if (::poll(waits.data(), waits.size(), static_cast<int>(patience.count())) <= 0) return false;
  for (std::size_t i = 0; i < waits.size(); ++i) {
    if (waits[i].revents == 0) continue;
    processes_[i].child->read();
    while (const auto line = processes_[i].child->take_line()) {
      std::size_t digits = 0;
      const int rank = std::stoi(line->text, &digits);
      lines_[rank].push_back({line->text.substr(digits + 1), line->when});
    }
  }
  return true;
}

}  // namespace xd::test
