#include "environment.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/fd.h"

namespace xd::run {
namespace {

// Number of ports above the given one on which ranks may also meet.
constexpr int kMoreMeetingPorts = 15;

[[noreturn]] void fail_errno(const char* call) {
  throw std::system_error(errno, std::generic_category(), call);
}

std::string comma_list(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

// `hosts`: the number of ranks on each, which are all ranks.
std::string host_of(const std::vector<int>& hosts, int rank) {
  std::size_t host = 0;
  for (int end = hosts[0]; end <= rank; end += hosts[host]) ++host;
  return std::to_string(host);
}

}  // namespace

std::vector<std::string> rank_environment(const JobEnvironment& job, int rank, int respawned,
                                          const std::vector<std::string>& inherited) {
  std::vector<std::pair<std::string, std::string>> variables{
      {"RANK", std::to_string(rank)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(job.ranks)},
      {"LOCAL_WORLD_SIZE", std::to_string(job.ranks)},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(job.master_port)},
      {"XD_JOB_SECRET", job.secret},
      {"XD_RUN_KIND", job.threads ? "threads" : "processes"},
      {"XD_RUN_RESPAWNED", std::to_string(respawned)},
  };
  if (!job.hosts.empty()) {
    variables.emplace_back("XD_RUN_HOSTS", comma_list(job.hosts));
    // One process with all ranks is on no host: it names each rank's itself.
    if (!job.threads) variables.emplace_back("XD_HOST_ID", "host-" + host_of(job.hosts, rank));
  }
  std::vector<std::string> result;
  for (const std::string& entry : inherited) {
    const bool replaced = std::any_of(variables.begin(), variables.end(), [&](const auto& own) {
      return entry.starts_with(own.first + "=");
    });
    if (!replaced) result.push_back(entry);
  }
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

int find_free_port() {
  for (;;) {
    const UniqueFd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!probe) fail_errno("socket");
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::bind(probe.get(), generic, length) != 0) fail_errno("bind to 127.0.0.1");
    if (::getsockname(probe.get(), generic, &length) != 0) fail_errno("getsockname");
    if (const int port = ntohs(address.sin_port); port + kMoreMeetingPorts <= 65535) return port;
  }
}

std::string make_secret() {
  std::array<unsigned char, 16> bytes{};
  // getrandom() never cuts requests of up to 256 bytes.
  if (::getrandom(bytes.data(), bytes.size(), 0) < 0) fail_errno("getrandom");
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace xd::run
