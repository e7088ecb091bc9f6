// The numbers of segments: kernels find symmetric memory by them.
#include "comm/symmetric_heap.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "comm/device/comm.h"
#include "unit/errors.h"

namespace xd {
namespace {

std::byte* at(std::uintptr_t address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// Memory that nobody touches.
class FakeSegment final : public Segment {
 public:
  FakeSegment(std::uintptr_t base, std::size_t bytes) : Segment(at(base), bytes, false) {}
};

class HeapNumbers : public testing::Test {
 protected:
  static constexpr std::size_t kBytes = 4096;

  SymmetricHeap::OfRank fresh() {
    next_base_ += kBytes;
    return {std::make_shared<FakeSegment>(next_base_, kBytes)};
  }
  std::uint32_t enlist() {
    const std::uint32_t number = heap_.next_number();
    heap_.require_room();
    heap_.add_registered(fresh());
    EXPECT_TRUE(heap_.is_registered(number));
    return number;
  }
  void delist(std::uint32_t number) {
    EXPECT_EQ(heap_.remove_registered(number).size(), 1u);
    EXPECT_FALSE(heap_.is_registered(number));
  }
  bool full() const {
    return !test::refusal_of([&] { heap_.require_room(); }, XD_ERROR_OUT_OF_MEMORY).empty();
  }

  std::uintptr_t next_base_ = 1 << 20;
  SymmetricHeap heap_{0};
};

TEST_F(HeapNumbers, OfAnEndedRegistrationAreGivenAgainAfterAllOthers) {
  heap_.add(fresh());
  const std::uint32_t kept = enlist();
  std::map<std::uint32_t, int> last_round;
  for (int round = 0; round < 3 * static_cast<int>(kMaxHeapSegments); ++round) {
    const std::uint32_t number = enlist();
    ASSERT_LT(number, kMaxHeapSegments);
    ASSERT_NE(number, 0u) << "the heap's own";
    ASSERT_NE(number, kept);
    if (last_round.contains(number)) {
      ASSERT_GE(round - last_round[number], static_cast<int>(kMaxHeapSegments) - 2) << number;
    }
    last_round[number] = round;
    delist(number);
  }
  EXPECT_EQ(last_round.size(), kMaxHeapSegments - 2);
}

TEST_F(HeapNumbers, RunOutOnlyWhenAllAreInUse) {
  std::deque<std::uint32_t> alive;
  heap_.add(fresh());
  // Wherever the registrations that stay may lie, growths find room beside them.
  for (int round = 0; round < static_cast<int>(kMaxHeapSegments); ++round) {
    alive.push_back(enlist());
    if (alive.size() <= 3) continue;
    delist(alive.front());
    alive.pop_front();
  }
  for (std::size_t in_use = 1 + alive.size(); in_use < kMaxHeapSegments; ++in_use) {
    ASSERT_FALSE(full()) << in_use;
    heap_.add(fresh());
  }
  EXPECT_TRUE(full());
  delist(alive.front());
  EXPECT_FALSE(full());
  EXPECT_EQ(enlist(), alive.front()) << "the only one";
  EXPECT_TRUE(full());
}

TEST_F(HeapNumbers, LeadToTheMemoryThatWasAddedWithThem) {
  // Growths and registrations take turns, and the places of both lead where they should.
  std::vector<std::uint32_t> registered;
  for (int i = 0; i < 5; ++i) {
    heap_.add(fresh());
    registered.push_back(enlist());
  }
  for (int i = 0; i < 5; ++i) {
    const auto number = static_cast<std::uint32_t>(2 * i);
    EXPECT_EQ(heap_.address(0, {number, 16}, 8),
              at((1 << 20) + (2 * static_cast<std::size_t>(i) + 1) * kBytes + 16));
    EXPECT_FALSE(heap_.is_registered(number));
  }
  std::vector<void*> allocated;
  for (int i = 0; i < 5; ++i) {
    void* const ptr = heap_.allocate(kBytes);  // a whole segment
    const auto place = heap_.find(ptr, kBytes);
    ASSERT_TRUE(place);
    EXPECT_EQ(place->offset, 0u);
    EXPECT_FALSE(heap_.is_registered(place->segment)) << place->segment;
    EXPECT_EQ(heap_.address(0, *place, kBytes), ptr);
    allocated.push_back(ptr);
  }
  for (const std::uint32_t number : registered) {
    void* const lent = heap_.address(0, {number, 0}, 1);
    ASSERT_NE(lent, nullptr);
    EXPECT_EQ(heap_.find(lent, 1)->segment, number);
    EXPECT_FALSE(heap_.release(lent)) << "it was not allocated here";
    delist(number);
    EXPECT_EQ(heap_.address(0, {number, 0}, 1), nullptr);
    EXPECT_FALSE(heap_.find(lent, 1));
  }
  for (void* const ptr : allocated) EXPECT_TRUE(heap_.release(ptr));
  EXPECT_EQ(heap_.usage().used, 0u);
}

}  // namespace
}  // namespace xd
