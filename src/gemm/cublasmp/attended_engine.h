// A rank's engine, and what bounds its waits. NCCL waits for ranks without a bound: a call that
// makes or ends an engine runs on a thread of its own, which is left alone where it takes too long;
// and while an engine lives, a thread watches the communicator, and ends what NCCL waits for when a
// fatal error has finished it.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/comm.h"
#include "gemm/cublasmp/engine.h"

namespace xd::gemm::cublasmp {

class AttendedEngine {
 public:
  // Collective: all ranks have an engine, or none has. Without config.allow_fallback, having none
  // throws UNSUPPORTED with the reason, on all ranks.
  AttendedEngine(Comm& comm, const Config& config);
  // All ranks end theirs, in any order, with no product under way; returns within some seconds.
  ~AttendedEngine();
  AttendedEngine(const AttendedEngine&) = delete;
  AttendedEngine& operator=(const AttendedEngine&) = delete;

  // nullptr = there is none, and why_not() says why.
  Engine* get() const { return engine_.get(); }
  const std::string& why_not() const { return why_not_; }

 private:
  void make(const Config& config, const Ranks& ranks);
  void watch();
  void end() noexcept;

  Comm& comm_;
  std::unique_ptr<Engine> engine_;
  std::string why_not_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread watch_;
};

}  // namespace xd::gemm::cublasmp
