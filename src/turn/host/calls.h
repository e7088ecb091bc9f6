// The common part of a sequence's calls on the host, however turns are taken: one call at a time,
// and the fate of an operation error.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "turn/sequence.h"

namespace xd::turn {

template <class Family>
class HostCalls {
 public:
  // `fatal_errors`: an operation error finishes the communicator.
  HostCalls(Sequence<Family>& sequence, bool fatal_errors)
      : sequence_(sequence), fatal_errors_(fatal_errors) {}

  // Marks the sequence as in use by this thread; finding it in use is fatal.
  class Claim {
   public:
    Claim(HostCalls& calls, std::int32_t operation) : calls_(calls) {
      calls.sequence_.comm().errors().check_usable();
      LongWait::take_story();  // of an operation that has not settled
      if (calls.busy_.exchange(true, std::memory_order_acquire)) calls.fail_busy(operation);
    }
    ~Claim() { calls_.busy_.store(false, std::memory_order_release); }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

   private:
    HostCalls& calls_;
  };

  // Ends an operation with its operation error, if it has one: counts it and throws it.
  void settle(const OperationError<Family>& operation_error, std::int32_t operation,
              std::uint64_t epoch);

  // The same for an operation that another call has brought to its end: its operation error is kept
  // until the sequence's status is read.
  void keep(const OperationError<Family>& operation_error, std::int32_t operation,
            std::uint64_t epoch) {
    if (!operation_error) return;
    count_error();
    sequence_.remember(operation_error, operation, epoch);
  }

  // Makes an operation error fatal. Peers that meet an error of the operation do so without this
  // rank.
  void finish_comm(const OperationError<Family>& operation_error, std::int32_t operation,
                   std::uint64_t epoch);

  const volatile std::uint64_t* watch() const { return &errors_; }

 private:
  [[noreturn]] void fail_busy(std::int32_t operation) {
    sequence_.comm().errors().raise_and_throw(sequence_.own_fatal_error(XD_ERROR_BUSY, operation),
                                              Spread::everywhere);
  }
  void count_error() {
    // Release, as in kernels, although no thread has to find anything here.
    std::atomic_ref(errors_).fetch_add(1, std::memory_order_release);
  }

  Sequence<Family>& sequence_;
  const bool fatal_errors_;
  std::atomic<bool> busy_{false};
  alignas(64) std::uint64_t errors_ = 0;  // written by operations, read by any thread
};

template <class Family>
void HostCalls<Family>::settle(const OperationError<Family>& operation_error,
                               std::int32_t operation, std::uint64_t epoch) {
  const std::string story = LongWait::take_story();
  if (!operation_error) return;
  count_error();
  // A sequence that goes on without lost peers does so whatever its other errors are.
  if (fatal_errors_ && operation_error.status != XD_ERROR_PEER_LOST)
    finish_comm(operation_error, operation, epoch);
  // This rank's own mistake is told in its own words.
  const bool of_circle =
      operation_error.status == XD_ERROR_MISMATCH && operation_error.rank != sequence_.rank();
  if (story.empty() || !of_circle) sequence_.give_back(operation_error, operation, epoch);
  OperationError<Family> told = operation_error;
  told.text = story;
  sequence_.give_back(told, operation, epoch);
}

template <class Family>
void HostCalls<Family>::finish_comm(const OperationError<Family>& operation_error,
                                    std::int32_t operation, std::uint64_t epoch) {
  sequence_.comm().errors().raise_cause({.status = operation_error.status,
                                         .rank = sequence_.rank(),
                                         .peer = operation_error.rank,
                                         .group = sequence_.number(),
                                         .operation = operation,
                                         .expected_epoch = epoch,
                                         .met_by_all = operation_error.met_by_all ? 1 : 0},
                                        sequence_.cause(operation_error, operation, epoch));
}

}  // namespace xd::turn
