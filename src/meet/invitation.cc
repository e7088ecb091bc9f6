#include "meet/invitation.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/error.h"

namespace xd {
namespace {

constexpr std::array<char, 4> kMagic{'X', 'D', 'I', 'N'};
constexpr Tag kNoDoor{};

// The checksum catches accidents of transport; the secret keeps strangers out.
struct InvitationBytes {
  std::array<char, 4> magic;
  std::uint32_t version;
  Secret secret;
  std::array<Tag, Invitation::kMostDoors> doors;  // zeros = none
  std::array<unsigned char, 8> unused;
  Tag checksum;
};
static_assert(sizeof(InvitationBytes) == XD_UNIQUE_ID_BYTES);

Tag checksum_of(InvitationBytes bytes) {
  bytes.checksum = {};
  const std::string_view text(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
  return tag_of(derive_secret({&text, 1}));
}

}  // namespace

xd_unique_id encode_invitation(const Invitation& invitation) {
  XD_CHECK(invitation.doors.size() <= Invitation::kMostDoors);
  InvitationBytes out{kMagic, kProtocolVersion, invitation.secret, {}, {}, {}};
  std::ranges::copy(invitation.doors, out.doors.begin());
  out.checksum = checksum_of(out);
  xd_unique_id bytes;
  std::memcpy(bytes.bytes, &out, sizeof(out));
  return bytes;
}

Invitation decode_invitation(const xd_unique_id& bytes) {
  InvitationBytes in;
  std::memcpy(&in, bytes.bytes, sizeof(in));
  XD_REQUIRE(in.magic == kMagic,
             "config.unique_id holds no invitation: expected the bytes of xd_comm_invite");
  if (in.version != kProtocolVersion)
    fail(XD_ERROR_MISMATCH, "config.unique_id is an invitation of protocol version ", in.version,
         ", expected ", kProtocolVersion, ": it was made by another version of the library");
  XD_REQUIRE(in.checksum == checksum_of(in), "config.unique_id is damaged: expected the ",
             XD_UNIQUE_ID_BYTES, " bytes of xd_comm_invite, unchanged");
  Invitation invitation{.secret = in.secret, .doors = {}};
  std::ranges::copy_if(in.doors, std::back_inserter(invitation.doors),
                       [](const Tag& door) { return door != kNoDoor; });
  XD_REQUIRE(!invitation.doors.empty(), "config.unique_id names no rank that invites");
  return invitation;
}

Secret door_secret(const Secret& of_mesh) {
  const std::array<std::string_view, 2> parts{
      "crossdock door",
      std::string_view(reinterpret_cast<const char*>(of_mesh.data()), of_mesh.size())};
  return derive_secret(parts);
}

}  // namespace xd
