// The handshake, the frames and the unique id as functions of bytes.
#include "meet/handshake.h"

#include <cstring>

#include "meet/messages.h"
#include "meet/unique_id.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

// Carries bytes between the two ends, at most `step` at a time, until nothing moves.
void converse(Handshake& client, Handshake& server, std::size_t step = 1000) {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto [from, to] : {std::pair(&client, &server), std::pair(&server, &client)}) {
      const Bytes bytes = from->take_output();
      for (std::size_t at = 0; at < bytes.size(); at += step) {
        const auto part = std::span(bytes).subspan(at, std::min(step, bytes.size() - at));
        if (to->wanted() == 0) break;
        EXPECT_EQ(to->receive(part), part.size());
        moved = true;
      }
    }
  }
}

TEST(Handshake, ProvesAnEqualSecretAndWhoTheEndsAre) {
  const auto secret = make_random<Secret>();
  for (const std::size_t step : {1, 7, 1000}) {
    Handshake client(Side::client, secret, 5), server(Side::server, secret, 2);
    converse(client, server, step);
    EXPECT_TRUE(client.proven() && server.proven());
    EXPECT_EQ(client.peer_sender(), 2U);
    EXPECT_EQ(server.peer_sender(), 5U);
    EXPECT_EQ(client.wanted() + server.wanted(), 0U);
  }
}

TEST(Handshake, SecretsDoNotCrossTheWire) {
  const auto secret = make_random<Secret>();
  Handshake client(Side::client, secret), server(Side::server, secret);
  std::string wire;
  for (int turn = 0; turn < 3; ++turn) {
    for (auto [from, to] : {std::pair(&client, &server), std::pair(&server, &client)}) {
      const Bytes bytes = from->take_output();
      wire += text_of(bytes);
      to->receive(bytes);
    }
  }
  ASSERT_TRUE(client.proven() && server.proven());
  EXPECT_EQ(wire.size(), 2 * (sizeof(Hello) + sizeof(Proof)));
  EXPECT_EQ(wire.find(text_of(std::as_bytes(std::span(secret))).substr(0, 8)), std::string::npos);
}

TEST(Handshake, OtherSecretIsAnotherMeetingOnBothSides) {
  Handshake client(Side::client, make_random<Secret>()),
      server(Side::server, make_random<Secret>());
  converse(client, server);
  EXPECT_EQ(server.refusal(), Refusal::other_meeting);
  EXPECT_EQ(client.refusal(), Refusal::other_meeting);
  EXPECT_EQ(client.refusal_text(), "serves another meeting");
}

TEST(Handshake, AnotherSecretOfTheSameMeetingIsNamedOnBothSides) {
  const auto name = make_random<Tag>();
  Handshake client(Side::client, {make_random<Secret>(), name}),
      server(Side::server, {make_random<Secret>(), name});
  converse(client, server);
  EXPECT_EQ(server.refusal(), Refusal::wrong_proof);
  EXPECT_EQ(server.refusal_text(), "failed to prove that it knows the secret");
  EXPECT_EQ(client.refusal(), Refusal::denied);
  EXPECT_EQ(client.refusal_text(), "refused this rank: it knows another secret");
}

// The answer to a stranger says no, and has no byte that depends on the secret.
TEST(Handshake, RefusalsAreTheSameForEverySecret) {
  const auto to_other_meeting = [] {
    Handshake server(Side::server, make_random<Secret>());
    server.receive(Handshake(Side::client, make_random<Secret>()).take_output());
    EXPECT_EQ(server.refusal(), Refusal::other_meeting);
    return server.take_output();
  };
  const auto to_forged_proof = [] {
    const auto secret = make_random<Secret>();
    Handshake client(Side::client, secret), server(Side::server, secret);
    server.receive(client.take_output());
    client.receive(server.take_output());
    Bytes proof = client.take_output();
    EXPECT_EQ(proof.size(), sizeof(Proof));
    proof[31] ^= std::byte{1};
    server.receive(proof);
    EXPECT_EQ(server.refusal(), Refusal::wrong_proof);
    return server.take_output();
  };
  EXPECT_EQ(to_other_meeting(), to_other_meeting());
  EXPECT_EQ(to_other_meeting().size(), sizeof(Hello));
  EXPECT_EQ(to_forged_proof(), to_forged_proof());
  EXPECT_EQ(to_forged_proof(), Bytes(sizeof(Proof)));
}

// A server that has not seen a right proof has proved nothing, even if the client trusts it.
TEST(Handshake, AServerThatSaysYesToEveryProofIsNotBelieved) {
  const auto name = make_random<Tag>();
  Handshake client(Side::client, {make_random<Secret>(), name}),
      server(Side::server, {make_random<Secret>(), name});
  server.receive(client.take_output());
  client.receive(server.take_output());
  client.receive(Bytes(sizeof(Proof), std::byte{1}));
  EXPECT_EQ(client.refusal(), Refusal::wrong_proof);
}

TEST(Handshake, ClientRefusesAServerThatReflectsItsProof) {
  const auto secret = make_random<Secret>();
  Handshake client(Side::client, secret), server(Side::server, secret);
  server.receive(client.take_output());
  client.receive(server.take_output());
  client.receive(client.take_output());
  EXPECT_EQ(client.refusal(), Refusal::wrong_proof);
}

TEST(Handshake, AProofDoesNotFitAnotherSender) {
  const auto secret = make_random<Secret>();
  Handshake client(Side::client, secret, 1), server(Side::server, secret);
  Bytes hello = client.take_output();
  hello[offsetof(Hello, sender)] = std::byte{3};
  server.receive(hello);
  client.receive(server.take_output());
  server.receive(client.take_output());
  EXPECT_EQ(server.refusal(), Refusal::wrong_proof);
}

TEST(Handshake, OtherVersionIsToldOurs) {
  const auto secret = make_random<Secret>();
  Handshake client(Side::client, secret, 0, kProtocolVersion + 1), server(Side::server, secret);
  converse(client, server);
  EXPECT_EQ(server.refusal(), Refusal::version);
  EXPECT_EQ(client.refusal(), Refusal::version);
  EXPECT_EQ(client.refusal_text(), concat("speaks protocol version ", kProtocolVersion,
                                          ", expected ", kProtocolVersion + 1));
}

TEST(Handshake, TwoClientsRefuseEachOther) {
  const auto secret = make_random<Secret>();
  Handshake one(Side::client, secret), other(Side::client, secret);
  one.receive(other.take_output());
  EXPECT_EQ(one.refusal(), Refusal::not_crossdock);
}

TEST(Handshake, GarbageIsRefusedAtItsFirstBytes) {
  Handshake server(Side::server, make_random<Secret>());
  server.receive(bytes_of("GET / HTTP/1.1\r\n"));
  EXPECT_EQ(server.refusal(), Refusal::not_crossdock);
  EXPECT_EQ(server.receive(bytes_of("more")), 0U);
}

TEST(FrameReader, ReadsWhatMakeFrameWrote) {
  for (const std::string& text : {std::string(), std::string("x"), std::string(4096, 'y')}) {
    FrameReader reader(4096);
    const Bytes frame = make_frame(bytes_of(text));
    for (const std::byte byte : frame) EXPECT_EQ(reader.receive({&byte, 1}), 1U);
    EXPECT_TRUE(reader.complete());
    EXPECT_EQ(reader.wanted(), 0U);
    EXPECT_EQ(text_of(reader.payload()), text);
  }
}

TEST(FrameReader, RefusesALengthAboveItsLimitBeforeAnyPayload) {
  FrameReader reader(100);
  const std::uint32_t length = 0xffffffff;
  reader.receive(std::as_bytes(std::span(&length, 1)));
  EXPECT_EQ(reader.refusal_text(), "announced a frame of 4294967295 bytes, expected at most 100");
  EXPECT_EQ(reader.wanted(), 0U);
  EXPECT_FALSE(reader.complete());
}

TEST(MeetingMessages, JoinSurvivesTheWire) {
  const auto join = decode_join(encode(JoinMessage{3, 8, 1500, bytes_of("blob")}));
  ASSERT_TRUE(join);
  EXPECT_EQ(join->rank, 3);
  EXPECT_EQ(join->num_ranks, 8);
  EXPECT_EQ(join->remaining_ms, 1500);
  EXPECT_EQ(text_of(join->blob), "blob");
}

TEST(MeetingMessages, ImpossibleJoinsAreNone) {
  for (const JoinMessage& join :
       {JoinMessage{8, 8, 0, {}}, JoinMessage{-1, 8, 0, {}}, JoinMessage{0, 0, 0, {}},
        JoinMessage{0, kMaxRanks + 1, 0, {}}, JoinMessage{0, 1, -1, {}},
        JoinMessage{0, 1, 0, Bytes(Bootstrap::kMaxBlob + 1)}})
    EXPECT_FALSE(decode_join(encode(join)));
  EXPECT_FALSE(decode_join(Bytes(11)));
}

TEST(MeetingMessages, AnswersSurviveTheWire) {
  const auto answer =
      decode_answer(encode(AnswerMessage{XD_SUCCESS, "", {bytes_of("a"), bytes_of("b")}}), 2);
  ASSERT_TRUE(answer);
  EXPECT_EQ(text_of(answer->blobs[1]), "b");
  const auto failure = decode_answer(encode(AnswerMessage{XD_ERROR_TIMEOUT, "why", {}}), 2);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->text, "why");
  EXPECT_FALSE(decode_answer(encode(AnswerMessage{XD_SUCCESS, "", {Bytes(3)}}), 2));
  EXPECT_FALSE(decode_answer(Bytes(4, std::byte{0xff}), 2));
  EXPECT_FALSE(decode_answer(Bytes(3), 2));
}

TEST(UniqueId, SurvivesTheWire) {
  const MeetingPoint point{"fe80::1%eth0", 4711, make_random<Secret>()};
  const MeetingPoint read = decode_unique_id(encode_unique_id(point));
  EXPECT_EQ(read.address, point.address);
  EXPECT_EQ(read.port, point.port);
  EXPECT_EQ(read.secret, point.secret);
}

TEST(UniqueId, EveryDamagedByteIsNoticed) {
  const xd_unique_id id = encode_unique_id({"127.0.0.1", 4711, make_random<Secret>()});
  for (int at = 0; at < XD_UNIQUE_ID_BYTES; ++at) {
    xd_unique_id damaged = id;
    damaged.bytes[at] ^= 0x20;
    expect_error(error_of([&] { decode_unique_id(damaged); }), XD_ERROR_INVALID_ARGUMENT,
                 "config.unique_id");
  }
  expect_error(error_of([] { decode_unique_id(xd_unique_id{}); }), XD_ERROR_INVALID_ARGUMENT,
               "holds no unique id");
}

TEST(DeriveSecret, DelimitsItsParts) {
  const std::vector<std::string_view> one{"ab", "c"}, other{"a", "bc"};
  EXPECT_NE(derive_secret(one), derive_secret(other));
  EXPECT_EQ(derive_secret(one), derive_secret(std::vector<std::string_view>{"ab", "c"}));
}

}  // namespace
}  // namespace xd::test
