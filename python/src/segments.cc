#include "segments.h"

#include <sys/types.h>

#include <mutex>
#include <new>
#include <unordered_set>

namespace xdpy {
namespace {

struct Offer {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
};
thread_local Offer offer;

struct Taken {
  std::mutex mutex;
  std::unordered_set<std::uintptr_t> addresses;
};

// It is never destroyed, since torch gives segments back until the process is gone.
Taken& taken() {
  static Taken& all = *new Taken;
  return all;
}

// nullptr says that there is no memory. Nothing may be thrown into torch.
void* take(ssize_t bytes, int, void*) noexcept {
  const Offer offered = std::exchange(offer, {});
  if (offered.address == 0 || bytes < 0 || static_cast<std::size_t>(bytes) > offered.bytes) {
    return nullptr;
  }
  try {
    const std::scoped_lock lock(taken().mutex);
    taken().addresses.insert(offered.address);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  return reinterpret_cast<void*>(offered.address);  // NOLINT(performance-no-int-to-ptr)
}

void give_back(void* segment, ssize_t, int, void*) noexcept {
  const std::scoped_lock lock(taken().mutex);
  taken().addresses.erase(reinterpret_cast<std::uintptr_t>(segment));
}

}  // namespace

std::pair<std::uintptr_t, std::uintptr_t> segment_functions() {
  return {reinterpret_cast<std::uintptr_t>(&take), reinterpret_cast<std::uintptr_t>(&give_back)};
}

void offer_segment(std::uintptr_t address, std::size_t bytes) { offer = {address, bytes}; }

bool segment_taken(std::uintptr_t address) {
  const std::scoped_lock lock(taken().mutex);
  return taken().addresses.contains(address);
}

}  // namespace xdpy
