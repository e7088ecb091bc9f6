// A stream of batches with no wait of the host between them: each is dispatched and combined, the
// outputs alternate between two sets, and the period of a batch stands beside the times of its
// operations alone. An operation that waits for something hidden shows there.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ll_calls.h"
#include "machine.h"
#include "rank.h"
#include "table.h"

namespace bench {

inline constexpr int kChainSets = 2;

// `--chain N`, or without a number, for 20.
void complete_chain_option(std::vector<std::string>& arguments);

struct ChainResult {
  std::vector<double> alone;    // seconds of each operation, p50 of the slowest rank's
  std::vector<double> periods;  // seconds per batch, of all ranks and trials
  bool equal_bits = false;      // the last output is that of operations that were waited for
};

// Bytes of symmetric memory that `ep_chain` takes, if tensors are not staged.
std::size_t ep_chain_heap(const Workload& workload, const Traffic& traffic);

// These are collective, and complete on rank 0. A chain has `links` batches.
ChainResult ep_chain(const Rank& at, const Workload& workload, const Traffic& traffic, int links,
                     bool staged, int num_sms);
ChainResult ll_chain(const Rank& at, const Workload& workload, const Traffic& traffic, int links);

// A measured chain: its operations by name, and fields of its row in the table.
struct Chain {
  std::vector<const char*> operations;
  Json fields;
  ChainResult result;
};
inline constexpr const char* kEpChain[] = {"prepare", "dispatch", "combine"};
inline constexpr const char* kLlChain[] = {"dispatch", "combine"};

// Prints the table, with a warning where periods spread, and writes `json`, if there is a path.
// Returns the exit code.
int report_chains(const std::string& title, const Machine& machine,
                  const std::vector<Chain>& chains, const std::string& json);

// `command`: ep or ll; `more`: of the workload, behind its sizes.
std::string chain_title(const char* command, const Workload& workload, int links,
                        const std::string& more);
std::string ep_chain_title(const Workload& workload, int links);

// Returns the exit code.
int run_ep_chain_on_cpu(const Launch& launch, const Options& options);

}  // namespace bench
