// The GPUs of this host, for the head of a table.
#pragma once

#include <string>

#include "../table.h"

namespace bench::gpu {

struct GpuMachine {
  std::string name;
  int count = 0;
  int sms = 0;
  int links = -1;      // active NVLinks of the first device; -1: unknown
  std::string driver;  // NVIDIA's version; empty: unknown
  std::string cuda;    // "13.0, driver's 13.0"
  std::string l2;
};

// There must be a device.
GpuMachine describe_gpus();
std::string to_string(const GpuMachine& machine);
Json to_json(const GpuMachine& machine);

}  // namespace bench::gpu
