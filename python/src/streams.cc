#include "streams.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

namespace xdpy {
namespace {

using Handle = void*;  // of a context, a stream or an event

void succeed(int error, const char* function) {
  if (error == 0) return;
  throw std::runtime_error(std::string(function) + ": CUDA driver error " + std::to_string(error));
}

// A function of the driver, which torch has loaded.
template <class... Args>
class Function {
 public:
  explicit Function(const char* name) : name_(name) {
    void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void* const found = driver == nullptr ? nullptr : ::dlsym(driver, name);
    if (found == nullptr)
      throw std::runtime_error(std::string(name) + ": not found in libcuda.so.1");
    function_ = reinterpret_cast<int (*)(Args...)>(found);
  }
  void operator()(Args... args) const { succeed(function_(args...), name_); }
  [[nodiscard]] int attempt(Args... args) const noexcept { return function_(args...); }

 private:
  const char* name_;
  int (*function_)(Args...);
};

struct Driver {
  Function<Handle*, int> retain_context{"cuDevicePrimaryCtxRetain"};
  Function<Handle> push_context{"cuCtxPushCurrent_v2"};
  Function<Handle*> pop_context{"cuCtxPopCurrent_v2"};
  Function<Handle*, unsigned> create_event{"cuEventCreate"};
  Function<Handle> destroy_event{"cuEventDestroy_v2"};
  Function<Handle, Handle> record_event{"cuEventRecord"};
  Function<Handle, Handle, unsigned> wait_event{"cuStreamWaitEvent"};
};

const Driver& driver() {
  static const Driver all;
  return all;
}

// The context that the runtime, and so torch, uses on a device. It is kept for good.
Handle context_of(int device) {
  static std::array<std::atomic<Handle>, 128> known{};
  auto& context = known.at(static_cast<std::size_t>(device));
  Handle found = context.load(std::memory_order_acquire);
  if (found != nullptr) return found;
  driver().retain_context(&found, device);
  context.store(found, std::memory_order_release);
  return found;
}

class CurrentContext {
 public:
  CurrentContext(const Driver& driver, int device) : driver_(driver) {
    driver_.push_context(context_of(device));
  }
  ~CurrentContext() {
    Handle popped = nullptr;
    static_cast<void>(driver_.pop_context.attempt(&popped));
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
};

// The driver frees an event that has been destroyed when it has come.
class Event {
 public:
  explicit Event(const Driver& driver) : driver_(driver) {
    constexpr unsigned without_timing = 2;
    driver_.create_event(&handle, without_timing);
  }
  ~Event() { static_cast<void>(driver_.destroy_event.attempt(handle)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  Handle handle = nullptr;

 private:
  const Driver& driver_;
};

Handle stream_at(std::uintptr_t address) {
  return reinterpret_cast<Handle>(address);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

void order_streams(int device, std::uintptr_t first, std::uintptr_t second) {
  const Driver& all = driver();
  const CurrentContext current(all, device);
  const Event event(all);
  all.record_event(event.handle, stream_at(first));
  all.wait_event(stream_at(second), event.handle, 0U);
}

}  // namespace xdpy
