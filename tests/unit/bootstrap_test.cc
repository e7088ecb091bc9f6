// Ranks meeting through unique ids and callbacks, also with strangers at the door.
#include "meet/bootstrap.h"

#include <sys/socket.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <thread>

#include "base/tcp.h"
#include "meet/handshake.h"
#include "meet/meeting.h"
#include "meet/meeting_client.h"
#include "meet/unique_id.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

TcpAddress address_of(const MeetingPoint& point) {
  return resolve(point.address, "address").front().with_port(point.port);
}

UniqueFd connect_as_stranger(const MeetingPoint& point) {
  return tcp_connect(address_of(point), Deadline::after_ms(5000));
}

void say(const UniqueFd& fd, std::span<const std::byte> bytes) {
  EXPECT_EQ(send_all(fd.get(), bytes, Deadline::after_ms(5000)), Io::done);
}

// True once the meeting point has closed the connection.
bool is_closed(const UniqueFd& fd) {
  std::array<std::byte, 256> buffer;
  std::size_t count = 1;
  while (count > 0)
    if (!receive_some(fd.get(), buffer, count)) return true;
  return false;
}

class Meetings : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Meetings, testing::Values(1, 2, 3, 8));

TEST_P(Meetings, AllRanksGetAllBlobs) { expect_meeting(new_id(), GetParam()); }

TEST(Bootstrap, OneRankNeedsNoMeetingPoint) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.num_ranks = 1;
  expect_all_came(meet(config), 1);
}

TEST(Bootstrap, TheMeetingPointHasATimeoutOfItsOwn) {
  const xd_unique_id id = new_id(300);
  expect_error(error_of([&] { meet(id_config(id, 1, 2), 20000); }), XD_ERROR_TIMEOUT,
               "rank 0 of 2 did not come");
  expect_error(error_of([&] { meet(id_config(id, 0, 2)); }), XD_ERROR_SYSTEM, "Connection refused");
}

TEST(Bootstrap, ASecondRankOfTheSameNumberIsTurnedAway) {
  const xd_unique_id id = new_id();
  std::atomic<bool> turned_away{false};
  const auto errors = on_threads(3, [&](int thread) {
    if (thread == 2) {
      ASSERT_TRUE(eventually([&] { return turned_away.load(); }));
      return expect_all_came(meet(id_config(id, 1, 2)), 2);
    }
    try {
      expect_all_came(meet(id_config(id, 0, 2)), 2);
    } catch (const Error&) {
      turned_away = true;
      throw;
    }
  });
  EXPECT_FALSE(errors[2]) << errors[2]->text();
  ASSERT_NE(errors[0].has_value(), errors[1].has_value());
  expect_error(errors[0] ? errors[0] : errors[1], XD_ERROR_MISMATCH, "has come twice");
}

TEST(Bootstrap, AnotherNumberOfRanksIsAMismatchAtOnceOnAllWhoHaveCome) {
  const xd_unique_id id = new_id();
  const auto start = std::chrono::steady_clock::now();
  const auto errors = on_threads(3, [&](int rank) {
    if (rank < 2) meet(id_config(id, rank, 4));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (rank == 2) meet(id_config(id, 2, 3));
  });
  EXPECT_LT(ms_since(start), 3000);
  for (const auto& error : errors)
    expect_error(error, XD_ERROR_MISMATCH, "has num_ranks = 3, expected 4 as rank ");
}

TEST(Bootstrap, ARankThatGaveUpMayComeAgain) {
  const xd_unique_id id = new_id();
  const MeetingPoint point = decode_unique_id(id);
  {
    const UniqueFd fd = enter_meeting(address_of(point), point.secret, Deadline::after_ms(5000));
    say(fd, make_frame(encode(JoinMessage{0, 2, 60000, bytes_of("rank 0")})));
  }
  expect_meeting(id, 2);
}

// A stranger does something; the meeting point closes its connection with one line, and two ranks
// meet meanwhile.
struct Stranger {
  const char* name;
  void (*act)(const UniqueFd& fd, const MeetingPoint& point);
  const char* log;
};

void do_handshake(const UniqueFd& fd, Handshake& handshake) {
  say(fd, handshake.take_output());
  const Deadline deadline = Deadline::after_ms(5000);
  std::array<std::byte, 128> buffer;
  while (handshake.wanted() != 0) {
    std::size_t count = 0;
    if (!receive_some(fd.get(), std::span(buffer).first(handshake.wanted()), count)) return;
    handshake.receive(std::span(buffer).first(count));
    say(fd, handshake.take_output());
    if (count == 0) {
      ASSERT_EQ(wait_readable(fd.get(), deadline), Io::done);
    }
  }
}

const Stranger kStrangers[] = {
    {"Garbage",
     [](const UniqueFd& fd, const MeetingPoint&) { say(fd, bytes_of("GET / HTTP/1.1\r\n\r\n")); },
     "does not speak this library's protocol"},
    {"WrongVersion",
     [](const UniqueFd& fd, const MeetingPoint& point) {
       Handshake handshake(Side::client, point.secret, 0, kProtocolVersion + 5);
       do_handshake(fd, handshake);
       EXPECT_EQ(handshake.refusal(), Refusal::version);
     },
     "speaks protocol version 10, expected 5"},
    {"WrongSecret",
     [](const UniqueFd& fd, const MeetingPoint&) {
       Handshake handshake(Side::client, make_random<Secret>());
       do_handshake(fd, handshake);
     },
     "means another meeting"},
    {"ForgedProof",
     [](const UniqueFd& fd, const MeetingPoint& point) {
       // A stranger may have overheard the public name of the meeting.
       Hello hello;
       const Bytes real = Handshake(Side::client, point.secret).take_output();
       std::memcpy(&hello, real.data(), sizeof(hello));
       hello.nonce = make_random<Nonce>();
       say(fd, std::as_bytes(std::span(&hello, 1)));
       say(fd, Bytes(sizeof(Proof)));
     },
     "failed to prove"},
    {"AbsurdLength",
     [](const UniqueFd& fd, const MeetingPoint& point) {
       Handshake handshake(Side::client, point.secret);
       do_handshake(fd, handshake);
       EXPECT_TRUE(handshake.proven());
       say(fd, Bytes(4, std::byte{0xff}));
     },
     "announced a frame of 4294967295 bytes"},
    {"ImpossibleRank",
     [](const UniqueFd& fd, const MeetingPoint& point) {
       Handshake handshake(Side::client, point.secret);
       do_handshake(fd, handshake);
       say(fd, make_frame(encode(JoinMessage{9, 2, 1000, {}})));
     },
     "sent no valid request"},
    {"Leaves",
     [](const UniqueFd& fd, const MeetingPoint&) {
       say(fd, bytes_of("CROS"));
       ::shutdown(fd.get(), SHUT_WR);
     },
     "closed the connection before it had joined"},
};

class Strangers : public testing::TestWithParam<Stranger> {};
INSTANTIATE_TEST_SUITE_P(Each, Strangers, testing::ValuesIn(kStrangers),
                         [](const auto& stranger) { return stranger.param.name; });

TEST_P(Strangers, AreRefusedWithOneLineAndDisturbNobody) {
  const xd_unique_id id = new_id();
  const MeetingPoint point = decode_unique_id(id);
  LogCapture log;
  const auto errors = on_threads(2, [&](int rank) {
    if (rank == 1) {
      const UniqueFd fd = connect_as_stranger(point);
      GetParam().act(fd, point);
      EXPECT_TRUE(eventually([&] { return is_closed(fd); }));
    }
    expect_all_came(meet(id_config(id, rank, 2)), 2);
  });
  const auto lines = log.end();
  expect_no_errors(errors);
  ASSERT_EQ(lines.size(), 1U) << testing::PrintToString(lines);
  expect_words(lines[0], {GetParam().log, "refused 127.0.0.1:"});
}

TEST(Bootstrap, SilentStrangersAreClosedInTime) {
  constexpr int kLimitMs = 1000;  // also of the ranks, which must not be late on a busy machine
  UniqueFd listener = tcp_listen(resolve("127.0.0.1", "address").front().with_port(0));
  const MeetingPoint point{"127.0.0.1", local_address(listener.get()).port(),
                           make_random<Secret>()};
  Meeting meeting(
      std::move(listener),
      {.key = point.secret, .deadline = Deadline::after_ms(60000), .guest_limit_ms = kLimitMs});
  const std::jthread server([&] { meeting.run(); });
  const xd_unique_id id = encode_unique_id(point);
  LogCapture log;
  const auto start = std::chrono::steady_clock::now();
  const auto errors = on_threads(2, [&](int rank) {
    if (rank == 1) {
      const UniqueFd silent = connect_as_stranger(decode_unique_id(id));
      const UniqueFd slow = connect_as_stranger(decode_unique_id(id));
      say(slow, bytes_of("CROSDOCK"));
      EXPECT_TRUE(eventually([&] { return is_closed(silent) && is_closed(slow); }, 8000));
      EXPECT_GE(ms_since(start), kLimitMs);
    }
    expect_all_came(meet(id_config(id, rank, 2)), 2);
  });
  const auto lines = log.end();
  expect_no_errors(errors);
  ASSERT_EQ(lines.size(), 2U) << testing::PrintToString(lines);
  for (const std::string& line : lines) expect_words(line, {"was silent for too long"});
}

TEST(Bootstrap, ManyStrangersAreCountedAndNotListed) {
  const std::size_t threads = running_threads();
  const xd_unique_id id = new_id();
  LogCapture log;
  std::vector<UniqueFd> flood;
  for (int i = 0; i < 300; ++i) flood.push_back(connect_as_stranger(decode_unique_id(id)));
  expect_meeting(id, 4);
  EXPECT_TRUE(eventually([&] {
    return std::all_of(flood.begin(), flood.end(),
                       [](const UniqueFd& fd) { return is_closed(fd); });
  }));
  EXPECT_TRUE(eventually([&] { return running_threads() <= threads; }));  // its last word is said
  const auto lines = log.end();
  ASSERT_EQ(lines.size(), 11U) << testing::PrintToString(lines);
  expect_words(lines[10], {"290 more connections refused"});
}

TEST(Bootstrap, ARankOfAnotherMeetingIsToldSo) {
  const xd_unique_id id = new_id();
  MeetingPoint point = decode_unique_id(id);
  point.secret = make_random<Secret>();
  const xd_unique_id forged = encode_unique_id(point);
  LogCapture log;
  expect_error(error_of([&] { meet(id_config(forged, 0, 2)); }), XD_ERROR_MISMATCH,
               "serves another meeting");
  expect_meeting(id, 2);
  EXPECT_EQ(log.end().size(), 1U);
}

TEST(UniqueIdCreate, ListensWhereItIsTold) {
  for (const char* address : {"127.0.0.1", "::1", "localhost", "127.0.0.2"}) {
    xd_unique_id_config config = XD_UNIQUE_ID_CONFIG_INIT;
    config.address = address;
    const xd_unique_id id = create_unique_id(config, 10000);
    const MeetingPoint point = decode_unique_id(id);
    if (std::strcmp(address, "localhost") != 0) {
      EXPECT_EQ(point.address, address);
    }
    if (std::strcmp(address, "127.0.0.2") == 0) {
      const MeetingPoint elsewhere{"127.0.0.1", point.port, point.secret};
      expect_error(error_of([&] { connect_as_stranger(elsewhere); }), XD_ERROR_SYSTEM, "refused");
    }
    expect_meeting(id, 2);
  }
}

TEST(UniqueIdCreate, RefusesWhatItCannotListenOn) {
  const auto create = [](const char* address, int port) {
    xd_unique_id_config config = XD_UNIQUE_ID_CONFIG_INIT;
    config.address = address;
    config.port = port;
    return error_of([&] { create_unique_id(config, 1000); });
  };
  const xd_unique_id id = new_id(1000);
  expect_error(create(nullptr, decode_unique_id(id).port), XD_ERROR_SYSTEM,
               "Address already in use");
  expect_error(create("192.0.2.77", 0), XD_ERROR_SYSTEM, "Cannot assign requested address");
  for (const char* wildcard : {"0.0.0.0", "0", "0x0", "000.0", "::", "0::0", "::ffff:0.0.0.0"})
    expect_error(create(wildcard, 0), XD_ERROR_INVALID_ARGUMENT,
                 concat("config.address = ", wildcard, " is the wildcard address"));
  for (const char* multicast :
       {"224.0.0.1", "239.255.255.255", "::ffff:224.0.0.1", "ff02::1", "ff05::2"})
    expect_error(create(multicast, 0), XD_ERROR_INVALID_ARGUMENT,
                 concat("config.address = ", multicast, " is a multicast address"));
  // The last address is the broadcast address of the loopback network.
  for (const char* broadcast :
       {"255.255.255.255", "0xffffffff", "::ffff:255.255.255.255", "127.255.255.255"})
    expect_error(create(broadcast, 0), XD_ERROR_INVALID_ARGUMENT,
                 concat("config.address = ", broadcast, " is a broadcast address"));
  expect_error(create("no such host", 0), XD_ERROR_INVALID_ARGUMENT,
               "config.address = no such host");
  expect_error(create(nullptr, 65536), XD_ERROR_INVALID_ARGUMENT, "config.port = 65536");
}

// An all-gather between threads, as a caller would bring one.
struct ThreadGather {
  explicit ThreadGather(int ranks) : blobs(static_cast<std::size_t>(ranks)), meet(ranks) {}
  struct Context {
    ThreadGather* all;
    int rank;
    int result = 0;
  };
  static int gather(void* context, const void* send, void* recv, std::size_t bytes) {
    const auto [all, rank, result] = *static_cast<Context*>(context);
    const char* from = static_cast<const char*>(send);
    all->blobs[static_cast<std::size_t>(rank)].assign(from, from + bytes);
    all->meet.arrive_and_wait();
    char* to = static_cast<char*>(recv);
    for (const auto& blob : all->blobs) to = std::copy(blob.begin(), blob.end(), to);
    return result;
  }
  std::vector<std::vector<char>> blobs;
  std::barrier<> meet;
};

xd_comm_config callback_config(ThreadGather::Context& context, int num_ranks) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.bootstrap = XD_BOOTSTRAP_ALL_GATHER;
  config.rank = context.rank;
  config.num_ranks = num_ranks;
  config.all_gather = &ThreadGather::gather;
  config.all_gather_context = &context;
  return config;
}

TEST(Callback, CarriesTheBlobs) {
  ThreadGather all(4);
  expect_no_errors(on_threads(4, [&](int rank) {
    ThreadGather::Context context{&all, rank};
    expect_all_came(meet(callback_config(context, 4)), 4);
  }));
}

TEST(Callback, ItsFailureIsReportedWithItsNumber) {
  ThreadGather all(2);
  const auto errors = on_threads(2, [&](int rank) {
    ThreadGather::Context context{&all, rank, rank == 1 ? 77 : 0};
    meet(callback_config(context, 2));
  });
  EXPECT_FALSE(errors[0]);
  expect_error(errors[1], XD_ERROR_SYSTEM, "config.all_gather returned 77 on rank 1");
}

TEST(Config, MistakesAreNamed) {
  const auto error_with = [](auto change) {
    xd_comm_config config = XD_COMM_CONFIG_INIT;
    config.num_ranks = 2;
    change(config);
    return error_of([&] { make_bootstrap(config); });
  };
  const auto status = XD_ERROR_INVALID_ARGUMENT;
  expect_error(error_with([](auto& c) { c.rank = 2; }), status, "config.rank = 2, expected 0 to 1");
  expect_error(error_with([](auto& c) { c.num_ranks = 1025; }), status, "config.num_ranks = 1025");
  expect_error(error_with([](auto& c) { c.num_ranks = 0; }), status, "config.num_ranks = 0");
  expect_error(error_with([](auto&) {}), status, "config.unique_id = NULL");
  expect_error(error_with([](auto& c) { c.bootstrap = XD_BOOTSTRAP_ALL_GATHER; }), status,
               "config.all_gather = NULL");
  expect_error(error_with([](auto& c) { c.bootstrap = static_cast<xd_bootstrap>(4); }), status,
               "config.bootstrap = 4");
}

}  // namespace
}  // namespace xd::test
