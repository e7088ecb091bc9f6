#include "ep/group.h"

#include <array>
#include <cstdio>
#include <cstring>
#include <new>

#include "base/error.h"

namespace xd::ep {
namespace {

// What ranks tell one another of their configs.
struct Announcement {
  std::int64_t experts, max_topk, max_tokens, max_row_bytes, max_scale_bytes, layout, alignment,
      overflow, duplicate_ids, on_error;      // equal on all ranks
  std::int64_t capacity, staging, zero_tail;  // may differ
};

struct Field {
  const char* name;
  std::int64_t Announcement::*value;
};
constexpr std::array kEqualFields = {
    Field{"num_experts", &Announcement::experts},
    Field{"max_topk", &Announcement::max_topk},
    Field{"max_tokens_per_rank", &Announcement::max_tokens},
    Field{"hidden * size of dtype", &Announcement::max_row_bytes},
    Field{"max_scale_bytes", &Announcement::max_scale_bytes},
    Field{"layout", &Announcement::layout},
    Field{"alignment", &Announcement::alignment},
    Field{"overflow", &Announcement::overflow},
    Field{"duplicate_ids", &Announcement::duplicate_ids},
    Field{"on_error", &Announcement::on_error},
};

Announcement announce(const Config& c) {
  return {.experts = c.experts,
          .max_topk = c.max_topk,
          .max_tokens = c.max_tokens,
          .max_row_bytes = static_cast<std::int64_t>(c.max_row_bytes),
          .max_scale_bytes = static_cast<std::int64_t>(c.max_scale_bytes),
          .layout = c.layout,
          .alignment = c.alignment,
          .overflow = c.overflow,
          .duplicate_ids = c.collapse,
          .on_error = c.fatal_errors,
          .capacity = c.capacity,
          .staging = c.staging,
          .zero_tail = c.zero_tail};
}

// All ranks compare everybody with rank 0, so all come to the same verdict.
void require_equal(std::span<const Announcement> of_rank) {
  for (std::size_t r = 1; r < of_rank.size(); ++r) {
    for (const Field& field : kEqualFields) {
      const std::int64_t first = of_rank[0].*field.value, other = of_rank[r].*field.value;
      if (first != other) {
        fail(XD_ERROR_MISMATCH, "config.", field.name, " = ", first, " on rank 0 and ", other,
             " on rank ", r, ", expected equal values");
      }
    }
  }
}

}  // namespace

Setback current_setback(int rank) noexcept {
  std::array<char, 1024> text;
  Setback setback{.status = caught(text).status, .text = {}, .rank = rank};
  try {
    setback.text = text.data();
  } catch (const std::bad_alloc&) {
    setback.text = "(no memory)";  // short enough to need none
  }
  return setback;
}

namespace {

thread_local xd_ep_status last_error_of_thread XD_EP_STATUS_INIT;

void describe(const Setback& setback, xd_ep_operation operation, std::uint64_t epoch,
              xd_ep_status& status) {
  status.status = setback.status;
  status.operation = operation;
  status.epoch = epoch;
  status.rank = setback.rank;
  status.needed_rows = setback.needed_rows;
  status.capacity_rows = setback.capacity_rows;
  std::strncpy(status.text, setback.text.c_str(), sizeof(status.text) - 1);
}

}  // namespace

xd_ep_status last_error() { return last_error_of_thread; }
void forget_last_error() { last_error_of_thread = xd_ep_status XD_EP_STATUS_INIT; }

void Group::give_back(const Setback& setback, xd_ep_operation operation, std::uint64_t epoch) {
  describe(setback, operation, epoch, last_error_of_thread);
  last_error_of_thread.bad_ids = setback.bad_ids;
  fail(setback.status, setback.text);
}

Comm::Cause Group::cause(const Setback& setback, std::int32_t operation,
                         std::uint64_t epoch) const {
  Comm::Cause cause{.peer = setback.rank, .text = {}};
  std::snprintf(cause.text.data(), cause.text.size(), "xd_ep_%s of group %d, epoch %llu: %s",
                operation_name(operation), number_, static_cast<unsigned long long>(epoch),
                setback.text.c_str());
  return cause;
}

Group::Group(std::shared_ptr<Comm> comm, const xd_ep_config* config)
    : comm_(std::move(comm)), number_(comm_->group_number()) {
  agree_on_config(config);
  for (const Config& c : configs_) capacities_.push_back(c.capacity);
  capacities_hash_ = hash_capacities(capacities_);
  codec_ = std::make_unique<RowCodec>(capacities_, config_.layout, config_.local_experts);
}

void Group::agree_on_config(const xd_ep_config* config) {
  const auto items = comm_->agree(Comm::Collective::group, [&] {
    config_ = read_config(config, comm_->num_ranks());
    const bool cuda = comm_->device().device_type == kDLCUDA;
    XD_REQUIRE(config_.cuda == cuda || config_.device_type == 0,
               "config.device_type = ", config_.device_type, ", expected 0 or the communicator's ",
               int{comm_->device().device_type});
    config_.cuda = cuda;
    const Announcement mine = announce(config_);
    Comm::Contribution contribution{.blob = Bytes(sizeof(mine))};
    std::memcpy(contribution.blob.data(), &mine, sizeof(mine));
    return contribution;
  });
  std::vector<Announcement> of_rank(items.size());
  for (std::size_t r = 0; r < items.size(); ++r) {
    if (items[r].blob.size() != sizeof(Announcement)) {
      fail(XD_ERROR_MISMATCH, "rank ", r, " runs another version of the library");
    }
    std::memcpy(&of_rank[r], items[r].blob.data(), sizeof(Announcement));
  }
  require_equal(of_rank);
  for (const Announcement& a : of_rank) config_.any_staging |= a.staging != 0;
  for (const Announcement& a : of_rank) {
    Config c = config_;
    c.capacity = a.capacity;
    c.staging = a.staging != 0;
    c.zero_tail = a.zero_tail != 0;
    configs_.push_back(c);
  }
}

void Group::remember(const Setback& setback, xd_ep_operation operation, std::uint64_t epoch) {
  const std::lock_guard lock(status_mutex_);
  if (status_.status == XD_SUCCESS) describe(setback, operation, epoch, status_);
}

void Group::count_losses(std::int64_t bad_ids, std::int64_t dropped_rows) {
  const std::lock_guard lock(status_mutex_);
  status_.bad_ids += bad_ids;
  status_.dropped_rows += dropped_rows;
}

xd_ep_status Group::take_status() {
  const std::lock_guard lock(status_mutex_);
  const xd_ep_status taken = status_;
  status_ = xd_ep_status XD_EP_STATUS_INIT;
  return taken;
}

}  // namespace xd::ep
