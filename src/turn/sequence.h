// One rank's part in a sequence of operations of a family, on any executor. It has the sequence's
// number in the communicator, and keeps the non-fatal errors that nobody has read.
#pragma once

#include <crossdock/comm.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "comm/comm.h"
#include "observe/subject.h"
#include "turn/operation_error.h"

namespace xd::turn {

template <class Family>
class Sequence {
 public:
  using Status = typename Family::Status;

  virtual ~Sequence() {
    if (!comm_->errors().in_fork()) comm_->errors().notes().unlist_join(number_);
  }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  Comm& comm() const { return *comm_; }
  int rank() const { return comm_->rank(); }
  int number() const { return number_; }
  // This sequence, for people who look.
  observe::Subject& subject() const { return subject_; }

  // Takes this rank's turn with a failure, for a caller that found a mistake before it could make
  // its call, so that the peers learn of it at once. `operation`: the caller's number of an
  // operation of the family.
  void join_failed(std::int32_t operation, const char* text, xd_stream stream);
  // The same with an error that the library has found. Throws what the turn throws. last_error()
  // stays the first of the calling thread's call.
  void join_failed(std::int32_t operation, Error&& error, xd_stream stream) {
    const Status first = last_error_;
    try {
      take_failed_turn(operation, std::move(error), stream);
    } catch (...) {
      if (first.status != XD_SUCCESS) last_error_ = first;
      throw;
    }
  }

  // Keeps the first operation error that no call has returned until it is read.
  void remember(const OperationError<Family>& operation_error, std::int32_t operation,
                std::uint64_t epoch);
  virtual Status take_status();
  // A word that counts the operations that have met a non-fatal error.
  virtual const volatile std::uint64_t* watch() const = 0;

  // The status of the calling thread's last failed call; forgotten when its next call begins.
  static Status last_error() { return last_error_; }
  static void forget_last_error() { last_error_ = Family::no_error(); }
  // Makes the call return this operation error.
  [[noreturn]] static void give_back(const OperationError<Family>& operation_error,
                                     std::int32_t operation, std::uint64_t epoch);

  // An error of this rank's own part in an operation, which finishes the communicator.
  FatalError own_fatal_error(xd_status status, std::int32_t operation) const {
    return {
        .status = status, .rank = rank(), .peer = rank(), .group = number_, .operation = operation};
  }
  // The communicator's account of an operation error, where the sequence's errors are fatal.
  Cause cause(const OperationError<Family>& operation_error, std::int32_t operation,
              std::uint64_t epoch) const;

 protected:
  explicit Sequence(std::shared_ptr<Comm> comm)
      : comm_(std::move(comm)),
        number_(comm_->group_number()),
        subject_({comm_->rank(), comm_->num_ranks(), number_, comm_->device().device_type},
                 Family::kOperations, comm_->name()) {
    comm_->errors().name_operations(Family::kOperations);
    comm_->errors().notes().list_join(number_, [this](std::int32_t operation, const char* text) {
      try {
        join_failed(operation, text, nullptr);
      } catch (...) {
        forget_last_error();  // it is no call of the caller's
        throw;
      }
    });
  }

  // Takes this rank's turn with only this error, and returns it.
  virtual void take_failed_turn(std::int32_t operation, Error&& error, xd_stream stream) = 0;

  template <class Add>
  void add_to_status(Add&& add) {
    const std::lock_guard lock(mutex_);
    add(status_);
  }

 private:
  static void tell(const OperationError<Family>& operation_error, std::int32_t operation,
                   std::uint64_t epoch, Status& status);

  static inline thread_local Status last_error_ = Family::no_error();

  std::shared_ptr<Comm> comm_;
  const int number_;
  mutable observe::Subject subject_;
  std::mutex mutex_;
  Status status_ = Family::no_error();
};

template <class Family>
void Sequence<Family>::join_failed(std::int32_t operation, const char* text, xd_stream stream) {
  const Operations& names = Family::kOperations;
  if (!names.knows(operation)) {
    // The peers wait for this rank's turn in any operation, so any operation will do.
    Error unknown(XD_ERROR_INVALID_ARGUMENT,
                  error_text("operation = ", operation, ", expected ", names.type));
    return take_failed_turn(names.first, std::move(unknown), stream);
  }
  const std::string_view cause(text != nullptr ? text : "",
                               text != nullptr ? ::strnlen(text, 255) : 0);
  take_failed_turn(operation, Error(XD_ERROR_INVALID_ARGUMENT, error_text(cause)), stream);
}

template <class Family>
void Sequence<Family>::tell(const OperationError<Family>& operation_error, std::int32_t operation,
                            std::uint64_t epoch, Status& status) {
  status.status = operation_error.status;
  status.operation = static_cast<decltype(status.operation)>(operation);
  status.epoch = epoch;
  status.rank = operation_error.rank;
  std::strncpy(status.text, operation_error.text.c_str(), sizeof(status.text) - 1);
  Family::tell(operation_error, status);
}

template <class Family>
void Sequence<Family>::give_back(const OperationError<Family>& operation_error,
                                 std::int32_t operation, std::uint64_t epoch) {
  tell(operation_error, operation, epoch, last_error_);
  Family::tell_caller(operation_error, last_error_);
  fail(operation_error.status, operation_error.text);
}

template <class Family>
Cause Sequence<Family>::cause(const OperationError<Family>& operation_error, std::int32_t operation,
                              std::uint64_t epoch) const {
  Cause cause{.peer = operation_error.rank, .text = {}};
  std::snprintf(cause.text.data(), cause.text.size(), "%s%s of group %d, epoch %llu: %s",
                Family::kOperations.prefix, Family::kOperations.name(operation), number_,
                static_cast<unsigned long long>(epoch), operation_error.text.c_str());
  return cause;
}

template <class Family>
void Sequence<Family>::remember(const OperationError<Family>& operation_error,
                                std::int32_t operation, std::uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  if (status_.status == XD_SUCCESS) tell(operation_error, operation, epoch, status_);
}

template <class Family>
typename Family::Status Sequence<Family>::take_status() {
  const std::lock_guard lock(mutex_);
  const Status taken = status_;
  status_ = Family::no_error();
  return taken;
}

}  // namespace xd::turn
