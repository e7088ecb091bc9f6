#include "machine.h"

#include <crossdock/version.h>
#include <sched.h>
#include <sys/utsname.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>

namespace bench {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

bool is_virtual_machine() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("flags")) return line.find(" hypervisor") != std::string::npos;
  }
  return false;
}

int usable_cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

// State of the source tree that this program was built from; without the tree, its state when it
// was configured.
std::string commit() {
  const std::string command =
      "git -C '" CROSSDOCK_SOURCE_DIR "' describe --always --dirty --exclude '*' 2>/dev/null";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "re"), ::pclose);
  char line[64] = {};
  if (!pipe || std::fgets(line, sizeof(line), pipe.get()) == nullptr) {
    return *CROSSDOCK_COMMIT != '\0' ? CROSSDOCK_COMMIT : "unknown";
  }
  return std::string(line).substr(0, std::string(line).find('\n'));
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm fields{};
  ::gmtime_r(&now, &fields);
  char text[16] = {};
  std::strftime(text, sizeof(text), "%Y-%m-%d", &fields);
  return text;
}

std::vector<std::string> doubts(int ranks) {
  std::vector<std::string> result;
#ifndef __OPTIMIZE__
  result.push_back("built without optimisation");
#endif
  if (*CROSSDOCK_SANITIZERS != '\0') result.push_back("built with sanitizers");
  const int cores = usable_cores();
  if (ranks > cores) {
    result.push_back(std::to_string(ranks) + " ranks share " + std::to_string(cores) +
                     " cores: times include waiting for a core");
  }
  const std::string governor = first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
  if (!governor.empty() && governor != "performance") {
    result.push_back("frequency scaling: governor " + governor);
  }
  if (is_virtual_machine()) result.push_back("virtual machine: clocks and neighbours are unknown");
  if (double load = 0; ::getloadavg(&load, 1) == 1 && load > 0.5 * cores) {
    result.push_back("the machine was busy before: load " + std::to_string(load).substr(0, 4));
  }
  return result;
}

}  // namespace

Machine describe_machine(int ranks) {
  utsname system{};
  ::uname(&system);
  return {.processor = processor_name() + ", " + std::to_string(usable_cores()) + " cores, " +
                       system.sysname + " " + system.release,
          .build = "commit " + commit() + ", " CROSSDOCK_BUILD_TYPE ", compiler " __VERSION__,
          .date = today(),
          .doubts = doubts(ranks)};
}

}  // namespace bench
