#include "streams.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

namespace xdpy {
namespace {

using Handle = void*;  // of a context, a stream or an event
constexpr std::size_t kMostDevices = 128;
constexpr unsigned kWithoutTiming = 2;  // of an event

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
  Function<Handle*> current_context{"cuCtxGetCurrent"};
  Function<int*> current_device{"cuCtxGetDevice"};
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
  static std::array<std::atomic<Handle>, kMostDevices> known{};
  auto& context = known.at(static_cast<std::size_t>(device));
  Handle found = context.load(std::memory_order_acquire);
  if (found != nullptr) return found;
  driver().retain_context(&found, device);
  context.store(found, std::memory_order_release);
  return found;
}

// Whether another context of this device than the primary is current, as under torch's
// GreenContext: stream 0 is that context's own then.
bool in_other_context(const Driver& driver, int device) {
  Handle current = nullptr;
  driver.current_context(&current);
  if (current == nullptr || current == context_of(device)) return false;
  int its_device = -1;
  driver.current_device(&its_device);
  return its_device == device;
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

// The events of a thread, one for each device that it uses: a wait that has been enqueued keeps to
// the work that was recorded before it, so the next record takes nothing away.
class Events {
 public:
  explicit Events(const Driver& driver) : driver_(driver) {}
  ~Events() {
    for (const Handle event : of_device_) {
      if (event != nullptr) static_cast<void>(driver_.destroy_event.attempt(event));
    }
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  Handle of(int device) {
    Handle& event = of_device_.at(static_cast<std::size_t>(device));
    if (event == nullptr) driver_.create_event(&event, kWithoutTiming);
    return event;
  }

 private:
  const Driver& driver_;
  std::array<Handle, kMostDevices> of_device_{};
};

Handle stream_at(std::uintptr_t address) {
  return reinterpret_cast<Handle>(address);  // NOLINT(performance-no-int-to-ptr)
}

// Lets a stream wait for stream 0 of the current context, by an event of that context.
void wait_for_own(const Driver& driver, Handle second) {
  Handle event = nullptr;
  driver.create_event(&event, kWithoutTiming);
  const int recorded = driver.record_event.attempt(event, nullptr);
  const int waited = recorded == 0 ? driver.wait_event.attempt(second, event, 0U) : 0;
  static_cast<void>(driver.destroy_event.attempt(event));  // once the work before it has ended
  succeed(recorded, "cuEventRecord");
  succeed(waited, "cuStreamWaitEvent");
}

}  // namespace

void order_streams(int device, std::uintptr_t first, std::uintptr_t second) {
  const Driver& all = driver();
  const bool other = in_other_context(all, device);
  if (other && first == 0) {
    wait_for_own(all, stream_at(second));
    return;
  }
  thread_local Events events(all);
  Handle event = nullptr;
  {
    const CurrentContext primary(all, device);
    event = events.of(device);
    all.record_event(event, stream_at(first));
    if (!other || second != 0) all.wait_event(stream_at(second), event, 0U);
  }
  if (other && second == 0) all.wait_event(nullptr, event, 0U);
}

}  // namespace xdpy
