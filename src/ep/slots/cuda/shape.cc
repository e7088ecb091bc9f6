#include "ep/slots/cuda/shape.h"

#include <algorithm>

namespace xd::ep::cuda {
namespace {

// Places parts of a block's dynamic shared memory one after another.
struct SmemCursor {
  std::uint32_t at = 0;

  std::uint32_t place(std::uint64_t bytes) {
    const std::uint32_t offset = at;
    at = static_cast<std::uint32_t>(round_up(at + bytes, 128));
    return offset;
  }
};

}  // namespace

LlSmemLayout ll_smem_layout(const LlSizes& s, std::size_t shared_bytes) {
  const auto ranks = at(s.ranks), tokens = at(s.max_tokens);
  const std::uint64_t candidates = ranks * tokens;
  LlSmemLayout room{};
  SmemCursor cursor;
  room.has_places = s.experts <= kLlMostSharedPlaces;
  room.places = cursor.place(room.has_places ? at(s.experts) * sizeof(std::uint32_t) : 0);
  const std::uint64_t columns = at(s.local_experts) + (s.has_slots ? 0 : 1);
  room.counts = cursor.place((ranks * columns + 1) / 2 * sizeof(std::uint32_t));
  const std::uint64_t zones = std::max(ranks, at(s.local_experts)) + 1;
  room.zones = cursor.place(s.has_slots ? 0 : zones * sizeof(std::int32_t));
  room.hits = cursor.place((candidates + kLlDispatchMovers - 1) / kLlDispatchMovers *
                           (kLlDispatchMovers / 32) * sizeof(std::uint32_t));
  room.orders = cursor.place(candidates);
  // Scales of a quantised row: a float32 for 128 columns of bf16.
  room.tail_stride =
      static_cast<std::uint32_t>(round_up(s.max_row_bytes / 2 / 128 * sizeof(float), 8));
  room.tails = cursor.place(std::uint64_t{4} * room.tail_stride);
  // Vectors of eight ids are read at once: where a token has no more, each has one of its own.
  room.ids_topk = static_cast<std::uint32_t>(std::max(s.max_topk, kLlFewTopk));
  room.ids_stride = static_cast<std::uint32_t>(round_up(tokens * room.ids_topk, 8));
  const std::uint64_t ids = ranks * room.ids_stride * sizeof(std::uint16_t);
  room.has_ids = cursor.at + ids <= shared_bytes;
  room.ids = cursor.place(room.has_ids ? ids : 0);
  const std::uint64_t names = candidates * sizeof(std::uint32_t);
  room.has_names = cursor.at + names <= shared_bytes;
  room.names = cursor.place(room.has_names ? names : 0);
  room.end = cursor.at;
  return room;
}

std::vector<std::uint32_t> ll_places(const LlConfig& config) {
  std::vector<std::uint32_t> places;
  for (int e = 0; e < config.experts; ++e) {
    const int physical_expert = config.map().physical_expert_of(e),
              rank = config.map().rank_at(physical_expert);
    places.push_back(static_cast<std::uint32_t>(rank) << 16 |
                     static_cast<std::uint32_t>(physical_expert - config.map().first(rank)));
  }
  return places;
}

std::vector<std::uint32_t> ll_order(const LlSizes& s, int rank, int senders) {
  std::vector<std::uint32_t> order;
  const auto add = [&](int source, int token) {
    order.push_back(static_cast<std::uint32_t>(source) << 16 | static_cast<std::uint32_t>(token));
  };
  for (int t = 0; t < s.max_tokens; ++t) add(rank, t);
  // Every rank sends to its next neighbour first, and has two tokens of each block under way.
  const int wave = 2 * std::max(senders, 1);
  for (int first = 0; first < s.max_tokens; first += wave) {
    for (int n = 1; n < s.ranks; ++n) {
      for (int t = first; t < std::min(first + wave, s.max_tokens); ++t) {
        add((rank - n + s.ranks) % s.ranks, t);
      }
    }
  }
  return order;
}

}  // namespace xd::ep::cuda
