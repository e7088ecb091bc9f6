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
    case XD_PHASE_CREDIT:
      return "credit";
  }
  return nullptr;
}

[[noreturn]] void raise_exception(const nb::dict& details) {
  nb::object made = nb::module_::import_("crossdock.errors").attr("from_details")(details);
  PyErr_SetObject(made.type().ptr(), made.ptr());
  throw nb::python_error();
}

}  // namespace

nb::dict fatal_details(const xd_error_info& info) {
  nb::dict details;
  details["status"] = xd_status_name(info.status);
  details["text"] = info.text;
  details["fatal"] = true;
  details["rank"] = number_or_none(info.rank);
  details["peer"] = number_or_none(info.peer);
  details["group"] = number_or_none(info.group);
  details["operation"] = number_or_none(info.operation);
  const char* phase = phase_name(info.phase);
  details["phase"] = phase == nullptr ? nb::none() : nb::object(nb::str(phase));
  if (info.status == XD_ERROR_TIMEOUT) {
    details["expected_epoch"] = info.expected_epoch;
    details["seen_epoch"] = info.seen_epoch;
  }
  return details;
}

void raise(xd_status status, const Failure& failure) {
  const std::string text = xd_last_error();
  nb::dict details;
  xd_error_info info XD_ERROR_INFO_INIT;
  if (failure.comm != nullptr && xd_comm_error(failure.comm, &info) == XD_SUCCESS &&
      info.status == status) {
    // An event that ends a wait, such as the loss of a peer, may not know the operation.
    if (info.operation < 0) info.operation = failure.operation;
    details = fatal_details(info);
  } else {
    details["status"] = xd_status_name(status);
    details["peer"] = number_or_none(failure.peer);
    details["operation"] = number_or_none(failure.operation);
  }
  if (status == XD_ERROR_OVERFLOW) {
    details["needed_rows"] = failure.needed_rows;
    details["capacity_rows"] = failure.capacity_rows;
  }
  details["text"] = text;
  details["rank"] = number_or_none(failure.rank);
  raise_exception(details);
}

void raise_invalid(const char* text, int rank) {
  nb::dict details;
  details["status"] = xd_status_name(XD_ERROR_INVALID_ARGUMENT);
  details["text"] = text;
  details["rank"] = number_or_none(rank);
  raise_exception(details);
}

}  // namespace xdpy
