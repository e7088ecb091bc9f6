#include "bootstrap/meeting_client.h"

#include <algorithm>
#include <array>

#include "bootstrap/handshake.h"

namespace xd {
namespace {

constexpr int kHandshakeMs = 5000;

// Feeds `reader` (a Handshake or a FrameReader) until it wants no more or something has gone wrong.
template <class Reader>
Io read_what_it_wants(int fd, Reader& reader, const Deadline& deadline) {
  std::array<std::byte, 65536> buffer;
  while (reader.wanted() != 0) {
    const auto room = std::span(buffer).first(std::min(reader.wanted(), buffer.size()));
    std::size_t count = 0;
    if (!receive_some(fd, room, count)) return Io::closed;
    reader.receive(room.first(count));
    if (count == 0 && wait_readable(fd, deadline) == Io::timed_out) return Io::timed_out;
    if constexpr (requires { reader.take_output(); }) {
      const Io sent = send_all(fd, reader.take_output(), deadline);
      if (sent != Io::done) return sent;
    }
  }
  return Io::done;
}

}  // namespace

UniqueFd enter_meeting(const TcpAddress& address, const Secret& secret, int greeting_ms,
                       const Deadline& deadline) {
  const Deadline greeting(std::min(Deadline::after_ms(greeting_ms).when(), deadline.when()));
  UniqueFd fd = tcp_connect(address, greeting);
  Handshake handshake(Side::client, secret);
  if (send_all(fd.get(), handshake.take_output(), greeting) != Io::done)
    fail(XD_ERROR_MISMATCH, address.text(), " closed the connection: no meeting point");
  // Who does not greet soon is somebody else; who does may be busy with many ranks.
  Io end = wait_readable(fd.get(), greeting);
  if (end == Io::done) {
    const Deadline rest(std::min(Deadline::after_ms(kHandshakeMs).when(), deadline.when()));
    end = read_what_it_wants(fd.get(), handshake, rest);
  }
  if (handshake.proven()) return fd;
  if (handshake.refusal() != Refusal::none)
    fail(XD_ERROR_MISMATCH, "what listens at ", address.text(), " ", handshake.refusal_text());
  if (end == Io::timed_out)
    fail(XD_ERROR_TIMEOUT, address.text(), " did not answer the greeting in time");
  fail(XD_ERROR_MISMATCH, address.text(),
       handshake.peer_greeted() ? " refused this rank: it knows another secret"
                                : " refused this rank: it is no meeting point, or another one");
}

std::vector<Bytes> join_meeting(UniqueFd connection, const JoinRequest& request,
                                const Deadline& deadline) {
  const JoinMessage join{request.rank, request.num_ranks, deadline.remaining_ms(),
                         Bytes(request.blob.begin(), request.blob.end())};
  FrameReader reader(max_answer_bytes(request.num_ranks));
  Io end = send_all(connection.get(), make_frame(encode(join)), deadline);
  if (end == Io::done) end = read_what_it_wants(connection.get(), reader, deadline);
  if (end == Io::timed_out)
    fail(XD_ERROR_TIMEOUT, "the meeting point did not answer rank ", request.rank, " in time");
  if (end == Io::closed)
    throw MeetingGone(XD_ERROR_MISMATCH,
                      concat("the meeting point closed its connection to rank ", request.rank,
                             ": the process that serves it has ended"));
  const auto answer =
      reader.complete() ? decode_answer(reader.payload(), request.num_ranks) : std::nullopt;
  if (!answer)
    fail(XD_ERROR_MISMATCH, "the meeting point gave rank ", request.rank, " an invalid answer ",
         reader.refusal_text());
  if (answer->status != XD_SUCCESS) throw Error(answer->status, answer->text);
  return answer->blobs;
}

}  // namespace xd
