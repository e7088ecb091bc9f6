// Symmetric memory: one rank's allocations, seen by all.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "conformance/fixed_step.h"
#include "conformance/one_mistake.h"
#include "support/gtest_main.h"
#include "support/random.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

constexpr std::size_t kHeap = std::size_t{1} << 20;  // rounded up to pages, on some devices larger

xd_mem_info memory_info(xd_comm* comm) {
  xd_mem_info info = XD_MEM_INFO_INIT;
  ok(xd_mem_get_info(comm, &info));
  return info;
}

void* allocate(xd_comm* comm, std::size_t bytes) {
  void* ptr = nullptr;
  ok(xd_mem_alloc(comm, bytes, &ptr));
  return ptr;
}

std::vector<std::byte> pattern(int rank, std::size_t bytes) {
  std::vector<std::byte> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    values[i] = static_cast<std::byte>(mix(static_cast<std::uint64_t>(rank), i));
  }
  return values;
}

TEST(SymmetricMemory, IsFreedInAnyOrderAndComesTogetherAgain) {
  on_every_rank([](Rank& rank) {
    const Comm comm = rank.another_comm("memory", kHeap);
    const xd_mem_info empty = memory_info(comm.get());
    EXPECT_GE(empty.total_bytes, kHeap);
    EXPECT_EQ(empty.used_bytes, 0u);
    EXPECT_EQ(empty.largest_free_bytes, empty.total_bytes);
    Random random(static_cast<std::uint64_t>(rank.rank) + 1);  // ranks need not do the same
    for (int round = 0; round < 4; ++round) {
      std::vector<std::byte*> live;
      std::vector<std::size_t> sizes;
      for (int i = 0; i < 50; ++i) {
        sizes.push_back(random.below(8192));
        live.push_back(static_cast<std::byte*>(allocate(comm.get(), sizes.back())));
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(live.back()) % 256, 0u);
      }
      for (std::size_t a = 0; a < live.size(); ++a) {
        for (std::size_t b = 0; b < a; ++b) {
          EXPECT_TRUE(live[a] + sizes[a] <= live[b] || live[b] + sizes[b] <= live[a]);
          EXPECT_NE(live[a], live[b]);
        }
      }
      while (!live.empty()) {
        const auto at = static_cast<std::ptrdiff_t>(random.below(live.size()));
        ok(xd_mem_free(comm.get(), live[static_cast<std::size_t>(at)]));
        live.erase(live.begin() + at);
      }
      EXPECT_EQ(memory_info(comm.get()).used_bytes, 0u);
      EXPECT_EQ(memory_info(comm.get()).largest_free_bytes, empty.total_bytes);
    }
  });
}

TEST(SymmetricMemory, IsSeenByEveryRankThroughHandles) {
  on_every_rank([](Rank& rank) {
    const Comm comm = rank.another_comm("memory", kHeap);
    constexpr std::size_t kBytes = 10000;
    void* mine = allocate(comm.get(), kBytes);
    const std::vector<std::byte> own = pattern(rank.rank, kBytes);
    rank.memory->copy_in(mine, own.data(), kBytes);
    xd_mem_handle handle{};
    ok(xd_mem_export(comm.get(), static_cast<std::byte*>(mine) + 100, &handle));
    EXPECT_EQ(handle.rank, rank.rank);
    ok(xd_comm_barrier(comm.get()));
    for (int peer = 0; peer < rank.num_ranks; ++peer) {
      const xd_mem_handle there{peer, handle.segment, handle.offset};
      void* seen = nullptr;
      ok(xd_mem_import(comm.get(), &there, &seen));
      std::vector<std::byte> got(kBytes - 100);
      rank.memory->copy_out(got.data(), seen, got.size());
      const std::vector<std::byte> theirs = pattern(peer, kBytes);
      EXPECT_TRUE(std::equal(got.begin(), got.end(), theirs.begin() + 100)) << "rank " << peer;
      // The same by a copy of some of it, whose neighbours stay as they are.
      Buffer copied(rank, 5000, Place::ordinary);
      copied.fill(kPoison);
      ok(xd_mem_copy(comm.get(), copied.data(), &there, 0, rank.stream()));
      ok(xd_mem_copy(comm.get(), copied.data(), &there, 4999, rank.stream()));
      rank.memory->synchronize();
      const std::vector<std::byte> some = copied.read();
      EXPECT_TRUE(std::equal(some.begin(), some.end() - 1, theirs.begin() + 100));
      EXPECT_EQ(some.back(), kPoison);
      EXPECT_TRUE(copied.guards_intact());
    }
    ok(xd_comm_barrier(comm.get()));
  });
}

TEST(SymmetricMemory, IsNotCopiedFromPlacesThatDoNotExist) {
  on_every_rank([](Rank& rank) {
    const Comm comm = rank.another_comm("memory", kHeap);
    Buffer to(rank, 64, Place::ordinary);
    to.fill(kPoison);
    const auto refused = [&](const xd_mem_handle& from, std::size_t bytes, const char* words) {
      expect_error(xd_mem_copy(comm.get(), to.data(), &from, bytes, rank.stream()),
                   XD_ERROR_INVALID_ARGUMENT, words);
    };
    refused({rank.num_ranks, 0, 0}, 1, "from.rank = ");
    refused({-1, 0, 0}, 1, "from.rank = -1");
    refused({0, 7, 0}, 1, "from: rank 0 has no place at segment 7");
    refused({0, 0, std::uint64_t{1} << 40}, 1, "from: rank 0 has no place");
    refused({0, 0, 0}, std::size_t{1} << 40, "from: rank 0 has no place");
    EXPECT_EQ(xd_mem_copy(comm.get(), nullptr, nullptr, 0, rank.stream()),
              XD_ERROR_INVALID_ARGUMENT);
    const std::vector<std::byte> bytes = to.read();
    EXPECT_TRUE(std::ranges::all_of(bytes, [](std::byte b) { return b == kPoison; }));
  });
}

TEST(SymmetricMemory, GrowsByDifferentAmountsAndMovesNothing) {
  on_every_rank([](Rank& rank) {
    const Comm comm = rank.another_comm("memory", rank.rank % 2 == 0 ? 0 : kHeap);
    void* before = nullptr;
    if (rank.rank % 2 == 1) {
      before = allocate(comm.get(), 1000);
      const std::vector<std::byte> own = pattern(rank.rank, 1000);
      rank.memory->copy_in(before, own.data(), own.size());
    }
    const std::size_t grown = std::size_t{4096} * static_cast<std::size_t>(rank.rank + 1);
    const xd_mem_info first = memory_info(comm.get());
    ok(xd_mem_grow(comm.get(), grown));
    EXPECT_GE(memory_info(comm.get()).total_bytes, first.total_bytes + grown);
    EXPECT_EQ(memory_info(comm.get()).segments, first.segments + 1);
    void* after = allocate(comm.get(), grown);
    const std::vector<std::byte> own = pattern(rank.rank, grown);
    rank.memory->copy_in(after, own.data(), own.size());
    xd_mem_handle handle{};
    ok(xd_mem_export(comm.get(), after, &handle));
    // Peers publish their handle where all can read it: in a growth of one page that all share.
    ok(xd_mem_grow(comm.get(), 4096));
    ok(xd_comm_barrier(comm.get()));
    void* back = nullptr;
    ok(xd_mem_import(comm.get(), &handle, &back));
    EXPECT_EQ(back, after);
    if (before) {
      std::vector<std::byte> still(1000);
      rank.memory->copy_out(still.data(), before, still.size());
      EXPECT_EQ(still, pattern(rank.rank, 1000));
    }
    ok(xd_mem_grow(comm.get(), 0));
  });
}

// A pool that grows, or registers, segment by segment.
TEST(SymmetricMemory, GrowsThousandsOfTimes) {
  if (world().memory().device().device_type != kDLCPU) return;  // registrations: below
  // Every rank maps all segments of all ranks; with many, fewer of them are enough.
  const int growths = world().num_ranks() <= 2 ? 3000 : 100;
  on_every_rank([&](Rank& rank) {
    const Comm comm = rank.another_comm("memory", 4096);
    for (int i = 0; i < growths; ++i) ok(xd_mem_grow(comm.get(), 4096));
    EXPECT_EQ(memory_info(comm.get()).segments, growths + 1);
    std::vector<bool> found(static_cast<std::size_t>(growths) + 1);
    for (int i = 0; i <= growths; ++i) {
      xd_mem_handle handle{};
      auto* ptr = static_cast<std::byte*>(allocate(comm.get(), 4096));
      ok(xd_mem_export(comm.get(), ptr + 17, &handle));
      EXPECT_EQ(handle.offset, 17u);
      ASSERT_FALSE(found.at(static_cast<std::size_t>(handle.segment))) << handle.segment;
      found[static_cast<std::size_t>(handle.segment)] = true;
      void* back = nullptr;
      ok(xd_mem_import(comm.get(), &handle, &back));
      EXPECT_EQ(back, ptr + 17);
    }
    EXPECT_EQ(memory_info(comm.get()).largest_free_bytes, 0u);
  });
}

TEST(SymmetricMemory, ExhaustionIsAStatusWithTheSizes) {
  on_every_rank([](Rank& rank) {
    const Comm comm = rank.another_comm("memory", kHeap);
    void* big = allocate(comm.get(), kHeap / 2);
    const xd_mem_info info = memory_info(comm.get());
    void* ptr = nullptr;
    const std::size_t asked = info.largest_free_bytes + 1;
    EXPECT_EQ(xd_mem_alloc(comm.get(), asked, &ptr), XD_ERROR_OUT_OF_MEMORY);
    const std::string text = xd_last_error();
    for (const std::size_t size : {asked, info.largest_free_bytes, info.total_bytes}) {
      EXPECT_NE(text.find(std::to_string(size)), std::string::npos) << size << " in: " << text;
    }
    EXPECT_EQ(ptr, nullptr);
    EXPECT_EQ(xd_mem_alloc(comm.get(), SIZE_MAX, &ptr), XD_ERROR_OUT_OF_MEMORY);
    ok(xd_mem_free(comm.get(), allocate(comm.get(), info.largest_free_bytes)));
    ok(xd_mem_free(comm.get(), big));
    EXPECT_EQ(memory_info(comm.get()).used_bytes, 0u);
  });
}

TEST(SymmetricMemory, AGrowthThatOneRankCannotAffordGrowsNowhere) {
  on_every_rank([](Rank& rank) {
    const Comm comm = rank.another_comm("memory", kHeap);
    const bool guilty = rank.rank == rank.num_ranks - 1;
    const std::size_t bytes = guilty ? std::size_t{1} << 50 : 4096;
    EXPECT_EQ(xd_mem_grow(comm.get(), bytes), guilty ? XD_ERROR_OUT_OF_MEMORY : XD_ERROR_MISMATCH)
        << xd_last_error();
    if (!guilty) {
      expect_said("rank " + std::to_string(rank.num_ranks - 1));
    }
    EXPECT_EQ(memory_info(comm.get()).segments, 1);
    ok(xd_mem_grow(comm.get(), 4096));
    EXPECT_EQ(memory_info(comm.get()).segments, 2);
  });
}

// Without staging nothing but the registration lets rows reach these tensors.
void use_in_place(const Rank& rank) {
  FixedShape shape;
  shape.staging = XD_EP_STAGING_NONE;
  FixedStep step(rank, shape);
  std::vector<std::int32_t> registrations;
  for (Tensor* tensor : step.receive_tensors()) {
    const xd_status status =
        xd_mem_register(rank.comm, tensor->buffer().data(), tensor->buffer().bytes(),
                        &registrations.emplace_back());
    if (rank.memory->device().device_type == kDLCPU) {
      EXPECT_EQ(status, XD_ERROR_UNSUPPORTED) << xd_last_error();
      return;
    }
    ok(status);
  }
  const Group group = make_group(rank.comm, shape.config(rank.num_ranks));
  for (int number = 0; number < 7; ++number) {
    step.load(number);
    step.enqueue_all(group.get());
    ok(finish(rank, group.get(), XD_SUCCESS));
    step.check();
  }
  for (const std::int32_t registration : registrations) {
    ok(xd_mem_deregister(rank.comm, registration));
  }
  EXPECT_EQ(step.enqueue(group.get(), XD_EP_PREPARE), XD_SUCCESS) << xd_last_error();
  EXPECT_EQ(finish(rank, group.get(), step.enqueue(group.get(), XD_EP_DISPATCH)),
            XD_ERROR_INVALID_ARGUMENT);
}

TEST(SymmetricMemory, OfTheCallerIsUsedInPlaceOnceRegistered) { on_every_rank(use_in_place); }

TEST(SymmetricMemory, TellsAllRanksOfARegistrationWithoutAPlaceForItsNumber) {
  on_every_rank([](Rank& rank) {
    if (rank.memory->device().device_type == kDLCPU) return;  // it is refused there
    const auto take = [&](std::int32_t* number) {
      return xd_mem_register(rank.comm, nullptr, 0, number);
    };
    expect_mistake<std::int32_t>(
        rank, "registration = NULL", -1, [&](std::int32_t*) { return take(nullptr); }, take);
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(SymmetricMemory, RegistersThousandsOfSegmentsBesideThoseInUse) {
  on_every_rank([](Rank& rank) {
    if (rank.memory->device().device_type == kDLCPU) return;
    constexpr std::size_t kPiece = 256, kPieces = 3000;
    Buffer pool(rank, kPiece * kPieces, Place::ordinary);
    std::vector<std::int32_t> registrations(kPieces);
    for (std::size_t i = 0; i < kPieces; ++i) {
      ok(xd_mem_register(rank.comm, static_cast<std::byte*>(pool.data()) + i * kPiece, kPiece,
                         &registrations[i]));
    }
    use_in_place(rank);
    for (const std::int32_t registration : registrations) {
      ok(xd_mem_deregister(rank.comm, registration));
    }
  });
}

TEST(SymmetricMemory, VirtualMemoryOfTheCallerIsUsedInPlaceOnceRegistered) {
  on_every_rank([](Rank& rank) {
    const std::unique_ptr<Memory> memory = rank.memory->of_virtual_memory();
    if (memory == nullptr) {
      EXPECT_EQ(rank.memory->device().device_type, kDLCPU);
      return;
    }
    use_in_place(rank.on(*memory));
  });
}

TEST(SymmetricMemory, WrongPointersAndPlacesAreRefused) {
  on_every_rank([](Rank& rank) {
    const Comm comm = rank.another_comm("memory", kHeap);
    auto* ptr = static_cast<std::byte*>(allocate(comm.get(), 1000));
    int local = 0;
    EXPECT_EQ(xd_mem_free(comm.get(), ptr + 256), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_mem_free(comm.get(), &local), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(xd_mem_free(comm.get(), nullptr), XD_SUCCESS);
    ok(xd_mem_free(comm.get(), ptr));
    EXPECT_EQ(xd_mem_free(comm.get(), ptr), XD_ERROR_INVALID_ARGUMENT) << "freed twice";
    xd_mem_handle handle{};
    EXPECT_EQ(xd_mem_export(comm.get(), &local, &handle), XD_ERROR_INVALID_ARGUMENT);
    ok(xd_mem_export(comm.get(), ptr, &handle));
    void* seen = nullptr;
    for (const xd_mem_handle& bad :
         {xd_mem_handle{rank.num_ranks, 0, 0}, xd_mem_handle{-1, 0, 0}, xd_mem_handle{0, 1, 0},
          xd_mem_handle{0, -1, 0}, xd_mem_handle{0, 0, std::uint64_t{1} << 40}}) {
      EXPECT_EQ(xd_mem_import(comm.get(), &bad, &seen), XD_ERROR_INVALID_ARGUMENT);
    }
  });
}

}  // namespace
}  // namespace xd::test
