// crossdock-run: starts the ranks of a job on this machine. See options.cc for its manual.
#include <crossdock/version.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "job.h"
#include "options.h"

int main(int argc, char** argv) {
  using namespace xd::run;
  try {
    const Options options = parse_options(std::vector<std::string>(argv + 1, argv + argc));
    if (options.help) return std::fputs(help_text(), stdout) < 0 ? 125 : 0;
    if (options.version) {
      std::printf("crossdock-run %d.%d.%d\n", XD_VERSION_MAJOR, XD_VERSION_MINOR, XD_VERSION_PATCH);
      return 0;
    }
    return Job(options).run();
  } catch (const UsageError& error) {
    std::fprintf(stderr, "crossdock-run: %s\nTry 'crossdock-run --help'.\n", error.what());
    return 2;
  } catch (const StartError& error) {
    std::fprintf(stderr, "crossdock-run: %s\n", error.what());
    return error.code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "crossdock-run: %s\n", error.what());
    return 125;
  }
}
