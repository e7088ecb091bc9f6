#include "bootstrap/secret.h"

#include <sodium.h>

#include "base/error.h"

namespace xd {
namespace {

static_assert(std::tuple_size_v<Secret> == crypto_auth_KEYBYTES);
static_assert(std::tuple_size_v<Proof> == crypto_auth_BYTES);

// The call is cheap after the first one, and safe on any thread.
void require_sodium() {
  if (sodium_init() < 0)
    fail(XD_ERROR_SYSTEM, "libsodium cannot be initialised: no random numbers");
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

}  // namespace xd
