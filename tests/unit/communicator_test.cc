// Communicators of threads, by their own header: what the C API cannot bring about.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memory/host_segment.h"
#include "unit/comms.h"
#include "unit/mesh/support.h"

namespace xd::test {
namespace {

std::vector<std::shared_ptr<xd::Comm>> masking_comms(int num_ranks) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
  return make_comms(num_ranks, config);
}

xd::Cause cause(const char* text) {
  xd::Cause result;
  std::strncpy(result.text.data(), text, result.text.size() - 1);
  return result;
}

// A device that may refuse to be told where symmetric memory lies, and whose kernels may meet an
// error.
class FakeDevice final : public DeviceSide {
 public:
  explicit FakeDevice(bool refuses) : refuses_(refuses) {}
  const DeviceComm& device_comm() const override { return device_comm_; }
  std::unique_ptr<SegmentMaker> lender(void*) const override { return nullptr; }
  void set_finished() override {}
  void set_lost(int rank, bool left) override { lost.emplace_back(rank, left); }
  void set_heap(std::uint32_t, std::span<const std::shared_ptr<Segment>>) override {
    if (refuses_) fail(XD_ERROR_SYSTEM, "the device refuses");
  }
  const FatalError* raised() const override { return raised_; }
  std::vector<std::pair<int, bool>> lost;  // as it was told
  void raise(const FatalError& error) {
    error_ = error;
    raised_ = &error_;
  }

 private:
  bool refuses_;
  DeviceComm device_comm_{};
  FatalError error_;
  std::atomic<const FatalError*> raised_{nullptr};
};

// The errors of rank 1 of 2 ranks, with a device and without a peer.
class ErrorsOfRank1 {
 public:
  FakeDevice device{false};

  explicit ErrorsOfRank1(xd_comm_peer_loss on_peer_loss = XD_COMM_PEER_LOSS_FATAL) {
    member_.join(new_id(), 0, 1);
    const HostSegmentMaker host;
    for (int r = 0; r < 2; ++r) {
      segments_.push_back(host.create(RankBoardMap::make(2).end, "a board").segment);
    }
    errors_ = std::make_unique<Errors>(hosts_, *member_.mesh, segments_, &device, on_peer_loss);
  }
  Errors& operator*() { return *errors_; }
  Errors* operator->() { return errors_.get(); }
  // Does as rank 0 when it leaves with an error.
  void report_of_rank_0(const FatalError& error) {
    RankBoard(NearMemory(segments_[1]->base()), 2).post(0, error);
  }

 private:
  Member member_;
  const HostMap hosts_{1, 2};
  Segments segments_;
  std::unique_ptr<Errors> errors_;
};

void expect_fatal(const Errors& errors, xd_status status, int rank, const std::string& text) {
  const ToldError* error = errors.fatal_error();
  ASSERT_NE(error, nullptr);
  EXPECT_EQ(error->status, status);
  EXPECT_EQ(error->rank, rank);
  expect_words(errors.text_of(*error), {text});
  expect_error(error_of([&] { errors.check_usable(); }), status, text);
}

// An error of an operation in a group whose errors are fatal, as rank `rank` meets it.
FatalError met_by(int rank, xd_status status) {
  return {.status = status,
          .rank = rank,
          .peer = 1,
          .group = 7,
          .operation = 1,
          .expected_epoch = 4,
          .met_by_all = 1};
}

// A rank whose end is masked is told to kernels and to those who ask, and finishes nothing.
TEST(Communicator, RemembersLossesThatItMasks) {
  ErrorsOfRank1 errors(XD_COMM_PEER_LOSS_MASK);
  expect_no_errors({error_of([&] { errors->require_all_ranks(); })});
  EXPECT_FALSE(errors->lost(0));
  errors->on_lost({.ranks = std::array{0}});
  EXPECT_TRUE(errors->lost(0));
  EXPECT_FALSE(errors->left(0));
  EXPECT_EQ(errors->dead(), 0);
  EXPECT_EQ(errors.device.lost, (std::vector<std::pair<int, bool>>{{0, false}}));
  EXPECT_EQ(errors->fatal_error(), nullptr);
  expect_error(error_of([&] { errors->require_all_ranks(); }), XD_ERROR_PEER_LOST,
               "rank 0 has been lost");
}

TEST(Communicator, IsFinishedByLossesThatItDoesNotMask) {
  ErrorsOfRank1 errors;
  errors->on_lost({.ranks = std::array{0}});
  expect_fatal(*errors, XD_ERROR_PEER_LOST, 1,
               concat("rank 0 was lost: the process has ended or broken the protocol (pid ",
                      ::getpid(), "), which finishes a communicator with on_peer_loss = FATAL"));
  EXPECT_TRUE(errors->lost(0));
  EXPECT_TRUE(errors.device.lost.empty()) << "kernels know that the communicator is finished";
}

// An error that a rank on another host has met comes as bytes, and counts once.
TEST(Communicator, TakesOverWhatARankOnAnotherHostReports) {
  ErrorsOfRank1 errors;
  ToldError timeout(
      FatalError{.status = XD_ERROR_TIMEOUT, .rank = 0, .peer = 1, .timeout_ms = 250});
  timeout.set_call("xd_mem_grow");
  errors->on_report(0, std::as_bytes(std::span(&timeout, 1)).first(8));
  EXPECT_EQ(errors->fatal_error(), nullptr) << "of another version perhaps";
  errors->on_report(0, std::as_bytes(std::span(&timeout, 1)));
  expect_fatal(*errors, XD_ERROR_TIMEOUT, 0, "rank 0 waited 250 ms in xd_mem_grow");
  const ToldError other(FatalError{.status = XD_ERROR_SYSTEM, .rank = 0});
  errors->on_report(0, std::as_bytes(std::span(&other, 1)));
  expect_fatal(*errors, XD_ERROR_TIMEOUT, 0, "rank 0 waited 250 ms");
}

// In either case a rank that leaves is remembered, and finishes nothing by that.
TEST(Communicator, RemembersRanksThatLeave) {
  for (const auto on_peer_loss : {XD_COMM_PEER_LOSS_FATAL, XD_COMM_PEER_LOSS_MASK}) {
    ErrorsOfRank1 errors(on_peer_loss);
    errors->on_left(0);
    EXPECT_TRUE(errors->lost(0));
    EXPECT_TRUE(errors->left(0));
    EXPECT_EQ(errors->dead(), -1);
    EXPECT_EQ(errors.device.lost, (std::vector<std::pair<int, bool>>{{0, true}}));
    EXPECT_EQ(errors->fatal_error(), nullptr);
  }
}

TEST(Communicator, ThatMasksLossesGoesOnWhenACallNeedsARankThatHasLeft) {
  const auto comms = masking_comms(3);
  comms[2]->close();
  const auto errors = on_threads(2, [&](int rank) { comms[at(rank)]->collective().barrier(); });
  for (int rank = 0; rank < 2; ++rank) {
    expect_error(errors[at(rank)], XD_ERROR_PEER_LOST, "rank 2 has left");
    expect_error(error_of([&] { comms[at(rank)]->memory().grow(4096); }), XD_ERROR_PEER_LOST,
                 "rank 2 has left");
    EXPECT_TRUE(comms[at(rank)]->errors().lost(2));
    EXPECT_EQ(comms[at(rank)]->errors().fatal_error(), nullptr);
  }
}

// A wait for rank 1, which is there and does not come.
std::optional<Error> wait_for_rank_1(xd::Comm& comm, bool needs_all_ranks, int timeout_ms) {
  const HostWait site{.phase = XD_PHASE_ENTRY,
                      .group = 0,
                      .operation = 1,
                      .epoch = 5,
                      .deadline = Deadline::after_ms(timeout_ms),
                      .needs_all_ranks = needs_all_ranks};
  return error_of([&] {
    comm.wait_for(
        1, site, [] { return false; }, [] { return 4; });
  });
}

TEST(Communicator, ThatMasksLossesEndsAWaitByADeathIfTheOperationNeedsAllRanks) {
  const auto comms = masking_comms(3);
  comms[0]->errors().on_lost({.ranks = std::array{2}});
  expect_error(wait_for_rank_1(*comms[0], true, 20000), XD_ERROR_PEER_LOST, "rank 2 was lost");
  expect_fatal(comms[0]->errors(), XD_ERROR_PEER_LOST, 0, "rank 2 was lost");
  EXPECT_EQ(comms[1]->errors().fatal_error(), nullptr) << "it has needed nobody";
  comms[2]->errors().on_lost({.ranks = std::array{0}});
  expect_error(wait_for_rank_1(*comms[2], false, 50), XD_ERROR_TIMEOUT, "for rank 1");
}

TEST(Communicator, ItsRanksAllMaskLossesOrNone) {
  const xd_unique_id id = new_id();
  const auto errors = on_threads(2, [&](int rank) {
    xd_comm_config config = id_config(id, rank, 2);
    if (rank == 1) config.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
    xd::Comm::create(config);
  });
  for (const auto& error : errors) {
    expect_error(error, XD_ERROR_MISMATCH,
                 "config.on_peer_loss = 0 on rank 0 and 1 on rank 1, expected equal values");
  }
}

// The outcome of a communicator's creation for each rank; rank r names its host `hosts[r]`.
std::vector<std::optional<Error>> create_on_hosts(const std::vector<const char*>& hosts) {
  const xd_unique_id id = new_id();
  const int num_ranks = static_cast<int>(hosts.size());
  return on_threads(num_ranks, [&](int rank) {
    xd_comm_config config = id_config(id, rank, num_ranks);
    config.host = hosts[at(rank)];
    config.timeout_ms = 20000;
    xd::Comm::create(config);
  });
}

TEST(Communicator, ItsRanksAllNameTheirHostsOrNone) {
  expect_no_errors(create_on_hosts({"a", "b", "a"}));
  for (const auto& error : create_on_hosts({"a", nullptr, "b", nullptr})) {
    expect_error(error, XD_ERROR_MISMATCH,
                 "config.host = 'a' on rank 0 and not given on ranks 1, 3, expected that all "
                 "ranks name their hosts, or none");
  }
}

TEST(Communicator, ARankNamesItsHostByAtMost63Bytes) {
  const std::string longest(63, 'h'), longer(64, 'h');
  expect_no_errors(create_on_hosts({longest.c_str()}));
  expect_error(create_on_hosts({""})[0], XD_ERROR_INVALID_ARGUMENT,
               "config.host = '' of 0 bytes, expected 1 to 63 bytes");
  expect_error(create_on_hosts({longer.c_str()})[0], XD_ERROR_INVALID_ARGUMENT,
               longer + "' of 64 bytes, expected 1 to 63 bytes");
}

// Every rank meets such an error by itself; the first to leave also writes it to the others'
// boards, so that its goodbye is not taken for the cause.
TEST(Communicator, ShowsStatusAndTextOfOneRankAndItsOwnOnceItHasMetAnError) {
  auto comms = make_comms(2);
  comms[0]->errors().raise_cause(met_by(0, XD_ERROR_MISMATCH), cause("as rank 0 has it"));
  expect_fatal(comms[0]->errors(), XD_ERROR_MISMATCH, 0, "as rank 0 has it");
  comms[0]->close();
  Errors& errors = comms[1]->errors();
  ASSERT_TRUE(eventually([&] { return errors.fatal_error() != nullptr; }));
  expect_fatal(errors, XD_ERROR_MISMATCH, 0, "fatal error XD_ERROR_MISMATCH raised by rank 0");
  errors.raise_cause(met_by(1, XD_ERROR_INVALID_ARGUMENT), cause("as rank 1 has it"));
  expect_fatal(errors, XD_ERROR_INVALID_ARGUMENT, 1, "as rank 1 has it");
  errors.raise_cause(met_by(1, XD_ERROR_OVERFLOW), cause("a second one"));
  expect_fatal(errors, XD_ERROR_INVALID_ARGUMENT, 1, "as rank 1 has it");
}

TEST(Communicator, ShowsAnErrorThatCameBeforeItsOwn) {
  ErrorsOfRank1 errors;
  errors.report_of_rank_0({.status = XD_ERROR_BUSY, .rank = 0, .peer = 0, .group = 3});
  errors->raise_cause(met_by(1, XD_ERROR_INVALID_ARGUMENT), cause("as rank 1 has it"));
  expect_fatal(*errors, XD_ERROR_BUSY, 0, "rank 0 used group 3 at once");
}

TEST(Communicator, ShowsTheErrorOfItsKernelsAfterTheReportOfAPeer) {
  for (const bool watched : {false, true}) {
    ErrorsOfRank1 errors;
    for (const int group : {6, 7}) {
      errors->explain_by(group, [group](const FatalError& error) {
        return cause(group == 7 && error.rank == 1 ? "of my kernel" : "another");
      });
    }
    errors.report_of_rank_0(met_by(0, XD_ERROR_MISMATCH));
    if (watched) errors->on_tick();
    expect_fatal(*errors, XD_ERROR_MISMATCH, 0, "raised by rank 0");
    errors.device.raise({.status = XD_ERROR_ABORTED, .rank = 1, .peer = 1});
    expect_fatal(*errors, XD_ERROR_MISMATCH, 0, "raised by rank 0");
    errors.device.raise(met_by(1, XD_ERROR_OVERFLOW));
    expect_fatal(*errors, XD_ERROR_OVERFLOW, 1, "of my kernel");
    errors->explain_by(7, {});  // the group goes
    expect_fatal(*errors, XD_ERROR_OVERFLOW, 1, "of my kernel");
  }
}

// A peer may be in a group that this rank has destroyed, or has not made yet.
TEST(Communicator, NamesTheOperationOfAGroupThatItDoesNotHave) {
  static constexpr const char* kSteps[] = {"walk", "run"};
  static constexpr const char* kJumps[] = {"hop", "leap"};
  static constexpr Operations kGo{"xd_go_", "an xd_go_operation", 1, kSteps};
  static constexpr Operations kJump{"xd_jump_", "an xd_jump_operation", 3, kJumps};
  const std::pair<int, const char*> named[] = {{1, "xd_go_walk"},
                                               {2, "xd_go_run"},
                                               {3, "xd_jump_hop"},
                                               {4, "xd_jump_leap"},
                                               {5, "operation 5"}};
  for (const auto& [operation, name] : named) {
    ErrorsOfRank1 errors;
    for (int group = 0; group < 3; ++group) errors->name_operations(group == 1 ? kJump : kGo);
    errors.report_of_rank_0({.status = XD_ERROR_TIMEOUT,
                             .phase = XD_PHASE_ENTRY,
                             .rank = 0,
                             .peer = 1,
                             .group = 9,
                             .operation = operation});
    expect_fatal(*errors, XD_ERROR_TIMEOUT, 0, std::string(" in ") + name + " of group 9, ");
  }
}

TEST(Communicator, RefusesAFamilyWhoseOperationsHaveNumbersOfAnother) {
  static constexpr const char* kNames[] = {"hop", "leap", "skip", "jump"};
  constexpr std::span kAll(kNames);
  static constexpr Operations kGo{"xd_go_", "an xd_go_operation", 2, kAll.first(2)};
  static constexpr Operations kShared[] = {
      {"xd_before_", "", 1, kAll.first(2)}, {"xd_within_", "", 3, kAll.first(1)},
      {"xd_around_", "", 1, kAll},          {"xd_behind_", "", 3, kAll.first(2)},
      {"xd_same_", "", 2, kAll.first(2)},
  };
  static constexpr Operations kApart[] = {{"xd_below_", "", 0, kAll.first(2)},
                                          {"xd_above_", "", 4, kAll.first(2)}};
  ErrorsOfRank1 errors;
  errors->name_operations(kGo);
  for (const Operations& shared : kShared) {
    SCOPED_TRACE(shared.prefix);
    expect_error(error_of([&] { errors->name_operations(shared); }), XD_ERROR_INTERNAL,
                 "expected none of 2 to 3, which are those of xd_go_");
  }
  for (const Operations& apart : kApart) {  // also beside those that have been refused
    SCOPED_TRACE(apart.prefix);
    EXPECT_EQ(error_of([&] { errors->name_operations(apart); }), std::nullopt);
    EXPECT_EQ(error_of([&] { errors->name_operations(apart); }), std::nullopt);
  }
}

// The outcome of a wait of `comm` for rank 0 if it goes on after it has looked for errors.
std::optional<Error> long_wait(xd::Comm& comm, int group, int operation, std::uint64_t epoch) {
  int looks = 0;
  const HostWait site{XD_PHASE_DONE, group, operation, epoch, Deadline::after_ms(20000)};
  return error_of([&] {
    comm.wait_for(
        0, site, [&] { return ++looks > 2; }, [] { return std::uint64_t{0}; });
  });
}

// The peers have ended that operation, so this rank's part of it ends as well.
TEST(Communicator, EndsAnOperationWhoseErrorAPeerHasReported) {
  auto comms = make_comms(2);
  comms[0]->errors().raise_cause(met_by(0, XD_ERROR_MISMATCH), cause("as rank 0 has it"));
  comms[0]->close();
  ASSERT_TRUE(eventually([&] { return comms[1]->errors().fatal_error() != nullptr; }));
  EXPECT_EQ(long_wait(*comms[1], 7, 1, 4), std::nullopt);
  expect_error(long_wait(*comms[1], 7, 1, 5), XD_ERROR_MISMATCH, "raised by rank 0");
  expect_error(long_wait(*comms[1], 6, 1, 4), XD_ERROR_MISMATCH, "raised by rank 0");
  comms[1]->errors().abort();
  expect_error(long_wait(*comms[1], 7, 1, 4), XD_ERROR_MISMATCH, "raised by rank 0");
}

// Operations that are counted together are one turn where their numbers are equal, and ranks may
// disagree which one it is. Operations of lanes have epochs of their own.
TEST(Communicator, EndsAWaitInAnotherLaneThanThatOfTheReportedError) {
  constexpr int kWalk = 1, kRun = 2, kHop = 3, kLeap = 4;
  static constexpr const char* kNames[] = {"walk", "run", "hop", "leap"};
  static constexpr Operations kGo{"xd_go_", "an xd_go_operation", kWalk, kNames, kHop};
  for (const int reported : {kWalk, kRun, kHop, kLeap}) {
    auto comms = make_comms(2);
    for (const auto& comm : comms) comm->errors().name_operations(kGo);
    FatalError error = met_by(0, XD_ERROR_MISMATCH);
    error.operation = reported;
    comms[0]->errors().raise_cause(error, cause("as rank 0 has it"));
    comms[0]->close();
    ASSERT_TRUE(eventually([&] { return comms[1]->errors().fatal_error() != nullptr; }));
    for (const int awaited : {kWalk, kRun, kHop, kLeap}) {
      SCOPED_TRACE(kGo.name(reported) + std::string(" reported while in ") + kGo.name(awaited));
      const auto ended = long_wait(*comms[1], 7, awaited, 4);
      if (reported == awaited || (reported < kHop && awaited < kHop)) {
        EXPECT_EQ(ended, std::nullopt);
      } else {
        expect_error(ended, XD_ERROR_MISMATCH, "raised by rank 0");
      }
    }
  }
}

TEST(Communicator, OfAForkTakesNoLockThatItsParentMayHold) {
  ErrorsOfRank1 errors;
  std::atomic<bool> held{false}, over{false};
  errors->explain_by(7, [&](const FatalError&) {
    held = true;
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return cause("late");
  });
  errors.device.raise(met_by(1, XD_ERROR_OVERFLOW));
  std::thread holder([&] { errors->fatal_error(); });
  EXPECT_TRUE(eventually([&] { return held.load(); }));
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(5);
    errors->explain_by(7, {});
    ::_exit(0);
  }
  int ended = -1;
  EXPECT_EQ(::waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0) << "signal " << WTERMSIG(ended);
  over = true;
  holder.join();
}

TEST(Communicator, RanksThatNumberTheirSegmentsDifferentlyAreToldSo) {
  const auto comms = make_comms(2);
  comms[1]->heap().make_room();
  comms[1]->heap().add_registered({nullptr, nullptr});
  const auto errors = on_threads(2, [&](int rank) { comms[at(rank)]->memory().grow(4096); });
  expect_error(errors[0], XD_ERROR_MISMATCH, "rank 1 has other segments");
  expect_error(errors[1], XD_ERROR_MISMATCH, "rank 0 has other segments");
  for (const auto& comm : comms) EXPECT_EQ(comm->heap().usage().segments, 0);
  expect_no_errors(on_threads(2, [&](int rank) { comms[at(rank)]->collective().barrier(); }));
}

// Its kernels may still find memory that the caller is about to free.
TEST(Communicator, IsFinishedByADeviceThatCannotBeToldOfADeregistration) {
  const auto comms = make_comms(2);
  const HostSegmentMaker host;
  const auto errors = on_threads(2, [&](int rank) {
    xd::Comm& comm = *comms[at(rank)];
    FakeDevice device(rank == 0);
    SymmetricMemory memory(rank, comm.collective(), comm.errors(), host, &device);
    memory.heap().make_room();
    memory.heap().add_registered({nullptr, nullptr});
    const auto error = error_of([&] { memory.delist(0); });
    EXPECT_FALSE(memory.heap().is_registered(0)) << "rank " << rank;
    if (error) throw Error(*error);
  });
  expect_error(errors[0], XD_ERROR_SYSTEM, "the device refuses");
  expect_error(errors[1], XD_ERROR_MISMATCH, "rank 0 failed: the device refuses");
  for (const auto& comm : comms) {
    ASSERT_TRUE(eventually([&] { return comm->errors().fatal_error() != nullptr; }));
    EXPECT_EQ(comm->errors().fatal_error()->status, XD_ERROR_SYSTEM);
    EXPECT_EQ(comm->errors().fatal_error()->rank, 0);
  }
}

}  // namespace
}  // namespace xd::test
