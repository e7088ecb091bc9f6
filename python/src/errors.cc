#include "errors.h"

#include <nanobind/stl/string.h>

#include <string>

namespace xdpy {
namespace {

nb::object number_or_none(int value) {
  return value < 0 ? nb::none() : nb::object(nb::int_(value));
}

const char* phase_name(xd_phase phase) {
  switch (phase) {
    case XD_PHASE_NONE:
      return nullptr;
    case XD_PHASE_HOST:
      return "host";
    case XD_PHASE_ENTRY:
      return "entry";
    case XD_PHASE_COUNTS:
      return "counts";
    case XD_PHASE_DONE:
      return "done";
    case XD_PHASE_ROWS:
      return "rows";
  }
  return nullptr;
}

[[noreturn]] void raise_exception(int status, const nb::dict& details) {
  nb::object made = nb::module_::import_("crossdock.errors").attr("from_status")(status, details);
  PyErr_SetObject(made.type().ptr(), made.ptr());
  throw nb::python_error();
}

}  // namespace

void raise(xd_status status, const Failure& failure) {
  const std::string text = xd_last_error();
  nb::dict details;
  details["text"] = text;
  details["name"] = xd_status_name(status);
  details["rank"] = number_or_none(failure.rank);
  details["peer"] = number_or_none(failure.peer);
  details["group"] = number_or_none(failure.group);
  details["operation"] = number_or_none(failure.operation);

  xd_error_info info XD_ERROR_INFO_INIT;
  if (failure.comm != nullptr && xd_comm_error(failure.comm, &info) == XD_SUCCESS &&
      info.status == status) {
    details["fatal"] = true;
    details["peer"] = number_or_none(info.peer);
    const char* phase = phase_name(info.phase);
    details["phase"] = phase == nullptr ? nb::none() : nb::object(nb::str(phase));
    if (info.group >= 0) details["group"] = info.group;
    if (info.operation >= 0) details["operation"] = info.operation;
    if (status == XD_ERROR_TIMEOUT) {
      details["expected_epoch"] = info.expected_epoch;
      details["seen_epoch"] = info.seen_epoch;
    }
  }
  raise_exception(status, details);
}

void raise_invalid(const char* text, int rank) {
  nb::dict details;
  details["text"] = text;
  details["name"] = xd_status_name(XD_ERROR_INVALID_ARGUMENT);
  details["rank"] = number_or_none(rank);
  raise_exception(XD_ERROR_INVALID_ARGUMENT, details);
}

}  // namespace xdpy
