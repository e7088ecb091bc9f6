#include "bootstrap/unique_id.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "bootstrap/handshake.h"

namespace xd {
namespace {

constexpr std::array<char, 4> kMagic{'X', 'D', 'I', 'D'};

// The checksum catches accidents of transport; the secret keeps strangers out.
struct IdBytes {
  std::array<char, 4> magic;
  std::uint32_t version;
  Secret secret;
  std::uint16_t port;
  std::array<char, 70> address;  // zero-terminated
  Tag checksum;
};
static_assert(sizeof(IdBytes) == XD_UNIQUE_ID_BYTES);
static_assert(std::tuple_size_v<decltype(IdBytes::address)> > INET6_ADDRSTRLEN + 16,
              "room for any address with the name of its interface");

Tag checksum_of(IdBytes id) {
  id.checksum = {};
  const std::string_view bytes(reinterpret_cast<const char*>(&id), sizeof(id));
  return tag_of(derive_secret({&bytes, 1}));
}

}  // namespace

xd_unique_id encode_unique_id(const MeetingPoint& point) {
  IdBytes out{kMagic, kProtocolVersion, point.secret, point.port, {}, {}};
  XD_CHECK(point.address.size() < out.address.size());
  std::copy(point.address.begin(), point.address.end(), out.address.begin());
  out.checksum = checksum_of(out);
  xd_unique_id id;
  std::memcpy(id.bytes, &out, sizeof(out));
  return id;
}

MeetingPoint decode_unique_id(const xd_unique_id& id) {
  IdBytes in;
  std::memcpy(&in, id.bytes, sizeof(in));
  XD_REQUIRE(in.magic == kMagic,
             "config.unique_id holds no unique id: expected the bytes of xd_unique_id_create");
  XD_REQUIRE(in.version == kProtocolVersion, "config.unique_id has protocol version ", in.version,
             ", expected ", kProtocolVersion, ": it was made by another version of the library");
  XD_REQUIRE(in.checksum == checksum_of(in), "config.unique_id is damaged: expected the ",
             XD_UNIQUE_ID_BYTES, " bytes of xd_unique_id_create, unchanged");
  // The checksum needs no secret, so a well-formed id may still have been made up.
  const auto end = std::find(in.address.begin(), in.address.end(), '\0');
  XD_REQUIRE(end != in.address.begin() && end != in.address.end() && in.port != 0,
             "config.unique_id names no address and port");
  return {std::string(in.address.begin(), end), in.port, in.secret};
}

}  // namespace xd
