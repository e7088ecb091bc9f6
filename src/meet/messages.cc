#include "meet/messages.h"

#include <algorithm>

#include "meet/bootstrap.h"

namespace xd {
namespace {

constexpr std::size_t kJoinHeaderBytes = 3 * sizeof(std::int32_t);
constexpr std::size_t kAnswerHeaderBytes = sizeof(std::int32_t);
constexpr std::size_t kMaxTextBytes = 1024;

}  // namespace

std::size_t max_join_bytes() { return kJoinHeaderBytes + Bootstrap::kMaxBlob; }

std::size_t max_answer_bytes(int num_ranks) {
  const std::size_t blobs = static_cast<std::size_t>(num_ranks) * Bootstrap::kMaxBlob;
  return kAnswerHeaderBytes + std::max(blobs, kMaxTextBytes);
}

std::size_t answer_bytes(int num_ranks, std::size_t blob_bytes) {
  return kAnswerHeaderBytes + static_cast<std::size_t>(num_ranks) * blob_bytes;
}

Bytes encode(const JoinMessage& join) {
  WireWriter out;
  out.put(join.rank);
  out.put(join.num_ranks);
  out.put(join.remaining_ms);
  out.put_bytes(join.blob);
  return out.take();
}

Bytes encode(const AnswerMessage& answer) {
  WireWriter out;
  out.put(static_cast<std::int32_t>(answer.status));
  for (const Bytes& blob : answer.blobs) out.put_bytes(blob);
  const auto text = std::as_bytes(std::span(answer.text));
  out.put_bytes(text.first(std::min(text.size(), kMaxTextBytes)));
  return out.take();
}

std::optional<JoinMessage> decode_join(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  JoinMessage join;
  join.rank = in.take<std::int32_t>();
  join.num_ranks = in.take<std::int32_t>();
  join.remaining_ms = in.take<std::int32_t>();
  join.blob.assign(in.rest().begin(), in.rest().end());
  const bool valid = in.ok() && join.num_ranks >= 1 && join.num_ranks <= kMaxRanks &&
                     join.rank >= 0 && join.rank < join.num_ranks && join.remaining_ms >= 0 &&
                     join.blob.size() <= Bootstrap::kMaxBlob;
  if (!valid) return std::nullopt;
  return join;
}

std::optional<AnswerMessage> decode_answer(std::span<const std::byte> bytes, int num_ranks) {
  AnswerMessage answer;
  if (!decode_answer_into(answer, bytes, num_ranks)) return std::nullopt;
  return answer;
}

bool decode_answer_into(AnswerMessage& answer, std::span<const std::byte> bytes, int num_ranks) {
  WireReader in(bytes);
  const auto status = in.take<std::int32_t>();
  if (!in.ok() || status < XD_SUCCESS || status > XD_ERROR_INTERNAL) return false;
  answer.status = static_cast<xd_status>(status);
  if (status != XD_SUCCESS) {
    const auto text = in.rest().first(std::min(in.rest().size(), kMaxTextBytes));
    answer.text.assign(reinterpret_cast<const char*>(text.data()), text.size());
    answer.blobs.clear();
    return true;
  }
  const std::size_t ranks = static_cast<std::size_t>(num_ranks);
  if (in.rest().size() % ranks != 0) return false;
  const std::size_t blob_bytes = in.rest().size() / ranks;
  answer.blobs.resize(ranks);
  for (Bytes& blob : answer.blobs) {
    const auto taken = in.take_bytes(blob_bytes);
    blob.assign(taken.begin(), taken.end());
  }
  return true;
}

}  // namespace xd
