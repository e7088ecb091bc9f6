#include "bootstrap/environment.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>

#include "base/env.h"
#include "base/error.h"
#include "bootstrap/meeting_messages.h"

namespace xd {
namespace {

constexpr int kPortsTried = 15;  // ports tried after the first

// These variables belong to the launcher, so they are read anew for each communicator.
std::string variable(const char* name) {
  const char* text = std::getenv(name);
  XD_REQUIRE(text != nullptr && *text != '\0', "environment variable ", name,
             " is not set: XD_BOOTSTRAP_ENVIRONMENT needs it, as torchrun sets it");
  return text;
}

std::string variable_or_empty(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : "";
}

int number(const char* name, int least, int most) {
  const std::string text = variable(name);
  int value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  XD_REQUIRE(
      error == std::errc() && stop == text.data() + text.size() && value >= least && value <= most,
      "environment variable ", name, " = ", text, ", expected a number from ", least, " to ", most);
  return value;
}

}  // namespace

RankEnvironment read_rank_environment(const xd_comm_config& config) {
  RankEnvironment result;
  if (config.num_ranks > 0) {
    result.rank = config.rank;
    result.num_ranks = config.num_ranks;
  } else {
    result.num_ranks = number("WORLD_SIZE", 1, kMaxRanks);
    result.rank = number("RANK", 0, result.num_ranks - 1);
  }
  result.master_address = variable("MASTER_ADDR");
  const int port = number("MASTER_PORT", 1, 65535);
  // torchrun's own store listens on MASTER_PORT if this variable says so; then the port is not
  // tried.
  const bool taken = variable_or_empty("TORCHELASTIC_USE_AGENT_STORE") == "True";
  result.first_port = static_cast<std::uint16_t>(std::min(port + (taken ? 1 : 0), 65535));
  result.last_port = static_cast<std::uint16_t>(std::min(port + kPortsTried, 65535));

  const std::string run = variable_or_empty("TORCHELASTIC_RUN_ID");
  const std::string port_text = std::to_string(port);
  // A rank with another job secret has the same tag, so it reaches the meeting and is told that it
  // is refused. The number of ranks is neither in the tag nor in the secret, so that ranks that
  // disagree about it meet and are told.
  const std::array<std::string_view, 6> parts{
      "crossdock environment", env().job_secret, run,
      result.master_address,   port_text,        config.name != nullptr ? config.name : ""};
  std::array<std::string_view, 6> name = parts;
  name[1] = "";
  result.key = Key(derive_secret(parts), tag_of(derive_secret(name)));
  return result;
}

}  // namespace xd
