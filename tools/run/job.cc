#include "job.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

namespace xd::run {
namespace {

constexpr std::int64_t kKillAfterMs = 2'000;
// The output of processes that have ended is in the pipe already. Only a process that has left its
// session could still hold the pipe open.
constexpr std::int64_t kDrainMs = 1'000;
// Before a rank is started again. Ranks that all make the same mistake fail meanwhile.
constexpr int kFirstPauseMs = 100;
constexpr int kLongestPauseMs = 1'000;
// A process that has been started again and has run for so long counts as one that goes on.
constexpr std::int64_t kSettledMs = 10'000;

std::vector<std::string> inherited_environment() {
  std::vector<std::string> result;
  for (char** entry = ::environ; *entry != nullptr; ++entry) result.emplace_back(*entry);
  return result;
}

std::string join(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::string seconds(std::chrono::milliseconds time) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g s", static_cast<double>(time.count()) / 1000);
  return text.data();
}

// Writes all of the text, or gives up at the deadline or when no process reads any more. A pipe
// that polls as writable takes PIPE_BUF bytes without blocking.
void write_all(int fd, std::string_view text, Deadline deadline) {
  while (!text.empty()) {
    pollfd writable{.fd = fd, .events = POLLOUT, .revents = 0};
    if (::poll(&writable, 1, deadline.remaining_ms()) == 0) return;
    const ssize_t bytes = ::write(fd, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
    if (bytes < 0 && errno != EINTR && errno != EAGAIN) return;
    if (bytes > 0) text.remove_prefix(static_cast<std::size_t>(bytes));
  }
}

}  // namespace

Job::Signals::Signals() {
  // Some parents leave these signals ignored. Then ranks could not be reaped, and would run on
  // although no process reads their output any more.
  ::signal(SIGCHLD, SIG_DFL);
  ::signal(SIGPIPE, SIG_DFL);
  sigset_t handled;
  sigemptyset(&handled);
  for (const int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&handled, number);
  if (::sigprocmask(SIG_BLOCK, &handled, &mask_before) != 0) {
    throw std::system_error(errno, std::generic_category(), "sigprocmask");
  }
  fd.reset(::signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) throw std::system_error(errno, std::generic_category(), "signalfd");
}

Job::Job(const Options& options)
    : options_(options),
      environment_{.ranks = options.ranks,
                   .threads = options.threads,
                   .master_port = find_free_port(),
                   .secret = make_secret(),
                   .hosts = options.hosts},
      inherited_(inherited_environment()),
      ranks_(static_cast<std::size_t>(options.processes())),
      respawned_(ranks_.size()),
      settled_(ranks_.size(), Deadline::after_ms(0)),
      pause_ms_(ranks_.size(), kFirstPauseMs),
      timeout_(Deadline::after_ms(options.timeout.count())),
      patience_(timeout_.when() + std::chrono::milliseconds(kKillAfterMs)),
      end_at_(timeout_) {
  for (int rank = 0; rank < options.processes(); ++rank) start(rank);
}

void Job::start(int rank) {
  const auto place = static_cast<std::size_t>(rank);
  const auto environment = rank_environment(environment_, rank, respawned_[place], inherited_);
  const bool capture = options_.processes() > 1;
  const Start start{.command = options_.command,
                    .environment = environment,
                    .signal_mask = signals_.mask_before,
                    .capture = capture};
  ranks_[place] = std::make_unique<Process>(start, guardian_);
  if (!capture) return;
  const std::string prefix = options_.prefix ? "[" + std::to_string(rank) + "] " : "";
  streams_.push_back({std::move(ranks_[place]->out), STDOUT_FILENO, Lines(prefix)});
  streams_.push_back({std::move(ranks_[place]->err), STDERR_FILENO, Lines(prefix)});
}

bool Job::may_start_again(int rank) const {
  return !is_ending() && others_go_on() &&
         respawned_[static_cast<std::size_t>(rank)] < options_.respawns;
}

void Job::wait_to_start(int rank, const Process::End& end) {
  const auto place = static_cast<std::size_t>(rank);
  if (settled_[place].passed()) pause_ms_[place] = kFirstPauseMs;
  waiting_.push_back({rank, end, Deadline::after_ms(pause_ms_[place])});
  pause_ms_[place] = std::min(2 * pause_ms_[place], kLongestPauseMs);
}

void Job::start_waiting() {
  for (const Failed& failed : std::exchange(waiting_, {})) {
    if (is_ending() || !failed.start_at.passed()) {
      waiting_.push_back(failed);
    } else {
      start_again(failed);
    }
  }
}

// A start that fails is one of the rank's N.
void Job::start_again(const Failed& failed) {
  const auto place = static_cast<std::size_t>(failed.rank);
  const std::string which =
      ", " + std::to_string(++respawned_[place]) + " of " + std::to_string(options_.respawns);
  settled_[place] = Deadline::after_ms(kSettledMs);
  try {
    start(failed.rank);
    tell(failed.rank, failed.end, "started again" + which);
  } catch (const std::runtime_error& error) {
    tell(failed.rank, failed.end, "cannot be started again" + which + ": " + error.what());
    if (may_start_again(failed.rank)) {
      wait_to_start(failed.rank, failed.end);
    } else {
      count(failed.rank, failed.end);
    }
  }
}

void Job::tell(int rank, const Process::End& end, const std::string& rest) const {
  write_all(
      STDERR_FILENO,
      "crossdock-run: rank " + std::to_string(rank) + " failed: " + end.text + "; " + rest + "\n",
      patience_);
}

void Job::count(int rank, const Process::End& end) {
  if (outcome_ || options_.expendable.contains(rank)) return;
  outcome_ = {end.code, "rank " + std::to_string(rank) + " failed: " + end.text};
  end_by(Deadline::after_ms(options_.grace.count()));
}

// Where the job ends nobody is started any more, and where nobody goes on the failures count.
void Job::drop_waiting() {
  if (is_ending()) {
    for (const Failed& failed : waiting_) tell(failed.rank, failed.end, "not started again");
  } else {
    for (const Failed& failed : waiting_) count(failed.rank, failed.end);
  }
  waiting_.clear();
}

int Job::run() {
  while (!running().empty()) {
    wait_for_event();
    for (Stream& stream : streams_) pump(stream);
    std::erase_if(streams_, [](const Stream& stream) { return !stream.from; });
    read_signals();
    reap_ranks();
    start_waiting();
    keep_deadlines();
  }
  drain();
  return report();
}

void Job::wait_for_event() {
  std::vector<pollfd> polled{{.fd = signals_.fd.get(), .events = POLLIN, .revents = 0}};
  for (const Stream& stream : streams_) {
    if (stream.from) polled.push_back({.fd = stream.from.get(), .events = POLLIN, .revents = 0});
  }
  auto next = kill_at_ ? *kill_at_ : end_at_;
  for (const Failed& failed : waiting_) {
    if (failed.start_at.when() < next.when()) next = failed.start_at;
  }
  ::poll(polled.data(), polled.size(), next.remaining_ms());
}

// Reads the output that is there, without blocking, and passes whole lines on.
void Job::pump(Stream& stream) {
  std::array<char, 65536> chunk;
  while (stream.from) {
    const ssize_t bytes = ::read(stream.from.get(), chunk.data(), chunk.size());
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == EAGAIN) return;
    if (bytes <= 0) {
      stream.from.reset();
      write_all(stream.to, stream.lines.finish(), patience_);
      return;
    }
    const std::string_view read(chunk.data(), static_cast<std::size_t>(bytes));
    write_all(stream.to, stream.lines.feed(read), patience_);
    // A read of less than was asked for has emptied the pipe, and the other ranks have their turn.
    if (read.size() < chunk.size()) return;
  }
}

void Job::read_signals() {
  signalfd_siginfo info{};
  while (::read(signals_.fd.get(), &info, sizeof(info)) == sizeof(info)) {
    const int number = static_cast<int>(info.ssi_signo);
    if (number == SIGCHLD) continue;  // reap_ranks() looks at each of them anyway.
    const bool first = !outcome_;
    if (first) outcome_ = {128 + number, std::string("interrupted by ") + ::strsignal(number)};
    // A user who asks again while the job is ending does not want to wait.
    signal_all(first ? number : SIGKILL);
    end_by(Deadline::after_ms(options_.grace.count()));
  }
}

void Job::reap_ranks() {
  std::vector<std::pair<int, Process::End>> failed;
  for (int rank = 0; rank < options_.processes(); ++rank) {
    const auto end = ranks_[static_cast<std::size_t>(rank)]->reap();
    if (end && end->code != 0) failed.emplace_back(rank, *end);
  }
  // If several ends are found at once, a rank that crashed is the likely cause of the others.
  std::ranges::stable_partition(failed, [](const auto& one) { return one.second.by_signal; });
  if (is_ending() || !others_go_on()) drop_waiting();
  for (const auto& [rank, end] : failed) {
    if (may_start_again(rank)) {
      wait_to_start(rank, end);
    } else {
      count(rank, end);
    }
  }
}

void Job::keep_deadlines() {
  const auto left = running();
  if (left.empty()) return;
  if (only_expendable_run()) end_by(Deadline::after_ms(options_.grace.count()));
  if (!kill_at_ && end_at_.passed()) {
    ended_ = left;
    if (!outcome_ && !only_expendable_run()) {
      outcome_ = {124, "not finished after " + seconds(options_.timeout)};
    }
    signal_all(SIGTERM);
    kill_at_ = Deadline::after_ms(kKillAfterMs);
  } else if (kill_at_ && kill_at_->passed()) {
    signal_all(SIGKILL);
    kill_at_ = Deadline::after_ms(kKillAfterMs);  // nothing survives SIGKILL
  }
}

void Job::end_by(Deadline deadline) {
  if (deadline.when() < end_at_.when()) end_at_ = deadline;
}

bool Job::is_ending() const { return outcome_ || end_at_.when() < timeout_.when() || kill_at_; }

// Whether there is a rank that one which comes back can join: a process from the beginning, or one
// that has run for long since it was started again. Others may have failed of the same mistake.
bool Job::others_go_on() const {
  return std::ranges::any_of(running(), [this](int rank) {
    const auto place = static_cast<std::size_t>(rank);
    return respawned_[place] == 0 || settled_[place].passed();
  });
}

void Job::signal_all(int number) {
  for (const auto& rank : ranks_) rank->signal(number);
}

std::vector<int> Job::running() const {
  std::vector<int> result;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank]->running()) result.push_back(static_cast<int>(rank));
  }
  return result;
}

bool Job::only_expendable_run() const {
  // Where all may be lost, none is there for another's sake.
  if (options_.expendable.size() == static_cast<std::size_t>(options_.ranks)) return false;
  auto left = running();
  for (const Failed& failed : waiting_) left.push_back(failed.rank);
  return std::all_of(left.begin(), left.end(),
                     [this](int rank) { return options_.expendable.contains(rank); });
}

void Job::drain() {
  const auto deadline = Deadline::after_ms(kDrainMs);
  for (Stream& stream : streams_) {
    while (stream.from && !deadline.passed()) {
      pollfd readable{.fd = stream.from.get(), .events = POLLIN, .revents = 0};
      ::poll(&readable, 1, deadline.remaining_ms());
      pump(stream);
    }
    write_all(stream.to, stream.lines.finish(), deadline);
  }
}

int Job::report() const {
  if (!outcome_) return 0;
  std::string line = "crossdock-run: " + outcome_->text;
  if (!ended_.empty()) line += "; ended " + join(ended_);
  std::fprintf(stderr, "%s\n", line.c_str());
  return outcome_->code;
}

}  // namespace xd::run
