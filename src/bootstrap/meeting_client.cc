#include "bootstrap/meeting_client.h"

#include <algorithm>
#include <array>

#include "bootstrap/handshake.h"
#include "bootstrap/meeting_search.h"

namespace xd {
namespace {

// Feeds `reader` until its frame is complete or reading fails.
Io read_what_it_wants(int fd, FrameReader& reader, const Deadline& deadline) {
  std::array<std::byte, 65536> buffer;
  while (reader.wanted() != 0) {
    const auto room = std::span(buffer).first(std::min(reader.wanted(), buffer.size()));
    std::size_t count = 0;
    if (!receive_some(fd, room, count)) return Io::closed;
    reader.receive(room.first(count));
    if (count == 0 && wait_readable(fd, deadline) == Io::timed_out) return Io::timed_out;
  }
  return Io::done;
}

}  // namespace

UniqueFd enter_meeting(const TcpAddress& address, const Key& key, const Deadline& deadline) {
  MeetingSearch search({&address, 1}, key, MeetingSearch::Place::sure);
  if (auto entered = search.enter(deadline)) return std::move(*entered);
  fail(XD_ERROR_TIMEOUT, "no way into the meeting in time: ", search.obstacles());
}

std::vector<Bytes> join_meeting(UniqueFd connection, const JoinRequest& request,
                                const Deadline& deadline) {
  const JoinMessage join{request.rank, request.num_ranks, deadline.remaining_ms(),
                         Bytes(request.blob.begin(), request.blob.end())};
  // Once this rank has joined, the others rely on it, so it takes the memory for the answer first.
  FrameReader reader(max_answer_bytes(request.num_ranks));
  reader.reserve(answer_bytes(request.num_ranks, request.blob.size()));
  AnswerMessage answer;
  answer.blobs.assign(static_cast<std::size_t>(request.num_ranks), join.blob);
  Io end = send_all(connection.get(), make_frame(encode(join)), deadline);
  if (end == Io::done) end = read_what_it_wants(connection.get(), reader, deadline);
  if (end == Io::timed_out)
    fail(XD_ERROR_TIMEOUT, "the meeting point did not answer rank ", request.rank, " in time");
  if (end == Io::closed)
    throw MeetingGone(XD_ERROR_MISMATCH,
                      concat("the meeting point closed its connection to rank ", request.rank,
                             ": the process that serves it has ended"));
  if (!reader.complete() || !decode_answer_into(answer, reader.payload(), request.num_ranks))
    fail(XD_ERROR_MISMATCH, "the meeting point gave rank ", request.rank, " an invalid answer ",
         reader.refusal_text());
  if (answer.status != XD_SUCCESS) throw Error(answer.status, std::move(answer.text));
  return std::move(answer.blobs);
}

}  // namespace xd
