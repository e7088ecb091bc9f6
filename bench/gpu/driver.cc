#include "driver.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <stdexcept>

#include "case_report.h"
#include "nccl.h"

namespace bench::gpu {
namespace {

std::string describe_baseline(const Place& place, const Options& options) {
  if (options.driver.no_peer) return "none (--no-peer)";
  if (place.shares_devices()) return "NCCL skipped: ranks share GPUs";
  if (place.launch.num_ranks == 1) return "NCCL skipped: one rank";
  const NcclState& nccl = nccl_state();
  return nccl.unavailable.empty() ? "NCCL " + nccl.version : "NCCL skipped: " + nccl.unavailable;
}

Run describe(const Options& options) {
  const Place place = place_ranks(options.driver);
  Run run{.machine = describe_machine(place.launch.num_ranks),
          .gpus = describe_gpus(),
          .options = options,
          .place = place,
          .baseline = describe_baseline(place, options)};
  if (place.shares_devices()) {
    run.machine.doubts.push_back("ranks share GPUs: their SMs and memory, and no wire between");
  }
  if (place.launch.num_ranks == 1) run.machine.doubts.emplace_back("one rank: nothing crosses");
  return run;
}

// After an illegal access nothing runs in this process any more.
bool devices_are_usable(const Place& place) {
  for (int device = 0; device < place.devices; ++device) {
    if (cudaSetDevice(device) != cudaSuccess || cudaStreamQuery(cudaStreamPerThread) != cudaSuccess)
      return false;
  }
  return true;
}

// False if the case has failed; the reason is printed.
bool measure(Run run, const Case& one, int number, CaseResult& result) {
  run.place.launch.num_ranks = one.workload.ranks;
  try {
    run_case(run.place, one, number, result);
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "crossdock-bench: case %d: %s\n", number, error.what());
    return false;
  }
}

}  // namespace

int run_on_cuda(const Options& options) {
  set_up_environment(/*eager=*/true);
  const Run run = describe(options);
  const bool speaks = run.place.launch.first_rank == 0;
  const std::vector<Case> cases =
      make_cases(options, {.ranks = run.place.launch.num_ranks,
                           .devices = run.place.devices,
                           .sms = run.gpus.sms / run.place.ranks_per_gpu,
                           .may_shrink = !is_launched()});
  std::unique_ptr<JsonLines> json;
  if (speaks && !options.driver.json.empty()) {
    json = std::make_unique<JsonLines>(options.driver.json, run);
  }
  if (speaks) print_head(run);
  int failed = 0;
  std::vector<Finished> finished;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    CaseResult result;
    if (!measure(run, cases[i], static_cast<int>(i), result)) ++failed;
    if (!speaks) continue;
    print_case(run, cases[i], result);
    if (json) json->add(run, cases[i], result);
    finished.push_back({cases[i], std::move(result)});
    if (failed != 0 && !devices_are_usable(run.place)) {
      std::fprintf(stderr, "crossdock-bench: a device is unusable now, giving up\n");
      break;
    }
  }
  if (speaks && !options.driver.preset.empty()) print_summary(finished);
  if (speaks && failed != 0) std::printf("%d of %zu cases FAILED\n", failed, cases.size());
  return failed == 0 ? 0 : 1;
}

}  // namespace bench::gpu
