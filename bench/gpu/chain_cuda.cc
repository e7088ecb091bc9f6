#include "chain_cuda.h"

#include "rank.h"

namespace bench::gpu {
namespace {

ChainResult on_rank(const Place& place, int rank, const CommOptions& options,
                    const std::function<ChainResult(const Rank&)>& run) {
  const int device = place.device_of(rank);
  ok(cudaSetDevice(device), "cudaSetDevice");
  CommOptions own = options;
  own.heap_bytes += Means::heap_bytes();
  own.device = {kDLCUDA, device};
  own.timeout_ms = kTimeoutMs;
  const Means means(place.launch, rank, own);
  return run(means.at);
}

}  // namespace

int run_ep_chain(const Options& options) {
  set_up_environment(/*eager=*/true);
  const DriverOptions& driver = options.driver;
  const bool launched = is_launched();
  const Place place = place_ranks(driver);
  Workload w = options.workload;
  w.ranks = place.launch.num_ranks;
  check(w);
  const std::vector<Choices> routing = make_routing(w);
  std::vector<Chain> chains;  // on rank 0
  for (const int sms : driver.sms) {
    for (const bool staged : {false, true}) {
      if (!(staged ? driver.staged : driver.zero_copy)) continue;
      const char* const by = staged ? "staged" : "zero-copy";
      const std::string name = "bench-chain-" + std::to_string(sms) + "-" + by;
      xd_unique_id id{};
      if (!launched) bench::ok(xd_unique_id_create(nullptr, &id));
      const int failures = run_ranks(place.launch, [&](int rank) {
        const Traffic traffic = traffic_of(w, routing, rank);
        const CommOptions comm{.name = name.c_str(),
                               .heap_bytes = staged ? 0 : ep_chain_heap(w, traffic),
                               .unique_id = launched ? nullptr : &id};
        ChainResult result = on_rank(place, rank, comm, [&](const Rank& at) {
          return ep_chain(at, w, traffic, driver.chain, staged, sms);
        });
        if (rank != 0) return;
        chains.push_back(
            {{std::begin(kEpChain), std::end(kEpChain)}, {{"by", by}, {"SMs", sms}}, result});
      });
      if (failures != 0) return 1;
    }
  }
  if (place.launch.first_rank != 0) return 0;
  return report_chains(ep_chain_title(w, driver.chain), describe_machine(w.ranks), chains,
                       driver.json);
}

ChainResult run_ll_chain(const Launch& launch, int rank, const Workload& w, const Traffic& traffic,
                         int links) {
  const std::string name = "bench-ll-chain-" + std::to_string(w.tokens);
  return on_rank(place_ranks(launch), rank, {.name = name.c_str(), .heap_bytes = 0},
                 [&](const Rank& at) { return ll_chain(at, w, traffic, links); });
}

}  // namespace bench::gpu
