// The memory that the ranks of a group of low latency share on CUDA, and the forms in which ids
// and rows travel through it. Pure functions of sizes, for hosts and kernels.
//
//   area of rank r             written by        its reader knows that it is there from
//   pipeline[kind]             src               the record's seal: see turn/device/pipeline.h
//   bad_ids[stage][src]        src, in dispatch  the tag beside the count
//   ids[stage][src][t]         src, in dispatch  the tag in each word
//   weights[stage][src][t][k]  src, in combine   the tag beside the weight
//   meet[src]                  src, in reset     LlMeeting, for each round
//   rows[stage][src][t]        src, in dispatch  each word: it is not all ones (see words.cuh)
//   partials[stage][t][order]  ranks, in combine each word, likewise: partial sums of r's token t
//
// stage = number of the operation mod ll_stages(in_flight). A stage is written again only under its
// reader's credit. Words with tags are never cleared: in one place two operations follow one
// another whose tags differ. Rows and partial sums are all ones whenever they are free.
#pragma once

#include <crossdock/low_latency.h>

#include <cstdint>

#include "base/layout.h"
#include "turn/device/pipeline.h"

namespace xd::ep::cuda {

inline constexpr int kLlDispatch = 0, kLlCombine = 1;  // pipelines

// The stages of a pipeline of which so many operations may be between their halves. A send half of
// n comes when all ranks have sent n - in_flight. By then they have freed the stages of the
// operations up to n - 2 * in_flight - 1, delivered or not: see docs/internals/low_latency.md.
constexpr int ll_stages(int in_flight) { return 2 * in_flight + 1; }
inline constexpr int kLlMaxStages = ll_stages(XD_LL_MAX_IN_FLIGHT);

// The words in which a token's expert ids travel: in each word some ids, below a tag of 16 bits. An
// id of all ones is none.
struct LlIdWords {
  static constexpr int kTagBits = 16;
  // Up to eight ids below 4095 lie in places that do not depend on the group.
  static constexpr int kFewBits = 12, kFewPerWord = 4;

  std::int32_t bits;      // of an id
  std::int32_t per_word;  // ids
  std::int32_t words;     // of a token: an even number, as they travel in pairs

  static constexpr LlIdWords make(int experts, int topk) {
    LlIdWords w{};
    while (experts >> w.bits != 0) ++w.bits;
    if (topk <= 2 * kFewPerWord && w.bits < kFewBits) w.bits = kFewBits;
    w.per_word = (64 - kTagBits) / w.bits;
    w.words = ((topk + w.per_word - 1) / w.per_word + 1) / 2 * 2;
    return w;
  }
  constexpr bool few() const { return bits == kFewBits && per_word == kFewPerWord && words == 2; }
  constexpr std::uint32_t none() const { return (1u << bits) - 1; }
  constexpr std::uint32_t id(std::uint64_t word, int place) const {
    return static_cast<std::uint32_t>(word >> (place * bits)) & none();
  }
};

// The tag of an operation's words. Its top bit is set, so memory of zeros has no tag.
constexpr std::uint32_t ll_tag(std::uint64_t epoch) {
  return 0x8000u | static_cast<std::uint32_t>(epoch & 0x7FFF);
}

// The parts of a row as it travels: payload, then the scales, then the weights, each in whole
// words.
struct LlRowForm {
  std::uint32_t vectors;       // 16 bytes each: of the payload
  std::uint32_t scale_words;   // 8 bytes each
  std::uint32_t weight_words;  // likewise

  constexpr std::uint32_t payload() const { return vectors * 16; }
  constexpr std::uint32_t tail_words() const { return scale_words + weight_words; }
};
constexpr LlRowForm ll_row_form(std::uint32_t row_bytes, std::uint32_t scale_bytes, bool quantised,
                                int weights) {
  return {.vectors = (quantised ? row_bytes / 2 : row_bytes) / 16,
          .scale_words = (scale_bytes + 7) / 8,
          .weight_words = (static_cast<std::uint32_t>(weights) + 1) / 2};
}

// The words in the place of scales in a row of bytes that the caller gives: its scales, then
// escapes, words with a bit for each of 32 words (dispatch/given.cuh).
struct LlGivenForm {
  std::uint32_t scale_words;
  // Of the payload: for 32 vectors those of their lower words, then of their upper ones.
  std::uint32_t payload_escapes;
  std::uint32_t scale_escapes;

  static constexpr std::uint32_t kEach = 32;
  static constexpr LlGivenForm of(std::uint32_t row_bytes, std::uint32_t scale_bytes) {
    const std::uint32_t scales = (scale_bytes + 7) / 8;
    return {.scale_words = scales,
            .payload_escapes = (row_bytes / 16 + kEach - 1) / kEach * 2,
            .scale_escapes = (scales + kEach - 1) / kEach};
  }
  constexpr std::uint32_t escapes() const { return payload_escapes + scale_escapes; }
  constexpr std::uint32_t words() const { return scale_words + escapes(); }
  // The escapes of a vector's lower (0) or upper (1) word, and those of a word of scales.
  constexpr std::uint32_t escapes_of_vector(std::uint32_t vector, std::uint32_t half) const {
    return scale_words + vector / kEach * 2 + half;
  }
  constexpr std::uint32_t escapes_of_scales(std::uint32_t word) const {
    return scale_words + payload_escapes + word / kEach;
  }
};

struct LlSizes {
  int ranks, experts, local_experts, max_tokens, max_topk, stages;
  bool masks;
  std::uint64_t max_row_bytes;
  std::uint64_t max_partial_bytes;  // of a partial sum, in any form
  bool has_slots = true;            // else rows lie without gaps
  bool rows_last = false;           // behind the partial sums: where ranks are on several machines

  // Where ranks may be masked, each has a place of its own: what a masked rank has stored lies
  // there for good, and no other rank's sum is taken from it.
  constexpr std::uint64_t partials_per_token() const {
    return static_cast<std::uint64_t>(max_topk < ranks && !masks ? max_topk : ranks);
  }
  // The longest row as it travels. Quantised rows are half as long, and have room for their scales.
  constexpr std::uint64_t row_stride() const {
    const std::uint64_t weights = (static_cast<std::uint64_t>(max_topk) + 1) / 2 * 8;
    return (max_row_bytes + weights + 127) / 128 * 128;
  }
};

// The words that a rank writes at a peer when it comes back into step: see
// ep/slots/cuda/control.cu.
struct LlMeeting {
  std::uint64_t greeting;    // a number that it has never used
  std::uint64_t answer;      // the peer's greeting that it has seen last
  std::uint64_t numbers[2];  // by pipeline; written before the greeting
};

// Byte offsets. All ranks have the same.
struct LlWordsMap {
  turn::PipelineMap pipeline[2];
  std::uint64_t bad_ids, ids, weights, meet;
  // From the first of both on memory is all ones when it is free.
  std::uint64_t rows, partials, end;
  std::uint64_t row_stride, partial_stride;

  template <class Record>
  static constexpr LlWordsMap make(const LlSizes& s) {
    const auto ranks = static_cast<std::uint64_t>(s.ranks);
    const auto stages = static_cast<std::uint64_t>(s.stages);
    const auto tokens = static_cast<std::uint64_t>(s.max_tokens);
    const std::uint64_t cells = stages * ranks;
    LayoutCursor cursor;
    LlWordsMap map{};
    for (turn::PipelineMap& pipeline : map.pipeline) {
      pipeline = turn::PipelineMap::add<Record>(cursor, s.ranks, s.stages);
    }
    map.bad_ids = cursor.add<std::uint64_t>(cells, 64);
    const LlIdWords ids = LlIdWords::make(s.experts, s.max_topk);
    map.ids = cursor.add<std::uint64_t>(cells * tokens * static_cast<std::uint64_t>(ids.words), 64);
    map.weights =
        cursor.add<std::uint64_t>(cells * tokens * static_cast<std::uint64_t>(s.max_topk), 64);
    map.meet = cursor.add<LlMeeting>(2 * ranks, 64);
    map.row_stride = s.row_stride();
    map.partial_stride = s.max_partial_bytes;
    const std::uint64_t row_bytes = cells * tokens * map.row_stride;
    if (!s.rows_last) map.rows = cursor.add<std::byte>(row_bytes, 256);
    map.partials =
        cursor.add<std::byte>(stages * tokens * s.partials_per_token() * map.partial_stride, 256);
    if (s.rows_last) map.rows = cursor.add<std::byte>(row_bytes, 256);
    map.end = cursor.add<std::byte>(0, 256);
    return map;
  }
};

}  // namespace xd::ep::cuda
