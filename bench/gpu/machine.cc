#include "machine.h"

#include <dlfcn.h>

#include "device.h"

namespace bench::gpu {
namespace {

std::string version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

// Asks NVML for facts that the runtime does not know. NVML's library comes with the driver.
void ask_nvml(GpuMachine& machine) {
  void* const library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return;
  using Device = struct nvmlDevice_st*;
  const auto init = reinterpret_cast<int (*)()>(::dlsym(library, "nvmlInit_v2"));
  const auto driver_version =
      reinterpret_cast<int (*)(char*, unsigned)>(::dlsym(library, "nvmlSystemGetDriverVersion"));
  const auto device_at = reinterpret_cast<int (*)(unsigned, Device*)>(
      ::dlsym(library, "nvmlDeviceGetHandleByIndex_v2"));
  const auto link_state = reinterpret_cast<int (*)(Device, unsigned, unsigned*)>(
      ::dlsym(library, "nvmlDeviceGetNvLinkState"));
  if (init == nullptr || init() != 0) return;
  char text[96] = {};
  if (driver_version != nullptr && driver_version(text, sizeof(text)) == 0) machine.driver = text;
  Device device = nullptr;
  if (device_at == nullptr || link_state == nullptr || device_at(0, &device) != 0) return;
  machine.links = 0;
  for (unsigned link = 0; link < 18; ++link) {
    unsigned active = 0;
    if (link_state(device, link, &active) == 0 && active != 0) ++machine.links;
  }
}

}  // namespace

GpuMachine describe_gpus() {
  GpuMachine machine;
  ok(cudaGetDeviceCount(&machine.count), "cudaGetDeviceCount");
  cudaDeviceProp properties{};
  ok(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  machine.name = properties.name;
  machine.sms = properties.multiProcessorCount;
  machine.l2 = std::to_string(properties.l2CacheSize >> 20) + " MiB";
  int runtime = 0, driver = 0;
  ok(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  ok(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  machine.cuda = version(runtime) + ", driver's " + version(driver);
  ask_nvml(machine);
  return machine;
}

std::string to_string(const GpuMachine& machine) {
  std::string text = std::to_string(machine.count) + " x " + machine.name + ", " +
                     std::to_string(machine.sms) + " SMs, L2 " + machine.l2;
  if (machine.links >= 0) text += ", " + std::to_string(machine.links) + " NVLinks each";
  text += ", CUDA " + machine.cuda;
  if (!machine.driver.empty()) text += ", driver " + machine.driver;
  return text;
}

Json to_json(const GpuMachine& machine) {
  Json json{{"name", machine.name},
            {"count", machine.count},
            {"sms", machine.sms},
            {"l2", machine.l2},
            {"cuda", machine.cuda}};
  if (machine.links >= 0) json["nvlinks"] = machine.links;
  if (!machine.driver.empty()) json["driver"] = machine.driver;
  return json;
}

}  // namespace bench::gpu
