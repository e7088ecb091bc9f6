#include <crossdock/stats.h>

#include "base/options.h"
#include "capi/boundary.h"
#include "observe/stats_segment.h"

using xd::guarded;
using xd::guarded_on;

struct xd_monitor {
  xd::observe::StatsReader reader;
};

void xd::tell_stats(const observe::Subject& subject, xd_stats* stats, std::int64_t* wait_ns) {
  xd::write_struct("stats", stats, observe::stats_of(subject.counters()));
  if (wait_ns == nullptr) return;
  for (const observe::Number& wait : subject.waits()) {
    *wait_ns++ = static_cast<std::int64_t>(wait.get());
  }
}

namespace {

template <class Handle>
xd_status group_stats(const char* function, Handle* group, xd_stats* stats, int64_t* wait_ns) {
  XD_REQUIRE_GIVEN(function, group);
  auto& g = *group->group;
  return guarded_on(function, g.comm(), [&] {
    g.comm().errors().check_process();
    g.collect_losses();
    xd::tell_stats(g.subject(), stats, wait_ns);
  });
}

template <class Handle>
xd_status set_group_name(const char* function, Handle* group, const char* name) {
  XD_REQUIRE_GIVEN(function, group);
  XD_REQUIRE_GIVEN(function, name);
  auto& g = *group->group;
  return guarded_on(function, g.comm(), [&] {
    g.comm().errors().check_process();
    g.subject().set_name(name);
  });
}

}  // namespace

xd_status xd_ep_group_stats(xd_ep_group* group, xd_stats* stats, int64_t* wait_ns) {
  return group_stats("xd_ep_group_stats", group, stats, wait_ns);
}

xd_status xd_ll_group_stats(xd_ll_group* group, xd_stats* stats, int64_t* wait_ns) {
  return group_stats("xd_ll_group_stats", group, stats, wait_ns);
}

xd_status xd_ep_group_set_name(xd_ep_group* group, const char* name) {
  return set_group_name("xd_ep_group_set_name", group, name);
}

xd_status xd_ll_group_set_name(xd_ll_group* group, const char* name) {
  return set_group_name("xd_ll_group_set_name", group, name);
}

xd_status xd_monitor_open(int32_t pid, xd_monitor** monitor) {
  XD_REQUIRE_GIVEN("xd_monitor_open", monitor);
  *monitor = nullptr;
  return guarded("xd_monitor_open",
                 [&] { *monitor = new xd_monitor{xd::observe::StatsReader(pid)}; });
}

xd_status xd_monitor_close(xd_monitor* monitor) {
  return guarded("xd_monitor_close", [&] { delete monitor; });
}

xd_status xd_monitor_places(xd_monitor* monitor, int32_t* places) {
  XD_REQUIRE_GIVEN("xd_monitor_places", monitor);
  XD_REQUIRE_GIVEN("xd_monitor_places", places);
  *places = static_cast<int32_t>(xd::observe::kPlaces);
  return XD_SUCCESS;
}

xd_status xd_monitor_read(xd_monitor* monitor, int32_t place, xd_stats_source* source,
                          xd_stats* stats, int64_t* wait_ns, int32_t max_ranks) {
  XD_REQUIRE_GIVEN("xd_monitor_read", monitor);
  return guarded("xd_monitor_read", [&] {
    const int places = static_cast<int>(xd::observe::kPlaces);
    XD_REQUIRE(place >= 0 && place < places, "place = ", place, ", expected 0 to ", places - 1);
    XD_REQUIRE(max_ranks >= 0 && (max_ranks == 0 || wait_ns != nullptr), "max_ranks = ", max_ranks,
               ", expected 0 without wait_ns, and no less than 0");
    xd_stats_source read XD_STATS_SOURCE_INIT;
    xd_stats numbers XD_STATS_INIT;
    monitor->reader.read(xd::at(place), read, numbers, wait_ns, max_ranks);
    xd::write_struct("source", source, read);
    xd::write_struct("stats", stats, numbers);
  });
}
