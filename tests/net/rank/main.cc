// The program of a rank process. Its settings come from the environment:
//   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT    as for any communicator by environment
//   XD_TEST_ID       a unique id in hexadecimal digits: the ranks meet there instead
//   XD_TEST_FOLDER   the ranks meet by an all-gather over files in this folder instead
//   XD_TEST_WHEN_MET  die, or wait for half a second, between that and connecting
//   XD_TEST_TIMEOUT_MS, XD_TEST_SILENCE_MS, XD_TEST_HOST, XD_TEST_MASK (1: losses are masked)
#include <crossdock/gemm.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "faults/hex.h"
#include "net/rank/channels.h"
#include "net/rank/process.h"
#include "net/rank/steps.h"
#include "support/usage.h"

namespace xd::test {
namespace {

namespace fs = std::filesystem;

std::string setting(const char* name, const char* otherwise = "") {
  const char* text = std::getenv(name);
  return text != nullptr ? text : otherwise;
}
int number(const char* name, int otherwise) {
  const std::string text = setting(name);
  return text.empty() ? otherwise : std::stoi(text);
}

// Gathers over files, each of which appears when it is complete.
class FileGather {
 public:
  static int gather(void* context, const void* send, void* recv, std::size_t bytes) {
    return static_cast<FileGather*>(context)->gather(send, static_cast<char*>(recv), bytes);
  }

 private:
  int gather(const void* send, char* recv, std::size_t bytes) {
    const fs::path folder = setting("XD_TEST_FOLDER");
    const auto name = [&](int rank) {
      return std::to_string(::getppid()) + "-" + std::to_string(round_) + "-" +
             std::to_string(rank);
    };
    const int own = number("RANK", 0);
    const fs::path draft = folder / (name(own) + ".draft");
    std::ofstream(draft).write(static_cast<const char*>(send), static_cast<std::streamsize>(bytes));
    fs::rename(draft, folder / name(own));
    for (int rank = 0; rank < number("WORLD_SIZE", 1); ++rank) {
      const fs::path file = folder / name(rank);
      for (int tries = 0; !fs::exists(file); ++tries) {
        if (tries == 2000) return 1;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      std::ifstream(file).read(recv + static_cast<std::size_t>(rank) * bytes,
                               static_cast<std::streamsize>(bytes));
    }
    // With several hosts the ranks gather twice before they connect.
    if (++round_ == 2) when_met();
    return 0;
  }

  static void when_met() {
    if (setting("XD_TEST_WHEN_MET") == "die") ::raise(SIGKILL);
    if (setting("XD_TEST_WHEN_MET") == "wait")
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }

  int round_ = 0;
};

class RankMain {
 public:
  ~RankMain() { destroy(); }

  std::string obey(const std::string& order) {
    std::istringstream words(order);
    std::string verb;
    int count = 0, more = 0;
    words >> verb >> count >> more;
    if (verb == "id") return make_id();
    if (verb == "create") return create();
    if (verb == "barrier") return outcome(xd_comm_barrier(comm_));
    if (verb == "abort") return outcome(xd_comm_abort(comm_));
    if (verb == "destroy") return destroy();
    if (verb == "lost") return lost();
    if (verb == "error") return error();
    if (verb == "info") return info();
    if (verb == "memory") return memory();
    if (verb == "import") return import_of(count);
    if (verb == "slots") return steps(make_slot_steps, 1, count);
    if (verb == "slot_groups") return steps(make_slot_steps, count, 1);
    if (verb == "steps") return steps(make_steps, 1, count);
    if (verb == "groups") return steps(make_steps, count, 1);
    if (verb == "held") return held();
    if (verb == "context") return context();
    if (verb == "cycle") return cycle(count);
    if (verb == "channels") return channels();
    if (channels_) {
      if (verb == "put") return in_a_line(channels_->put(count));
      if (verb == "hear") return in_a_line(channels_->wait(count));
      if (verb == "ask") return in_a_line(channels_->ask(count));
      if (verb == "flush") return in_a_line(channels_->flush(count));
      if (verb == "swap") return in_a_line(channels_->swap(count, more));
    }
    if (verb == "open") return std::to_string(open_descriptors());
    return "no such order: " + order;
  }

 private:
  static std::string outcome(xd_status status) { return in_a_line(test::outcome(status)); }
  static std::string in_a_line(std::string text) {
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text;
  }

  static std::string make_id() {
    xd_unique_id_config config = XD_UNIQUE_ID_CONFIG_INIT;
    const std::string address = setting("MASTER_ADDR");
    config.address = address.c_str();
    xd_unique_id id;
    const xd_status status = xd_unique_id_create(&config, &id);
    return status == XD_SUCCESS ? to_hex(id) : outcome(status);
  }

  std::string create() {
    xd_comm_config config = XD_COMM_CONFIG_INIT;
    const std::string id_text = setting("XD_TEST_ID"), host = setting("XD_TEST_HOST");
    const xd_unique_id id = id_text.empty() ? xd_unique_id{} : from_hex<xd_unique_id>(id_text);
    config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
    config.rank = number("RANK", 0);
    config.num_ranks = number("WORLD_SIZE", 1);
    if (!id_text.empty()) {
      config.bootstrap = XD_BOOTSTRAP_UNIQUE_ID;
      config.unique_id = &id;
    } else if (!setting("XD_TEST_FOLDER").empty()) {
      config.bootstrap = XD_BOOTSTRAP_ALL_GATHER;
      config.all_gather = FileGather::gather;
      config.all_gather_context = &files_;
    }
    config.heap_bytes = 1 << 16;
    config.timeout_ms = number("XD_TEST_TIMEOUT_MS", 15000);
    config.silence_ms = number("XD_TEST_SILENCE_MS", 1000);
    if (!host.empty()) config.host = host.c_str();
    if (number("XD_TEST_MASK", 0) != 0) config.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
    return outcome(xd_comm_create(&config, &comm_));
  }

  std::string destroy() {
    channels_.reset();
    return outcome(xd_comm_destroy(std::exchange(comm_, nullptr)));
  }

  // Channels that are there already give way to the new ones, of the same memory.
  std::string channels() {
    if (!channels_) channels_.emplace(comm_, number("RANK", 0), number("WORLD_SIZE", 1));
    return in_a_line(channels_->make());
  }

  std::string lost() {
    std::vector<int32_t> lost(static_cast<std::size_t>(number("WORLD_SIZE", 1)));
    const xd_status status = xd_comm_lost(comm_, lost.data());
    if (status != XD_SUCCESS) return outcome(status);
    std::string ranks;
    for (std::size_t r = 0; r < lost.size(); ++r)
      if (lost[r] != 0) ranks += (ranks.empty() ? "" : ",") + std::to_string(r);
    return ranks.empty() ? "none" : ranks;
  }

  std::string error() {
    xd_error_info info XD_ERROR_INFO_INIT;
    const xd_status status = xd_comm_error(comm_, &info);
    if (status != XD_SUCCESS) return outcome(status);
    return in_a_line(std::string(xd_status_name(info.status)) + " peer " +
                     std::to_string(info.peer) + " host " + std::to_string(info.host) + " " +
                     info.text);
  }

  std::string info() {
    xd_comm_info info XD_COMM_INFO_INIT;
    const xd_status status = xd_comm_get_info(comm_, &info);
    if (status != XD_SUCCESS) return outcome(status);
    return "host " + std::to_string(info.host) + " of " + std::to_string(info.num_hosts);
  }

  // Grows, and uses memory that peers of this host have mapped.
  std::string memory() {
    void* own = nullptr;
    if (const xd_status status = xd_mem_grow(comm_, 1 << 16); status != XD_SUCCESS)
      return outcome(status);
    return outcome(xd_mem_alloc(comm_, 100000 / 2, &own));
  }

  std::string import_of(int rank) {
    const xd_mem_handle handle{.rank = rank, .segment = 0, .offset = 0};
    void* there = nullptr;
    return outcome(xd_mem_import(comm_, &handle, &there));
  }

  // One group after another, each with `count` steps.
  std::string steps(decltype(make_steps)* make, int groups, int count) {
    for (int i = 0; i < groups; ++i) {
      const std::string made = make(comm_, number("RANK", 0), number("WORLD_SIZE", 1), count);
      if (made != "fine") return in_a_line(made);
    }
    return "fine";
  }

  static std::string held() {
    return std::to_string(open_descriptors()) + " descriptors, " + std::to_string(live_threads()) +
           " threads, " + std::to_string(shared_bytes()) + " bytes of shared memory";
  }

  std::string context() {
    xd_gemm_config config = XD_GEMM_CONFIG_INIT;
    xd_gemm_context* made = nullptr;
    const xd_status status = xd_gemm_context_create(comm_, &config, &made);
    xd_gemm_context_destroy(made);
    return outcome(status);
  }

  std::string cycle(int count) {
    for (int i = 0; i < count; ++i) {
      std::string failed = create();
      if (failed == "fine") failed = outcome(xd_comm_barrier(comm_));
      if (failed == "fine") failed = outcome(xd_comm_destroy(std::exchange(comm_, nullptr)));
      if (failed != "fine") return failed;
    }
    return "fine";
  }

  xd_comm* comm_ = nullptr;
  std::optional<RankChannels> channels_;
  FileGather files_;
};

}  // namespace

bool run_if_rank_process() {
  if (setting("XD_TEST_NET_RANK").empty()) return false;
  RankMain rank;
  for (std::string order; std::getline(std::cin, order);) {
    std::cout << rank.obey(order) << "\n" << std::flush;
  }
  return true;
}

}  // namespace xd::test
