#include "comm.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <exception>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arguments.h"

namespace xdpy {
namespace {

// Communicators that are left at the interpreter's exit, so that peers hear a goodbye: objects that
// are still referenced then are never destroyed.
std::set<Comm*>& alive() {
  static std::set<Comm*> comms;
  return comms;
}

void close_all() {
  for (Comm* comm : std::set<Comm*>(alive())) {
    try {
      comm->close();
    } catch (...) {  // a thread is still inside a call: the process's end tells the peers
      PyErr_Clear();
    }
  }
}

// The contents of bytes or a bytearray, for as long as Python does not change them.
std::optional<std::string_view> bytes_of(nb::handle value) {
  PyObject* const object = value.ptr();
  if (PyBytes_Check(object)) {
    return std::string_view(PyBytes_AS_STRING(object), std::size_t(PyBytes_GET_SIZE(object)));
  }
  if (PyByteArray_Check(object)) {
    return std::string_view(PyByteArray_AS_STRING(object),
                            std::size_t(PyByteArray_GET_SIZE(object)));
  }
  return std::nullopt;
}

// TypeError like expected(), which does not show a value that strangers must not read.
[[noreturn]] void expected_secret(const char* name, const char* what, nb::handle value) {
  std::string got = nb::cast<std::string>(nb::type_name(value.type()));
  if (const auto bytes = bytes_of(value)) got += " of length " + std::to_string(bytes->size());
  throw nb::type_error((std::string(name) + ": expected " + what + ", got " + got).c_str());
}

// A Python callable (bytes -> sequence of bytes, one per rank) as an xd_all_gather_fn.
struct AllGather {
  nb::object callable;
  int num_ranks = 0;
  std::exception_ptr thrown;  // the callable's exception, for the caller of xd_comm_create

  void gather(const void* send, void* recv, std::size_t bytes) const {
    nb::list gathered(callable(nb::bytes(send, bytes)));
    if (gathered.size() != static_cast<std::size_t>(num_ranks)) {
      expected_secret("all_gather", "a result with one item per rank", gathered);
    }
    char* next = static_cast<char*>(recv);
    for (nb::handle item : gathered) {
      const std::optional<std::string_view> piece = bytes_of(item);
      if (!piece || piece->size() != bytes) {
        expected_secret("all_gather", "items that are bytes, as long as what was sent", item);
      }
      std::memcpy(next, piece->data(), bytes);
      next += bytes;
    }
  }

  static int call(void* context, const void* send, void* recv, std::size_t bytes) {
    auto& self = *static_cast<AllGather*>(context);
    const nb::gil_scoped_acquire gil;
    try {
      self.gather(send, recv, bytes);
      return 0;
    } catch (...) {
      self.thrown = std::current_exception();
      return 1;
    }
  }
};

xd_bootstrap bootstrap_of(const std::string& name) {
  if (name == "unique_id") return XD_BOOTSTRAP_UNIQUE_ID;
  if (name == "environment") return XD_BOOTSTRAP_ENVIRONMENT;
  if (name == "all_gather") return XD_BOOTSTRAP_ALL_GATHER;
  if (name == "nccl") return XD_BOOTSTRAP_NCCL;
  if (name == "join") return XD_BOOTSTRAP_JOIN;
  throw nb::value_error(
      ("bootstrap: expected 'unique_id', 'environment', 'all_gather', 'nccl' or 'join', got '" +
       name + "'")
          .c_str());
}

xd_unique_id unique_id_of(nb::handle value) {
  xd_unique_id id;
  const std::optional<std::string_view> given = bytes_of(value);
  if (!given || given->size() != sizeof(id.bytes)) {
    expected_secret("unique_id", "128 bytes from unique_id()", value);
  }
  std::memcpy(id.bytes, given->data(), sizeof(id.bytes));
  return id;
}

}  // namespace

Comm::Comm(const Options& options) {
  AllGather all_gather{options.all_gather, options.num_ranks, nullptr};
  xd_unique_id id;
  xd_comm_config config XD_COMM_CONFIG_INIT;
  config.bootstrap = bootstrap_of(options.bootstrap);
  config.rank = options.rank;
  config.num_ranks = options.num_ranks;
  if (!options.unique_id.is_none()) {
    id = unique_id_of(options.unique_id);
    config.unique_id = &id;
  }
  if (!options.all_gather.is_none()) {
    config.all_gather = &AllGather::call;
    config.all_gather_context = &all_gather;
  }
  config.nccl_comm = pointer(options.nccl_comm);
  config.device = {static_cast<DLDeviceType>(options.device_type), options.device_id};
  config.heap_bytes = options.heap_bytes;
  config.timeout_ms = options.timeout_ms;
  config.name = options.name.c_str();
  config.on_peer_loss = static_cast<xd_comm_peer_loss>(options.on_peer_loss);
  if (options.host) config.host = options.host->c_str();
  if (options.net_interface) config.net_interface = options.net_interface->c_str();
  config.silence_ms = options.silence_ms;
  if (!options.global_ranks.empty()) config.global_ranks = options.global_ranks.data();
  config.elastic = options.elastic ? 1 : 0;

  const xd_status status = without_gil([&] { return xd_comm_create(&config, &comm_); });
  if (all_gather.thrown) std::rethrow_exception(all_gather.thrown);
  check(status, {.rank = options.num_ranks == 0 ? -1 : options.rank});
  check(xd_comm_get_info(comm_, &info_));
  alive().insert(this);
}

Comm::~Comm() {
  if (comm_ == nullptr) return;
  alive().erase(this);
  without_gil([&] { return xd_comm_destroy(comm_); });
}

void Comm::close() {
  if (comm_ == nullptr) return;
  if (calls_ != 0) {
    raise_invalid("Comm.close: a call on this communicator is running in another thread",
                  info_.rank);
  }
  alive().erase(this);
  xd_comm* const comm = std::exchange(comm_, nullptr);
  check(without_gil([&] { return xd_comm_destroy(comm); }), {.rank = info_.rank});
}

xd_comm* Comm::usable() const {
  if (comm_ == nullptr) raise_invalid("this communicator has been closed", info_.rank);
  return comm_;
}

void Comm::refuse_in_handler() const {
  if (calls_ == 0 || !in_signal_handler()) return;
  raise_invalid(
      "called by a signal handler while a call on this communicator waits: let the handler set a "
      "flag, raise, or call abort()",
      info_.rank);
}

void Comm::abort() const {
  xd_comm* const comm = usable();
  const InUse in_use(*this);
  check(without_gil([&] { return xd_comm_abort(comm); }), failure());
}

void Comm::barrier() const { call(xd_comm_barrier); }

nb::bytes Comm::invite() const {
  xd_unique_id invitation;
  call([&](xd_comm* comm) { return xd_comm_invite(comm, &invitation); });
  return nb::bytes(reinterpret_cast<const char*>(invitation.bytes), sizeof(invitation.bytes));
}

nb::list Comm::all_gather(const nb::bytes& data) const {
  const std::size_t bytes = data.size();
  std::vector<char> gathered(static_cast<std::size_t>(info_.num_ranks) * bytes);
  call([&](xd_comm* comm) {
    return xd_comm_all_gather(comm, data.c_str(), gathered.data(), bytes);
  });
  nb::list of_rank;
  for (int r = 0; r < info_.num_ranks; ++r)
    of_rank.append(nb::bytes(gathered.data() + static_cast<std::size_t>(r) * bytes, bytes));
  return of_rank;
}

nb::object Comm::error() const {
  xd_error_info info XD_ERROR_INFO_INIT;
  call([&](xd_comm* comm) { return xd_comm_error(comm, &info); });
  return info.status == XD_SUCCESS ? nb::none() : nb::object(fatal_details(info));
}

nb::tuple Comm::lost() const {
  std::vector<std::int32_t> is_lost(static_cast<std::size_t>(info_.num_ranks));
  call([&](xd_comm* comm) { return xd_comm_lost(comm, is_lost.data()); });
  nb::list ranks;
  for (std::size_t r = 0; r < is_lost.size(); ++r) {
    if (is_lost[r] != 0) ranks.append(r);
  }
  return nb::tuple(ranks);
}

namespace {

nb::tuple ranks_in(const std::uint64_t* set) {
  nb::list ranks;
  for (int r = 0; r < XD_VIEW_WORDS * 64; ++r) {
    if ((set[r / 64] >> (r % 64) & 1) != 0) ranks.append(r);
  }
  return nb::tuple(ranks);
}

nb::dict fields_of_view(const xd_view& view) {
  nb::dict fields;
  fields["number"] = view.number;
  fields["members"] = ranks_in(view.members);
  fields["joined"] = ranks_in(view.joined);
  fields["gone"] = ranks_in(view.gone);
  fields["all_ok"] = view.all_ok != 0;
  fields["first_step"] = view.first_step;
  fields["last_step"] = view.last_step;
  return fields;
}

}  // namespace

nb::dict Comm::agree(std::int64_t step, bool ok, bool leave, const std::vector<int>& leave_out,
                     int timeout_ms, std::uintptr_t stream) const {
  std::vector<std::uint64_t> set(XD_VIEW_WORDS);
  for (const int rank : leave_out) {
    if (rank < 0 || rank >= info_.num_ranks) {
      throw nb::value_error(("leave_out has rank " + std::to_string(rank) +
                             ", expected ranks 0 to " + std::to_string(info_.num_ranks - 1))
                                .c_str());
    }
    set[static_cast<std::size_t>(rank) / 64] |= std::uint64_t{1} << (rank % 64);
  }
  xd_comm_agree_args args XD_COMM_AGREE_ARGS_INIT;
  args.step = step;
  args.ok = ok ? 1 : 0;
  args.leave = leave ? 1 : 0;
  args.leave_out = set.data();
  args.timeout_ms = timeout_ms;
  args.stream = static_cast<xd_stream>(pointer(stream));
  xd_view found XD_VIEW_INIT;
  call([&](xd_comm* comm) { return xd_comm_agree(comm, &args, &found); });
  return fields_of_view(found);
}

nb::dict Comm::view() const {
  xd_view known XD_VIEW_INIT;
  call([&](xd_comm* comm) { return xd_comm_get_view(comm, &known); });
  return fields_of_view(known);
}

std::uintptr_t Comm::allocate(std::size_t bytes) const {
  void* allocated = nullptr;
  call([&](xd_comm* comm) { return xd_mem_alloc(comm, bytes, &allocated); });
  return address(allocated);
}

void Comm::free(std::uintptr_t address) const {
  call([&](xd_comm* comm) { return xd_mem_free(comm, pointer(address)); });
}

void Comm::grow(std::size_t bytes) const {
  call([&](xd_comm* comm) { return xd_mem_grow(comm, bytes); });
}

nb::dict Comm::memory() const {
  xd_mem_info info XD_MEM_INFO_INIT;
  call([&](xd_comm* comm) { return xd_mem_get_info(comm, &info); });
  nb::dict sizes = fields_of(info);
  sizes["huge_pages"] = info.huge_pages != 0;
  return sizes;
}

int Comm::register_memory(std::uintptr_t address, std::size_t bytes) const {
  std::int32_t registration = 0;
  call(
      [&](xd_comm* comm) { return xd_mem_register(comm, pointer(address), bytes, &registration); });
  return registration;
}

void Comm::deregister_memory(int registration) const {
  call([&](xd_comm* comm) { return xd_mem_deregister(comm, registration); });
}

nb::tuple Comm::export_handle(std::uintptr_t address) const {
  xd_mem_handle handle{};
  call([&](xd_comm* comm) { return xd_mem_export(comm, pointer(address), &handle); });
  return nb::make_tuple(handle.rank, handle.segment, handle.offset);
}

std::uintptr_t Comm::import_handle(int rank, int segment, std::uint64_t offset) const {
  const xd_mem_handle handle{rank, segment, offset};
  void* place = nullptr;
  call([&](xd_comm* comm) { return xd_mem_import(comm, &handle, &place); });
  return address(place);
}

void Comm::copy(std::uintptr_t to, int rank, int segment, std::uint64_t offset, std::size_t bytes,
                std::uintptr_t stream) const {
  const xd_mem_handle handle{rank, segment, offset};
  call([&](xd_comm* comm) {
    return xd_mem_copy(comm, pointer(to), &handle, bytes, stream_of(stream));
  });
}

namespace {

void routing_layout(const Comm& self, const nb::dict& fields) {
  const Given<xd_ep_routing_layout_args> args(fields, self.info().device);
  self.call([&](xd_comm* comm) { return xd_ep_routing_layout(comm, args.get(), args.stream()); });
}

void gated(const Comm& self, const nb::dict& fields) {
  const Given<xd_gated_args> args(fields, self.info().device);
  self.call([&](xd_comm* comm) { return xd_gated(comm, args.get(), args.stream()); });
}

void grouped_product(const Comm& self, const nb::dict& fields) {
  const Given<xd_grouped_product_args> args(fields, self.info().device);
  self.call([&](xd_comm* comm) { return xd_grouped_product(comm, args.get(), args.stream()); });
}

void grouped_outer(const Comm& self, const nb::dict& fields) {
  const Given<xd_grouped_outer_args> args(fields, self.info().device);
  self.call([&](xd_comm* comm) { return xd_grouped_outer(comm, args.get(), args.stream()); });
}

void gated_bwd(const Comm& self, const nb::dict& fields) {
  const Given<xd_gated_bwd_args> args(fields, self.info().device);
  self.call([&](xd_comm* comm) { return xd_gated_bwd(comm, args.get(), args.stream()); });
}

nb::list net_adapters() {
  std::vector<xd_net_adapter> adapters;
  std::int32_t count = 0;
  do {  // there may be more than there were a moment ago
    adapters.resize(static_cast<std::size_t>(count));
    check(xd_net_adapters(adapters.data(), sizeof(xd_net_adapter), &count));
  } while (adapters.size() < static_cast<std::size_t>(count));
  adapters.resize(static_cast<std::size_t>(count));
  nb::list found;
  for (const xd_net_adapter& adapter : adapters) {
    nb::dict fields;
    fields["name"] = adapter.name;
    fields["provider"] = adapter.provider;
    fields["address"] = adapter.address;
    fields["pci_path"] = adapter.pci_path;
    fields["bits_per_second"] = adapter.bits_per_second;
    nb::list devices;
    for (int device = 0; device < 64; ++device)
      if ((adapter.cuda_devices >> device & 1) != 0) devices.append(device);
    fields["cuda_devices"] = devices;
    fields["numa_node"] = adapter.numa_node;
    fields["is_up"] = adapter.is_up < 0 ? nb::none() : nb::object(nb::bool_(adapter.is_up != 0));
    found.append(std::move(fields));
  }
  return found;
}

void bind_class(nb::module_& module) {
  nb::class_<Comm>(module, "Comm", nb::is_weak_referenceable())
      .def(
          "__init__",
          [](Comm* self, std::string bootstrap, int rank, int num_ranks, nb::object unique_id,
             nb::object all_gather, std::uintptr_t nccl_comm, int device_type, int device_id,
             std::size_t heap_bytes, int timeout_ms, std::string name, int on_peer_loss,
             std::optional<std::string> host, std::optional<std::string> net_interface,
             int silence_ms, std::vector<int> global_ranks, bool elastic) {
            new (self)
                Comm({std::move(bootstrap), rank, num_ranks, std::move(unique_id),
                      std::move(all_gather), nccl_comm, device_type, device_id, heap_bytes,
                      timeout_ms, std::move(name), on_peer_loss, std::move(host),
                      std::move(net_interface), silence_ms, std::move(global_ranks), elastic});
          },
          nb::kw_only(), nb::arg("bootstrap"), nb::arg("rank") = 0, nb::arg("num_ranks") = 0,
          nb::arg("unique_id") = nb::none(), nb::arg("all_gather") = nb::none(),
          nb::arg("nccl_comm") = 0, nb::arg("device_type") = int(kDLCPU), nb::arg("device_id") = 0,
          nb::arg("heap_bytes") = 0, nb::arg("timeout_ms") = 0, nb::arg("name") = "",
          nb::arg("on_peer_loss") = int(XD_COMM_PEER_LOSS_FATAL), nb::arg("host") = nb::none(),
          nb::arg("net_interface") = nb::none(), nb::arg("silence_ms") = 0,
          nb::arg("global_ranks") = std::vector<int>(), nb::arg("elastic") = false)
      .def("close", &Comm::close)
      .def("abort", &Comm::abort)
      .def("barrier", &Comm::barrier)
      .def("all_gather", &Comm::all_gather, nb::arg("data"))
      .def("invite", &Comm::invite)
      .def("error", &Comm::error)
      .def("lost", &Comm::lost)
      .def("agree", &Comm::agree, nb::kw_only(), nb::arg("step") = 0, nb::arg("ok") = true,
           nb::arg("leave") = false, nb::arg("leave_out") = std::vector<int>(),
           nb::arg("timeout_ms") = 0, nb::arg("stream") = 0)
      .def("view", &Comm::view)
      .def_prop_ro("closed", &Comm::closed)
      .def_prop_ro("rank", [](const Comm& c) { return c.info().rank; })
      .def_prop_ro("num_ranks", [](const Comm& c) { return c.info().num_ranks; })
      .def_prop_ro("device_type", [](const Comm& c) { return int(c.info().device.device_type); })
      .def_prop_ro("device_id", [](const Comm& c) { return c.info().device.device_id; })
      .def_prop_ro("timeout_ms", [](const Comm& c) { return c.info().timeout_ms; })
      .def_prop_ro("local_ranks", [](const Comm& c) { return c.info().local_ranks; })
      .def_prop_ro("num_hosts", [](const Comm& c) { return c.info().num_hosts; })
      .def_prop_ro("host", [](const Comm& c) { return c.info().host; })
      .def_prop_ro("near_ranks", [](const Comm& c) { return c.info().near_ranks; })
      .def("mem_alloc", &Comm::allocate, nb::arg("bytes"))
      .def("mem_free", &Comm::free, nb::arg("ptr"))
      .def("mem_grow", &Comm::grow, nb::arg("bytes"))
      .def("mem_info", &Comm::memory)
      .def("mem_register", &Comm::register_memory, nb::arg("ptr"), nb::arg("bytes"))
      .def("mem_deregister", &Comm::deregister_memory, nb::arg("registration"))
      .def("mem_export", &Comm::export_handle, nb::arg("ptr"))
      .def("mem_import", &Comm::import_handle, nb::arg("rank"), nb::arg("segment"),
           nb::arg("offset"))
      .def("mem_copy", &Comm::copy, nb::arg("to"), nb::arg("rank"), nb::arg("segment"),
           nb::arg("offset"), nb::arg("bytes"), nb::arg("stream") = 0)
      .def("routing_layout", &routing_layout, nb::arg("fields"))
      .def("gated", &gated, nb::arg("fields"))
      .def("gated_bwd", &gated_bwd, nb::arg("fields"))
      .def("grouped_product", &grouped_product, nb::arg("fields"))
      .def("grouped_outer", &grouped_outer, nb::arg("fields"));
}

}  // namespace

void bind_comm(nb::module_& module) {
  bind_class(module);
  module.def("net_adapters", &net_adapters);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&close_all));
}

}  // namespace xdpy
