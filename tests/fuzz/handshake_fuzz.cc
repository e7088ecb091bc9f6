// Everything that reads bytes of strangers or peers: handshake, frames, messages, unique ids.
// The first byte of an input chooses the reader; the second, how the rest is cut into pieces.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "base/error.h"
#include "fuzz/seeds.h"
#include "meet/handshake.h"
#include "meet/introduction.h"
#include "meet/messages.h"
#include "meet/packet.h"
#include "meet/unique_id.h"

namespace xd::fuzz {
namespace {

constexpr std::size_t kMaxFrame = 256;
constexpr int kNumRanks = 3;

// The promises that hold for any input. Not assert(): it must not vanish with NDEBUG.
void expect(bool promise) {
  if (!promise) std::abort();
}

// Feeds what a reader wants, piece by piece; it must never take more than it said.
template <class Reader>
void feed(Reader& reader, std::span<const std::byte> input, std::size_t piece) {
  while (!input.empty() && reader.wanted() != 0) {
    const auto part = input.first(std::min(piece, input.size()));
    const std::size_t wanted = reader.wanted();
    const std::size_t taken = reader.receive(part);
    expect(taken == std::min(part.size(), wanted));
    input = input.subspan(taken);
  }
}

void read_handshake(Side side, std::span<const std::byte> input, std::size_t piece) {
  Handshake handshake(side, Secret{});
  feed(handshake, input, piece);
  // Nonces are new in every run, so no input can hold the right proof.
  expect(!handshake.proven());
  expect((handshake.refusal() == Refusal::none) == handshake.refusal_text().empty());
  expect(handshake.take_output().size() <= sizeof(Hello) + sizeof(Proof));
}

void read_frame(std::span<const std::byte> input, std::size_t piece) {
  FrameReader reader(kMaxFrame);
  feed(reader, input, piece);
  expect(reader.payload().capacity() <= kMaxFrame);
  expect(!reader.complete() || reader.refusal_text().empty());
}

// A message that was understood must be the same when it is written again.
void read_join(std::span<const std::byte> input) {
  const auto join = decode_join(input);
  if (!join) return;
  const Bytes again = encode(*join);
  expect(again == Bytes(input.begin(), input.end()));
}

void read_answer(std::span<const std::byte> input) {
  const auto answer = decode_answer(input, kNumRanks);
  if (answer && answer->status == XD_SUCCESS) {
    expect(answer->blobs.size() == kNumRanks);
    expect(encode(*answer) == Bytes(input.begin(), input.end()));
  }
}

void read_unique_id(std::span<const std::byte> input) {
  xd_unique_id id{};
  std::memcpy(id.bytes, input.data(), std::min(input.size(), sizeof(id.bytes)));
  try {
    const MeetingPoint point = decode_unique_id(id);
    const xd_unique_id again = encode_unique_id(point);
    expect(!point.address.empty() && point.port != 0);
    expect(decode_unique_id(again).address == point.address);
  } catch (const Error& error) {
    expect(error.status() == XD_ERROR_INVALID_ARGUMENT);
  }
}

void read_introduction(std::span<const std::byte> input) {
  const auto introduction = decode_introduction(input);
  if (!introduction) return;
  static const Introduction own = make_introduction(kNumRanks);
  try {
    check_peer(0, own, 1, *introduction);
    expect(introduction->version == own.version && introduction->num_ranks == own.num_ranks);
    expect(failure_of(*introduction).empty() || introduction->failure_is_of_address != 0);
  } catch (const Error& error) {
    expect(error.status() == XD_ERROR_MISMATCH);
  }
}

void read_packet(std::span<const std::byte> input, bool has_descriptor) {
  const auto message = decode_mesh_packet(input, has_descriptor);
  if (!message) return;
  expect(message->header.has_descriptor == (has_descriptor ? 1U : 0U));
  expect(message->blob.size() + sizeof(MeshHeader) == input.size());
}

Bytes seed(unsigned char reader, std::span<const std::byte> input) {
  WireWriter out;
  out.put(reader);
  out.put(static_cast<unsigned char>(16));
  out.put_bytes(input);
  return out.take();
}

}  // namespace

std::vector<Bytes> seeds() {
  const xd_unique_id id = encode_unique_id({"127.0.0.1", 4711, Secret{}});
  const MeshHeader exchange{MeshMessageType::exchange, 0, 5, 1},
      goodbye{MeshMessageType::goodbye, 0, 0, 1};
  Bytes forged = Handshake(Side::client, Secret{}).take_output();
  forged.resize(forged.size() + sizeof(Proof));
  Handshake server(Side::server, Secret{});
  server.receive(Handshake(Side::client, Secret{}).take_output());
  return {seed(0, forged),
          seed(1, server.take_output()),
          seed(2, make_frame(Bytes(20))),
          seed(3, encode(JoinMessage{1, 3, 1000, Bytes(8)})),
          seed(4, encode(AnswerMessage{XD_SUCCESS, "", {Bytes(4), Bytes(4), Bytes(4)}})),
          seed(4, encode(AnswerMessage{XD_ERROR_TIMEOUT, "rank 1 did not come", {}})),
          seed(5, std::as_bytes(std::span(id.bytes))),
          seed(6, encode(make_introduction(kNumRanks))),
          seed(7, std::as_bytes(std::span(&exchange, 1))),
          seed(7, std::as_bytes(std::span(&goodbye, 1)))};
}

}  // namespace xd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace xd::fuzz;
  if (size < 2) return 0;
  const auto input = std::as_bytes(std::span(data, size)).subspan(2);
  const std::size_t piece = std::size_t{1} + data[1];
  switch (data[0] % 8) {
    case 0:
      read_handshake(xd::Side::server, input, piece);
      break;
    case 1:
      read_handshake(xd::Side::client, input, piece);
      break;
    case 2:
      read_frame(input, piece);
      break;
    case 3:
      read_join(input);
      break;
    case 4:
      read_answer(input);
      break;
    case 5:
      read_unique_id(input);
      break;
    case 6:
      read_introduction(input);
      break;
    default:
      read_packet(input, data[1] % 2 == 1);
      break;
  }
  return 0;
}
