// Memory of the device that an executor computes on, behind one small interface, so that test
// bodies are the same for every executor.
#pragma once

#include <crossdock/comm.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

namespace xd::test {

// The memory of one rank's device.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual DLDevice device() const = 0;
  // The stream of the rank's operations. NULL: they have finished when their call returns.
  virtual xd_stream stream() const = 0;
  // 256-byte aligned.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* ptr) = 0;
  // Each device address may be in this memory or in symmetric memory of the same device. Copies
  // follow the stream's order, and have finished when the call returns.
  virtual void copy_in(void* device, const void* host, std::size_t bytes) = 0;
  virtual void copy_out(void* host, const void* device, std::size_t bytes) = 0;
  // Returns when all that was enqueued on the stream has finished.
  virtual void synchronize() = 0;
  // Memory of the same device, with a stream of its own.
  virtual std::unique_ptr<Memory> another_stream() const = 0;
  // Memory of the same device, allocated as pools of virtual memory do it; null where there is no
  // virtual memory.
  virtual std::unique_ptr<Memory> of_virtual_memory() const = 0;
  // Bytes of the device that any process has taken; 0 where the number says nothing.
  virtual std::size_t device_bytes_used() const = 0;
};

// Thrown where this machine cannot run the launch; the text says what is missing.
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
