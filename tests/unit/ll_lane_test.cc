// Lanes on the host, over ranks that are threads: halves, credits, and ranks that are masked.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "ep/family.h"
#include "ep/ll_record.h"
#include "turn/host_lane.h"
#include "turn/host_reset.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

using Record = ep::LlRecord;
using Lane = turn::HostLane<Record>;

constexpr int kRanks = 3;
constexpr CollectiveCall kCall{"lane_test"};

// One rank's end of a lane with two slots.
class End {
 public:
  End(std::shared_ptr<Comm> comm, bool masks_lost, int timeout_ms)
      : comm_(std::move(comm)),
        segments_(comm_->share(kCall, make_map().end)),
        areas_(segments_),
        masks(*comm_, {masks_lost, timeout_ms}, areas_, make_map().masked_by),
        reset(*comm_, masks_ref(), areas_, make_map().reset),
        lane(*comm_, 0, {make_map().turn, areas_, 2}, 0, masks_ref()) {}

  void send(std::uint64_t number) {
    lane.begin();
    Record record;
    record.fingerprint = number;
    lane.enter(record);
    lane.ring_peers();
  }
  // The sum of the numbers of all that take part.
  std::uint64_t receive() {
    observe::WaitTimes times(subject_);
    lane.await(times);
    std::uint64_t sum = 0;
    for (int r = 0; r < kRanks; ++r) {
      if (lane.here().has(r)) sum += lane.records()[at(r)].fingerprint;
    }
    lane.leave();
    return sum;
  }
  Comm& comm() { return *comm_; }

 private:
  struct Map {
    turn::TurnMap turn;
    std::uint64_t masked_by, reset, end;
  };
  static Map make_map() {
    LayoutCursor cursor;
    Map map{};
    map.turn = turn::TurnMap::add<Record>(cursor, kRanks, 2);
    map.masked_by = cursor.add<std::uint64_t>(kRanks, 64);
    map.reset = cursor.add<turn::ResetCell>(kRanks);
    map.end = cursor.at;
    return map;
  }
  turn::PeerMasks& masks_ref() { return masks; }

  std::shared_ptr<Comm> comm_;
  Segments segments_;
  NearTable areas_;
  observe::Subject subject_{{comm_->rank(), kRanks, 0, kDLCPU}, ep::Family::kOperations, ""};

 public:
  turn::PeerMasks masks;
  turn::HostReset reset;
  Lane lane;
};

class Lanes : public testing::Test {
 protected:
  void make(bool masks, int timeout_ms = 0) {
    const xd_unique_id id = new_id();
    expect_no_errors(on_threads(kRanks, [&](int rank) {
      xd_comm_config config = id_config(id, rank, kRanks);
      config.timeout_ms = 20000;
      const auto comm = Comm::create(config);
      comm->begin_group();
      ends_[at(rank)] = std::make_unique<End>(comm, masks, timeout_ms);
      comm->collective().barrier();
    }));
  }
  End& end(int rank) { return *ends_[at(rank)]; }

  std::vector<std::unique_ptr<End>> ends_{kRanks};
};

TEST_F(Lanes, TakeHalvesInOrderWhateverOtherRanksDoBetweenTheirs) {
  make(false);
  expect_no_errors(on_threads(kRanks, [&](int rank) {
    for (std::uint64_t n = 0; n < 200; n += 2) {
      if (rank == 0) {  // one after the other
        for (const std::uint64_t i : {n, n + 1}) {
          end(rank).send(i);
          EXPECT_EQ(end(rank).receive(), 3 * i);
        }
      } else {
        end(rank).send(n);
        end(rank).send(n + 1);
        EXPECT_TRUE(end(rank).lane.full());
        EXPECT_EQ(end(rank).receive(), 3 * n);
        EXPECT_EQ(end(rank).receive(), 3 * (n + 1));
      }
    }
  }));
}

TEST_F(Lanes, SendAgainIntoASlotOnlyWhenAllHaveTakenWhatWasThere) {
  make(false);
  std::atomic<bool> taken{false};
  expect_no_errors(on_threads(kRanks, [&](int rank) {
    End& e = end(rank);
    e.send(1);
    e.send(2);
    e.comm().collective().barrier();
    if (rank == 2) {  // the others cannot send a third time before it has taken the first
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      taken = true;
    }
    EXPECT_EQ(e.receive(), 3u);
    e.send(3);
    EXPECT_TRUE(taken);
    EXPECT_EQ(e.receive(), 6u);
    EXPECT_EQ(e.receive(), 9u);
  }));
}

TEST_F(Lanes, DropAnOperationBehindOlderOnes) {
  make(false);
  expect_no_errors(on_threads(kRanks, [&](int rank) {
    End& e = end(rank);
    e.send(1);
    e.send(100);
    if (rank == 1) {
      e.lane.drop_sent();
      EXPECT_EQ(e.lane.between_halves(), 2u);  // still behind the first
    }
    EXPECT_EQ(e.receive(), 3u);
    if (rank != 1) {
      EXPECT_EQ(e.receive(), 300u);
    }
    EXPECT_EQ(e.lane.between_halves(), 0u);
    e.send(7);
    EXPECT_EQ(e.receive(), 21u);
  }));
}

TEST_F(Lanes, MaskARankThatIsLateAndTakeItBackInAReset) {
  make(true, 100);
  std::atomic<int> alone{0};
  expect_no_errors(on_threads(kRanks, [&](int rank) {
    End& e = end(rank);
    e.send(1);
    EXPECT_EQ(e.receive(), 3u);
    if (rank == 2) {
      while (alone < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      // It learns at once that the others have left it out, and works by itself.
      for (std::uint64_t n = 0; n < 9; ++n) {
        e.send(n);
        EXPECT_EQ(e.receive(), n);
      }
      EXPECT_TRUE(e.masks.masked_by().has(0) && e.masks.masked_by().has(1));
    } else {
      for (std::uint64_t n = 0; n < 5; ++n) {
        e.send(n);
        EXPECT_EQ(e.receive(), 2 * n);
        EXPECT_EQ(e.masks.masked().has(2), true);
      }
      ++alone;
    }
    e.comm().collective().barrier();
    for (const NearRank peer : e.lane.peers()) e.masks.unmask(peer);
    e.comm().collective().barrier();
    RankBits lost{};
    const HostWait site{.phase = XD_PHASE_ENTRY,
                        .group = 0,
                        .operation = 0,
                        .epoch = 1,
                        .deadline = Deadline::after_ms(20000)};
    const auto numbers = e.reset.run(site, {e.lane.sent(), 0}, lost);
    EXPECT_TRUE(lost.empty());
    EXPECT_EQ(numbers[0], 10u);  // rank 2 has gone furthest
    e.lane.restart(numbers[0]);
    for (std::uint64_t n = 0; n < 20; ++n) {
      e.send(n);
      EXPECT_EQ(e.receive(), 3 * n);
    }
    EXPECT_TRUE(e.masks.masked().empty() && e.masks.masked_by().empty());
  }));
}

}  // namespace
}  // namespace xd::test
