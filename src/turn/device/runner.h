// Runs a sequence's operations as kernels on their callers' streams: the host's half of
// turn/device/turn.cuh. It numbers launches, takes the turns of calls that fail on the host, and
// brings what kernels report to the sequence. It waits for no kernel while the sequence lives.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/deadline.h"
#include "base/env.h"
#include "cuda/device.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "turn/device/group.h"
#include "turn/device/times.h"
#include "turn/failed_calls.h"
#include "turn/sequence.h"

namespace xd::turn {

// `Control` and `Report` are a DeviceControl and a DeviceReport, or derive from them.
template <class Family, class Control, class Report>
class DeviceRunner {
 public:
  // Puts a kernel's report into words.
  using OperationErrorOf = std::function<OperationError<Family>(const Report& report)>;
  // Launches the turn of a call that has a status and nothing else. Throws where that fails.
  using LaunchFailed =
      std::function<void(const Call& call, std::uint32_t launch, xd_stream stream)>;
  // The memory that kernels of any sequence use.
  struct Memory {
    cuda::DeviceBuffer control;
    cuda::PinnedBlock report;
    cuda::PinnedBlock last_look;  // a copy of DeviceControl::owner, which end() waits for
  };

  // `fatal_errors`: an operation error finishes the communicator. `launch_failed`: of calls that do
  // not give run() their own.
  DeviceRunner(Sequence<Family>& sequence, bool fatal_errors, OperationErrorOf operation_error_of,
               LaunchFailed launch_failed = {})
      : sequence_(sequence),
        fatal_errors_(fatal_errors),
        operation_error_of_(std::move(operation_error_of)),
        launch_failed_(std::move(launch_failed)) {}

  // Called while the sequence is made. Throws OUT_OF_MEMORY.
  void allocate() {
    const int device = device_id();
    memory_.control =
        cuda::DeviceBuffer(device, sizeof(Control), "the control block of a sequence");
    memory_.report = cuda::PinnedBlock(device, sizeof(Report));
    memory_.last_look = cuda::PinnedBlock(device, sizeof(DeviceControl::owner));
    if (observe::tracing() && env().trace_device != 0) {
      const cuda::DeviceGuard guard(device);
      times_ = std::make_unique<DeviceTimes>(device, sequence_.subject());
    }
  }
  // Called when the sequence is made: from now on the communicator asks here for the cause of a
  // fatal error in the sequence.
  void begin() {
    if (!fatal_errors_) return;
    sequence_.comm().errors().explain_by(
        sequence_.number(), [this](const FatalError& error) { return cause_of(error); });
  }
  // For how long the end of a sequence waits for operations that run all the same.
  static constexpr int kPatienceMs = 2000;
  // Called when the sequence goes. Its caller has promised that no operation runs any more. A
  // kernel that does run would write into memory that has another owner by then, so end() waits for
  // it, within bounds. False if a kernel still runs: then the memory that it uses must be kept. (A
  // kernel that has not begun is not seen.)
  bool end();
  Memory take_memory() { return std::move(memory_); }

  // Sets a word of the control block, before any operation.
  template <class Word>
  void set_control(Word Control::*member, const Word& value) const {
    const auto* place = reinterpret_cast<const std::byte*>(&(control()->*member));
    memory_.control.write(at(place - memory_.control.data()), &value, sizeof(Word));
  }

  Control* control() const { return memory_.control.template as<Control>(); }
  Report* report() const { return memory_.report.template as<Report>(); }

  // Wraps after 2^32 - 1 launches: numbers only tell apart launches that overlap.
  std::uint32_t next_launch() {
    const std::uint32_t number = ++launches_;
    return number != 0 ? number : next_launch();
  }

  // start() enqueues the operation, or throws if the call is wrong. A call that fails here still
  // takes this rank's turn, so that its peers learn of it at once and the epochs stay together.
  //
  // The start() of an operation of several launches takes a `bool& entered` and sets it when it has
  // enqueued the first that carries the turn. An exception behind that finishes the communicator:
  // peers are in the operation, and a second turn would put this rank one operation behind them.
  template <class Start>
  void run(std::int32_t operation, xd_stream stream, Start&& start) {
    run(operation, stream, std::forward<Start>(start), launch_failed_);
  }
  template <class Start>
  void run(std::int32_t operation, xd_stream stream, Start&& start,
           const LaunchFailed& launch_failed);

  // Gives the sequence the operation error that kernels have reported since the last time, if there
  // is one.
  void collect();
  const volatile std::uint64_t* watch() const { return &report()->errors; }

 private:
  int device_id() const { return sequence_.comm().device().device_id; }
  bool at_rest() const;
  Cause cause_of(const FatalError& error) const;
  std::uint32_t break_off(std::int32_t operation, xd_stream stream);
  std::uint32_t take_failed_turn(std::int32_t operation,
                                 const OperationError<Family>& operation_error, xd_stream stream,
                                 const LaunchFailed& launch_failed);
  // Acquire: a report is complete before it is counted.
  std::uint32_t written() const {
    return std::atomic_ref(report()->written).load(std::memory_order_acquire);
  }

  Sequence<Family>& sequence_;
  const bool fatal_errors_;
  const OperationErrorOf operation_error_of_;
  const LaunchFailed launch_failed_;
  Memory memory_;
  std::atomic<std::uint32_t> launches_{0};
  std::mutex report_mutex_;
  FailedCalls<Family> failed_calls_;    // where errors are fatal
  std::unique_ptr<DeviceTimes> times_;  // where the trace has a line for the device
};

template <class Family, class Control, class Report>
bool DeviceRunner<Family, Control, Report>::end() {
  bool rests = true;
  cuda::try_on_device(device_id(), [&] {
    rests = at_rest();
    if (times_) times_->collect();
  });
  if (fatal_errors_) {
    static_cast<void>(sequence_.comm().errors().fatal_error());  // its text needs this sequence
    sequence_.comm().errors().explain_by(sequence_.number(), {});
  }
  return rests;
}

template <class Family, class Control, class Report>
bool DeviceRunner<Family, Control, Report>::at_rest() const {
  // A fatal error ends every wait of a kernel within a millisecond, but it may leave the sequence
  // owned. Where it is still owned later, the kernel has ended nevertheless.
  constexpr int kFailedMs = 100;
  const Comm& comm = sequence_.comm();
  const auto deadline =
      Deadline::after_ms(comm.errors().fatal_error() == nullptr ? kPatienceMs : kFailedMs);
  const auto* owner = memory_.last_look.template as<std::uint64_t>();
  do {
    // A copy that has not ended may still run and needs both memories, so the sequence is not at
    // rest.
    if (!memory_.control.read(offsetof(DeviceControl, owner), memory_.last_look.data(),
                              sizeof(*owner), deadline)) {
      return false;
    }
    if (static_cast<std::uint32_t>(*owner) == 0) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  } while (!deadline.passed());
  return comm.errors().fatal_error() != nullptr;
}

template <class Family, class Control, class Report>
template <class Start>
void DeviceRunner<Family, Control, Report>::run(std::int32_t operation, xd_stream stream,
                                                Start&& start, const LaunchFailed& launch_failed) {
  sequence_.comm().errors().check_usable();
  const cuda::DeviceGuard guard(device_id());
  OperationError<Family> operation_error;
  bool entered = false;
  try {
    // It is checked here and not by the launch, which would take that capture down.
    XD_REQUIRE(!cuda::is_legacy_stream(stream) || cuda::takes_work(stream),
               "stream: is the legacy default stream, as NULL is, expected another one while a "
               "blocking stream is captured");
    if (times_) times_->begin(stream);
    if constexpr (std::is_invocable_v<Start, bool&>) {
      start(entered);
    } else {
      start();
    }
    if (times_) times_->end(operation, stream);
    return;
  } catch (...) {
    operation_error = current_operation_error<Family>(sequence_.rank());
  }
  const std::uint32_t launch =
      entered ? break_off(operation, stream)
              : take_failed_turn(operation, operation_error, stream, launch_failed);
  if (launch == 0) {
    operation_error.text +=
        ": the stream takes no work because of a capture, so nothing was enqueued and peers do not "
        "hear of this call";
  }
  sequence_.give_back(operation_error, operation, launch);
}

// An operation of which a part has been enqueued cannot be ended. Returns the number of its launch;
// or 0 if that part was captured, and the capture has been invalidated, so that it never runs.
template <class Family, class Control, class Report>
std::uint32_t DeviceRunner<Family, Control, Report>::break_off(std::int32_t operation,
                                                               xd_stream stream) {
  if (!cuda::takes_work(stream)) return 0;
  sequence_.comm().errors().raise(sequence_.own_fatal_error(XD_ERROR_INTERNAL, operation),
                                  Spread::everywhere);
  return launches_;
}

// Returns the number of the launch, or 0 if the stream takes no kernel, because its capture has
// been invalidated or because another one forbids it. Then nothing of this call has been enqueued:
// it is as if it had not been made, on this rank and on the others. If the launch fails otherwise
// (a stream of another device), the peers would wait for the timeout, so that is fatal.
template <class Family, class Control, class Report>
std::uint32_t DeviceRunner<Family, Control, Report>::take_failed_turn(
    std::int32_t operation, const OperationError<Family>& operation_error, xd_stream stream,
    const LaunchFailed& launch_failed) {
  const Call call{static_cast<std::uint8_t>(operation_error.status),
                  static_cast<std::uint8_t>(operation)};
  const std::uint32_t launch = next_launch();
  if (!cuda::takes_work(stream)) return 0;
  if (fatal_errors_) failed_calls_.note(launch, operation, operation_error);
  try {
    launch_failed(call, launch, stream);
  } catch (...) {
    if (!cuda::takes_work(stream)) {
      failed_calls_.forget(launch);
      return 0;
    }
    sequence_.comm().errors().raise(sequence_.own_fatal_error(XD_ERROR_INTERNAL, operation),
                                    Spread::everywhere);
  }
  return launch;
}

// The cause of an error that a kernel of this sequence has raised. Only the host knows a mistake
// that a call has found on the host; only the kernel knows which call that was, and at which epoch.
template <class Family, class Control, class Report>
Cause DeviceRunner<Family, Control, Report>::cause_of(const FatalError& error) const {
  const Report& said = *report();
  // Relaxed: it was written before the error, which has been taken over with acquire.
  const auto launch = std::atomic_ref(report()->fatal_launch).load(std::memory_order_relaxed);
  if (const auto call = failed_calls_.find(launch)) {
    return sequence_.cause(call->operation_error, call->operation, error.expected_epoch);
  }
  if (written() != 0) return sequence_.cause(operation_error_of_(said), said.operation, said.epoch);
  return {.peer = error.peer, .text = {}};
}

template <class Family, class Control, class Report>
void DeviceRunner<Family, Control, Report>::collect() {
  const std::lock_guard lock(report_mutex_);
  const std::uint32_t count = written();
  if (count == report()->taken) return;
  sequence_.remember(operation_error_of_(*report()), report()->operation, report()->epoch);
  // Release: kernels write the next operation error only where this one has been read.
  std::atomic_ref(report()->taken).store(count, std::memory_order_release);
}

}  // namespace xd::turn
