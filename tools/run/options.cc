#include "options.h"

#include <charconv>
#include <cstddef>
#include <string_view>

namespace xd::run {
namespace {

constexpr int kMaxRanks = 1024;
constexpr double kMaxSeconds = 1e6;

class Parser {
 public:
  explicit Parser(const std::vector<std::string>& arguments) : arguments_(arguments) {}

  Options parse() {
    while (at_ < arguments_.size() && arguments_[at_].starts_with('-')) {
      const std::string option = arguments_[at_++];
      if (option == "--") break;
      take(option);
      if (options_.help || options_.version) return options_;
    }
    options_.command.assign(arguments_.begin() + static_cast<std::ptrdiff_t>(at_),
                            arguments_.end());
    check();
    return options_;
  }

 private:
  void take(const std::string& option) {
    if (option == "-h" || option == "--help") {
      options_.help = true;
    } else if (option == "--version") {
      options_.version = true;
    } else if (option == "-n") {
      options_.ranks = number(option, value(option), 1, kMaxRanks);
    } else if (option == "--threads") {
      options_.threads = true;
    } else if (option == "--no-prefix") {
      options_.prefix = false;
    } else if (option == "--timeout") {
      options_.timeout = seconds(option, value(option));
    } else if (option == "--grace") {
      options_.grace = seconds(option, value(option));
    } else if (option == "--expendable") {
      take_expendable(option, value(option));
    } else {
      throw UsageError("unknown option '" + option + "'");
    }
  }

  void take_expendable(const std::string& option, std::string_view list) {
    for (;;) {
      const auto comma = list.find(',');
      options_.expendable.insert(number(option, list.substr(0, comma), 0, kMaxRanks - 1));
      if (comma == std::string_view::npos) return;
      list.remove_prefix(comma + 1);
    }
  }

  void check() {
    if (options_.ranks == 0) throw UsageError("-n is missing: how many ranks?");
    if (options_.command.empty()) throw UsageError("the program to run is missing");
    if (options_.threads && !options_.expendable.empty()) {
      throw UsageError("--expendable needs a process per rank, but --threads makes one of all");
    }
    if (!options_.expendable.empty() && *options_.expendable.rbegin() >= options_.ranks) {
      throw UsageError("--expendable " + std::to_string(*options_.expendable.rbegin()) +
                       ": expected ranks below " + std::to_string(options_.ranks));
    }
    if (options_.timeout.count() == 0) throw UsageError("--timeout 0: expected more");
    if (options_.processes() == 1) options_.prefix = false;
  }

  const std::string& value(const std::string& option) {
    if (at_ == arguments_.size()) throw UsageError(option + " needs a value");
    return arguments_[at_++];
  }

  static int number(const std::string& option, std::string_view text, int least, int most) {
    int result = 0;
    if (!parse_whole(text, result) || result < least || result > most) {
      throw UsageError(option + " " + std::string(text) + ": expected a whole number from " +
                       std::to_string(least) + " to " + std::to_string(most));
    }
    return result;
  }

  static std::chrono::milliseconds seconds(const std::string& option, std::string_view text) {
    double result = 0;
    // Written so that NaN is refused.
    if (!parse_whole(text, result) || !(result >= 0 && result <= kMaxSeconds)) {
      throw UsageError(option + " " + std::string(text) + ": expected seconds, from 0 to 1000000");
    }
    return std::chrono::milliseconds(static_cast<std::int64_t>(result * 1000));
  }

  template <class T>
  static bool parse_whole(std::string_view text, T& result) {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, result);
    return error == std::errc() && stop == end;
  }

  const std::vector<std::string>& arguments_;
  std::size_t at_ = 0;
  Options options_;
};

}  // namespace

Options parse_options(const std::vector<std::string>& arguments) {
  return Parser(arguments).parse();
}

const char* help_text() {
  return R"(usage: crossdock-run -n N [options] [--] program [arguments...]

Starts a program as N ranks on this machine, waits for them, and passes their
output on line by line.

  -n N                    number of ranks
  --threads               one process that starts all N ranks as threads
  --timeout SECONDS       end everything after this time (default 600)
  --grace SECONDS         after a rank has failed, time that the others get to
                          end by themselves (default 5)
  --expendable R[,R...]   ranks that may fail; when all others have ended they
                          are ended, too, after the grace period
  --no-prefix             no "[rank] " before lines of output
  --help, --version

Each rank finds in its environment RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, XD_JOB_SECRET, and XD_RUN_KIND,
which is "processes" or "threads". Its standard input is empty. A process is
asked to end by SIGTERM, and 2 seconds later by SIGKILL, with all that it has
started; the same happens when crossdock-run itself is killed.

Exit code: 0 if all ranks succeeded; that of the first rank that failed, or 128
plus the number of the signal that ended it; 2 after a usage error, 124 after
the timeout, 125 if crossdock-run itself failed, 126 or 127 if the program
cannot be started, 128 plus the number of a signal that interrupted it.
)";
}

}  // namespace xd::run
