// crossdock._jax: XLA's custom calls of expert parallelism, and the groups that they find.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../arguments.h"
#include "group.h"
#include "handlers.h"
#include "ranks.h"

namespace nb = nanobind;

namespace xdjax {
namespace {

[[noreturn]] void raise(const nb::dict& details) {
  nb::object made = nb::module_::import_("crossdock.errors").attr("from_details")(details);
  PyErr_SetObject(made.type().ptr(), made.ptr());
  throw nb::python_error();
}

[[noreturn]] void raise(const Problem& problem) {
  nb::dict details;
  details["status"] = xd_status_name(problem.status);
  details["text"] = problem.text;
  raise(details);
}

std::shared_ptr<Ranks> join(int device_type, const nb::list& seats, int timeout_ms,
                            const std::string& name) {
  std::vector<Seat> places;
  for (nb::handle item : seats) {
    const auto seat = nb::cast<nb::tuple>(item);
    const auto id = nb::cast<nb::bytes>(seat[4]);
    places.push_back({nb::cast<int>(seat[0]), nb::cast<int>(seat[1]), nb::cast<int>(seat[2]),
                      nb::cast<int>(seat[3]), std::string(id.c_str(), id.size())});
  }
  try {
    const nb::gil_scoped_release released;
    return std::make_shared<Ranks>(static_cast<DLDeviceType>(device_type), places, timeout_ms,
                                   name);
  } catch (const Problem& problem) {
    raise(problem);
  }
}

// Dropping the last reference may wait for kernels, and kernels may wait for ranks of other
// threads. Those threads may look at the handle as soon as they have the GIL, so it is emptied
// before.
template <class T>
void drop(std::shared_ptr<T>& object) {
  std::shared_ptr<T> last = std::move(object);
  const nb::gil_scoped_release released;
  last.reset();
}

// Python's share of the ranks.
struct RanksHandle {
  std::shared_ptr<Ranks> ranks;
  ~RanksHandle() { drop(ranks); }

  // A share for the call: close() may come while it runs.
  [[nodiscard]] std::shared_ptr<Ranks> open() const {
    if (!ranks) raise(invalid("these ranks have been closed"));
    return ranks;
  }
};

// Python's share of a group.
struct GroupHandle {
  std::shared_ptr<Group> group;
  std::int64_t number = 0;
  ~GroupHandle() { drop(group); }

  [[nodiscard]] std::shared_ptr<Group> open() const {
    if (!group) raise(invalid("this group has been closed"));
    return group;
  }
};

void create_group(const GroupHandle& self) {
  std::shared_ptr<Group> group = self.open();
  std::optional<Problem> problem;
  {
    const nb::gil_scoped_release released;
    problem = group->create();
    group.reset();  // the last reference, if close() came
  }
  if (problem) raise(*problem);
}

// The status of the rank with that index; None before the group has been made.
nb::object group_status(const GroupHandle& self, std::size_t index) {
  const std::shared_ptr<Group> group = self.open();
  const Group::Member* member = group->member(index);
  if (member == nullptr) return nb::none();
  xd_ep_status status XD_EP_STATUS_INIT;
  if (const auto problem = problem_of(xd_ep_group_status(member->group, &status))) raise(*problem);
  return xdpy::fields_of(status);
}

// The number of errors of the rank with that index; None before the group has been made.
nb::object group_errors(const GroupHandle& self, std::size_t index) {
  const std::shared_ptr<Group> group = self.open();
  const Group::Member* member = group->member(index);
  if (member == nullptr) return nb::none();
  const volatile std::uint64_t* word = nullptr;
  if (const auto problem = problem_of(xd_ep_group_watch(member->group, &word))) raise(*problem);
  return nb::int_(__atomic_load_n(word, __ATOMIC_ACQUIRE));
}

// (status, text) of the first rank of this process whose communicator is finished, or None.
nb::object fatal_error(const RanksHandle& self) {
  const std::shared_ptr<Ranks> ranks = self.open();
  for (const Ranks::Rank& rank : ranks->all()) {
    xd_error_info info XD_ERROR_INFO_INIT;
    if (xd_comm_error(rank.comm, &info) == XD_SUCCESS && info.status != XD_SUCCESS) {
      return nb::make_tuple(xd_status_name(info.status), info.text);
    }
  }
  return nb::none();
}

void register_memory(const RanksHandle& self, const std::vector<std::uintptr_t>& pointers,
                     const std::vector<std::size_t>& bytes) {
  std::shared_ptr<Ranks> ranks = self.open();
  std::optional<Problem> problem;
  {
    const nb::gil_scoped_release released;
    problem = ranks->register_memory(pointers, bytes);
    ranks.reset();
  }
  if (problem) raise(*problem);
}

void give_up(const RanksHandle& self) {
  const std::shared_ptr<Ranks> ranks = self.open();
  for (const Ranks::Rank& rank : ranks->all()) xd_comm_abort(rank.comm);
}

}  // namespace
}  // namespace xdjax

NB_MODULE(_jax, module) {
  using namespace nb::literals;
  using namespace xdjax;
  module.def("registrations", &registrations,
             "What jax.ffi registers, by platform: types and targets with their stages.");
  module.def("calls", &calls, "How often XLA has called a handler of an operation.");
  nb::class_<RanksHandle>(module, "Ranks")
      .def(
          "__init__",
          [](RanksHandle* self, int device_type, const nb::list& seats, int timeout_ms,
             const std::string& name) {
            new (self) RanksHandle{join(device_type, seats, timeout_ms, name)};
          },
          "device_type"_a, "seats"_a, "timeout_ms"_a = 0, "name"_a = "")
      .def("close", [](RanksHandle& self) { drop(self.ranks); })
      .def_prop_ro("closed", [](const RanksHandle& self) { return self.ranks == nullptr; })
      .def("error", &fatal_error)
      .def("register_memory", &register_memory, "pointers"_a, "bytes"_a)
      .def("abort", &give_up);
  nb::class_<GroupHandle>(module, "Group")
      .def("__init__",
           [](GroupHandle* self, const RanksHandle& ranks, const std::string& text,
              const nb::kwargs& config) {
             auto group = std::make_shared<Group>(ranks.open(), xdpy::group_config(config), text);
             const std::int64_t number = enter_group(group);
             new (self) GroupHandle{std::move(group), number};
           })
      .def_ro("number", &GroupHandle::number)
      .def("create", &create_group)
      .def("status", &group_status, "index"_a)
      .def("errors", &group_errors, "index"_a)
      .def("close", [](GroupHandle& self) { drop(self.group); });
}
