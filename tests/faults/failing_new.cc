#include "faults/failing_new.h"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace xd::test {
namespace {

// Atomic one by one: threads that outlive a trial may look while the next one is set up.
std::atomic<Of> of{Of::process};
std::atomic<const char*> thread_name{""};
std::atomic<bool> lasting{false};
std::atomic<bool> armed{false};
std::atomic<long> left{0};  // allocations until the one that fails
std::atomic<bool> has_struck{false};
thread_local bool arms = false;

bool counts() {
  if (of == Of::process) return true;
  if (of == Of::this_thread) return arms;
  char name[16] = "";
  ::prctl(PR_GET_NAME, name);
  return std::strcmp(name, thread_name) == 0;
}

bool fails() {
  if (!armed.load(std::memory_order_acquire) || !counts()) return false;
  const long before = left.fetch_sub(1);
  if (before == 1) has_struck = true;
  return before == 1 || (before < 1 && lasting);
}

void* allocate(std::size_t bytes) {
  return fails() ? nullptr : std::malloc(std::max<std::size_t>(bytes, 1));
}

void* allocate(std::size_t bytes, std::align_val_t alignment) {
  const auto align = static_cast<std::size_t>(alignment);
  const std::size_t rounded = (std::max<std::size_t>(bytes, 1) + align - 1) / align * align;
  return fails() ? nullptr : std::aligned_alloc(align, rounded);
}

void* or_throw(void* ptr) {
  if (ptr == nullptr) throw std::bad_alloc();
  return ptr;
}

}  // namespace

MemoryFault::MemoryFault(const Spec& what, long nth) {
  of = what.of;
  thread_name = what.thread;
  lasting = what.lasting;
  left = nth;
  has_struck = false;
  arms = true;
  armed.store(true, std::memory_order_release);
}

MemoryFault::~MemoryFault() {
  armed = false;
  arms = false;
}

bool MemoryFault::struck() const { return has_struck; }

}  // namespace xd::test

using xd::test::allocate;
using xd::test::or_throw;

void* operator new(std::size_t bytes) { return or_throw(allocate(bytes)); }
void* operator new[](std::size_t bytes) { return or_throw(allocate(bytes)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return or_throw(allocate(bytes, alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return or_throw(allocate(bytes, alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate(bytes, alignment);
}
void* operator new[](std::size_t bytes, std::align_val_t alignment,
                     const std::nothrow_t&) noexcept {
  return allocate(bytes, alignment);
}
void operator delete(void* ptr) noexcept { std::free(ptr); }
void operator delete[](void* ptr) noexcept { std::free(ptr); }
void operator delete(void* ptr, std::size_t) noexcept { std::free(ptr); }
void operator delete[](void* ptr, std::size_t) noexcept { std::free(ptr); }
void operator delete(void* ptr, std::align_val_t) noexcept { std::free(ptr); }
void operator delete[](void* ptr, std::align_val_t) noexcept { std::free(ptr); }
void operator delete(void* ptr, std::size_t, std::align_val_t) noexcept { std::free(ptr); }
void operator delete[](void* ptr, std::size_t, std::align_val_t) noexcept { std::free(ptr); }
