#include "comm/join/join.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/math.h"
#include "base/pidfd.h"
#include "comm/control.h"
#include "comm/join/door.h"
#include "comm/join/entrance.h"
#include "meet/invitation.h"
#include "meet/met_ranks.h"
#include "memory/host_segment.h"

namespace xd {
namespace {

constexpr int kTryAgainMs = 5;

// A process of this number, which the caller knows to live, or none where the system has none.
UniqueFd require_pidfd(pid_t pid) {
  UniqueFd pidfd = open_pidfd(pid);
  if (!pidfd && (errno == EMFILE || errno == ENFILE))
    fail_errno(concat("descriptor of process ", pid), errno);
  return pidfd;
}

std::string host_of(const DoorCard& card) {
  return {card.host_name.data(), ::strnlen(card.host_name.data(), card.host_name.size())};
}

// One try of a new process.
class Joining {
 public:
  Joining(const xd_comm_config& config, const JoinWish& wish, const Invitation& invitation,
          const Deadline& deadline)
      : config_(config), wish_(wish), secret_(invitation.secret), deadline_(deadline) {
    Entrance first = knock(invitation);
    const auto entered =
        first.ask({.ask = Ask::enter, .rank = config.rank, .number = config.num_ranks});
    place_ = entered.reply.rank;
    num_ranks_ = entered.reply.number;
    XD_REQUIRE(num_ranks_ > 1 && num_ranks_ <= XD_MAX_RANKS && place_ >= 0 && place_ < num_ranks_,
               "the invitation's communicator has ", num_ranks_, " ranks and no rank ", place_);
    for (int r = 0; r < num_ranks_; ++r) {
      controls_.push_back(first.ask_memory({.ask = Ask::control, .rank = r}, memory()));
      require_size(controls_.back(), control_bytes(num_ranks_), r);
      cards_.push_back(door(r).card.read().value_or(DoorCard{}));
    }
    watch_by_number();
    require_host();
  }

  std::shared_ptr<Comm> run() {
    claim();
    const std::vector<Segments> heap = heap_of_all();
    take_over();
    return make(heap);
  }
  // The ranks that let this process in have changed since it asked who they are: it may ask anew.
  bool has_met_change() const { return has_met_change_; }

 private:
  const HostSegmentMaker& memory() const { return maker_; }
  DoorPlace& door(int rank) const {
    return door_place(NearMemory(controls_[at(rank)]->base()), num_ranks_);
  }
  std::string name_of(int rank) const {
    return concat("rank ", rank, " (pid ", cards_[at(rank)].process.pid, ")");
  }

  // At the first door of the invitation that opens.
  Entrance knock(const Invitation& invitation) const {
    for (std::size_t i = 0;; ++i) {
      try {
        return Entrance(invitation.doors[i], secret_, "the rank of the invitation", deadline_);
      } catch (const Error& error) {
        if (error.status() != XD_ERROR_PEER_LOST || i + 1 == invitation.doors.size()) throw;
      }
    }
  }

  // Sums over ranks are made by host, so a place keeps the host that it counts to.
  void require_host() const {
    const std::string before = host_of(cards_[at(place_)]);
    XD_REQUIRE(wish_.host.empty() || wish_.host == before, "config.host or XD_HOST_ID = '",
               wish_.host, "', expected ", before.empty() ? "none" : concat("'", before, "'"),
               " as rank ", place_, " had before");
  }

  // By ascending rank; those whose doors do not open have ended, unless others say that they are
  // here.
  void claim() {
    const std::string waits_for =
        concat(" has not let this process in as rank ", place_,
               ": it has not agreed on a view without that rank, or lets another process in,");
    std::optional<Members> here;
    Members closed;
    links_.resize(at(num_ranks_));
    for (int r = 0; r < num_ranks_; ++r) {
      if (r == place_ || (here && !here->has(r))) continue;
      try {
        links_[at(r)].emplace(cards_[at(r)].socket_name, secret_, name_of(r), deadline_);
      } catch (const Error& error) {
        if (error.status() != XD_ERROR_PEER_LOST) throw;
        has_met_change_ = here.has_value();
        if (here) throw;
        closed.add(r);
        continue;
      }
      const Question question{
          .ask = Ask::claim, .rank = place_, .number = deadline_.remaining_ms()};
      const auto claimed = ask_for_place(*links_[at(r)], question, waits_for, !here);
      if (here) continue;
      here = Members(claimed.reply.here);
      ended_ = Members(claimed.reply.ended);
      segments_ = claimed.reply.number;
      for (int other = 0; other < num_ranks_; ++other)  // some may have come since
        cards_[at(other)] = door(other).card.read().value_or(DoorCard{});
    }
    if (here && here->common(closed).count() == 0) return;
    has_met_change_ = here.has_value();
    fail(XD_ERROR_PEER_LOST,
         here ? concat(name_of(here->common(closed).lowest()), " does not open its door")
              : "all ranks of the invitation's communicator have ended",
         ": this process may try again");
  }

  // Another process may have taken the place that the first of the ranks had said was free: perhaps
  // there is one more.
  Entrance::Answer ask_for_place(Entrance& rank, const Question& question,
                                 const std::string& waits_for, bool is_first) {
    try {
      return rank.ask(question, {}, waits_for);
    } catch (const Error& error) {
      has_met_change_ = is_first && config_.rank < 0 && error.status() == XD_ERROR_INVALID_ARGUMENT;
      throw;
    }
  }

  // Processes by the numbers on their cards. Such a descriptor is the right one if somebody who
  // knows says later that the process has not ended.
  void watch_by_number() {
    const ProcessIdentity own = this_process();
    by_number_.resize(at(num_ranks_));
    for (int r = 0; r < num_ranks_; ++r) {
      const ProcessIdentity& process = cards_[at(r)].process;
      if (process.pid > 0 && process.pid_namespace == own.pid_namespace)
        by_number_[at(r)] = {process, require_pidfd(static_cast<pid_t>(process.pid))};
    }
  }

  // None where the rank has ended, or this process cannot tell.
  UniqueFd pidfd_of(int rank) {
    if (rank == place_) return {};
    if (links_[at(rank)]) return require_pidfd(links_[at(rank)]->pid());
    if (ended_.has(rank) || by_number_[at(rank)].first != cards_[at(rank)].process) return {};
    return std::move(by_number_[at(rank)].second);
  }

  Entrance& anybody() {
    return **std::ranges::find_if(links_, [](const auto& l) { return l.has_value(); });
  }

  std::vector<Segments> heap_of_all() {
    std::vector<Segments> heap(at(segments_));
    for (int s = 0; s < segments_; ++s) {
      for (int r = 0; r < num_ranks_; ++r)
        heap[at(s)].push_back(
            anybody().ask_memory({.ask = Ask::heap, .rank = r, .number = s}, memory()));
    }
    return heap;
  }

  // Clears what the process before has left, but for what others rely on: the place's part in the
  // latest view, and counts that only grow.
  void take_over() {
    const NearMemory control(controls_[at(place_)]->base());
    RankBoard(control, num_ranks_).clear();
    ViewPlaces& views = view_places(control, num_ranks_);
    views.card.write(Card{});
    serial_ = door(place_).serial.fetch_add(1) + 1;
  }

  // The connections of this rank to those that are here.
  std::unique_ptr<Mesh> connect() {
    std::vector<std::string> hosts;
    for (const DoorCard& card : cards_) hosts.push_back(host_of(card));
    if (hosts[at(place_)].empty()) hosts.clear();
    std::vector<UniqueFd> pidfds(at(num_ranks_));
    std::vector<std::int64_t> pids;
    for (int r = 0; r < num_ranks_; ++r) {
      pids.push_back(r == place_ ? ::getpid() : cards_[at(r)].process.pid);
      pidfds[at(r)] = pidfd_of(r);
    }
    auto ranks = std::make_unique<MetRanks>(MetRanks::of_joined(
        place_, std::move(hosts), std::move(pidfds), pids, config_.global_ranks));
    // Of a rank that was gone before there may be no process to watch.
    for (int r = 0; r < num_ranks_; ++r)
      if (r != place_ && !links_[at(r)])
        ranks->processes.processes[at(r)].has_ended = ended_.has(r);
    Mesh::Parts parts{.wake = UniqueFd(::eventfd(0, EFD_CLOEXEC)),
                      .ranks = std::move(ranks),
                      .links = {},
                      .silence_ms = 0};
    if (!parts.wake) fail_errno("eventfd", errno);
    parts.links.resize(at(num_ranks_));
    for (int r = 0; r < num_ranks_; ++r)
      if (links_[at(r)]) parts.links[at(r)] = MeshLink(links_[at(r)]->duplicate());
    return std::make_unique<Mesh>(std::move(parts));
  }

  std::shared_ptr<Comm> make(const std::vector<Segments>& heap) {
    const DeviceKind& kind = kind_of(wish_.device);
    auto events = std::make_unique<EventRelay>(num_ranks_, kind.tick_ms);
    EventRelay& relay = *events;
    Comm::Parts parts{.rank = place_,
                      .num_ranks = num_ranks_,
                      .name = config_.name != nullptr ? config_.name : "",
                      .device = wish_.device,
                      .timeout_ms = wish_.timeout_ms,
                      .on_peer_loss = XD_COMM_PEER_LOSS_MASK,
                      .memory = std::make_unique<HostSegmentMaker>(true),
                      .introductions = std::vector<DeviceIntroduction>(
                          at(num_ranks_), kind.introduce(wish_.device.device_id, num_ranks_)),
                      .boards = controls_,
                      .device_side = nullptr,
                      .events = std::move(events),
                      .mesh = connect(),
                      .serial = serial_};
    Mesh& mesh = *parts.mesh;
    auto comm = std::make_shared<Comm>(std::move(parts));
    comm->errors().mark_replaced(place_);
    for (int r = 0; r < num_ranks_; ++r)
      if (r != place_ && !links_[at(r)]) comm->errors().on_lost({.ranks = {&r, 1}});
    // Whom this rank lets in gets the memory from it.
    for (const Segments& segments : heap) comm->memory().adopt(segments);
    comm->open_door(secret_);
    for (auto& link : links_)
      if (link) link->ask({.ask = Ask::ready});
    mesh.start(relay);
    for (auto& link : links_)
      if (link) link->leave_open();
    return comm;
  }

  const xd_comm_config& config_;
  const JoinWish& wish_;
  const Secret secret_;
  const Deadline deadline_;
  const HostSegmentMaker maker_{true};
  std::vector<std::optional<Entrance>> links_;  // by rank; withdraw behind the end of the memory
  int place_ = -1, num_ranks_ = 0, segments_ = 0;
  Segments controls_;            // by rank
  std::vector<DoorCard> cards_;  // by rank; empty where a rank has none
  std::vector<std::pair<ProcessIdentity, UniqueFd>> by_number_;  // by rank
  Members ended_;
  std::uint64_t serial_ = 0;
  bool has_met_change_ = false;
};

// Null if the ranks have changed meanwhile.
std::shared_ptr<Comm> try_to_join(const xd_comm_config& config, const JoinWish& wish,
                                  const Invitation& invitation, const Deadline& deadline) {
  Joining joining(config, wish, invitation, deadline);
  try {
    return joining.run();
  } catch (const Error&) {
    if (!joining.has_met_change() || deadline.passed()) throw;
    return nullptr;
  }
}

// A rank's answer about its groups.
struct Offered {
  std::optional<Entrance> rank;
  AdoptedGroup group;
};

// The first of the groups that any rank which lives has. Throws where there is none.
Offered ask_for_group(Comm& comm, int number, const std::string& call, const Deadline& deadline) {
  Offered first;
  bool has_answer = false;
  for (const NearRank rank : comm.hosts().peers()) {
    if (comm.errors().lost(rank)) continue;
    const DoorCard card = comm.door_place(rank).card.read().value_or(DoorCard{});
    try {
      Entrance entrance(card.socket_name, comm.door_secret(),
                        comm.errors().names().with_process(rank), deadline);
      const auto found =
          entrance.ask({.ask = Ask::group, .number = number}, std::as_bytes(std::span(call)));
      has_answer = true;
      // A rank that has come later itself may have yet to make the group.
      if (found.reply.number < 0 || (first.rank && first.group.number <= found.reply.number))
        continue;
      first.rank.emplace(std::move(entrance));
      first.group = {found.reply.number, found.more, {}};
    } catch (const Error& error) {
      if (error.status() != XD_ERROR_PEER_LOST) throw;
    }
  }
  if (!has_answer)
    fail(XD_ERROR_PEER_LOST, "all other ranks have ended: none can say which groups there are");
  if (!first.rank)
    fail(XD_ERROR_UNSUPPORTED,
         "the others have no more groups with masks that this rank, which has joined later, could "
         "have a part in; new groups need the ranks that began together");
  return first;
}

// False if the rank has ended or has destroyed the group meanwhile.
bool get_memory(Offered& offered, int num_ranks) {
  const HostSegmentMaker memory(true);
  try {
    for (int r = 0; r < num_ranks; ++r) {
      offered.group.memory.push_back(offered.rank->ask_memory(
          {.ask = Ask::group_memory, .rank = r, .number = offered.group.number}, memory));
      if (!offered.group.memory.back()) return false;
    }
    return true;
  } catch (const Error& error) {
    if (error.status() != XD_ERROR_PEER_LOST) throw;
    return false;
  }
}

}  // namespace

std::shared_ptr<Comm> join_comm(const xd_comm_config& config, const JoinWish& wish) {
  XD_REQUIRE(config.unique_id != nullptr,
             "config.unique_id = NULL, expected an invitation from xd_comm_invite");
  XD_REQUIRE(config.heap_bytes == 0, "config.heap_bytes = ", config.heap_bytes,
             ", expected 0: the symmetric memory is that of the process before");
  const Invitation invitation = decode_invitation(*config.unique_id);
  const Deadline deadline = Deadline::after_ms(wish.timeout_ms);
  while (true) {
    if (std::shared_ptr<Comm> comm = try_to_join(config, wish, invitation, deadline)) {
      log_topic("comm", "this process has joined '", comm->name(), "' as rank ", comm->rank());
      return comm;
    }
    ::poll(nullptr, 0, kTryAgainMs);
  }
}

AdoptedGroup adopt_group(Comm& comm, int number, const std::string& call) {
  const Deadline deadline = comm.deadline();
  while (true) {
    Offered offered = ask_for_group(comm, number, call, deadline);
    if (get_memory(offered, comm.num_ranks())) return std::move(offered.group);
    if (deadline.passed())
      fail(XD_ERROR_TIMEOUT, "the others' groups have changed as often as this rank has asked");
    ::poll(nullptr, 0, kTryAgainMs);
  }
}

}  // namespace xd
