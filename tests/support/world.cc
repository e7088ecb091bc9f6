#include "support/world.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace xd::test {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  if (!value) {
    throw std::runtime_error(std::string(name) +
                             " is not set: start this program with crossdock-run -n N");
  }
  return value;
}

int int_variable(const char* name) {
  const std::string text = variable(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw std::runtime_error(std::string(name) + " = '" + text + "', expected a number");
  }
  return value;
}

// The list of ranks per host that crossdock-run --hosts has made, as the host of each rank.
Hosts read_hosts() {
  const char* const list = std::getenv("XD_RUN_HOSTS");
  Hosts hosts;
  if (list == nullptr) return hosts;
  std::istringstream numbers(list);
  int host = 0;
  for (std::string ranks; std::getline(numbers, ranks, ','); ++host) {
    hosts.insert(hosts.end(), std::stoul(ranks), host);
  }
  return hosts;
}

}  // namespace

Comm Rank::comm_on(const Hosts& other, const std::string& name, std::size_t heap_bytes) const {
  Rank there = *this;
  there.hosts = other;
  return there.another_comm(name, heap_bytes);
}

Comm Rank::another_comm(const std::string& name, std::size_t heap_bytes, std::int32_t timeout_ms,
                        xd_comm_peer_loss on_peer_loss) const {
  const std::string full_name = run_name + "." + name;
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
  config.rank = rank;
  config.num_ranks = num_ranks;
  config.device = memory->device();
  config.heap_bytes = heap_bytes;
  config.timeout_ms = timeout_ms;
  config.on_peer_loss = on_peer_loss;
  config.name = full_name.c_str();
  const std::string host = hosts.empty() ? "" : host_name(hosts[static_cast<std::size_t>(rank)]);
  if (!hosts.empty()) config.host = host.c_str();
  return make_comm(config);
}

int Rank::ranks_on_device() const {
  const int devices = device_count("cuda");
  return (num_ranks + devices - 1) / devices;
}

Rank Rank::on(Memory& other) const {
  Rank result = *this;
  result.memory = &other;
  return result;
}

World::World(const std::string& executor) {
  const std::string kind = variable("XD_RUN_KIND");
  if (kind != "processes" && kind != "threads") {
    throw std::runtime_error("XD_RUN_KIND = '" + kind + "', expected processes or threads");
  }
  threads_ = kind == "threads";
  num_ranks_ = int_variable("WORLD_SIZE");
  hosts_ = read_hosts();
  first_rank_ = threads_ ? 0 : int_variable("RANK");
  // Processes that share a device take turns on it, so a wait would last until the others' turns.
  if (!threads_ && num_ranks_ > device_count(executor)) {
    throw Unavailable(std::to_string(num_ranks_) + " rank processes need as many devices, found " +
                      std::to_string(device_count(executor)));
  }
  comms_.resize(threads_ ? static_cast<std::size_t>(num_ranks_) : 1);
  for (std::size_t local = 0; local < comms_.size(); ++local) {
    memories_.push_back(make_memory(executor, first_rank_ + static_cast<int>(local)));
  }
}

void World::run_rank(int local, const std::function<void(Rank&)>& body) {
  Comm& comm = comms_[static_cast<std::size_t>(local)];
  Memory* const memory = memories_[static_cast<std::size_t>(local)].get();
  Rank rank{first_rank_ + local,           num_ranks_, threads_, nullptr, memory,
            "run" + std::to_string(runs_), hosts_};
  try {
    if (!comm) comm = rank.another_comm("shared", heap_bytes());
    rank.comm = comm.get();
    body(rank);
    // No rank starts the next body, or gives up the communicator, while a peer is still in this
    // one.
    ok(xd_comm_barrier(comm.get()));
  } catch (...) {
    if (rank.asynchronous() && comm) {  // nothing may run any more when it is destroyed
      xd_comm_abort(comm.get());
      memory->synchronize();
    }
    comm.reset();
    throw;
  }
}

std::vector<RankFailure> World::run(const std::function<void(Rank&)>& body) {
  ++runs_;
  std::mutex mutex;
  std::vector<RankFailure> failures;
  const auto run_one = [&](int local) {
    try {
      run_rank(local, body);
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex);
      failures.push_back({first_rank_ + local, error.what()});
    }
  };
  if (!threads_) {
    run_one(0);
    return failures;
  }
  std::vector<std::thread> ranks;
  for (int local = 0; local < num_ranks_; ++local) ranks.emplace_back(run_one, local);
  for (std::thread& rank : ranks) rank.join();
  return failures;
}

}  // namespace xd::test
