#include "meet/handshake.h"

#include <sodium.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace xd {
namespace {

constexpr std::array<char, 8> kMagic{'C', 'R', 'O', 'S', 'D', 'O', 'C', 'K'};
constexpr std::size_t kPrefixBytes = sizeof(std::uint32_t);
constexpr Tag kNoMeeting{};
constexpr Proof kDenial{};

static_assert(std::tuple_size_v<Secret> == crypto_auth_KEYBYTES);
static_assert(std::tuple_size_v<Proof> == crypto_auth_BYTES);

// The call is cheap after the first one, and safe on any thread.
void require_sodium() {
  if (sodium_init() < 0)
    fail(XD_ERROR_SYSTEM, "libsodium cannot be initialised: no random numbers");
}

std::string another_secret(const Key& than) {
  return than.variable != nullptr ? concat("another ", than.variable, ", or none")
                                  : "another secret";
}

const unsigned char* data(std::span<const std::byte> bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

}  // namespace

void random_fill(std::span<unsigned char> bytes) {
  require_sodium();
  randombytes_buf(bytes.data(), bytes.size());
}

Secret derive_secret(std::span<const std::string_view> parts) {
  require_sodium();
  crypto_generichash_state state;
  Secret secret;
  crypto_generichash_init(&state, nullptr, 0, secret.size());
  for (const std::string_view part : parts) {
    const unsigned long long size = part.size();
    crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(&size), sizeof(size));
    crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(part.data()), size);
  }
  crypto_generichash_final(&state, secret.data(), secret.size());
  return secret;
}

Tag tag_of(const Secret& secret) {
  require_sodium();
  static constexpr std::string_view kPurpose = "crossdock meeting";
  Tag tag;
  crypto_generichash(tag.data(), tag.size(),
                     reinterpret_cast<const unsigned char*>(kPurpose.data()), kPurpose.size(),
                     secret.data(), secret.size());
  return tag;
}

Proof prove(const Secret& secret, std::span<const std::byte> message) {
  require_sodium();
  Proof proof;
  crypto_auth(proof.data(), data(message), message.size(), secret.data());
  return proof;
}

bool proof_holds(const Secret& secret, std::span<const std::byte> message, const Proof& proof) {
  require_sodium();
  return crypto_auth_verify(proof.data(), data(message), message.size(), secret.data()) == 0;
}

template <class T>
void Handshake::send(const T& frame) {
  const auto bytes = std::as_bytes(std::span(&frame, 1));
  output_.insert(output_.end(), bytes.begin(), bytes.end());
}

Handshake::Handshake(Side side, const Key& key, std::uint64_t sender, std::uint32_t version)
    : side_(side), key_(key), own_{kMagic, version, side, sender, key.name, make_random<Nonce>()} {
  if (side_ == Side::client) send(own_);
}

Bytes Handshake::take_output() { return std::exchange(output_, {}); }

std::size_t Handshake::wanted() const {
  if (step_ == Step::hello) return sizeof(Hello) - input_.size();
  if (step_ == Step::proof) return sizeof(Proof) - input_.size();
  return 0;
}

std::size_t Handshake::receive(std::span<const std::byte> bytes) {
  const std::size_t count = std::min(bytes.size(), wanted());
  if (count == 0) return 0;
  input_.insert(input_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
  if (step_ == Step::hello) {
    // The first bytes already tell a stranger, so there is no need to wait for the rest of a frame
    // that may never come.
    const std::size_t known = std::min(input_.size(), kMagic.size());
    if (std::memcmp(input_.data(), kMagic.data(), known) != 0)
      refuse(Refusal::not_crossdock, "does not speak this library's protocol");
  }
  if (wanted() != 0) return count;
  if (step_ == Step::hello)
    on_hello();
  else if (step_ == Step::proof)
    on_proof();
  return count;
}

void Handshake::on_hello() {
  std::memcpy(&peer_, input_.data(), sizeof(peer_));
  input_.clear();
  if (peer_.version != own_.version) {
    if (side_ == Side::server) send(own_);
    return refuse(Refusal::version,
                  concat("speaks protocol version ", peer_.version, ", expected ", own_.version));
  }
  if (peer_.side == side_)
    return refuse(Refusal::not_crossdock, "is not at the other end of a meeting");
  if (peer_.meeting != own_.meeting) {
    if (side_ == Side::server) send(Hello{kMagic, own_.version, side_, 0, kNoMeeting, {}});
    return refuse(Refusal::other_meeting,
                  side_ == Side::server ? "means another meeting" : "serves another meeting");
  }
  step_ = Step::proof;
  if (side_ == Side::server) return send(own_);
  send(prove(key_.secret, transcript(side_)));
}

void Handshake::on_proof() {
  Proof proof;
  std::memcpy(proof.data(), input_.data(), sizeof(proof));
  input_.clear();
  const Side prover = side_ == Side::server ? Side::client : Side::server;
  if (side_ == Side::client && proof == kDenial)
    return refuse(Refusal::denied, concat("refused this rank: it knows ", another_secret(key_)));
  if (!proof_holds(key_.secret, transcript(prover), proof)) {
    if (side_ == Side::server) send(kDenial);
    return refuse(Refusal::wrong_proof,
                  concat("failed to prove that it knows the secret",
                         key_.variable != nullptr ? ": it has " + another_secret(key_) : ""));
  }
  if (side_ == Side::server) send(prove(key_.secret, transcript(side_)));
  step_ = Step::proven;
}

void Handshake::refuse(Refusal refusal, std::string text) {
  step_ = Step::refused;
  refusal_ = refusal;
  refusal_text_ = std::move(text);
}

Bytes Handshake::transcript(Side prover) const {
  WireWriter out;
  out.put(prover);
  out.put(side_ == Side::client ? own_ : peer_);
  out.put(side_ == Side::client ? peer_ : own_);
  return out.take();
}

void FrameReader::reserve(std::size_t bytes) {
  prefix_.reserve(kPrefixBytes);
  payload_.reserve(bytes);
}

std::size_t FrameReader::wanted() const {
  if (!refusal_text_.empty()) return 0;
  return length_ ? *length_ - payload_.size() : kPrefixBytes - prefix_.size();
}

std::size_t FrameReader::receive(std::span<const std::byte> bytes) {
  const std::size_t count = std::min(bytes.size(), wanted());
  Bytes& target = length_ ? payload_ : prefix_;
  target.insert(target.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
  if (!length_ && prefix_.size() == kPrefixBytes) {
    const std::size_t length = WireReader(prefix_).take<std::uint32_t>();
    if (length > max_bytes_) {
      refusal_text_ =
          concat("announced a frame of ", length, " bytes, expected at most ", max_bytes_);
    } else {
      length_ = length;
      payload_.reserve(length);
    }
  }
  return count;
}

Bytes make_frame(std::span<const std::byte> payload) {
  WireWriter out;
  out.put(static_cast<std::uint32_t>(payload.size()));
  out.put_bytes(payload);
  return out.take();
}

}  // namespace xd
