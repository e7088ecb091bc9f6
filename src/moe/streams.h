// The streams of a pass, and their order. Executors with streams of their own derive from Streams.
#pragma once

#include <crossdock/comm.h>

#include <atomic>
#include <memory>

namespace xd::moe {

// This class itself is that of the serial schedule: all work is on the caller's stream.
class Streams {
 public:
  virtual ~Streams() = default;

  // Begins a pass: everything behind it waits for what is on the caller's stream.
  virtual void begin(xd_stream caller) { caller_ = caller; }
  // Ends it, also behind an error: the caller's stream waits for everything.
  virtual void end() {}

  virtual xd_stream transfers() const { return caller_; }
  // Of a part, from 1.
  virtual xd_stream products(int) const { return caller_; }

  // A place on a stream, of this pass: the end of what is there now.
  using Mark = void*;
  virtual Mark mark(xd_stream) { return nullptr; }
  // Work that is enqueued on the stream from here on waits for the mark.
  virtual void wait(Mark, xd_stream) {}

 protected:
  xd_stream caller_ = nullptr;
};

// A group has this for its passes.
struct Passes {
  std::unique_ptr<Streams> streams;  // made by the first pass by parts
  std::atomic<bool> busy{false};     // a thread makes one
};

}  // namespace xd::moe
