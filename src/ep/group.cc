#include "ep/group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>

#include "base/error.h"
#include "base/hash.h"
#include "ep/slots/map.h"
#include "turn/agreement.h"

namespace xd::ep {
namespace {

// The part of a config that ranks tell one another.
struct Announcement {
  std::int64_t experts, max_topk, max_tokens, max_row_bytes, max_scale_bytes, layout, alignment,
      overflow, duplicate_ids, on_error, expert_ranks, in_flight, on_peer_loss, wait_timeout_ms,
      net_buffer_bytes;                       // equal on all ranks
  std::int64_t capacity, staging, zero_tail;  // may differ
  std::uint64_t nonce;                        // rank 0's becomes the group's
};

using Field = turn::EqualField<Announcement>;
constexpr std::array kEqualFields = {
    Field{"num_experts", &Announcement::experts},
    Field{"max_topk", &Announcement::max_topk},
    Field{"max_tokens_per_rank", &Announcement::max_tokens},
    Field{"hidden * size of dtype", &Announcement::max_row_bytes},
    Field{"max_scale_bytes", &Announcement::max_scale_bytes},
    Field{"layout", &Announcement::layout,
          [](std::int64_t id) { return Layout::of(static_cast<int>(id)).name; }},
    Field{"alignment", &Announcement::alignment},
    Field{"overflow", &Announcement::overflow,
          [](std::int64_t value) { return value != 0 ? "DROP" : "ERROR"; }},
    Field{"duplicate_ids", &Announcement::duplicate_ids,
          [](std::int64_t value) { return value != 0 ? "COLLAPSE" : "ERROR"; }},
    Field{"on_error", &Announcement::on_error,
          [](std::int64_t value) { return value != 0 ? "FATAL" : "STATUS"; }},
    Field{"in_flight", &Announcement::in_flight},
    Field{"on_peer_loss", &Announcement::on_peer_loss,
          [](std::int64_t value) { return value != 0 ? "MASK" : "FATAL"; }},
    Field{"wait_timeout_ms", &Announcement::wait_timeout_ms},
    Field{"net_buffer_bytes", &Announcement::net_buffer_bytes},
};

// Differs from every other that was ever made on this host, as a process makes one at a time.
std::uint64_t new_nonce() {
  static std::atomic<std::uint64_t> made{0};
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  const std::uint64_t hash = hash_combine(static_cast<std::uint64_t>(::getpid()), ++made);
  return hash_combine(hash, static_cast<std::uint64_t>(now));
}

std::uint64_t shared_bytes(const Config& config) {
  return config.layout.is_slots() ? LlMap::make(config).end : GroupMap::make(config).end;
}

Announcement announce(const Config& c) {
  return {.experts = c.experts,
          .max_topk = c.max_topk,
          .max_tokens = c.max_tokens,
          .max_row_bytes = static_cast<std::int64_t>(c.max_row_bytes),
          .max_scale_bytes = static_cast<std::int64_t>(c.max_scale_bytes),
          .layout = c.layout.id,
          .alignment = c.alignment,
          .overflow = c.overflow,
          .duplicate_ids = c.collapse,
          .on_error = c.fatal_errors,
          .expert_ranks = static_cast<std::int64_t>(c.expert_tables.hash()),
          .in_flight = c.in_flight,
          .on_peer_loss = c.masks_lost_peers,
          .wait_timeout_ms = c.wait_timeout_ms,
          .net_buffer_bytes = static_cast<std::int64_t>(c.net_buffer_bytes),
          .capacity = c.capacity,
          .staging = c.staging,
          .zero_tail = c.zero_tail,
          .nonce = new_nonce()};
}

std::string sizes_of(const Config& c) {
  return concat(c.layout.name, ", E=", c.experts, " K<=", c.max_topk, " T<=", c.max_tokens,
                " row<=", c.max_row_bytes, " B");
}

// Throws MISMATCH with the first expert that some rank places elsewhere than rank 0 does. Maps are
// too long to be announced, and all ranks know from their hashes whether any differs: so all ranks
// call this, or none does. They have the same number of experts.
void compare_maps(Collective& collective, const ExpertMap& map) {
  using Home = std::uint16_t;
  constexpr int kExpertsAtOnce = 8192;
  static_assert(kMaxRanks <= 1 << 16 && kExpertsAtOnce * sizeof(Home) < Mesh::kMaxBlob);
  for (int begin = 0; begin < map.experts; begin += kExpertsAtOnce) {
    const auto of_rank = collective.agree_on(kCreateGroup, [&] {
      std::array<Home, kExpertsAtOnce> homes{};
      for (int e = begin; e < std::min(begin + kExpertsAtOnce, map.experts); ++e) {
        homes[at(e - begin)] = static_cast<Home>(map.rank_of(e));
      }
      return homes;
    });
    for (std::size_t i = 0; i < kExpertsAtOnce; ++i) {
      for (std::size_t r = 1; r < of_rank.size(); ++r) {
        const Home first = of_rank[0][i], other = of_rank[r][i];
        if (first == other) continue;
        fail(XD_ERROR_MISMATCH, "config.expert_ranks[", at(begin) + i, "] = ", first,
             " on rank 0 and ", other, " on rank ", r, ", expected equal values");
      }
    }
  }
}

}  // namespace

xd_ep_memory shared_memory_of(const Config& config, KeepsOf keeps_of) {
  const auto bytes = [&](Config c) {
    c.keeps = keeps_of(c);
    return GroupMap::make(c).end;
  };
  Config without = config;
  without.staging = without.any_staging = false;
  xd_ep_memory memory XD_EP_MEMORY_INIT;
  memory.symmetric_bytes = bytes(config);
  memory.staging_bytes = memory.symmetric_bytes - bytes(without);
  return memory;
}

Group::Group(std::shared_ptr<Comm> comm, const xd_ep_config* config, KeepsOf keeps_of,
             Machines machines)
    : Sequence(std::move(comm)), ranks_(RankSet::all(Sequence::comm().num_ranks())) {
  if (machines == Machines::one) {
    Sequence::comm().require_all_near("expert parallelism in EXPERT_SLOTS on CUDA devices");
  }
  agree_on_config(config, keeps_of);
  if (config_.masks_lost_peers) {
    Sequence::comm().require_all_near("EXPERT_SLOTS with on_peer_loss = XD_EP_PEER_LOSS_MASK");
  }
  for (const Config& c : configs_) capacities_.push_back(c.capacity);
  capacities_hash_ = hash_capacities(capacities_);
  codec_ = std::make_unique<RowCodec>(capacities_, config_.layout, config_.most_local_experts());
  subject().describe(sizes_of(config_));
}

Segments Group::share_memory() const {
  Segments segments = comm().share(kCreateGroup, shared_bytes(config_));
  for (const NearRank r : near()) require_size(segments[at(r)], shared_bytes(config_of(r)), r);
  return segments;
}

void Group::refuse() const {
  give_back(
      {.status = XD_ERROR_INVALID_ARGUMENT,
       .text = concat("group: has layout ", config_.layout.name, ", expected ",
                      config_.layout.is_slots() ? "EXPERT_MAJOR or RANK_MAJOR" : "EXPERT_SLOTS",
                      "; peers do not hear of this call"),
       .rank = rank()},
      0, 0);
}

void Group::require_masks() const {
  XD_REQUIRE(config_.masks_lost_peers,
             "group: was made with on_peer_loss = XD_EP_PEER_LOSS_FATAL, expected "
             "XD_EP_PEER_LOSS_MASK");
}

void Group::join_failed_operation(std::int32_t operation, const char* text, xd_stream stream) {
  const bool of_slots = operation == XD_EP_LL_DISPATCH || operation == XD_EP_LL_COMBINE ||
                        operation == XD_EP_LL_RESET;
  // In EXPERT_SLOTS dispatch and combine take turns apart, so no other operation would do.
  if (config_.layout.is_slots()) {
    XD_REQUIRE(of_slots && operation != XD_EP_LL_RESET, "operation = ", operation,
               ", expected XD_EP_LL_DISPATCH or XD_EP_LL_COMBINE: the group has layout "
               "EXPERT_SLOTS; peers do not hear of this call");
  } else if (of_slots) {
    refuse();
  }
  Sequence::join_failed(operation, text, stream);
}

Reach Group::reach(const Tensor& tensor, const Staging& staging) const {
  Reach reach{turn::RemoteAddress::shared(staging.offset), false};
  // No peer touches a tensor without rows, wherever it lies.
  if (tensor.bytes() == 0) return reach;
  if (tensor.packed()) {
    if (const auto found = comm().heap().find(tensor.data, tensor.bytes())) {
      reach.address = turn::RemoteAddress::in_heap(found->segment, found->offset);
      return reach;
    }
  }
  XD_REQUIRE(staging.always || config_.staging, tensor.name,
             ": lies outside symmetric memory, expected memory from xd_mem_alloc or registered by "
             "xd_mem_register: the group was made with XD_EP_STAGING_NONE");
  reach.staged = true;
  return reach;
}

void Group::agree_on_config(const xd_ep_config* config, KeepsOf keeps_of) {
  const auto of_rank = comm().collective().agree_on(kCreateGroup, [&] {
    config_ = read_config(config, comm().num_ranks());
    const int device_type = comm().device().device_type;
    XD_REQUIRE(config_.device_type == 0 || config_.device_type == device_type,
               "config.device_type = ", config_.device_type, ", expected 0 or the communicator's ",
               device_type);
    comm().collective().describe(sizes_of(config_));
    return announce(config_);
  });
  turn::require_equal<Announcement>(kEqualFields, of_rank);
  const auto has_my_map = [&](const Announcement& a) {
    return static_cast<std::uint64_t>(a.expert_ranks) == config_.expert_tables.hash();
  };
  if (!std::ranges::all_of(of_rank, has_my_map)) compare_maps(comm().collective(), config_.map());
  config_.local_experts = config_.map().local_experts(rank());
  nonce_ = of_rank[0].nonce;
  for (const Announcement& a : of_rank) config_.any_staging |= a.staging != 0;
  config_.keeps = keeps_of(config_);
  for (const Announcement& a : of_rank) {
    Config c = config_;
    c.local_experts = c.map().local_experts(static_cast<int>(configs_.size()));
    c.capacity = a.capacity;
    c.staging = a.staging != 0;
    c.zero_tail = a.zero_tail != 0;
    c.keeps = keeps_of(c);
    configs_.push_back(c);
  }
}

}  // namespace xd::ep
