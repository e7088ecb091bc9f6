#include "conformance/counted_new.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

namespace {

thread_local std::size_t allocations = 0;
std::atomic<std::size_t> live{0};

void* counted(void* ptr) {
  if (!ptr) throw std::bad_alloc();
  ++allocations;
  live.fetch_add(malloc_usable_size(ptr), std::memory_order_relaxed);
  return ptr;
}

void release(void* ptr) noexcept {
  if (!ptr) return;
  live.fetch_sub(malloc_usable_size(ptr), std::memory_order_relaxed);
  std::free(ptr);
}

}  // namespace

void* operator new(std::size_t bytes) {
  return counted(std::malloc(std::max<std::size_t>(bytes, 1)));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto align = static_cast<std::size_t>(alignment);
  return counted(
      std::aligned_alloc(align, (std::max<std::size_t>(bytes, 1) + align - 1) / align * align));
}
void operator delete(void* ptr) noexcept { release(ptr); }
void operator delete(void* ptr, std::size_t) noexcept { release(ptr); }
void operator delete(void* ptr, std::align_val_t) noexcept { release(ptr); }
void operator delete(void* ptr, std::size_t, std::align_val_t) noexcept { release(ptr); }

namespace xd::test {

std::size_t allocations_of_this_thread() { return allocations; }
std::size_t live_bytes() { return live.load(std::memory_order_relaxed); }

}  // namespace xd::test
