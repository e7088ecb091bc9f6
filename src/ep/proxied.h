// A group's side of the thread that has its links on CUDA devices (net/proxy.h): what the thread
// tells the group, and what its failures mean for the communicator.
#pragma once

#include <mutex>

#include "base/error.h"
#include "comm/comm.h"
#include "net/proxy.h"
#include "observe/counters.h"

namespace xd::ep {

// Outlives the proxy.
class Proxied {
 public:
  // `group`: its number.
  Proxied(Comm& comm, int group, observe::Counters& counters)
      : comm_(comm), group_(group), counters_(&counters) {}

  net::Proxy::Calls calls();
  // The group goes, and its proxy stays for kernels that still run: no more puts are counted.
  void outlive_group();

 private:
  void give_up(const Error& error) const;
  bool nobody_waits() const;
  void count(const net::Links::Sent& sent);

  Comm& comm_;
  const int group_;
  std::mutex mutex_;
  observe::Counters* counters_;  // of the group, while it lives; under mutex_
};

}  // namespace xd::ep
