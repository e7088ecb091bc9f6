// Secrets, nonces, and values derived from them. The primitives are libsodium's.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

namespace xd {

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
};

// Keyed authentication code of `message`, and its comparison in constant time.
Proof prove(const Secret& secret, std::span<const std::byte> message);
bool proof_holds(const Secret& secret, std::span<const std::byte> message, const Proof& proof);

}  // namespace xd
