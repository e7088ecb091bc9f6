// Memory that holds up the thread which touches it: so a rank stops at a known place inside of an
// operation, at the first use of a tensor that lies there, and goes on when the test says so.
#pragma once

#include <chrono>
#include <cstddef>

namespace xd::test {

// One at a time.
class Gate {
 public:
  explicit Gate(std::size_t bytes);  // open
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

  // From here on a thread that loads or stores there waits until open(), 20 s at most.
  void close();
  void open();
  // Returns when a thread is held up; false if none comes.
  bool wait_for_thread(std::chrono::milliseconds limit) const;

 private:
  std::size_t bytes_;
  std::byte* data_;
};

}  // namespace xd::test
