#include "observe/counters.h"

#include <chrono>

namespace xd::observe {

std::uint64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

xd_stats stats_of(const Counters& counters) {
  xd_stats stats XD_STATS_INIT;
  for (std::size_t i = 0; i < XD_STATS_OPERATIONS; ++i) {
    stats.calls[i] = counters.calls[i].get();
    stats.call_ns[i] = counters.call_ns[i].get();
  }
  stats.failed_calls = counters.failed_calls.get();
  stats.tokens = counters.tokens.get();
  stats.token_bytes = counters.token_bytes.get();
  stats.rows = counters.rows.get();
  stats.row_bytes = counters.row_bytes.get();
  stats.bad_ids = counters.bad_ids.get();
  stats.dropped_rows = counters.dropped_rows.get();
  stats.net_puts = counters.net_puts.get();
  stats.net_bytes = counters.net_bytes.get();
  stats.staged_tensors = counters.staged_tensors.get();
  stats.counts_rows = static_cast<std::int32_t>(counters.counts_rows.get());
  stats.measures_waits = static_cast<std::int32_t>(counters.measures_waits.get());
  return stats;
}

xd_stats_source source_of(const Counters& counters) {
  const Identity& identity = counters.identity;
  xd_stats_source source XD_STATS_SOURCE_INIT;
  source.in_use = 1;
  source.rank = identity.rank;
  source.num_ranks = identity.num_ranks;
  source.first_operation = identity.first_operation;
  source.number = identity.number;
  source.device_type = identity.device_type;
  if (const std::uint64_t operation = counters.operation.get(); operation != 0) {
    source.operation = static_cast<std::int32_t>(operation - 1) + identity.first_operation;
    const std::uint64_t since = counters.since.get(), now = now_ns();
    source.operation_ns = now > since ? now - since : 0;
  }
  source.waits_for = static_cast<std::int32_t>(counters.waits_for.get()) - 1;
  std::memcpy(source.comm, counters.comm.get().data(), Text::kBytes);
  std::memcpy(source.name, counters.name.get().data(), Text::kBytes);
  std::memcpy(source.detail, counters.detail.get().data(), Text::kBytes);
  return source;
}

}  // namespace xd::observe
