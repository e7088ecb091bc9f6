#include "ep/bulk/group.h"

#include <array>

#include "base/error.h"
#include "base/hash.h"

namespace xd::ep {
namespace {

// The part of a config that ranks tell one another.
struct Terms : CommonTerms {
  std::int64_t max_scale_bytes, layout, alignment, overflow, net_buffer_bytes;  // equal
  std::int64_t outlives_losses;                                                 // likewise
  std::int64_t capacity, staging, zero_tail;                                    // may differ

  static Terms of(const Config& c) {
    return {CommonTerms::of(c), static_cast<std::int64_t>(c.max_scale_bytes),
            c.layout.id,        c.alignment,
            c.overflow,         static_cast<std::int64_t>(c.net_buffer_bytes),
            c.outlives_losses,  c.capacity,
            c.staging,          c.zero_tail};
  }
  static std::string sizes_of(const Config& c) {
    return concat(c.layout.name, ", ", common_sizes(c));
  }
};

using Field = turn::EqualField<Terms>;
constexpr std::array kEqualFields = {
    Field{"max_scale_bytes", &Terms::max_scale_bytes},
    Field{"layout", &Terms::layout,
          [](std::int64_t id) { return Layout::of(static_cast<int>(id)).name; }},
    Field{"alignment", &Terms::alignment},
    Field{"overflow", &Terms::overflow,
          [](std::int64_t value) { return value != 0 ? "DROP" : "ERROR"; }},
    Field{"net_buffer_bytes", &Terms::net_buffer_bytes},
    Field{"on_peer_loss", &Terms::outlives_losses,
          [](std::int64_t value) { return value != 0 ? "RESUME" : "FATAL"; }},
};

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

Group::Group(std::shared_ptr<Comm> comm, const xd_ep_config* config, KeepsOf keeps_of)
    : GroupOf(std::move(comm)) {
  const std::vector<Terms> of_rank = agree_on_sizes<Terms>(
      kEqualFields, [&](int num_ranks) { return read_config(config, num_ranks); });
  if (config_.outlives_losses) require_may_outlive();
  for (const Terms& terms : of_rank) config_.any_staging |= terms.staging != 0;
  config_.keeps = keeps_of(config_);
  for (const Terms& terms : of_rank) {
    Config c = config_;
    c.local_experts = c.map().local_experts(static_cast<int>(configs_.size()));
    c.capacity = terms.capacity;
    c.staging = terms.staging != 0;
    c.zero_tail = terms.zero_tail != 0;
    c.keeps = keeps_of(c);
    configs_.push_back(c);
    capacities_.push_back(c.capacity);
  }
  capacities_hash_ = hash_capacities(capacities_);
  codec_ = std::make_unique<RowCodec>(capacities_, config_.layout, config_.most_local_experts());
}

// Equal on all ranks.
void Group::require_may_outlive() const {
  constexpr const char* kField = "config.on_peer_loss = XD_EP_PEER_LOSS_RESUME";
  XD_REQUIRE(comm().errors().masks_losses(), kField,
             ": the communicator has on_peer_loss = FATAL, expected MASK, as a rank that is lost "
             "finishes it otherwise");
  comm().require_all_near(kField);
  comm().note_group_wait(comm().timeout_ms());
}

void Group::keep_members(const Members& members) {
  members_ = members;
  const Members& kept = *members_;
  members_hash_ = kept == Members::all(config_.ranks)
                      ? 0
                      : hash_bytes(1, kept.words().data(), sizeof(Members::Words)) | 1;  // not 0
}

Segments Group::share_memory() const {
  const auto bytes_of = [](const Config& config) { return GroupMap::make(config).end; };
  Segments segments = comm().share(Family::kCreate, bytes_of(config()));
  for (const NearRank r : near()) require_size(segments[at(r)], bytes_of(config_of(r)), r);
  return segments;
}

void Group::count_dropped_rows(std::int64_t rows) {
  subject().counters().dropped_rows.add(static_cast<std::uint64_t>(rows));
  add_to_status([=](xd_ep_status& status) { status.dropped_rows += rows; });
}

turn::PeerAddress Group::place_in_heap(const Tensor& tensor) const {
  if (!tensor.packed()) return {};
  const auto found = comm().heap().find(tensor.data, tensor.bytes());
  return found ? turn::PeerAddress::in_heap(found->segment, found->offset) : turn::PeerAddress{};
}

Reach Group::reach(const Tensor& tensor, const Staging& staging) const {
  Reach reach{turn::PeerAddress::shared(staging.offset), false};
  // No peer touches a tensor without rows, wherever it lies.
  if (tensor.bytes() == 0) return reach;
  if (const turn::PeerAddress place = place_in_heap(tensor)) return {place, false};
  XD_REQUIRE(staging.always || config_.staging, tensor.name,
             ": lies outside symmetric memory, expected memory from xd_mem_alloc or registered by "
             "xd_mem_register: the group was made with XD_EP_STAGING_NONE");
  reach.staged = true;
  if (!staging.always) subject().counters().staged_tensors.add(1);
  return reach;
}

}  // namespace xd::ep
