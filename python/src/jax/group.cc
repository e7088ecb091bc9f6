#include "group.h"

#include <map>
#include <utility>

#include "each.h"

namespace xdjax {
namespace {

struct Registry {
  std::mutex mutex;
  std::int64_t last = 0;
  std::map<std::int64_t, std::weak_ptr<Group>> groups;
};

// The registry is never destroyed, since executables may outlive static objects.
Registry& registry() {
  static auto* const made = new Registry;
  return *made;
}

}  // namespace

Group::Group(std::shared_ptr<Ranks> ranks, xdpy::GroupConfig config, std::string text)
    : ranks_(std::move(ranks)), config_(std::move(config)), text_(std::move(text)) {}

Group::~Group() {
  for (Member& member : members_) {
    member.worker.reset();
    xd_ep_group_destroy(member.group);
  }
}

std::optional<Problem> Group::create() {
  const std::lock_guard lock(creating_);
  if (created_.load(std::memory_order_relaxed)) return std::nullopt;
  const std::vector<Ranks::Rank>& ranks = ranks_->all();
  std::vector<Member> members(ranks.size());
  const xd_ep_config config = config_.get();
  std::optional<Problem> problem = for_each_rank(ranks.size(), [&](std::size_t i) {
    return problem_of(xd_ep_group_create(ranks[i].comm, &config, &members[i].group));
  });
  if (problem) {
    for (const Member& member : members) xd_ep_group_destroy(member.group);
    return problem;
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    members[i].rank = ranks[i].rank;
    members[i].device = ranks[i].device;
    if (ranks[i].device.device_type == kDLCPU) members[i].worker = std::make_unique<Worker>();
  }
  members_ = std::move(members);
  created_.store(true, std::memory_order_release);
  return std::nullopt;
}

Group::Member* Group::on_device(int ordinal) {
  const std::vector<Ranks::Rank>& ranks = ranks_->all();
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (ranks[i].ordinal == ordinal || ranks[i].ordinal == any_ordinal) return &members_[i];
  }
  return nullptr;
}

const Group::Member* Group::member(std::size_t index) const {
  return created_.load(std::memory_order_acquire) ? &members_[index] : nullptr;
}

std::int64_t enter_group(const std::shared_ptr<Group>& group) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.groups, [](const auto& entry) { return entry.second.expired(); });
  all.groups.emplace(++all.last, group);
  return all.last;
}

std::shared_ptr<Group> find_group(std::int64_t number) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.groups.find(number);
  return found == all.groups.end() ? nullptr : found->second.lock();
}

}  // namespace xdjax
