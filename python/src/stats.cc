#include "stats.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>

namespace xdpy {
namespace {

// xd_monitor.
class Monitor {
 public:
  explicit Monitor(std::int32_t pid) { check(xd_monitor_open(pid, &monitor_)); }
  Monitor(Monitor&& other) noexcept : monitor_(std::exchange(other.monitor_, nullptr)) {}
  Monitor& operator=(Monitor&&) = delete;
  ~Monitor() { xd_monitor_close(monitor_); }

  // Every place in use: its source's fields and its numbers'.
  [[nodiscard]] nb::list read() const {
    std::int32_t places = 0;
    check(xd_monitor_places(monitor_, &places));
    nb::list found;
    std::vector<std::int64_t> wait_ns(XD_MAX_RANKS);
    for (std::int32_t place = 0; place < places; ++place) {
      xd_stats_source source XD_STATS_SOURCE_INIT;
      xd_stats stats XD_STATS_INIT;
      check(xd_monitor_read(monitor_, place, &source, &stats, wait_ns.data(), XD_MAX_RANKS));
      if (source.in_use == 0) continue;
      const auto end = wait_ns.begin() + source.num_ranks;
      nb::dict fields = fields_of(stats, std::vector<std::int64_t>(wait_ns.begin(), end));
      fields.update(fields_of(source));
      fields["place"] = place;
      found.append(std::move(fields));
    }
    return found;
  }

 private:
  xd_monitor* monitor_ = nullptr;
};

}  // namespace

nb::dict fields_of(const xd_stats& stats, const std::vector<std::int64_t>& wait_ns) {
  nb::dict fields = fields_of(stats);
  nb::list waits;
  for (const std::int64_t wait : wait_ns) waits.append(wait);
  fields["wait_ns"] = nb::tuple(waits);
  return fields;
}

void bind_stats(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Monitor>(module, "Monitor")
      .def(
          "__init__", [](Monitor* self, std::int32_t pid) { new (self) Monitor(pid); }, "pid"_a)
      .def("read", &Monitor::read);
}

}  // namespace xdpy
