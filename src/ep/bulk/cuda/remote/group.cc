#include "ep/bulk/cuda/remote/group.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "comm/remote/network.h"

namespace xd::ep::cuda {
namespace {

net::LinkMap link_map(const Group& group, const RemoteRoutes& routes, const net::Engine& engine) {
  const RemoteWindow window =
      remote_window(group.config(), most_neighbours(group.comm().machines()),
                    engine.buffers_puts() ? kFewestDirectionFrames : kMostDirectionFrames);
  return {.neighbours = routes.neighbours().size(),
          .frames = at(kDirections * window.frames),
          .frame_bytes = window.frame_bytes};
}

// A rank stores into a remote rank's stand-in what it would store into its memory, at the same
// places. So what that rank keeps for staging decides how long a stand-in is.
std::size_t longest_stand_in(const Group& group) {
  std::uint64_t longest = 0;
  for (int r = 0; r < group.config().ranks; ++r)
    longest = std::max(longest, GroupMap::make(group.config_of(r)).scales);
  return round_up(longest, 256);
}

// Of this rank: where peers read all rows themselves, nobody pushes sums.
RemoteMap remote_map(const Config& config) {
  return RemoteMap::make(config.ranks, config.keeps.partials ? config.capacity : 0,
                         config.max_row_bytes);
}

// Sums of a machine are made as those of one host.
void require_hosts_are_machines(const Comm& comm) {
  const HostMap& hosts = comm.hosts();
  const int machines = comm.machines().num_hosts();
  if (hosts.num_hosts() != machines) {
    fail(XD_ERROR_UNSUPPORTED, "the ranks are on ", machines, " machines and name ",
         hosts.num_hosts(), " hosts, expected one host on each machine on CUDA devices");
  }
  if (machines > kMaxRemoteMachines) {
    fail(XD_ERROR_UNSUPPORTED, "the ranks are on ", machines, " machines, expected at most ",
         kMaxRemoteMachines, " on CUDA devices");
  }
}

}  // namespace

RemoteGroup::RemoteGroup(const Group& group)
    : RemoteGroup(group, network().open_together(group.comm(), Family::kCreate)) {}

RemoteGroup::RemoteGroup(const Group& group, std::unique_ptr<net::Engine> engine)
    : comm_(group.comm()),
      routes_(comm_.machines()),
      map_(link_map(group, routes_, *engine)),
      stand_in_bytes_(longest_stand_in(group)),
      proxied_(comm_, group.number(), group.subject().counters()) {
  const Config& config = group.config();
  comm_.collective().agree(Family::kCreate, [&] {
    require_hosts_are_machines(comm_);
    allocate(config);
    return Collective::Contribution{};
  });
  areas_ = comm_.share(Family::kCreate, remote_map(config).end);
  links_ = std::make_unique<RemoteLinks>(
      comm_, Family::kCreate,
      RemoteLinks::Config{.neighbours = routes_.neighbours(),
                          .frames = static_cast<int>(map_.frames),
                          .frame_bytes = map_.frame_bytes,
                          .memory = std::span(frames_.data(), map_.bytes())},
      std::move(engine));
  comm_.collective().agree(Family::kCreate, [&] {
    describe(config);
    proxy_ = std::make_unique<net::Proxy>(
        links_->links(), net::FrameWords::in(words_.as<std::uint64_t>(), map_.num_frames()),
        proxied_.calls());
    return Collective::Contribution{};
  });
}

RemoteGroup::~RemoteGroup() {
  if (!comm_.errors().in_fork()) return;
  // The thread is the other process's, and so are the connections.
  [[maybe_unused]] const net::Proxy* proxy = proxy_.release();
  links_->leave_behind();
}

void RemoteGroup::allocate(const Config& config) {
  const int device = comm_.device().device_id;
  const std::size_t tokens = at(config.max_tokens);
  const std::size_t most_answers =
      std::min(at(config.max_topk), routes_.remote_machines().size()) * tokens;
  frames_ = xd::cuda::PinnedBlock(device, map_.bytes());
  words_ = xd::cuda::PinnedBlock(device,
                                 net::FrameWords::words(map_.num_frames()) * sizeof(std::uint64_t));
  state_ = xd::cuda::DeviceBuffer(device, sizeof(RemoteState), "the state of a group's links");
  stand_ins_ = xd::cuda::DeviceBuffer(device, routes_.remote_ranks().size() * stand_in_bytes_,
                                      "memory in place of remote ranks'");
  rows_ = xd::cuda::DeviceBuffer(device, tokens * config.max_row_bytes, "rows for other machines");
  scales_ = xd::cuda::DeviceBuffer(device, std::max<std::size_t>(tokens * config.scale_room(), 256),
                                   "scales for other machines");
  answers_ =
      xd::cuda::DeviceBuffer(device, most_answers * config.max_row_bytes, "sums of other machines");
  answers_here_ =
      xd::cuda::DeviceBuffer(device, std::max<std::size_t>(tokens, 1) * sizeof(std::uint64_t),
                             "which sums of other machines are here");
  picks_ = xd::cuda::DeviceBuffer(
      device,
      std::max<std::size_t>(routes_.remote_machines().size() * tokens, 1) * sizeof(std::uint32_t),
      "tokens for other machines");
  table_ = xd::cuda::DeviceBuffer(device, sizeof(RemoteDevice), "a group's table of machines");
}

HeapRange RemoteGroup::stand_in(int remote_rank) const {
  const auto& remote = routes_.remote_ranks();
  const auto place = std::ranges::find(remote, remote_rank) - remote.begin();
  return {stand_ins_.data() + at(place) * stand_in_bytes_, stand_in_bytes_};
}

void RemoteGroup::describe(const Config& config) {
  const HostMap& hosts = comm_.hosts();
  RemoteDevice d{};
  d.links = map_;
  d.frames = static_cast<int>(map_.frames) / kDirections;
  d.words = net::FrameWords::in(words_.as<std::uint64_t>(), map_.num_frames());
  d.frames_at = frames_.data();
  d.state = state_.as<RemoteState>();
  d.chunk_room = map_.frame_bytes - sizeof(RemoteHeader);
  d.num_neighbours = static_cast<int>(routes_.neighbours().size());
  std::ranges::copy(routes_.neighbours(), d.rank_of);
  d.num_sources = static_cast<int>(routes_.sources().size());
  std::ranges::copy(routes_.sources(), d.sources);
  std::ranges::fill(d.machine_of, kNear);
  for (const int rank : routes_.remote_ranks()) {
    const auto& remote = routes_.remote_machines();
    const auto place = std::ranges::find(remote, routes_.machine_of(rank)) - remote.begin();
    d.machine_of[rank] = static_cast<std::int32_t>(place);
    d.host_of[place] = hosts.host_of(rank);
    if (hosts.host_of(rank) < hosts.host()) {
      d.machines_before = std::max(d.machines_before, static_cast<int>(place) + 1);
    }
  }
  for (const int machine : routes_.remote_machines())
    d.relays[d.num_machines++] = routes_.relay(machine);
  for (const NearRank rank : hosts.near()) {
    d.near[d.num_near++] = rank;
    d.near_areas[int{rank}] = areas_[at(rank)]->base();
  }
  d.map = remote_map(config);
  d.rows = rows_.data();
  d.scales = scales_.data();
  d.answers = answers_.data();
  d.answers_here = answers_here_.as<std::uint64_t>();
  d.picks = picks_.as<std::uint32_t>();
  table_.write(0, &d, sizeof(d));
}

}  // namespace xd::ep::cuda
