// The two messages of a meeting: a rank's contribution, and the answer to all.
#pragma once

#include <crossdock/comm.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/wire.h"

namespace xd {

struct JoinMessage {
  std::int32_t rank = 0;
  std::int32_t num_ranks = 0;
  std::int32_t remaining_ms = 0;  // the time that this rank is going to wait
  Bytes blob;
};

struct AnswerMessage {
  xd_status status = XD_SUCCESS;
  std::string text;          // text of a failure
  std::vector<Bytes> blobs;  // blobs of a success, by rank
};

inline constexpr std::int32_t kMaxRanks = XD_MAX_RANKS;
std::size_t max_join_bytes();
std::size_t max_answer_bytes(int num_ranks);
std::size_t answer_bytes(int num_ranks, std::size_t blob_bytes);  // on success

Bytes encode(const JoinMessage& join);
Bytes encode(const AnswerMessage& answer);

// Returns nothing if the bytes are no such message: wrong size, a rank out of range, an unknown
// status.
std::optional<JoinMessage> decode_join(std::span<const std::byte> bytes);
std::optional<AnswerMessage> decode_answer(std::span<const std::byte> bytes, int num_ranks);
// Decodes into `answer`, and allocates nothing for a success if `answer` has blobs of these sizes.
// False: the bytes are no such message.
bool decode_answer_into(AnswerMessage& answer, std::span<const std::byte> bytes, int num_ranks);

}  // namespace xd
