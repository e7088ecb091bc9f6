// crossdock._core: the C API for the Python packages above it. Addresses and streams are integers,
// a tensor is (address, shape, dtype), and every check beyond Python's types is the library's own.
#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "arguments.h"
#include "capsule.h"
#include "comm.h"
#include "constants.h"
#include "errors.h"
#include "gemm.h"
#include "group.h"
#include "placement.h"
#include "segments.h"
#include "stats.h"
#include "streams.h"

namespace xdpy {
namespace {

nb::bytes unique_id(const std::optional<std::string>& address, int port, int timeout_ms) {
  xd_unique_id_config config XD_UNIQUE_ID_CONFIG_INIT;
  config.address = address ? address->c_str() : nullptr;
  config.port = port;
  config.timeout_ms = timeout_ms;
  xd_unique_id id;
  check(without_gil([&] { return xd_unique_id_create(&config, &id); }));
  return nb::bytes(id.bytes, sizeof(id.bytes));
}

std::int64_t recv_bound(const nb::kwargs& options) {
  const Given<xd_ep_config> config(options);
  std::int64_t rows = 0;
  check(xd_ep_recv_bound(config.get(), &rows));
  return rows;
}

nb::dict group_memory(const nb::kwargs& options) {
  const Given<xd_ep_config> config(options);
  xd_ep_memory memory XD_EP_MEMORY_INIT;
  check(xd_ep_group_memory(config.get(), &memory));
  return fields_of(memory);
}

nb::dict plan_info(std::uintptr_t plan, std::size_t plan_bytes) {
  xd_ep_plan_info info XD_EP_PLAN_INFO_INIT;
  check(xd_ep_plan_get_info(pointer(plan), plan_bytes, &info));
  return fields_of(info);
}

// A word has the number of a call in its upper bits, and in the `bits` below it what the first to
// make that call has left.
std::uint64_t first_value(std::uintptr_t word, std::uint64_t call, int bits, std::uint64_t value) {
  const std::atomic_ref<std::uint64_t> shared(*static_cast<std::uint64_t*>(pointer(word)));
  const std::uint64_t mine = call << bits | value;
  std::uint64_t seen = shared.load(std::memory_order_relaxed);
  for (;;) {
    // As a signed number in the upper bits: numbers of calls wrap around.
    const auto ahead = static_cast<std::int64_t>((mine >> bits << bits) - (seen >> bits << bits));
    if (ahead == 0) return seen & ((std::uint64_t{1} << bits) - 1);
    if (ahead < 0) return value;  // the word serves a later call by now
    // Relaxed: the word stands for itself, no other memory is read because of it.
    if (shared.compare_exchange_weak(seen, mine, std::memory_order_relaxed)) return value;
  }
}

std::pair<bool, std::string> feature(const std::string& name) {
  static constexpr std::array<std::pair<const char*, xd_feature>, 8> features = {{
      {"cpu", XD_FEATURE_CPU},
      {"cuda", XD_FEATURE_CUDA},
      {"network", XD_FEATURE_NETWORK},
      {"gemm", XD_FEATURE_GEMM},
      {"cublasmp", XD_FEATURE_CUBLASMP},
      {"cuda_wire", XD_FEATURE_CUDA_WIRE},
      {"cuda_placement", XD_FEATURE_CUDA_PLACEMENT},
      {"cuda_ll_machines", XD_FEATURE_CUDA_LL_MACHINES},
  }};
  for (const auto& [known, which] : features) {
    if (name != known) continue;
    const char* reason = nullptr;
    const bool available = xd_feature_available(which, &reason) != 0;
    return {available, reason};
  }
  throw nb::value_error(
      ("feature: expected 'cpu', 'cuda', 'network', 'gemm', 'cublasmp', 'cuda_wire', "
       "'cuda_placement' or 'cuda_ll_machines', got '" +
       name + "'")
          .c_str());
}

std::string version() {
  const int number = xd_version();
  return std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." +
         std::to_string(number % 100);
}

}  // namespace

NB_MODULE(_core, module) {
  using namespace nb::literals;
  // At exit objects that a module still refers to are alive; that is no leak.
  nb::set_leak_warnings(false);
  bind_comm(module);
  bind_group(module);
  bind_low_latency(module);
  bind_gemm(module);
  bind_constants(module);
  bind_stats(module);
  bind_placement(module);
  module.def("unique_id", &unique_id, "address"_a = nb::none(), "port"_a = 0, "timeout_ms"_a = 0);
  module.def("recv_bound", &recv_bound);
  module.def("local_experts", &local_experts<BulkApi>, "rank"_a, "options"_a);
  module.def("plan_size", &plan_size<BulkApi>);
  module.def("group_memory", &group_memory);
  module.def("plan_info", &plan_info, "plan_ptr"_a, "plan_bytes"_a);
  module.def(
      "feature_available", [](const std::string& name) { return feature(name).first; }, "name"_a);
  module.def(
      "feature_reason", [](const std::string& name) { return feature(name).second; }, "name"_a);
  module.def("as_dlpack", &as_dlpack, "ptr"_a, "shape"_a, "dtype"_a, "device_type"_a, "device_id"_a,
             "owner"_a, "released"_a = nb::none());
  module.def("segment_functions", &segment_functions);
  module.def("offer_segment", &offer_segment, "ptr"_a, "bytes"_a);
  module.def("segment_taken", &segment_taken, "ptr"_a);
  // Without the GIL: a stream that is full waits for the device, which may wait for other threads.
  module.def("order_streams", &order_streams, "device"_a, "first"_a, "second"_a,
             nb::call_guard<nb::gil_scoped_release>());
  module.def("reads", &reads, "kind"_a);
  module.def("first_value", &first_value, "word"_a, "call"_a, "bits"_a, "value"_a);
  module.attr("version") = version();
  // By how the library was built: to ask it whether CUDA works would start the driver.
  module.attr("built_with_cuda") = XDPY_CUDA != 0;
}

}  // namespace xdpy
