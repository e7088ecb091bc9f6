// Where a device is on this machine's PCI buses, as sysfs tells.
#pragma once

#include <compare>
#include <filesystem>
#include <string>

namespace xd {

struct PciPlace {
  // The way from the root to the device: "pci0000:15/0000:15:01.0/0000:17:00.0". Empty = not known.
  std::string path{};
  std::string function{};  // the device's own address, "0000:17:00.0"
  // The function whose port it uses: itself, but for virtual functions of SR-IOV, which share that
  // of the physical one.
  std::string physical{};
  int numa_node = -1;  // -1 = not known

  bool is_known() const { return !path.empty(); }
};

// How near two devices are to one another: the greater, the nearer.
struct Nearness {
  int shared_steps = 0;  // of their paths, from the root on
  bool shares_numa_node = false;
  auto operator<=>(const Nearness&) const = default;
};
Nearness nearness(const PciPlace& one, const PciPlace& other);

inline constexpr const char* kSysfs = "/sys";

// The place of the device with this address. `sysfs` = kSysfs, or a folder like it. Unknown where
// sysfs does not have it, as in some containers.
PciPlace pci_place(const std::filesystem::path& sysfs, const std::string& address);

// The place of the device that has this name in a class of sysfs: an adapter of "infiniband", an
// interface of "net". Unknown also where it is on no PCI bus.
PciPlace pci_place_in_class(const std::filesystem::path& sysfs, const std::string& class_name,
                            const std::string& name);

}  // namespace xd
