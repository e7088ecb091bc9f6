// Links for kernels, which cannot call them: a thread does it for them, as they command by the
// words of net/commands.h.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.h"
#include "net/commands.h"
#include "net/links.h"

namespace xd::net {

// The steps that the thread takes, one by one. The links are its own; one thread at a time.
class Courier {
 public:
  // `words` are those of links.map().num_frames() frames. No frame has been used yet.
  Courier(Links& links, const FrameWords& words);

  // Does all that can be done now. True = something was. Throws what links throw, and INTERNAL if a
  // word makes no sense.
  bool step();
  // Nothing is left to be done of what has been commanded so far.
  bool at_rest() const;

 private:
  bool send(std::size_t frame);
  bool give_back(std::size_t frame);
  bool has_read(std::size_t frame) const;
  bool take_in(int neighbour);
  bool free(std::size_t frame);
  int neighbour_of(std::size_t frame) const { return static_cast<int>(frame / frames_); }
  unsigned place_of(std::size_t frame) const { return static_cast<unsigned>(frame % frames_); }

  struct Outgoing {
    std::uint32_t use = 0;
    bool under_way = false;
  };
  struct Incoming {
    std::uint32_t use = 0;
    std::optional<Links::Chunk> chunk;
  };

  Links& links_;
  const FrameWords words_;
  const std::size_t frames_;  // of a neighbour
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
};

class Proxy {
 public:
  // Called on the proxy's thread.
  struct Calls {
    std::function<void(const Error&)> failed;      // with what has ended its work, once
    std::function<void(const Links::Sent&)> sent;  // so far, when there was something to do
    std::function<bool()> is_over;  // asked when it is to end: whether nobody waits for the rest
  };
  Proxy(Links& links, const FrameWords& words, Calls calls);
  // Does what has been commanded before, for at most kPatienceMs, and ends. So do those that live
  // when the process ends, before what they use is taken down.
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  static constexpr int kPatienceMs = 1000;

 private:
  friend class ProxiesOfProcess;
  using Clock = std::chrono::steady_clock;
  void ask_to_end() { ends_.store(true, std::memory_order_release); }
  void await_end();
  void run() noexcept;
  void work();
  void sleep(Clock::duration idle);

  Links& links_;
  Courier courier_;
  const Calls calls_;
  std::atomic<bool> ends_{false};
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace xd::net
