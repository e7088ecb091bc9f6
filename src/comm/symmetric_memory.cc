#include "comm/symmetric_memory.h"

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/math.h"

namespace xd {

// The number of the next segment of symmetric memory. Ranks tell one another by such numbers where
// their tensors lie, so all must count alike.
std::uint32_t SymmetricMemory::agree_on_number(CollectiveCall call) {
  const auto numbers = collective_.agree_on(call, [&] {
    if (device_side_ != nullptr) heap_.require_room();
    return heap_.next_number();
  });
  for (std::size_t r = 0; r < numbers.size(); ++r) {
    if (numbers[r] == numbers[at(rank_)]) continue;
    fail(XD_ERROR_MISMATCH, "rank ", r, " has other segments of symmetric memory than rank ", rank_,
         ": it would give the next one another number");
  }
  return numbers[at(rank_)];
}

void SymmetricMemory::add(CollectiveCall call, std::size_t bytes) {
  const std::uint32_t number = agree_on_number(call);
  const auto any = [](const Segments& segments) {
    return std::ranges::any_of(segments, [](const auto& s) { return s != nullptr; });
  };
  auto segments = collective_.share(memory_, call, bytes, [&](const Segments& mapped) {
    if (any(mapped)) heap_.make_room();  // adding must not fail when all ranks have agreed
    // This comes before any rank's call returns, since its kernels and its peers' kernels may use
    // the memory at once.
    if (device_side_ != nullptr) device_side_->set_heap(number, mapped);
  });
  if (any(segments)) heap_.add(std::move(segments));
}

void SymmetricMemory::require_device_memory() const {
  if (device_side_ != nullptr) return;
  fail(XD_ERROR_UNSUPPORTED,
       "this communicator computes on the CPU, where memory cannot be shared once it is there: use "
       "xd_mem_alloc");
}

void SymmetricMemory::enlist(void* ptr, std::size_t bytes, std::int32_t* registration) {
  require_device_memory();
  collective_.run(Collective::kRegister, [&] {
    XD_REQUIRE(registration != nullptr, "registration = NULL, expected a pointer");
    *registration = add_registered(ptr, bytes);
  });
}

void SymmetricMemory::delist(int registration) {
  require_device_memory();
  collective_.run(Collective::kDeregister, [&] { remove_registered(registration); });
}

int SymmetricMemory::add_registered(void* ptr, std::size_t bytes) {
  const std::uint32_t number = agree_on_number(Collective::kRegister);
  const std::unique_ptr<SegmentMaker> lender = device_side_->lender(ptr);
  Segments segments =
      collective_.share(*lender, Collective::kRegister, bytes, [&](const Segments& of_rank) {
        heap_.make_room();  // adding must not fail when all ranks have agreed
        device_side_->set_heap(number, of_rank);
      });
  heap_.add_registered(std::move(segments));
  return static_cast<int>(number);
}

void SymmetricMemory::remove_registered(int registration) {
  const auto number = static_cast<std::uint32_t>(registration);
  const auto numbers = collective_.agree_on(Collective::kDeregister, [&] {
    XD_REQUIRE(registration >= 0 && heap_.is_registered(number), "registration = ", registration,
               ", expected one that xd_mem_register gave and that is still there");
    return registration;
  });
  for (std::size_t r = 0; r < numbers.size(); ++r) {
    if (numbers[r] != registration) {
      fail(XD_ERROR_MISMATCH, "rank ", r, " deregisters another registration than rank ", rank_);
    }
  }
  Segments mapped;
  bool kernels_know = false;
  try {
    // No rank goes on, to free its memory perhaps, before all have let go of it.
    collective_.agree(Collective::kDeregister, [&] {
      mapped = heap_.remove_registered(number);
      device_side_->set_heap(number, {});
      kernels_know = true;
      return Collective::Contribution{};
    });
  } catch (...) {
    if (!kernels_know) fail_delisting();
    throw;
  }
}

// Inside a catch block: this rank's kernels may still find memory that its owner is about to free,
// so none of them may run any more.
void SymmetricMemory::fail_delisting() {
  std::array<char, 1> no_text;
  const Caught error = caught(no_text);
  FatalError fatal{
      .status = error.status, .phase = XD_PHASE_HOST, .rank = rank_, .peer = rank_, .group = -1};
  fatal.error_number = error.error_number;
  errors_.raise(fatal, Spread::everywhere);
}

}  // namespace xd
