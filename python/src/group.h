// Expert-parallel groups of both kinds: the operations of crossdock/ep.h and low_latency.h on
// described tensors.
#pragma once

#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "errors.h"
#include "member.h"
#include "stats.h"

namespace xdpy {

// The functions of the C API for a kind of groups.
struct BulkApi {
  using Handle = xd_ep_group;
  using Operation = xd_ep_operation;
  using Status = xd_ep_status;
  static constexpr Operation first_operation = XD_EP_PREPARE;
  static constexpr Status no_error XD_EP_STATUS_INIT;
  using Config = xd_ep_config;
  static constexpr auto create = &xd_ep_group_create;
  static constexpr auto destroy = &xd_ep_group_destroy;
  static constexpr auto status = &xd_ep_group_status;
  static constexpr auto last_error = &xd_ep_last_error;
  static constexpr auto watch = &xd_ep_group_watch;
  static constexpr auto stats = &xd_ep_group_stats;
  static constexpr auto set_name = &xd_ep_group_set_name;
  static constexpr auto join_failed = &xd_ep_join_failed;
  static constexpr auto set_placement = &xd_ep_group_set_placement;
  static constexpr Operation placing = XD_EP_SET_PLACEMENT;
  static constexpr auto local_experts = &xd_ep_local_experts;
  static constexpr auto plan_size = &xd_ep_plan_size;
  static void tell(const Status& met, Failure& failure) {
    failure.needed_rows = met.needed_rows;
    failure.capacity_rows = met.capacity_rows;
  }
};

struct LowLatencyApi {
  using Handle = xd_ll_group;
  using Operation = xd_ll_operation;
  using Status = xd_ll_status;
  static constexpr Operation first_operation = XD_LL_DISPATCH;
  static constexpr Status no_error XD_LL_STATUS_INIT;
  using Config = xd_ll_config;
  static constexpr auto create = &xd_ll_group_create;
  static constexpr auto destroy = &xd_ll_group_destroy;
  static constexpr auto status = &xd_ll_group_status;
  static constexpr auto last_error = &xd_ll_last_error;
  static constexpr auto watch = &xd_ll_group_watch;
  static constexpr auto stats = &xd_ll_group_stats;
  static constexpr auto set_name = &xd_ll_group_set_name;
  static constexpr auto join_failed = &xd_ll_join_failed;
  static constexpr auto set_placement = &xd_ll_group_set_placement;
  static constexpr Operation placing = XD_LL_SET_PLACEMENT;
  static constexpr auto local_experts = &xd_ll_local_experts;
  static constexpr auto plan_size = &xd_ll_plan_size;
  static void tell(const Status&, Failure&) {}
};

// The pure functions of a config, which is given by keyword.
template <class Api>
std::int32_t local_experts(int rank, const nb::kwargs& options) {
  const Given<typename Api::Config> config(options);
  std::int32_t number = 0;
  check(Api::local_experts(config.get(), rank, &number));
  return number;
}

template <class Api>
std::size_t plan_size(const nb::kwargs& options) {
  const Given<typename Api::Config> config(options);
  std::size_t bytes = 0;
  check(Api::plan_size(config.get(), &bytes));
  return bytes;
}

template <class Api>
class GroupOf : public Member<typename Api::Handle, Api::destroy> {
 public:
  using Handle = typename Api::Handle;
  using Operation = typename Api::Operation;

  GroupOf(nb::object comm, const nb::kwargs& options)
      : Member<Handle, Api::destroy>(std::move(comm), "group") {
    const Given<typename Api::Config> config(options);
    slots_ = config.get()->num_experts;
    logical_experts_ = config.get()->num_logical_experts;
    this->comm_.call(
        [&](xd_comm* handle) { return Api::create(handle, config.get(), &this->handle_); });
  }

  // Reads and clears the state of non-fatal errors.
  [[nodiscard]] nb::dict status() const {
    typename Api::Status status = Api::no_error;
    check(Api::status(this->usable(), &status), this->comm_.failure());
    return fields_of(status);
  }

  // The numbers of the group's work so far.
  [[nodiscard]] nb::dict stats() const {
    return stats_of(this->usable(), this->comm_.info(), this->comm_.failure(), Api::stats);
  }
  void set_name(const std::string& name) const {
    check(Api::set_name(this->usable(), name.c_str()), this->comm_.failure());
  }

  // The number of operations that have ended with a non-fatal error.
  [[nodiscard]] std::uint64_t errors() const {
    const volatile std::uint64_t* word = nullptr;
    check(Api::watch(this->usable(), &word), this->comm_.failure());
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
  }

  // Of low latency: the address of the word that counts them on the device.
  [[nodiscard]] std::uintptr_t fault_word() const {
    const std::uint64_t* word = nullptr;
    check(xd_ll_group_fault_word(this->usable(), &word), this->comm_.failure());
    return address(const_cast<std::uint64_t*>(word));
  }

  // Runs fn(Handle*) -> xd_status, one operation, without the GIL.
  template <class Fn>
  void call(Operation operation, Fn fn) {
    const xd_status status = this->run(fn);
    if (status != XD_SUCCESS) fail(operation, status);
  }

  void join_failed(int operation, const std::string& text, std::uintptr_t stream) {
    const auto joined = static_cast<Operation>(operation);
    call(joined, [&](Handle* group) {
      return Api::join_failed(group, joined, text.c_str(), stream_of(stream));
    });
  }

  // `choices`: (choice_first, choice_slots) of the struct, or None.
  void set_placement(nb::handle expert_of_slot, nb::handle choices, std::uintptr_t stream) {
    const auto table = integers<std::int32_t>(expert_of_slot, "expert_of_slot", "a sequence");
    check_length("expert_of_slot", table.size(), slots_, "the expert of each of", "slots");
    std::vector<std::int32_t> first, slots;
    if (!choices.is_none()) {
      first = integers<std::int32_t>(choices[nb::int_(0)], "choice_first", "a sequence");
      slots = integers<std::int32_t>(choices[nb::int_(1)], "choice_slots", "a sequence");
      check_length("choice_first", first.size(), this->num_ranks() * logical_experts_ + 1,
                   "the beginnings and the end of lists,", "numbers");
      check_length("choice_slots", slots.size(), first.back(), "as choice_first ends with,",
                   "slots");
      slots.push_back(-1);  // so that an empty list has an address
    }
    xd_ep_placement placement XD_EP_PLACEMENT_INIT;
    placement.expert_of_slot = table.data();
    placement.choice_first = first.empty() ? nullptr : first.data();
    placement.choice_slots = slots.empty() ? nullptr : slots.data();
    call(Api::placing,
         [&](Handle* group) { return Api::set_placement(group, &placement, stream_of(stream)); });
  }

  // A Python class with what groups of both kinds have.
  static nb::class_<GroupOf> bind(nb::module_& module, const char* name) {
    using namespace nb::literals;
    nb::class_<GroupOf> group(module, name, nb::is_weak_referenceable());
    group
        .def("__init__",
             [](GroupOf* self, nb::object comm, const nb::kwargs& options) {
               if (!nb::isinstance<Comm>(comm)) expected("comm", "a Comm", comm);
               new (self) GroupOf(std::move(comm), options);
             })
        .def("close", &GroupOf::close)
        .def_prop_ro("closed", &GroupOf::closed)
        .def_prop_ro("comm", &GroupOf::comm)
        .def("status", &GroupOf::status)
        .def("errors", &GroupOf::errors)
        .def("stats", &GroupOf::stats)
        .def("set_name", &GroupOf::set_name, "name"_a)
        .def("join_failed", &GroupOf::join_failed, "operation"_a, "text"_a, "stream"_a = 0)
        .def("set_placement", &GroupOf::set_placement, "expert_of_slot"_a,
             "choices"_a.none() = nb::none(), "stream"_a = 0);
    group.attr("FIRST_OPERATION") = static_cast<int>(Api::first_operation);
    return group;
  }

 private:
  std::int64_t slots_ = 0, logical_experts_ = 0;

  [[noreturn]] void fail(Operation operation, xd_status status) const {
    Failure failure = this->comm_.failure();
    failure.operation = operation;
    typename Api::Status met = Api::no_error;
    if (Api::last_error(&met) == XD_SUCCESS && met.status == status) {
      failure.peer = met.rank;
      Api::tell(met, failure);
    }
    raise(status, failure);
  }
};
using Group = GroupOf<BulkApi>;
using LowLatencyGroup = GroupOf<LowLatencyApi>;

void bind_group(nb::module_& module);
void bind_low_latency(nb::module_& module);

}  // namespace xdpy
