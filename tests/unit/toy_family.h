// A family of one operation, made by the steps of docs/internals/families.md: in each turn every
// rank passes a number on to the next rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/math.h"
#include "comm/comm.h"
#include "comm/near_memory.h"
#include "turn/host/runner.h"
#include "turn/host/turn.h"
#include "turn/peer_address.h"
#include "turn/sequence.h"

namespace xd::toy {

struct Record {
  turn::Call call{};
  std::uint8_t padding[6]{};
  std::uint64_t factor = 0;     // numbers are multiplied by it; equal on all ranks
  turn::PeerAddress mailbox{};  // the word that the lower neighbour writes
  std::uint64_t unused[4]{};
};

struct Family {
  using Record = toy::Record;
  struct Facts {};
  struct Status {
    xd_status status = XD_SUCCESS;
    std::int32_t operation = 0, rank = -1;
    std::uint64_t epoch = 0;
    char text[256]{};
  };

  static constexpr const char* kNames[] = {"pass"};
  static constexpr Operations kOperations{"toy_", "a toy operation", 0, kNames};

  static constexpr bool same_operation(const Record& a, const Record& b) {
    return a.factor == b.factor;
  }
  static std::string difference(const Record& mine, const Record& theirs) {
    return concat("factor ", theirs.factor, ", here ", mine.factor);
  }
  static constexpr Status no_error() { return {}; }
  static void tell(const turn::OperationError<Family>&, Status&) {}
  static void tell_caller(const turn::OperationError<Family>&, Status&) {}
};

// The memory that every rank shares.
struct Map {
  turn::TurnMap turn;
  std::uint64_t views, mailbox, end;

  static constexpr Map make(int ranks) {
    LayoutCursor cursor;
    Map map{};
    map.turn = turn::TurnMap::add<Record>(cursor, ranks);
    map.views = cursor.add<turn::ViewCell>(static_cast<std::uint64_t>(ranks), 64);
    map.mailbox = cursor.add<std::uint64_t>(1);
    map.end = cursor.at;
    return map;
  }
};

class HostToy final : public turn::Sequence<Family> {
 public:
  // Collective, and called after Comm::begin_group().
  explicit HostToy(const std::shared_ptr<Comm>& comm)
      : Sequence(comm),
        map_(Map::make(comm->num_ranks())),
        segments_(comm->share(CollectiveCall{"toy_create"}, map_.end)),
        areas_(segments_),
        turn_(*comm, number(), map_.turn, areas_, subject()) {}

  // Gives `number` times `factor` to the next rank, and returns what the lower neighbour gave.
  std::uint64_t pass(std::uint64_t number, std::uint64_t factor) {
    std::uint64_t received = 0;
    forget_last_error();
    runner_.run(0, [&] { return Pass{*this, number, factor, received}; });
    return received;
  }
  // From now on the loss of a rank finishes nothing.
  void outlive_losses() { turn_.outlive_losses(map_.views); }
  void enter_view(const View& view) {
    forget_last_error();
    runner_.enter_view(
        1, [&] { return view; }, [] {});
  }
  std::uint64_t epoch() const { return turn_.epoch(); }
  const Map& map() const { return map_; }
  const NearTable& areas() const { return areas_; }
  std::uint64_t& mailbox() {
    const NearRank self = comm().hosts().self();
    return *areas_.of(self).from(map_.mailbox).array<std::uint64_t>();
  }
  const volatile std::uint64_t* watch() const override { return runner_.watch(); }

 protected:
  void take_failed_turn(std::int32_t operation, Error&& error, xd_stream) override {
    runner_.run_failed(operation, std::move(error));
  }

 private:
  struct Pass {
    HostToy& toy;
    std::uint64_t number, factor;
    std::uint64_t& received;

    Record record() const {
      Record record;
      record.factor = factor;
      record.mailbox = turn::PeerAddress::shared(toy.map_.mailbox);
      return record;
    }
    void stage_in() {}
    void announce() {}
    turn::OperationError<Family> obstacle() const { return {}; }
    void move() { *toy.next_mailbox() = number * factor; }
    turn::OperationError<Family> complete() {
      received = toy.mailbox();
      return {};
    }
  };

  // The mailbox of the next rank that takes part.
  std::uint64_t* next_mailbox() {
    const NearRanks& near = comm().hosts().near();
    std::size_t place = at(rank() + 1) % near.size();
    while (!turn_.takes_part(near[place])) place = (place + 1) % near.size();
    const NearRank next = near[place];
    std::byte* found = turn::find_peer_memory(
        turn_.record_of(next).mailbox, sizeof(std::uint64_t), alignof(std::uint64_t),
        {areas_.of(next).address(), segments_[at(next)]->bytes()}, [](std::uint64_t) {
          return HeapRange{nullptr, 0};
        });
    if (found == nullptr) fail(XD_ERROR_MISMATCH, "rank ", int{next}, " offers no mailbox");
    return reinterpret_cast<std::uint64_t*>(found);
  }

  const Map map_;
  const Segments segments_;
  const NearTable areas_;
  turn::HostTurn<Record> turn_;
  turn::HostRunner<Family> runner_{*this, turn_, false};
};

}  // namespace xd::toy
