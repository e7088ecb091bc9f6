#include "ep/slots/cpu/remote/reset.h"

#include <cstring>

#include "base/error.h"

namespace xd::ep::cpu {

LlRemoteReset::LlRemoteReset(net::Links& links, const std::vector<int>& ranks,
                             const std::vector<int>& neighbour_of, int first_frame)
    : links_(links),
      ranks_(ranks),
      neighbour_of_(neighbour_of),
      first_frame_(static_cast<unsigned>(first_frame)),
      rounds_(ranks.size()) {}

void LlRemoteReset::tell(int rank, std::size_t round, const turn::ResetRound& said) {
  rounds_[at(neighbour_of_[at(rank)])][round] = {said, true};
}

bool LlRemoteReset::has_told(int rank) const {
  const int neighbour = neighbour_of_[at(rank)];
  for (std::size_t round = 0; round < kRounds; ++round) {
    if (rounds_[at(neighbour)][round].unsent) return false;
    if (!links_.is_sent(neighbour, frame_of(round))) return false;
  }
  return true;
}

void LlRemoteReset::take_in(const net::Links::Chunk& chunk) {
  const int source = ranks_[at(chunk.neighbour)];
  ResetMessage message{};
  const bool whole = chunk.bytes.size() == sizeof(message);
  if (whole) std::memcpy(&message, chunk.bytes.data(), sizeof(message));
  if (!whole || message.source != source || frame_of(message.round) != chunk.frame) {
    throw Error(XD_ERROR_INTERNAL,
                error_text("rank ", source,
                           " has sent a message of a reset that cannot be: ", chunk.bytes.size(),
                           " bytes, round ", message.round, " of rank ", message.source),
                source);
  }
  if (reset_ != nullptr) reset_->bring(source, message.round, message.said);
  links_.give_back(chunk);
}

void LlRemoteReset::send() {
  for (int p = 0; p < static_cast<int>(ranks_.size()); ++p) {
    for (std::size_t r = 0; r < kRounds; ++r) {
      Round& round = rounds_[at(p)][r];
      const auto frame = static_cast<int>(frame_of(r));
      if (!round.unsent || !links_.is_free(p, frame_of(r))) continue;
      const auto taken = links_.take(p, {.first = frame, .end = frame + 1});
      XD_CHECK(taken.has_value());
      const ResetMessage message{
          .round = static_cast<std::uint32_t>(r), .source = links_.rank(), .said = round.said};
      std::memcpy(taken->bytes.data(), &message, sizeof(message));
      links_.send(*taken, sizeof(message));
      round.unsent = false;
    }
  }
}

}  // namespace xd::ep::cpu
