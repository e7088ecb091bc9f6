// Memory of the device that an executor computes on, behind one small interface, so that test
// bodies are the same for every executor.
#pragma once

#include <crossdock/comm.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

namespace xd::test {

// One rank's way to its device.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual DLDevice device() const = 0;
  // What the rank's operations run on. NULL: they have finished when their call returns.
  virtual xd_stream stream() const = 0;
  // 256-byte aligned.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* ptr) = 0;
  // Either side may be this memory or symmetric memory of the same device. In the stream's order;
  // returns when done.
  virtual void copy_in(void* device, const void* host, std::size_t bytes) = 0;
  virtual void copy_out(void* host, const void* device, std::size_t bytes) = 0;
  // Returns when all that was enqueued on the stream has finished.
  virtual void synchronize() = 0;
  // The same device, with a stream of its own.
  virtual std::unique_ptr<Memory> another_stream() const = 0;
  // The same device's, allocated as pools of virtual memory do; null where there is no such thing.
  virtual std::unique_ptr<Memory> of_virtual_memory() const = 0;
  // Bytes of the device that are taken, by whomever; 0 where that says nothing.
  virtual std::size_t device_bytes_used() const = 0;
};

// This machine cannot run what was asked for; says what is missing.
class Unavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// `executor` as given on the command line: "cpu" or "cuda". On "cuda" ranks take turns in choosing
// a device. Throws std::invalid_argument for another executor, Unavailable without a device.
std::unique_ptr<Memory> make_memory(const std::string& executor, int rank);

// Devices that ranks are spread over; throws like make_memory.
int device_count(const std::string& executor);

}  // namespace xd::test
