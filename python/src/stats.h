// The numbers of groups and contexts, and those of other processes.
#pragma once

#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "member.h"

namespace xdpy {

// The fields of the structs, and the waits by rank.
nb::dict fields_of(const xd_stats& stats, const std::vector<std::int64_t>& wait_ns);

// The numbers of a member; `read` is its function of the C API.
template <class Handle>
nb::dict stats_of(Handle* handle, const xd_comm_info& ranks, const Failure& failure,
                  xd_status (*read)(Handle*, xd_stats*, std::int64_t*)) {
  xd_stats stats XD_STATS_INIT;
  std::vector<std::int64_t> wait_ns(static_cast<std::size_t>(ranks.num_ranks));
  check(read(handle, &stats, wait_ns.data()), failure);
  return fields_of(stats, wait_ns);
}

void bind_stats(nb::module_& module);

}  // namespace xdpy
