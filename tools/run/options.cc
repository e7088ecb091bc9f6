#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <numeric>
#include <string_view>

namespace xd::run {
namespace {

constexpr int kMaxRanks = 1024;
constexpr int kMaxRespawns = 1'000;
constexpr double kMaxSeconds = 1e6;

template <class T>
bool parse_whole(std::string_view text, T& result) {
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const auto [stop, error] = std::from_chars(begin, end, result);
  return error == std::errc() && stop == end;
}

int number(const std::string& option, std::string_view text, int least, int most) {
  int result = 0;
  if (!parse_whole(text, result) || result < least || result > most) {
    throw UsageError(option + " " + std::string(text) + ": expected a whole number from " +
                     std::to_string(least) + " to " + std::to_string(most));
  }
  return result;
}

std::chrono::milliseconds seconds(const std::string& option, std::string_view text) {
  double result = 0;
  // Written so that NaN is refused.
  if (!parse_whole(text, result) || !(result >= 0 && result <= kMaxSeconds)) {
    throw UsageError(option + " " + std::string(text) + ": expected seconds, from 0 to 1000000");
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(result * 1000));
}

std::set<int> rank_list(const std::string& option, std::string_view list) {
  std::set<int> ranks;
  for (;;) {
    const auto comma = list.find(',');
    ranks.insert(number(option, list.substr(0, comma), 0, kMaxRanks - 1));
    if (comma == std::string_view::npos) return ranks;
    list.remove_prefix(comma + 1);
  }
}

// "2x3", two hosts of three ranks each, or "2,1,2": the number of ranks on each host.
std::vector<int> ranks_per_host(const std::string& option, std::string_view text) {
  if (const auto by = text.find('x'); by != std::string_view::npos) {
    const int hosts = number(option, text.substr(0, by), 1, kMaxRanks);
    return std::vector<int>(static_cast<std::size_t>(hosts),
                            number(option, text.substr(by + 1), 1, kMaxRanks));
  }
  std::vector<int> ranks;
  for (;;) {
    const auto comma = text.find(',');
    ranks.push_back(number(option, text.substr(0, comma), 1, kMaxRanks));
    if (comma == std::string_view::npos) return ranks;
    text.remove_prefix(comma + 1);
  }
}

// Adds `option`, whose value becomes a field by `read(option, text)`.
template <class Field, class Read>
void add(CLI::App& app, const std::string& option, Field& field, Read read) {
  app.add_option_function<std::string>(
      option, [option, &field, read](const std::string& text) { field = read(option, text); });
}

// The program to run and its arguments: what stands from the first word on that is no option.
std::vector<std::string> command_of(const CLI::App& app) {
  std::vector<std::string> command = app.remaining();
  if (!command.empty() && command.front() == "--") {
    command.erase(command.begin());
  } else if (!command.empty() && command.front().starts_with('-')) {
    throw UsageError("unknown option '" + command.front() + "'");
  }
  return command;
}

void check(Options& options) {
  const int on_hosts = std::accumulate(options.hosts.begin(), options.hosts.end(), 0);
  if (options.ranks == 0) options.ranks = on_hosts;
  if (options.ranks == 0) throw UsageError("-n is missing: how many ranks?");
  if (on_hosts > kMaxRanks) {
    throw UsageError("--hosts has " + std::to_string(on_hosts) + " ranks, expected at most " +
                     std::to_string(kMaxRanks));
  }
  if (on_hosts != 0 && on_hosts != options.ranks) {
    throw UsageError("--hosts has " + std::to_string(on_hosts) + " ranks, expected " +
                     std::to_string(options.ranks) + " as -n says");
  }
  if (options.command.empty()) throw UsageError("the program to run is missing");
  if (options.threads && !options.expendable.empty()) {
    throw UsageError("--expendable needs a process per rank, but --threads makes one of all");
  }
  if (options.respawns > 0 && options.processes() == 1) {
    throw UsageError(std::string("--respawn needs another process that goes on, but ") +
                     (options.threads ? "--threads makes one of all" : "there is one rank"));
  }
  if (!options.expendable.empty() && *options.expendable.rbegin() >= options.ranks) {
    throw UsageError("--expendable " + std::to_string(*options.expendable.rbegin()) +
                     ": expected ranks below " + std::to_string(options.ranks));
  }
  if (options.timeout.count() == 0) throw UsageError("--timeout 0: expected more");
  if (options.processes() == 1) options.prefix = false;
}

}  // namespace

Options parse_options(std::vector<std::string> arguments) {
  Options options;
  CLI::App app;
  app.set_help_flag();   // its text is help_text()
  app.prefix_command();  // options behind the program's name are the program's
  app.add_flag("-h,--help", options.help);
  app.add_flag("--version", options.version);
  app.add_flag("--threads", options.threads);
  app.add_flag("!--no-prefix", options.prefix);
  add(app, "-n", options.ranks, [](const std::string& option, const std::string& text) {
    return number(option, text, 1, kMaxRanks);
  });
  add(app, "--timeout", options.timeout, seconds);
  add(app, "--grace", options.grace, seconds);
  add(app, "--expendable", options.expendable, rank_list);
  add(app, "--respawn", options.respawns, [](const std::string& option, const std::string& text) {
    return number(option, text, 0, kMaxRespawns);
  });
  add(app, "--hosts", options.hosts, ranks_per_host);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes a vector
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (options.help || options.version) return options;
  options.command = command_of(app);
  check(options);
  return options;
}

const char* help_text() {
  return R"(usage: crossdock-run -n N [options] [--] program [arguments...]

Starts a program as N ranks on this machine, waits for them, and passes their
output on line by line.

  -n N                    number of ranks
  --hosts HxG, or G,G,... let ranks count to several hosts: H hosts of G ranks
                          each, or as many ranks on each as the list says.
                          All stay on this machine; -n may be left out
  --threads               one process that starts all N ranks as threads
  --timeout SECONDS       end everything after this time (default 600)
  --grace SECONDS         after a rank has failed, time that the others get to
                          end by themselves (default 5)
  --expendable R[,R...]   ranks that may fail; when all others have ended they
                          are ended, too, after the grace period. If all are
                          in the list, each ends by itself
  --respawn N             start a rank that fails again while others go on, up
                          to N times (0 to 1000) in all; after that its failure
                          ends the job, unless it is expendable
  --no-prefix             no "[rank] " before lines of output
  --help, --version

Each rank finds in its environment RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, XD_JOB_SECRET, XD_RUN_KIND, which is
"processes" or "threads", and XD_RUN_RESPAWNED, how many times it has been
started again. With --hosts there is also XD_RUN_HOSTS, the number of ranks on
each host, and for processes XD_HOST_ID. Its standard input is empty. A process
is asked to end by SIGTERM, and 2 seconds later by SIGKILL, with all that it has
started; the same happens when crossdock-run itself is killed.

Exit code: 0 if all ranks succeeded; that of the first rank that failed, or 128
plus the number of the signal that ended it; 2 after a usage error, 124 after
the timeout, 125 if crossdock-run itself failed, 126 or 127 if the program
cannot be started, 128 plus the number of a signal that interrupted it.
)";
}

}  // namespace xd::run
