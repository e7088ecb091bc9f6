#include "meet/unique_id.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/tcp.h"
#include "base/thread.h"
#include "meet/handshake.h"
#include "meet/meeting.h"
#include "meet/meeting_client.h"

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

class UniqueIdBootstrap final : public Bootstrap {
 public:
  UniqueIdBootstrap(const MeetingPoint& point, int rank, int num_ranks)
      : Bootstrap(rank, num_ranks), point_(point) {}

  std::vector<Bytes> all_gather(const MakeBlob& make, const Deadline& deadline) override {
    const TcpAddress address =
        resolve(point_.address, "config.unique_id: address").front().with_port(point_.port);
    return join_meeting(enter_meeting(address, point_.secret, deadline),
                        {.rank = rank(), .num_ranks = num_ranks(), .make = make}, deadline);
  }
  bool can_come_again() const override { return true; }

 private:
  MeetingPoint point_;
};

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

xd_unique_id create_unique_id(const xd_unique_id_config& config, int timeout_ms) {
  const std::string host = config.address != nullptr ? config.address : "127.0.0.1";
  XD_REQUIRE(config.port >= 0 && config.port <= 65535, "config.port = ", config.port,
             ", expected 0 to 65535");
  XD_REQUIRE(timeout_ms > 0, "config.timeout_ms = ", timeout_ms, ", expected at least 1");
  UniqueFd listener;
  int error = 0;
  for (const TcpAddress& address : resolve(host, "config.address")) {
    listener = tcp_listen(address.with_port(static_cast<std::uint16_t>(config.port)));
    if (listener) break;
    error = errno;
  }
  if (!listener) fail_errno(concat("listen on ", host, " port ", config.port), error);

  const TcpAddress here = local_address(listener.get());
  const MeetingPoint point{here.host(), here.port(), make_random<Secret>()};
  auto meeting = std::make_unique<Meeting>(
      std::move(listener),
      MeetingOptions{.key = point.secret, .deadline = Deadline::after_ms(timeout_ms)});
  // The thread owns all that it uses, and ends with the meeting or its timeout, so no thread has to
  // join it.
  start_thread("xd-meeting", [meeting = std::move(meeting)] { meeting->run(); }).detach();
  return encode_unique_id(point);
}

std::unique_ptr<Bootstrap> meet_at(const MeetingPoint& point, int rank, int num_ranks) {
  return std::make_unique<UniqueIdBootstrap>(point, rank, num_ranks);
}

}  // namespace xd
