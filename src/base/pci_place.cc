#include "base/pci_place.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <fstream>
#include <string_view>
#include <system_error>

namespace xd {
namespace {

namespace fs = std::filesystem;

// Whether the text is a domain of four digits or more, and then has this form, in which 'h' stands
// for a digit in hexadecimal.
bool is_of_domain(std::string_view text, std::string_view form) {
  const auto is_digit = [](char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; };
  const std::size_t domain = std::min(text.find(':'), text.size());
  return domain >= 4 && std::ranges::all_of(text.substr(0, domain), is_digit) &&
         std::ranges::equal(text.substr(domain), form, [&](char c, char of_form) {
           return of_form == 'h' ? is_digit(c) : c == of_form;
         });
}

bool is_function(std::string_view name) { return is_of_domain(name, ":hh:hh.h"); }

// "pci0000:15", where the buses of a domain begin.
bool is_root(std::string_view name) {
  return name.starts_with("pci") && is_of_domain(name.substr(3), ":hh");
}

int read_numa_node(const fs::path& folder) {
  std::ifstream file(folder / "numa_node");
  int node = -1;
  return file >> node && node >= 0 ? node : -1;
}

// The place of what a link in sysfs leads to. Above the root there are no buses, and below the last
// function are parts of it, such as subfunctions.
PciPlace follow(const fs::path& link) {
  std::error_code error;
  const fs::path target = fs::canonical(link, error);
  if (error) return {};
  PciPlace place;
  fs::path folder, device;
  for (const fs::path& part : target) {
    folder /= part;
    const std::string name = part;
    const bool is_step = is_root(name) || (!place.path.empty() && is_function(name));
    if (!is_step && !place.path.empty()) break;
    if (!is_step) continue;
    place.path += (place.path.empty() ? "" : "/") + name;
    place.function = name;
    device = folder;
  }
  if (!is_function(place.function)) return {};
  const fs::path owner = fs::canonical(device / "physfn", error);
  place.physical = error ? place.function : owner.filename().string();
  place.numa_node = read_numa_node(device);
  return place;
}

}  // namespace

Nearness nearness(const PciPlace& one, const PciPlace& other) {
  Nearness found;
  found.shares_numa_node = one.numa_node >= 0 && one.numa_node == other.numa_node;
  if (!one.is_known() || !other.is_known()) return found;
  const std::string a = one.path + "/", b = other.path + "/";
  const auto end = std::ranges::mismatch(a, b).in1;
  found.shared_steps = static_cast<int>(std::count(a.begin(), end, '/'));
  return found;
}

PciPlace pci_place(const fs::path& sysfs, const std::string& address) {
  return is_function(address) ? follow(sysfs / "bus/pci/devices" / address) : PciPlace{};
}

PciPlace pci_place_in_class(const fs::path& sysfs, const std::string& class_name,
                            const std::string& name) {
  if (name.empty() || name.find('/') != std::string::npos) return {};
  return follow(sysfs / "class" / class_name / name / "device");
}

}  // namespace xd
