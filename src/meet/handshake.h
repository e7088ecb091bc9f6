// The handshake by which two ends of a connection prove to each other that they know the same
// secret, without sending it, and the frames that follow. No input or output happens here: bytes go
// in, bytes and a verdict come out, so that sockets, tests and the fuzzer drive the same code.
//
//   client -> server   Hello   protocol version, sender, meeting, client's nonce
//   server -> client   Hello   the same of the server
//   client -> server   Proof   HMAC-SHA512-256(secret, "client" | client's Hello | server's Hello)
//   server -> client   Proof   the same over "server"
//
// Until the client's proof holds, the server reads nothing but these two fixed-size frames and
// proves nothing itself. The proofs cover both hellos, hence also the identities that the ends
// claim. They do not cover later frames: like the rest of the library, they keep strangers out of a
// connection, but do not stop an attacker who can rewrite packets on the way.
//
// A client that is refused is told so, by a frame that is the same whatever the secret: a Hello
// that names no meeting ("not this one"), or a Proof of zeros ("yours is wrong"). A connection that
// ends without one was not refused: the server had no room, or went away.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/wire.h"

namespace xd {

// ---- Secrets, nonces and what is derived from them; the primitives are libsodium's ----

using Secret = std::array<unsigned char, 32>;
using Nonce = std::array<unsigned char, 32>;
using Proof = std::array<unsigned char, 32>;
using Tag = std::array<unsigned char, 16>;

// Fills `bytes` with unpredictable bytes.
void random_fill(std::span<unsigned char> bytes);

// A random value of one of the array types above.
template <class Array>
Array make_random() {
  Array bytes;
  random_fill(bytes);
  return bytes;
}

// Hash of a list of parts. Parts are delimited, so that ("ab", "c") and ("a", "bc") differ.
Secret derive_secret(std::span<const std::string_view> parts);

// Public name of the thing that `secret` protects; the secret cannot be computed from it.
Tag tag_of(const Secret& secret);

// The secret that the ends of a connection must share, and the public name by which they find out,
// before any proof, whether they mean the same meeting.
struct Key {
  Key(const Secret& of) : Key(of, tag_of(of)) {}  // with the name that follows from it
  Key(const Secret& of, const Tag& called) : secret(of), name(called) {}

  Secret secret;
  Tag name;
  // The environment variable that users set for the secret, for texts; nullptr = there is none.
  const char* variable = nullptr;
};

// Keyed authentication code of `message`, and its comparison in constant time.
Proof prove(const Secret& secret, std::span<const std::byte> message);
bool proof_holds(const Secret& secret, std::span<const std::byte> message, const Proof& proof);

// ---- The handshake ----

// The number is raised whenever a message of the bootstrap or the mesh changes. The layout of Hello
// up to and including `version` never changes, so that versions can tell each other apart.
inline constexpr std::uint32_t kProtocolVersion = 5;

enum class Side : std::uint32_t { client = 1, server = 2 };

struct Hello {
  std::array<char, 8> magic;
  std::uint32_t version;
  Side side;
  std::uint64_t sender;  // the speaker, in the terms of the protocol above; the mesh puts its rank
  Tag meeting;           // names one of several meetings, before any proof
  Nonce nonce;
};
static_assert(sizeof(Hello) == 72);

enum class Refusal {
  none,
  not_crossdock,  // the bytes are no hello of the other side
  version,        // crossdock, but another protocol version
  other_meeting,  // a hello for another meeting
  wrong_proof,
  denied  // the other end says that this end's proof is wrong
};

class Handshake {
 public:
  Handshake(Side side, const Key& key, std::uint64_t sender = 0,
            std::uint32_t version = kProtocolVersion);

  // Bytes to send now; empty if there are none. After a refusal there may still be some, so that
  // the other end learns this end's version.
  Bytes take_output();
  // Bytes still missing of the frame expected next; 0 = the handshake is over.
  std::size_t wanted() const;
  // Takes at most wanted() bytes, as they come, and returns how many.
  std::size_t receive(std::span<const std::byte> bytes);

  bool proven() const { return step_ == Step::proven; }
  Refusal refusal() const { return refusal_; }
  const std::string& refusal_text() const { return refusal_text_; }  // "" = not refused
  bool peer_greeted() const { return step_ != Step::hello && step_ != Step::refused; }
  std::uint64_t peer_sender() const { return peer_.sender; }  // proved once proven() is true

 private:
  enum class Step { hello, proof, proven, refused };

  void on_hello();
  void on_proof();
  void refuse(Refusal refusal, std::string text);
  template <class T>
  void send(const T& frame);
  Bytes transcript(Side prover) const;

  Side side_;
  Key key_;
  Hello own_;
  Hello peer_{};
  Step step_ = Step::hello;
  Bytes input_;
  Bytes output_;
  Refusal refusal_ = Refusal::none;
  std::string refusal_text_;
};

// Reads one frame: a 32-bit length, then that many bytes. The length is checked before anything is
// allocated.
class FrameReader {
 public:
  explicit FrameReader(std::size_t max_bytes) : max_bytes_(max_bytes) {}

  void reserve(std::size_t bytes);  // takes the memory for a frame of that size now

  std::size_t wanted() const;  // 0 = complete, or refused
  std::size_t receive(std::span<const std::byte> bytes);
  bool complete() const { return length_ && payload_.size() == *length_; }
  const std::string& refusal_text() const { return refusal_text_; }  // "" = not refused
  const Bytes& payload() const { return payload_; }

 private:
  std::size_t max_bytes_;
  Bytes prefix_;
  std::optional<std::size_t> length_;
  Bytes payload_;
  std::string refusal_text_;
};

Bytes make_frame(std::span<const std::byte> payload);

}  // namespace xd
