// The parameters of the kernels of low latency: plain data, passed by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/rank_bits.h"
#include "comm/device/comm.h"
#include "ep/plan/count_word.h"
#include "ep/plan/cuda/slot_table.h"
#include "ep/plan/plan_check.h"
#include "ep/plan/quantise.h"
#include "ep/slots/cuda/map.h"
#include "ep/slots/placement.h"
#include "ep/slots/plan.h"
#include "ep/slots/record.h"
#include "turn/device/group.h"
#include "turn/device/pipeline.h"

namespace xd::ep::cuda {

// The mistakes that a kernel finds in its own call, beside those in a plan.
enum class LlFault : std::int32_t {
  none,
  plan,          // LlFindings::fault
  busy,          // as many operations are between their halves as may be: got
  both_between,  // a call of both halves while operations are between theirs: got
  no_send,       // a receive half without a send half
  not_as_sent,   // a receive half whose tensors have other rows than the send half: got, expected
  tokens,        // `out` has other rows than the plan: got, expected
  not_clean,     // XD_LL_VERIFY: words of an operation that has been taken are not free
  topk,          // topk_weights has other columns than the plan: got, expected
  rows,          // expert_out has fewer rows than the plan brings: got, expected
  form_not_as_sent,  // a receive half whose max_tokens, weights or choices are not the send half's
  wire_not_as_sent   // a receive half under another wire than the send half's: got, expected
};

struct LlFindings {
  LlFault kind;
  Fault fault;
  std::int64_t got, expected;
  std::int64_t bad_ids;
};

struct LlReport : turn::DeviceReport<LlRecord, LlFindings> {
  std::uint64_t total_bad_ids;
  RankBits masked, masked_by;  // as they are now
};

// Whom an operation has been sent to, in groups that mask. Its receive half waits for nobody else.
struct alignas(16) LlCompany {
  RankBits at_start;  // ranks that were not masked when the send half began, and this rank
  RankBits sent_to;   // ranks of at_start that had a free place for it: the others have been lost
};

// Working state of a group, in memory of its device that no peer touches.
struct LlControl : turn::DeviceControl {
  std::uint32_t reporting;  // a thread writes the report
  // By pipeline and stage: the last operation that has been reported.
  std::uint64_t reported[2][kLlMaxStages];
  std::uint64_t bad_ids;  // total
  // By pipeline and stage:
  std::uint64_t failed_send[2][kLlMaxStages];  // an operation whose send half has failed
  std::uint64_t left[2][kLlMaxStages];         // the last one taken whose words lie there
  LlCompany company[2][kLlMaxStages];          // by pipeline and stage
  std::uint64_t masked[2], masked_by[2];       // RankBits
  std::uint64_t greeting;                      // of the last reset
  std::uint64_t highest[2];                    // numbers of the operations, by pipeline, in a reset
  std::uint64_t lost[2];                       // RankBits: ranks that have been lost in this reset
  std::uint64_t verified[2];  // by pipeline: the last operation whose staging has been looked at
  // The decisions that the last block of a launch has made for all (ep/slots/cuda/agree.cuh), by
  // pipeline.
  std::uint64_t starts[2][sizeof(RankBits) / 4];
  std::uint64_t sources[2][kMaxDeviceRanks], verdict[2];
};

// Rows whose words are all ones while they are free.
struct LlStaging {
  std::byte* data;
  std::uint64_t bytes, stride;
};

// The data that stays the same over a group's life.
struct LlDevice {
  DeviceComm comm;  // with the group's timeout
  int number;
  bool fatal_errors, masks, collapse;
  bool dependent;  // launches begin while those before them still run
  int experts, local_experts, max_tokens, max_topk, in_flight, stages, most_blocks;
  LlControl* control;
  LlReport* report;
  turn::PipelineCount* counts[2];  // by pipeline, [most_blocks]
  std::byte* own_area;
  const HeapRange* areas;       // by rank, in device memory
  const std::uint32_t* places;  // [E] rank << 16 | local expert, in device memory
  const std::uint32_t* order;   // [W * max_tokens] source << 16 | token, as they are likely to come
  LlWordsMap map;
  LlIdWords ids;
  PlanTerms terms;
  // The parts of this group's plans, which have room for all that may come.
  LlPlanMap plan;
  std::uint64_t nonce;
  const SlotTableDevice* slots;  // nullptr = no logical experts
  int num_hosts;                 // 1: sums are not made by host
  const RankBits* hosts;         // [num_hosts] the ranks of each, in device memory

  constexpr int rank() const { return comm.rank; }
  constexpr int ranks() const { return comm.num_ranks; }
  constexpr std::int64_t slots_per_expert() const {
    return std::int64_t{comm.num_ranks} * max_tokens;
  }
  constexpr int partials_per_token() const {
    return max_topk < ranks() && !masks ? max_topk : ranks();
  }
  // The layout of a pipeline's stage in this rank's memory.
  constexpr LlStaging staging(int kind, std::uint64_t stage) const {
    const bool rows = kind == kLlDispatch;
    const std::uint64_t stride = rows ? map.row_stride : map.partial_stride;
    const int each = rows ? ranks() : partials_per_token();
    const std::uint64_t bytes =
        static_cast<std::uint64_t>(max_tokens) * static_cast<std::uint64_t>(each) * stride;
    return {own_area + (rows ? map.rows : map.partials) + stage * bytes, bytes, stride};
  }
};
static_assert(sizeof(LlDevice) <= 768);

// The halves that a launch does, and how.
struct LlStep {
  bool send, receive;
  bool failed;  // `record` has only a status: no row is sent, and none is waited for. `receive`
                // says that the call is known to have both halves
  bool silent;  // takes a receive half whose arguments are bad without its rows; the host told so
  std::uint32_t launch;
};

// A tensor [L,S,columns]; strides in bytes.
struct LlSlots {
  std::byte* data;
  std::int64_t expert_stride, slot_stride, col_stride;

  constexpr std::byte* row(std::int64_t expert, std::int64_t slot) const {
    return data + expert * expert_stride + slot * slot_stride;
  }
};

// The outputs of a receive half whose rows lie without gaps, in [N,H]: recv_tokens has one expert
// with N slots then.
struct LlRowsOut {
  bool by_rank;    // one row for all experts of a token here, else one for each
  bool wide_topk;  // recv_topk_idx is int64
  std::int32_t alignment;
  std::int32_t rows;  // N
  std::int32_t topk;  // columns of recv_weights, or recv_topk_idx; 0 = neither has any
  std::int64_t* row_offsets;
  float* recv_weights;
  void* recv_topk_idx;
};

// Offsets of the parts of a block's dynamic shared memory in dispatch.
struct LlSmemLayout {
  std::uint32_t places;  // [E] LlDevice::places, or nothing where they do not fit
  // [W][L] uint16: rows from each source; [W][L + 1] where rows lie without gaps (LlList::columns).
  std::uint32_t counts;
  std::uint32_t ids;     // [W][max_tokens * ids_topk] uint16: local expert, or none
  std::uint32_t hits;    // [rounds][warps]: candidates with rows here
  std::uint32_t orders;  // [W * max_tokens] uint8
  std::uint32_t names;   // [W * max_tokens] LlDevice::order, or nothing where they do not fit
  std::uint32_t tails;   // [groups][2]: scales that are on their way
  std::uint32_t end;
  std::uint32_t ids_topk;     // uint16 per token: max_topk, or more
  std::uint32_t ids_stride;   // uint16 per source
  std::uint32_t tail_stride;  // bytes
  // [L + 1] or [W + 1] int32, where rows lie without gaps: see LlList::make_zones().
  std::uint32_t zones;
  bool has_places, has_ids, has_names;
};

struct LlDispatchParams {
  LlDevice group;
  LlStep step;
  LlRecord record;
  int senders;  // the first blocks only send; the others only receive
  LlSmemLayout smem;
  // Send half.
  const std::byte* tokens;
  const void* topk_idx;
  bool wide_ids;  // int64
  const float* topk_weights;
  LlRowForm form;  // of the rows as they travel
  // Receive half.
  QuantiseFormat format;
  std::uint8_t recv_type;        // DType of recv_tokens
  std::uint32_t recv_row_bytes;  // of recv_tokens
  std::byte* plan;
  LlSlots recv_tokens, recv_scales;
  std::uint32_t scale_element;  // bytes of an element of recv_scales: 1 or 4
  std::uint32_t scale_columns;  // of recv_scales
  std::int32_t* counts;
  std::int64_t* source_ranges;
  std::int32_t* source_tokens;
  void* expert_load;
  bool wide_load;
  std::int64_t* wait_ns;
  LlRowsOut rows;
};

// A dispatch of rows of any bytes, beside which the caller gives scales. Kernels of their own have
// these parameters, as the size of a kernel's parameters is in its code.
struct LlGivenParams : LlDispatchParams {
  bool given;  // it is one of those; else the base is all
  LlGivenForm given_form;
  // Send half: [T,S], strides in bytes. They are as many, and as large, as the base says of
  // recv_scales.
  const std::byte* scales;
  std::int64_t scale_row_stride, scale_col_stride;
};

// A divisor that the host knows. A kernel's own division would take longer than a load of its
// registers' worth of words.
struct LlDivisor {
  std::uint32_t by = 1, inverse = ~0u;

  static constexpr LlDivisor of(std::int64_t by) {
    const auto divisor = static_cast<std::uint32_t>(by > 1 ? by : 1);
    return {divisor, ~0u / divisor};
  }
  // n / by, for n below 2^31: the product with the inverse is at most 1 too small.
  constexpr std::uint32_t divides(std::uint32_t n) const {
    const auto least = static_cast<std::uint32_t>(std::uint64_t{n} * inverse >> 32);
    return least + (n - least * by >= by ? 1 : 0);
  }
};

// The facts that the movers of a combine need first. A first read of each line of a kernel's
// parameters is slow, so all of this lies together, in front. Strides in vectors of 16 bytes.
struct LlCombineRoute {
  bool quick;   // the usual launch: see combine/quick.cuh
  bool weighs;  // the call has weights
  bool dependent;
  std::uint32_t item_bytes;
  const std::byte* facts;  // parts of the plan
  const std::byte* items;
  const std::byte* own_items;  // of own tokens
  const std::byte* home;
  LlDivisor row_parts;       // of a row of partial sums, each of kLlPartVectors vectors
  std::uint32_t most_items;  // of other ranks' tokens
  std::uint32_t topk;        // choices that an item has room for
  int max_tokens, rank, ranks;
  std::uint32_t vectors;  // of a row
  const std::byte* rows;  // expert_out
  std::int32_t expert_stride, slot_stride;
  std::uint32_t local_experts;  // of expert_out
  std::uint32_t places;         // of a rank's partial sums, of one operation
  int partials_per_token;
  std::uint32_t partial_stride;  // bytes
  std::byte* own_area;
};

// The words of a plan's head (PlanHeader) that are the same in all plans of a group.
struct LlPlanHead {
  static constexpr std::uint32_t kWords = sizeof(PlanHeader) / 8;
  std::uint64_t word[kWords];

  static constexpr LlPlanHead of(const PlanTerms& t, std::uint64_t bytes) {
    const auto pair = [](std::int32_t low, std::int32_t high) {
      return std::uint64_t{static_cast<std::uint32_t>(low)} |
             std::uint64_t{static_cast<std::uint32_t>(high)} << 32;
    };
    LlPlanHead head{};
    head.word[offsetof(PlanHeader, magic) / 8] = PlanHeader::kMagic;
    head.word[offsetof(PlanHeader, version) / 8] = pair(PlanHeader::kVersion, t.rank);
    head.word[offsetof(PlanHeader, ranks) / 8] = pair(t.ranks, t.experts);
    head.word[offsetof(PlanHeader, layout) / 8] =
        pair(t.layout, static_cast<std::int32_t>(t.alignment));
    head.word[offsetof(PlanHeader, overflow) / 8] = pair(t.overflow, t.keeps_list);
    head.word[offsetof(PlanHeader, keeps_items) / 8] = pair(t.keeps_items, 0);
    head.word[offsetof(PlanHeader, overflow_rank) / 8] = pair(0, t.local_experts);
    head.word[offsetof(PlanHeader, capacities) / 8] = t.capacities;
    head.word[offsetof(PlanHeader, expert_ranks) / 8] = t.expert_ranks;
    head.word[offsetof(PlanHeader, hosts) / 8] = t.hosts;
    head.word[offsetof(PlanHeader, capacity) / 8] = static_cast<std::uint64_t>(t.capacity);
    head.word[offsetof(PlanHeader, bytes) / 8] = bytes;
    return head;
  }
  // The bits of a word that count.
  static constexpr std::uint64_t mask(std::uint32_t word) {
    constexpr auto bit = [](std::size_t offset) { return 1u << (offset / 8); };
    constexpr std::uint32_t kWhole =
        bit(offsetof(PlanHeader, magic)) | bit(offsetof(PlanHeader, version)) |
        bit(offsetof(PlanHeader, ranks)) | bit(offsetof(PlanHeader, layout)) |
        bit(offsetof(PlanHeader, overflow)) | bit(offsetof(PlanHeader, capacities)) |
        bit(offsetof(PlanHeader, expert_ranks)) | bit(offsetof(PlanHeader, hosts)) |
        bit(offsetof(PlanHeader, capacity)) | bit(offsetof(PlanHeader, bytes));
    if ((kWhole >> word & 1) != 0) return ~std::uint64_t{0};
    if (word == offsetof(PlanHeader, keeps_items) / 8) return 0xFFFFFFFFu;
    return word == offsetof(PlanHeader, overflow_rank) / 8 ? ~std::uint64_t{0xFFFFFFFFu} : 0;
  }
};
static_assert(offsetof(PlanHeader, rank) % 8 == 4 && offsetof(PlanHeader, experts) % 8 == 4 &&
              offsetof(PlanHeader, topk) % 8 == 4 && offsetof(PlanHeader, alignment) % 8 == 4 &&
              offsetof(PlanHeader, keeps_list) % 8 == 4 &&
              offsetof(PlanHeader, keeps_items) % 8 == 0 &&
              offsetof(PlanHeader, local_experts) % 8 == 4);

// How partial sums of a combine travel.
enum class LlForm : std::uint8_t {
  same,    // in the payload type
  floats,  // as float32
  codes    // as codes, with a word of 8 bytes for the float32 scale of each block
};

// The columns of a row that a mover of combine has: those of 16 bytes of the payload type, and of
// float32 sums in all types.
constexpr std::uint32_t ll_vector_bytes(LlForm form, DType type) {
  return form == LlForm::floats ? 4 * static_cast<std::uint32_t>(dtype_bytes(type)) : 16;
}

struct LlCombineParams {
  LlCombineRoute route;
  LlDivisor slots;  // S
  int out_rows;
  std::uint32_t row_bytes;  // of expert_out, or of out
  std::byte* out;
  const float* topk_weights;  // [T,K]
  int weight_rows, weight_cols;
  LlStep step;
  std::int32_t most_rows = INT32_MAX;  // the most that a plan may bring: N of expert_out
  std::uint8_t type;                   // of expert_out, or of out
  LlDevice group;
  // Of the send half; topk, tokens and fingerprint come from the plan. Its flags say whether the
  // call has weights: those of no tokens have no address.
  LlRecord record;
  LlPlanHead head;  // of this group's plans
  const std::byte* plan;
  std::uint64_t plan_bytes;
  LlSlots expert_out;
  std::int64_t* wait_ns;
  LlForm form;
  QuantiseFormat codes;
};

}  // namespace xd::ep::cuda
