// crossdock-bench-net: a rank of a measurement between network namespaces, which bench/net/run.py
// makes. Its place comes from the environment:
//   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, XD_JOB_SECRET   as for any communicator
//   XD_BENCH_BOARD    the file of rank_results.h
//   XD_BENCH_HOSTS    the hosts, of equal size; ranks are on them in order
//   XD_BENCH_ADDRESS, XD_BENCH_PEER   of this rank's host, and of the host of the other rank
// Rank 0 prints lines of JSON.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <crossdock/stats.h>

#include "ep_calls.h"
#include "net/floor.h"
#include "net/measure.h"
#include "net/rank_results.h"
#include "ranks.h"
#include "routing.h"
#include "start_line.h"

namespace {

using namespace bench;
using bench::net::Measure;
using bench::net::RankResults;
using bench::net::Sent;
using Json = nlohmann::ordered_json;

std::string setting(const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr) throw std::invalid_argument(std::string(name) + " is not set");
  return text;
}
int number(const char* name) { return std::stoi(setting(name)); }

// Bytes that the host of this process has sent: a namespace has one interface.
double interface_bytes() {
  std::ifstream file("/sys/class/net/eth0/statistics/tx_bytes");
  double bytes = 0;
  return file >> bytes ? bytes : 0;
}

struct Place {
  int rank = number("RANK"), ranks = number("WORLD_SIZE"), hosts = number("XD_BENCH_HOSTS");
  int host_of(int r) const { return r * hosts / ranks; }
  bool first_of_host() const { return rank == 0 || host_of(rank) != host_of(rank - 1); }
};

// Rows that cross, [source]: unique (token, host) pairs, and unique (token, rank) pairs.
struct Crossing {
  std::vector<long> hosts, ranks;
};
Crossing crossing_of(const Workload& w, const std::vector<Choices>& routing, const Place& place) {
  Crossing rows;
  for (int source = 0; source < w.ranks; ++source) {
    const Choices& choices = routing[static_cast<std::size_t>(source)];
    long of_hosts = 0, of_ranks = 0;
    for (int t = 0; t < w.tokens; ++t) {
      std::set<int> hosts, ranks;
      for (int k = 0; k < w.topk; ++k) {
        const int rank = choices[static_cast<std::size_t>(t) * w.topk + k] / w.local_experts();
        if (place.host_of(rank) == place.host_of(source)) continue;
        ranks.insert(rank);
        hosts.insert(place.host_of(rank));
      }
      of_hosts += static_cast<long>(hosts.size());
      of_ranks += static_cast<long>(ranks.size());
    }
    rows.hosts.push_back(of_hosts);
    rows.ranks.push_back(of_ranks);
  }
  return rows;
}

void print(const Json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

// Prints the facts that other programs and the report need: rows [source][destination], rows that
// cross, and what every rank has received.
void print_facts(RankResults& rank_results, const Workload& w, const Place& place,
                 const std::vector<Choices>& routing, double checksum_of_rank) {
  rank_results.numbers(rank_results.rank())[0] = checksum_of_rank;
  rank_results.barrier();
  if (rank_results.rank() == 0) {
    const Crossing rows = crossing_of(w, routing, place);
    std::vector<double> sums;
    for (int r = 0; r < rank_results.ranks(); ++r) sums.push_back(rank_results.numbers(r)[0]);
    print({{"facts",
            {{"rows", count_rows(w, routing)},
             {"row_bytes", w.row_bytes()},
             {"host_rows", rows.hosts},
             {"rank_rows", rows.ranks},
             {"checksums", sums}}}});
  }
  rank_results.barrier();
}

// As a number that a double has exactly.
double short_checksum(std::uint64_t sum) { return static_cast<double>(sum >> 16); }

Comm meet(const Place& place, std::size_t heap_bytes) {
  return make_comm({.num_ranks = place.ranks, .threads = false, .first_rank = place.rank},
                   place.rank, {.name = "bench-net", .heap_bytes = heap_bytes});
}

struct EpRank {
  const Workload& w;
  const Traffic traffic;
  const Comm comm;
  const EpInputs in;
  EpCalls calls;

  EpRank(const Workload& workload, const std::vector<Choices>& routing, const Place& place)
      : w(workload),
        traffic(traffic_of(workload, routing, place.rank)),
        comm(meet(place, EpCalls::heap_bytes(workload, traffic) + (1 << 20))),
        in(workload, traffic, comm.get(), host()),
        calls(workload, traffic, in, comm.get(), host(), /*staged=*/false) {
    fill_tokens(workload, place.rank, in.tokens.data());
    calls.open();
  }

  Sent sent() const {
    xd_stats stats XD_STATS_INIT;
    ok(xd_ep_group_stats(calls.group(), &stats, nullptr));
    return {.puts = static_cast<double>(stats.net_puts),
            .bytes = static_cast<double>(stats.net_bytes),
            .wire = 0};
  }
};

void run_ep(RankResults& rank_results, const Workload& w, const Place& place) {
  const std::vector<Choices> routing = make_routing(w);
  EpRank rank(w, routing, place);
  const auto sent = [&] {
    Sent all = rank.sent();
    if (place.first_of_host()) all.wire = interface_bytes();
    return all;
  };
  Measure measure(rank_results, w.iters, w.warmup);
  for (const Operation operation : {Operation::prepare, Operation::dispatch, Operation::combine}) {
    measure.step(
        name_of(operation), [&] { rank.calls.call(operation); }, sent);
  }
  const std::uint64_t sum = checksum(rank.calls.recv().data(), rank.calls.recv_bytes(), 1);
  print_facts(rank_results, w, place, routing, short_checksum(sum));
}

// Seconds of processor that a communicator with a group costs in a second in which nobody calls.
void run_idle(RankResults& rank_results, const Workload& w, const Place& place) {
  EpRank rank(w, make_routing(w), place);
  rank.calls.call(Operation::prepare);
  rank_results.barrier();
  constexpr int kSeconds = 5;
  const std::clock_t begun = std::clock();
  std::this_thread::sleep_for(std::chrono::seconds(kSeconds));
  rank_results.numbers(rank_results.rank())[0] =
      static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC / kSeconds;
  rank_results.barrier();
  double most = 0;
  for (int r = 0; r < rank_results.ranks(); ++r) most = std::max(most, rank_results.numbers(r)[0]);
  if (rank_results.rank() == 0) print({{"step", "idle"}, {"core", most}});
  rank_results.barrier();
}

void run_floor(RankResults& rank_results, const Workload& w, const Place& place,
               const std::string& by) {
  const std::vector<long> rows = crossing_of(w, make_routing(w), place).hosts;
  const auto bytes = [&](int rank) {
    return static_cast<std::size_t>(rows[static_cast<std::size_t>(rank)]) * w.row_bytes();
  };
  const net::FloorConfig config{.address = setting("XD_BENCH_ADDRESS"),
                                .peer = setting("XD_BENCH_PEER"),
                                .bytes = bytes(place.rank),
                                .coming = bytes(net::other_rank(rank_results))};
  const auto floor = by == "links" ? net::make_links_floor(rank_results, config)
                                   : net::make_tcp_floor(rank_results, config);
  const auto sent = [&] {
    return Sent{.puts = 0, .bytes = 0, .wire = place.first_of_host() ? interface_bytes() : 0};
  };
  Measure(rank_results, w.iters, w.warmup)
      .step(
          "stream", [&] { floor->stream(); }, sent);
  constexpr int kTurns = 100;
  Measure(rank_results, w.iters, w.warmup).step("ping", [&] { floor->ping(kTurns); });
}

int run(const std::string& command, const std::vector<std::string>& arguments) {
  const Place place;
  const Workload w = parse_options(arguments, place.ranks).workload;
  RankResults rank_results(setting("XD_BENCH_BOARD"), place.rank, place.ranks);
  if (command == "ep") {
    run_ep(rank_results, w, place);
  } else if (command == "idle") {
    run_idle(rank_results, w, place);
  } else if (command == "links" || command == "tcp") {
    run_floor(rank_results, w, place, command);
  } else {
    throw std::invalid_argument("'" + command + "', expected ep, idle, links or tcp");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 1 && words[0] == "results-bytes") {
    std::printf("%zu\n", RankResults::bytes());
    return 0;
  }
  try {
    return run(words.empty() ? "" : words[0],
               {words.begin() + (words.empty() ? 0 : 1), words.end()});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "crossdock-bench-net: %s\n", error.what());
    return 1;
  }
}
