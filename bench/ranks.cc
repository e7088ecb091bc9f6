#include "ranks.h"

#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace bench {
namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr) {
    throw std::runtime_error(std::string(name) +
                             " is not set: start this program with crossdock-run -n N");
  }
  return value;
}

int number_in(const char* name) {
  const std::string text = variable(name);
  int value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size() || value < 0) {
    throw std::runtime_error(std::string(name) + " = '" + text + "', expected a number");
  }
  return value;
}

}  // namespace

void ok(xd_status status) {
  if (status == XD_SUCCESS) return;
  throw std::runtime_error(std::string(xd_status_name(status)) + ": " + xd_last_error());
}

bool is_launched() { return std::getenv("XD_RUN_KIND") != nullptr; }

Launch read_launch() {
  const bool threads = variable("XD_RUN_KIND") == "threads";
  return {.num_ranks = number_in("WORLD_SIZE"),
          .threads = threads,
          .first_rank = threads ? 0 : number_in("RANK")};
}

int run_ranks(const Launch& launch, const std::function<void(int rank)>& body) {
  std::atomic<int> failures{0};
  const auto run_one = [&](int rank) {
    try {
      body(rank);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "crossdock-bench: rank %d: %s\n", rank, error.what());
      ++failures;
    }
  };
  if (!launch.threads) {
    run_one(launch.first_rank);
    return failures;
  }
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < launch.num_ranks; ++rank) ranks.emplace_back(run_one, rank);
  ranks.clear();
  return failures;
}

Comm make_comm(const Launch& launch, int rank, const CommOptions& options) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.bootstrap =
      options.unique_id != nullptr ? XD_BOOTSTRAP_UNIQUE_ID : XD_BOOTSTRAP_ENVIRONMENT;
  config.rank = rank;
  config.num_ranks = launch.num_ranks;
  config.unique_id = options.unique_id;
  config.device = options.device;
  config.heap_bytes = options.heap_bytes;
  config.timeout_ms = options.timeout_ms;
  config.name = options.name;
  xd_comm* comm = nullptr;
  ok(xd_comm_create(&config, &comm));
  return Comm(comm);
}

}  // namespace bench
