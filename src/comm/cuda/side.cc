#include "comm/cuda/side.h"

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "comm/cuda/registered.h"
#include "cuda/memory.h"

namespace xd {
namespace {

class CudaSide final : public DeviceSide {
 public:
  CudaSide(int ordinal, const RankInfo& info, std::vector<std::shared_ptr<Segment>> boards)
      : ordinal_(ordinal),
        boards_(std::move(boards)),
        words_(ordinal, sizeof(HostWords)),
        table_(ordinal, table_offset(kMaxHeapSegments, info.num_ranks), "table of heaps"),
        board_table_(ordinal, boards_.size() * sizeof(DeviceBoard*), "table of error boards"),
        no_board_(ordinal, sizeof(DeviceBoard), "an error board") {
    device_comm_.rank = info.rank;
    device_comm_.num_ranks = info.num_ranks;
    device_comm_.timeout_ms = info.timeout_ms;
    device_comm_.host = words_.as<HostWords>();
    device_comm_.heap = table_.as<HeapRange>();
    std::vector<DeviceBoard*> of_rank;
    for (const auto& board : boards_) {
      // Ranks of other machines have none here: their hosts tell them of errors.
      of_rank.push_back(board ? reinterpret_cast<DeviceBoard*>(board->base())
                              : no_board_.as<DeviceBoard>());
    }
    board_table_.write(0, of_rank.data(), board_table_.bytes());
    device_comm_.own_board = of_rank[at(info.rank)];
    device_comm_.boards = board_table_.as<DeviceBoard*>();
  }

  const DeviceComm& device_comm() const override { return device_comm_; }

  std::unique_ptr<SegmentMaker> lender(void* ptr) const override {
    return std::make_unique<CudaLender>(ordinal_, ptr);
  }

  void set_finished() override { store(words().finished); }
  void set_lost(int rank, bool left) override {
    // Release, one after the other: a kernel that has seen one of them also sees those before it.
    if (left) add(words().left, rank);
    add(words().lost, rank);
    if (!left && words().dead == 0) store(words().dead, static_cast<std::uint32_t>(rank) + 1);
    store(words().some_lost);
  }

  void set_heap(std::uint32_t segment, std::span<const std::shared_ptr<Segment>> of_rank) override {
    XD_CHECK(segment < kMaxHeapSegments);
    std::array<HeapRange, kMaxDeviceRanks> ranges{};
    for (std::size_t r = 0; r < of_rank.size(); ++r) {
      if (of_rank[r]) ranges[r] = {of_rank[r]->base(), of_rank[r]->bytes()};
    }
    const int num_ranks = device_comm_.num_ranks;
    table_.write(table_offset(segment, num_ranks), ranges.data(), table_offset(1, num_ranks));
  }

  const FatalError* raised() const override {
    const bool complete = std::atomic_ref(words().raised).load(std::memory_order_acquire) != 0;
    return complete ? &words().error : nullptr;
  }

 private:
  static std::size_t table_offset(std::uint32_t segment, int num_ranks) {
    return heap_entry(segment, 0, num_ranks) * sizeof(HeapRange);
  }
  HostWords& words() const { return *words_.as<HostWords>(); }
  static void store(std::uint32_t& word, std::uint32_t value = 1) {
    std::atomic_ref(word).store(value, std::memory_order_release);
  }
  static void add(RankBits& ranks, int rank) {
    std::atomic_ref word(ranks.word[rank / 64]);
    const std::uint64_t others = word.load(std::memory_order_relaxed);  // this is the only writer
    word.store(others | std::uint64_t{1} << (rank % 64), std::memory_order_release);
  }

  const int ordinal_;
  std::vector<std::shared_ptr<Segment>> boards_;
  cuda::PinnedBlock words_;
  cuda::DeviceBuffer table_, board_table_;
  cuda::DeviceBuffer no_board_;  // a board that nobody reads
  DeviceComm device_comm_{};
};

}  // namespace

std::unique_ptr<DeviceSide> make_cuda_side(int ordinal, const RankInfo& info,
                                           std::vector<std::shared_ptr<Segment>> boards) {
  return std::make_unique<CudaSide>(ordinal, info, std::move(boards));
}

}  // namespace xd
