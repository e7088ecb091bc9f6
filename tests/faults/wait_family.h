// Operations that wait for their peers, of every family: bulk, low latency and products. The ends
// of such a wait are the same for all of them (wait_test.cc).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "support/world.h"

namespace xd::test {

// How an operation has ended.
struct CallEnd {
  xd_status status;
  std::string text;  // the library's error text; empty after success
};
inline bool operator==(const CallEnd& end, xd_status status) { return end.status == status; }
void PrintTo(const CallEnd& end, std::ostream* out);  // for GoogleTest

// One rank's group or context, with one good operation behind it, and the arguments of the
// operation of the test, which comes next. Making one is collective.
class Waiter {
 public:
  virtual ~Waiter() = default;
  // Makes the operation, of which the last call waits for all peers. Calls before that succeed.
  virtual CallEnd call() = 0;
  // Likewise as one call.
  virtual CallEnd call_whole() { return call(); }
  virtual std::uint64_t epoch() const { return 2; }  // of this operation
  // Other arguments for the same group or context, on another stream.
  virtual std::unique_ptr<Waiter> beside(Memory& memory) = 0;
  // The communicator is finished: every call of the family says so with this status.
  virtual void expect_finished(xd_status status) = 0;
  // Frees all but the group or context.
  virtual void free_arguments() = 0;
};

// An operation of some family.
struct Waiting {
  std::string name;       // part of the test's name
  int operation;          // as xd_error_info has it
  std::string mentioned;  // the name that error texts have
  bool tells_epochs;      // waits tell the last epoch of the peer
  std::function<std::unique_ptr<Waiter>(const Rank&)> make;
};
void PrintTo(const Waiting& waiting, std::ostream* out);  // for GoogleTest

std::vector<Waiting> bulk_waits();
std::vector<Waiting> part_waits();         // of later parts of operations
std::vector<Waiting> low_latency_waits();  // of whole calls, and of the receiving halves
std::vector<Waiting> product_waits();

}  // namespace xd::test
