#include <crossdock/comm.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/interrupt.h"
#include "base/options.h"
#include "capi/boundary.h"
#include "comm/remote/adapters.h"
#include "meet/unique_id.h"

using xd::guarded;
using xd::guarded_on;

namespace {

// A call that asks or changes what is this rank's alone, also of a communicator that is finished.
template <class Body>
xd_status alone(const char* function, xd_comm* comm, Body&& body) {
  return guarded_on(function, *comm->comm, [&] {
    comm->comm->errors().check_process();
    body(*comm->comm);
  });
}

// A call that all ranks make together.
template <class Body>
xd_status take_part(const char* function, xd_comm* comm, Body&& body) {
  return guarded_on(function, *comm->comm, [&] {
    comm->comm->errors().check_usable();
    body(*comm->comm);
  });
}

}  // namespace

xd_status xd_unique_id_create(const xd_unique_id_config* config, xd_unique_id* id) {
  XD_REQUIRE_GIVEN("xd_unique_id_create", id);
  return guarded("xd_unique_id_create", [&] {
    xd_unique_id_config read XD_UNIQUE_ID_CONFIG_INIT;
    if (config != nullptr) read = xd::read_struct("config", config, read);
    *id = xd::create_unique_id(read, xd::resolve_timeout(read.timeout_ms));
  });
}

xd_status xd_comm_create(const xd_comm_config* config, xd_comm** comm) {
  XD_REQUIRE_GIVEN("xd_comm_create", comm);
  *comm = nullptr;
  return guarded("xd_comm_create", [&] {
    auto handle = std::make_unique<xd_comm>();
    handle->comm =
        xd::Comm::create(xd::read_struct("config", config, xd_comm_config XD_COMM_CONFIG_INIT));
    *comm = handle.release();
  });
}

xd_status xd_comm_invite(xd_comm* comm, xd_unique_id* invitation) {
  XD_REQUIRE_GIVEN("xd_comm_invite", comm);
  XD_REQUIRE_GIVEN("xd_comm_invite", invitation);
  return take_part("xd_comm_invite", comm, [&](xd::Comm& c) { *invitation = c.invite(); });
}

xd_status xd_comm_destroy(xd_comm* comm) {
  if (comm == nullptr) return XD_SUCCESS;
  return guarded("xd_comm_destroy", [&] {
    const std::unique_ptr<xd_comm> owned(comm);
    owned->comm->close();
  });
}

xd_status xd_comm_abort(xd_comm* comm) {
  XD_REQUIRE_GIVEN("xd_comm_abort", comm);
  return guarded_on("xd_comm_abort", *comm->comm, [&] { comm->comm->errors().abort(); });
}

int32_t xd_default_timeout_ms(void) { return xd::env().timeout_ms; }

xd_status xd_set_interrupt(xd_interrupt_fn ask, void* context) {
  return guarded("xd_set_interrupt", [&] { xd::set_interrupt(ask, context); });
}

xd_status xd_comm_barrier(xd_comm* comm) {
  XD_REQUIRE_GIVEN("xd_comm_barrier", comm);
  return take_part("xd_comm_barrier", comm, [&](xd::Comm& c) { c.collective().barrier(); });
}

xd_status xd_comm_all_gather(xd_comm* comm, const void* input, void* output, size_t bytes) {
  XD_REQUIRE_GIVEN("xd_comm_all_gather", comm);
  return take_part("xd_comm_all_gather", comm,
                   [&](xd::Comm& c) { c.collective().all_gather(input, output, bytes); });
}

xd_status xd_comm_get_info(xd_comm* comm, xd_comm_info* info) {
  XD_REQUIRE_GIVEN("xd_comm_get_info", comm);
  return alone("xd_comm_get_info", comm, [&](const xd::Comm& c) {
    xd_comm_info value XD_COMM_INFO_INIT;
    value.rank = c.rank();
    value.num_ranks = c.num_ranks();
    value.device = c.device();
    value.timeout_ms = c.timeout_ms();
    value.local_ranks = c.local_ranks();
    value.num_hosts = c.hosts().num_hosts();
    value.host = c.hosts().host();
    value.near_ranks = static_cast<int32_t>(c.hosts().near().size());
    xd::write_struct("info", info, value);
  });
}

xd_status xd_comm_error(xd_comm* comm, xd_error_info* info) {
  XD_REQUIRE_GIVEN("xd_comm_error", comm);
  return alone("xd_comm_error", comm, [&](xd::Comm& c) {
    xd_error_info value XD_ERROR_INFO_INIT;
    if (const xd::ToldError* error = c.errors().fatal_error()) {
      value.status = xd::status_of(*error);
      value.phase = static_cast<xd_phase>(error->phase);
      value.rank = error->rank;
      value.peer = error->about >= 0 ? error->about : error->peer;
      value.group = error->group;
      value.operation = error->operation;
      value.expected_epoch = error->expected_epoch;
      value.seen_epoch = error->seen_epoch;
      const bool is_rank = value.peer >= 0 && value.peer < c.num_ranks();
      value.host = is_rank ? c.hosts().host_of(value.peer) : -1;
      const std::string text = c.errors().text_of(*error) + xd::Whereabouts(c).text.data();
      std::strncpy(value.text, text.c_str(), sizeof(value.text) - 1);
    }
    xd::write_struct("info", info, value);
  });
}

xd_status xd_comm_lost(xd_comm* comm, int32_t* lost) {
  XD_REQUIRE_GIVEN("xd_comm_lost", comm);
  XD_REQUIRE_GIVEN("xd_comm_lost", lost);
  return alone("xd_comm_lost", comm, [&](const xd::Comm& c) {
    for (int r = 0; r < c.num_ranks(); ++r) lost[r] = c.errors().lost(r) ? 1 : 0;
  });
}

// Text that ends with 0 in a field of a struct.
template <std::size_t N>
static void write_text(char (&field)[N], const std::string& text) {
  const std::size_t bytes = std::min(text.size(), N - 1);
  std::memcpy(field, text.data(), bytes);
  field[bytes] = 0;
}

static xd_net_adapter describe(const xd::ListedAdapter& listed) {
  using Link = xd::net::Adapter::Link;
  xd_net_adapter value{};
  write_text(value.name, listed.adapter.name);
  write_text(value.provider, listed.adapter.provider);
  write_text(value.address, listed.adapter.address);
  write_text(value.pci_path, listed.adapter.place.path);
  value.bits_per_second = listed.adapter.bits_per_second;
  value.cuda_devices = listed.cuda_devices;
  value.numa_node = listed.adapter.place.numa_node;
  value.is_up = listed.adapter.link == Link::unknown ? -1 : listed.adapter.link == Link::up ? 1 : 0;
  return value;
}

xd_status xd_net_adapters(xd_net_adapter* adapters, size_t adapter_bytes, int32_t* count) {
  XD_REQUIRE_GIVEN("xd_net_adapters", count);
  const int32_t room = *count;
  *count = 0;
  return guarded("xd_net_adapters", [&] {
    constexpr std::size_t kFirstBytes = 424;  // of the struct's first version
    XD_REQUIRE(room >= 0, "*count = ", room, ", expected 0 or more");
    XD_REQUIRE(room == 0 || adapters != nullptr, "adapters = NULL, expected room for ", room);
    XD_REQUIRE(adapter_bytes >= kFirstBytes && adapter_bytes % alignof(xd_net_adapter) == 0,
               "adapter_bytes = ", adapter_bytes, ", expected ", sizeof(xd_net_adapter));
    static_assert(sizeof(xd_net_adapter) >= kFirstBytes);
    const std::vector<xd::ListedAdapter> listed = xd::list_adapters();
    auto* place = reinterpret_cast<unsigned char*>(adapters);
    const std::size_t fitting = std::min(listed.size(), static_cast<std::size_t>(room));
    for (std::size_t i = 0; i < fitting; ++i, place += adapter_bytes) {
      const xd_net_adapter value = describe(listed[i]);
      std::memset(place, 0, adapter_bytes);
      std::memcpy(place, &value, std::min(adapter_bytes, sizeof(value)));
    }
    *count = static_cast<int32_t>(listed.size());
  });
}

xd_status xd_mem_alloc(xd_comm* comm, size_t bytes, void** ptr) {
  XD_REQUIRE_GIVEN("xd_mem_alloc", comm);
  XD_REQUIRE_GIVEN("xd_mem_alloc", ptr);
  *ptr = nullptr;
  return alone("xd_mem_alloc", comm, [&](xd::Comm& c) { *ptr = c.heap().allocate(bytes); });
}

xd_status xd_mem_free(xd_comm* comm, void* ptr) {
  XD_REQUIRE_GIVEN("xd_mem_free", comm);
  return alone("xd_mem_free", comm, [&](xd::Comm& c) {
    if (ptr == nullptr) return;
    XD_REQUIRE(c.heap().release(ptr), "ptr = ", ptr,
               ", expected the start of a live allocation of this rank");
  });
}

xd_status xd_mem_grow(xd_comm* comm, size_t bytes) {
  XD_REQUIRE_GIVEN("xd_mem_grow", comm);
  return take_part("xd_mem_grow", comm, [&](xd::Comm& c) { c.memory().grow(bytes); });
}

xd_status xd_mem_register(xd_comm* comm, void* ptr, size_t bytes, int32_t* registration) {
  XD_REQUIRE_GIVEN("xd_mem_register", comm);
  if (registration != nullptr) *registration = -1;
  return take_part("xd_mem_register", comm,
                   [&](xd::Comm& c) { c.memory().enlist(ptr, bytes, registration); });
}

xd_status xd_mem_deregister(xd_comm* comm, int32_t registration) {
  XD_REQUIRE_GIVEN("xd_mem_deregister", comm);
  return take_part("xd_mem_deregister", comm,
                   [&](xd::Comm& c) { c.memory().delist(registration); });
}

xd_status xd_mem_get_info(xd_comm* comm, xd_mem_info* info) {
  XD_REQUIRE_GIVEN("xd_mem_get_info", comm);
  return alone("xd_mem_get_info", comm, [&](xd::Comm& c) {
    const auto usage = c.heap().usage();
    xd_mem_info value XD_MEM_INFO_INIT;
    value.total_bytes = usage.total;
    value.used_bytes = usage.used;
    value.largest_free_bytes = usage.largest_free;
    value.segments = usage.segments;
    value.huge_pages = c.heap().huge_pages() ? 1 : 0;
    xd::write_struct("info", info, value);
  });
}

xd_status xd_mem_export(xd_comm* comm, const void* ptr, xd_mem_handle* handle) {
  XD_REQUIRE_GIVEN("xd_mem_export", comm);
  XD_REQUIRE_GIVEN("xd_mem_export", handle);
  return alone("xd_mem_export", comm, [&](xd::Comm& c) {
    const auto place = c.heap().find(ptr, 1);
    XD_REQUIRE(place, "ptr = ", ptr, ", expected an address in this rank's symmetric memory");
    *handle = {
        .rank = c.rank(), .segment = static_cast<int32_t>(place->segment), .offset = place->offset};
  });
}

// Where this process sees a place in some rank's symmetric memory.
static std::byte* see(xd::Comm& c, const char* name, const xd_mem_handle& handle,
                      std::size_t bytes) {
  XD_REQUIRE(handle.rank >= 0 && handle.rank < c.num_ranks(), name, ".rank = ", handle.rank,
             ", expected 0 to ", c.num_ranks() - 1);
  if (!c.hosts().is_near(handle.rank))
    xd::fail(XD_ERROR_UNSUPPORTED, name, ".rank = ", handle.rank,
             " is on another machine, whose memory has no address here");
  std::byte* const found = c.heap().address(
      handle.rank, {.segment = static_cast<uint32_t>(handle.segment), .offset = handle.offset},
      bytes);
  XD_REQUIRE(found != nullptr, name, ": rank ", handle.rank, " has no place at segment ",
             handle.segment, ", offset ", handle.offset);
  return found;
}

xd_status xd_mem_import(xd_comm* comm, const xd_mem_handle* handle, void** ptr) {
  XD_REQUIRE_GIVEN("xd_mem_import", comm);
  XD_REQUIRE_GIVEN("xd_mem_import", handle);
  XD_REQUIRE_GIVEN("xd_mem_import", ptr);
  *ptr = nullptr;
  return alone("xd_mem_import", comm, [&](xd::Comm& c) { *ptr = see(c, "handle", *handle, 1); });
}

xd_status xd_mem_copy(xd_comm* comm, void* to, const xd_mem_handle* from, size_t bytes,
                      xd_stream stream) {
  XD_REQUIRE_GIVEN("xd_mem_copy", comm);
  XD_REQUIRE_GIVEN("xd_mem_copy", to);
  XD_REQUIRE_GIVEN("xd_mem_copy", from);
  return alone("xd_mem_copy", comm, [&](xd::Comm& c) {
    const std::byte* const source = see(c, "from", *from, bytes);
    const DLDevice device = c.device();
    xd::kind_of(device).copy(device.device_id, to, source, bytes, stream);
  });
}
