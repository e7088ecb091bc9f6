#include "stats.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>

namespace xdpy {
namespace {

// A name may have been cut inside a character.
nb::object text_of(const char* text) { return nb::bytes(text).attr("decode")("utf-8", "replace"); }

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
      fields["place"] = place;
      fields["rank"] = source.rank;
      fields["num_ranks"] = source.num_ranks;
      fields["first_operation"] = source.first_operation;
      fields["number"] = source.number;
      fields["device_type"] = source.device_type;
      fields["operation"] = source.operation;
      fields["operation_ns"] = source.operation_ns;
      fields["waits_for"] = source.waits_for;
      fields["comm"] = text_of(source.comm);
      fields["name"] = text_of(source.name);
      fields["detail"] = text_of(source.detail);
      found.append(std::move(fields));
    }
    return found;
  }

 private:
  xd_monitor* monitor_ = nullptr;
};

template <class Numbers>
nb::tuple tuple_of(const Numbers& numbers) {
  nb::list list;
  for (const auto number : numbers) list.append(number);
  return nb::tuple(list);
}

}  // namespace

nb::dict fields_of(const xd_stats& stats, const std::vector<std::int64_t>& wait_ns) {
  nb::dict fields;
  fields["calls"] = tuple_of(stats.calls);
  fields["call_ns"] = tuple_of(stats.call_ns);
  fields["failed_calls"] = stats.failed_calls;
  fields["tokens"] = stats.tokens;
  fields["token_bytes"] = stats.token_bytes;
  fields["rows"] = stats.rows;
  fields["row_bytes"] = stats.row_bytes;
  fields["bad_ids"] = stats.bad_ids;
  fields["dropped_rows"] = stats.dropped_rows;
  fields["counts_rows"] = stats.counts_rows != 0;
  fields["measures_waits"] = stats.measures_waits != 0;
  fields["net_puts"] = stats.net_puts;
  fields["net_bytes"] = stats.net_bytes;
  fields["wait_ns"] = tuple_of(wait_ns);
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
