// crossdock._jax: XLA's custom calls, and the groups and contexts that they find.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../arguments.h"
#include "experts.h"
#include "handlers.h"
#include "low_latency.h"
#include "products.h"
#include "ranks.h"
#include "sequence.h"

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

std::shared_ptr<Ranks> join(int device_type, const nb::list& rank_infos, int timeout_ms) {
  std::vector<RankInfo> places;
  for (nb::handle item : rank_infos) {
    const auto rank_info = nb::cast<nb::tuple>(item);
    const auto id = nb::cast<nb::bytes>(rank_info[4]);
    places.push_back({nb::cast<int>(rank_info[0]), nb::cast<int>(rank_info[1]),
                      nb::cast<int>(rank_info[2]), nb::cast<int>(rank_info[3]),
                      std::string(id.c_str(), id.size()), nb::cast<std::string>(rank_info[5]),
                      nb::cast<std::vector<int>>(rank_info[6])});
  }
  try {
    const nb::gil_scoped_release released;
    return std::make_shared<Ranks>(static_cast<DLDeviceType>(device_type), places, timeout_ms);
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

using Choices = std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>;

// Python's share of a group, or of a context.
template <class Family>
struct Handle {
  std::shared_ptr<Sequence<Family>> sequence;
  std::int64_t number = 0;
  ~Handle() { drop(sequence); }

  [[nodiscard]] std::shared_ptr<Sequence<Family>> open() const {
    if (!sequence) raise(invalid(std::string("this ") + Family::word + " has been closed"));
    return sequence;
  }
};

template <class Family>
void create(const Handle<Family>& self) {
  std::shared_ptr<Sequence<Family>> sequence = self.open();
  std::optional<Problem> problem;
  {
    const nb::gil_scoped_release released;
    problem = sequence->create();
    sequence.reset();  // the last reference, if close() came
  }
  if (problem) raise(*problem);
}

nb::dict read_status(xd_ep_group* group) {
  xd_ep_status status XD_EP_STATUS_INIT;
  if (const auto problem = problem_of(xd_ep_group_status(group, &status))) raise(*problem);
  return xdpy::fields_of(status);
}

nb::dict read_status(xd_ll_group* group) {
  xd_ll_status status XD_LL_STATUS_INIT;
  if (const auto problem = problem_of(xd_ll_group_status(group, &status))) raise(*problem);
  return xdpy::fields_of(status);
}

nb::dict read_status(xd_gemm_context* context) {
  xd_gemm_status status XD_GEMM_STATUS_INIT;
  if (const auto problem = problem_of(xd_gemm_context_status(context, &status))) raise(*problem);
  return xdpy::fields_of(status);
}

xd_status watch(xd_ep_group* group, const volatile std::uint64_t** word) {
  return xd_ep_group_watch(group, word);
}

xd_status watch(xd_ll_group* group, const volatile std::uint64_t** word) {
  return xd_ll_group_watch(group, word);
}

xd_status watch(xd_gemm_context* context, const volatile std::uint64_t** word) {
  return xd_gemm_context_watch(context, word);
}

// The status of the rank with that index; None before create().
template <class Family>
nb::object status(const Handle<Family>& self, std::size_t index) {
  const auto sequence = self.open();
  const auto* member = sequence->member(index);
  if (member == nullptr) return nb::none();
  return read_status(member->handle);
}

// The number of errors of the rank with that index; None before create().
template <class Family>
nb::object errors(const Handle<Family>& self, std::size_t index) {
  const auto sequence = self.open();
  const auto* member = sequence->member(index);
  if (member == nullptr) return nb::none();
  const volatile std::uint64_t* word = nullptr;
  if (const auto problem = problem_of(watch(member->handle, &word))) raise(*problem);
  return nb::int_(__atomic_load_n(word, __ATOMIC_ACQUIRE));
}

// Runs fn(Handle*) -> xd_status on every rank of this process, whose groups it makes if need be.
template <class Family, class Fn>
void on_all(const Handle<Family>& self, Fn fn) {
  std::shared_ptr<Sequence<Family>> sequence = self.open();
  std::optional<Problem> problem;
  {
    const nb::gil_scoped_release released;
    problem = sequence->create();
    if (!problem) problem = sequence->on_all(fn);
    sequence.reset();
  }
  if (problem) raise(*problem);
}

// `choices`: (choice_first, choice_slots) of the struct, or None.
template <class Family>
void set_placement(const Handle<Family>& self, const std::vector<std::int32_t>& table,
                   const std::optional<Choices>& choices) {
  xd_ep_placement placement XD_EP_PLACEMENT_INIT;
  placement.expert_of_slot = table.data();
  std::vector<std::int32_t> slots;
  if (choices) {
    slots = choices->second;
    slots.push_back(-1);  // so that an empty list has an address
    placement.choice_first = choices->first.data();
    placement.choice_slots = slots.data();
  }
  on_all(self, [&](auto* group) { return Family::set_placement(group, &placement, nullptr); });
}

template <class Family>
void fail_set_placement(const Handle<Family>& self, const std::string& text) {
  on_all(self, [&](auto* group) { return Family::fail_set_placement(group, text.c_str()); });
}

// How often each logical expert was chosen, [ranks, experts], as the rank with that index knows;
// None before create().
nb::object loads(const Handle<Experts>& self, std::size_t index, std::int64_t ranks,
                 std::int64_t experts, bool clear) {
  const auto sequence = self.open();
  const auto* member = sequence->member(index);
  if (member == nullptr) return nb::none();
  std::vector<std::int64_t> found(static_cast<std::size_t>(ranks * experts));
  std::array<std::int64_t, 2> shape{ranks, experts};
  const DLTensor to{.data = found.data(),
                    .device = member->device,
                    .ndim = 2,
                    .dtype = {kDLInt, 64, 1},
                    .shape = shape.data(),
                    .strides = nullptr,
                    .byte_offset = 0};
  const xd_status status = xd_ep_group_loads(member->handle, &to, clear ? 1 : 0, nullptr);
  if (const auto problem = problem_of(status)) raise(*problem);
  return nb::cast(found);
}

// Says what a product of the rank with that index would do; None before create(). All ranks have
// equally many tokens here.
nb::object explain(const Handle<Products>& self, std::size_t index, int operation,
                   const nb::dict& fields) {
  const auto sequence = self.open();
  const auto* member = sequence->member(index);
  if (member == nullptr) return nb::none();
  const xdpy::Given<xd_gemm_args> args(fields, member->device, 0);
  xd_gemm_plan_info info XD_GEMM_PLAN_INFO_INIT;
  const xd_status status =
      xd_gemm_explain(member->handle, static_cast<xd_gemm_operation>(operation), args.get(), &info);
  if (const auto problem = problem_of(status)) raise(*problem);
  return xdpy::fields_of(info);
}

template <class Family>
nb::class_<Handle<Family>> bind(nb::module_& module, const char* name) {
  using namespace nb::literals;
  using Self = Handle<Family>;
  return nb::class_<Self>(module, name)
      .def("__init__",
           [](Self* self, const RanksHandle& ranks, const std::string& text,
              const nb::kwargs& options) {
             auto made = std::make_shared<Sequence<Family>>(ranks.open(),
                                                            typename Family::Config(options), text);
             const std::int64_t number = Registry<Family>::get().enter(made);
             new (self) Self{std::move(made), number};
           })
      .def_ro("number", &Self::number)
      .def("create", &create<Family>)
      .def("status", &status<Family>, "index"_a)
      .def("errors", &errors<Family>, "index"_a)
      .def("close", [](Self& self) { drop(self.sequence); });
}

template <class Family>
nb::class_<Handle<Family>> bind_group(nb::module_& module, const char* name) {
  using namespace nb::literals;
  return bind<Family>(module, name)
      .def("set_placement", &set_placement<Family>, "table"_a, "choices"_a.none())
      .def("fail_set_placement", &fail_set_placement<Family>, "text"_a);
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
          [](RanksHandle* self, int device_type, const nb::list& rank_infos, int timeout_ms) {
            new (self) RanksHandle{join(device_type, rank_infos, timeout_ms)};
          },
          "device_type"_a, "rank_infos"_a, "timeout_ms"_a = 0)
      .def("close", [](RanksHandle& self) { drop(self.ranks); })
      .def_prop_ro("closed", [](const RanksHandle& self) { return self.ranks == nullptr; })
      .def("error", &fatal_error)
      .def("register_memory", &register_memory, "pointers"_a, "bytes"_a)
      .def("abort", &give_up);
  bind_group<Experts>(module, "Group")
      .def("loads", &loads, "index"_a, "ranks"_a, "experts"_a, "clear"_a);
  bind_group<LowLatency>(module, "LowLatencyGroup");
  bind<Products>(module, "Context").def("explain", &explain, "index"_a, "operation"_a, "fields"_a);
}
