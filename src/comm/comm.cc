#include "comm/comm.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>

#include "base/env.h"
#include "base/error.h"
#include "base/log.h"
#include "base/options.h"
#include "base/pidfd.h"
#include "comm/control.h"
#include "comm/join/door.h"
#include "comm/join/join.h"
#include "comm/remote/network.h"
#include "comm/remote/puts.h"
#include "meet/invitation.h"
#include "meet/nccl/library.h"
#include "memory/host_segment.h"

namespace xd {
namespace {

// Spinning pays while every rank has a core of its own; with fewer cores it only keeps the awaited
// peer from running.
std::chrono::nanoseconds spin_time(int ranks_on_host) {
  if (env().spin_us >= 0) return std::chrono::microseconds(env().spin_us);
  cpu_set_t cores;
  const int available = ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return std::chrono::microseconds(ranks_on_host <= available ? 50 : 2);
}

xd_comm_peer_loss read_peer_loss(const xd_comm_config& config) {
  const std::int32_t value = raw_enum(config.on_peer_loss);
  XD_REQUIRE(value == XD_COMM_PEER_LOSS_FATAL || value == XD_COMM_PEER_LOSS_MASK,
             "config.on_peer_loss = ", value, ", expected one of xd_comm_peer_loss");
  return static_cast<xd_comm_peer_loss>(value);
}

// The name of this rank's host; empty = none.
std::string read_host(const xd_comm_config& config) {
  const char* const source = config.host != nullptr ? "config.host" : "XD_HOST_ID";
  const std::string name = config.host != nullptr ? config.host : env().host_id;
  const std::size_t least = config.host != nullptr ? 1 : 0;
  XD_REQUIRE(name.size() >= least && name.size() <= kMaxHostBytes, source, " = '",
             name.substr(0, 2 * kMaxHostBytes), "' of ", name.size(), " bytes, expected 1 to ",
             kMaxHostBytes, " bytes");
  return name;
}

int read_silence(const xd_comm_config& config) {
  if (config.silence_ms == 0) return env().silence_ms;
  XD_REQUIRE(config.silence_ms == -1 || config.silence_ms >= kLeastSilenceMs,
             "config.silence_ms = ", config.silence_ms, ", expected -1, 0 or at least ",
             kLeastSilenceMs);
  return config.silence_ms;
}

// Facts that ranks tell one another before they share memory.
struct Introduction {
  DeviceIntroduction device;
  std::int32_t on_peer_loss;
  std::int32_t elastic;
};

// The ranks compare what each has said, so all come to the same verdict.
std::vector<DeviceIntroduction> introduce(Collective& ranks, const Comm::Parts& parts,
                                          bool elastic) {
  const auto of_rank = ranks.agree_on(Collective::kCreate, [&] {
    return Introduction{kind_of(parts.device).introduce(parts.device.device_id, parts.num_ranks),
                        parts.on_peer_loss, elastic ? 1 : 0};
  });
  const auto kind = [](const Introduction& rank) {
    const DeviceKind* known = find_device_kind(rank.device.type);
    return known != nullptr ? known->device_in_words : "a device of an unknown kind";
  };
  std::vector<DeviceIntroduction> devices;
  for (std::size_t r = 0; r < of_rank.size(); ++r) {
    if (of_rank[r].device.type != of_rank[0].device.type) {
      fail(XD_ERROR_MISMATCH, "config.device is ", kind(of_rank[0]), " on rank 0 and ",
           kind(of_rank[r]), " on rank ", r, ", expected the same kind");
    }
    if (of_rank[r].on_peer_loss != of_rank[0].on_peer_loss) {
      fail(XD_ERROR_MISMATCH, "config.on_peer_loss = ", of_rank[0].on_peer_loss, " on rank 0 and ",
           of_rank[r].on_peer_loss, " on rank ", r, ", expected equal values");
    }
    if (of_rank[r].elastic != of_rank[0].elastic) {
      fail(XD_ERROR_MISMATCH, "config.elastic = ", of_rank[0].elastic, " on rank 0 and ",
           of_rank[r].elastic, " on rank ", r, ", expected equal values");
    }
    devices.push_back(of_rank[r].device);
  }
  return devices;
}

Segments share_boards(Collective& ranks, const SegmentMaker& memory, std::size_t bytes,
                      const HostMap& hosts) {
  auto boards = ranks.share(memory, Collective::kCreate, bytes);
  for (const NearRank r : hosts.near()) require_size(boards[at(r)], bytes, r);
  return boards;
}

std::unique_ptr<DeviceSide> share_device_boards(Collective& ranks, const Comm::Parts& parts,
                                                const HostMap& hosts) {
  const DeviceKind& kind = kind_of(parts.device);
  const std::size_t bytes = kind.board_bytes;
  if (bytes == 0) return nullptr;
  auto boards = share_boards(ranks, *parts.memory, bytes, hosts);
  std::unique_ptr<DeviceSide> made;
  ranks.agree(Collective::kCreate, [&] {
    made = kind.make_side(
        parts.device.device_id,
        {.rank = parts.rank, .num_ranks = parts.num_ranks, .timeout_ms = parts.timeout_ms},
        std::move(boards));
    return Collective::Contribution{};
  });
  return made;
}

// Takes the steps that all ranks take together once they are connected.
std::shared_ptr<Comm> set_up(Comm::Parts& parts, bool elastic) {
  Collective ranks(*parts.mesh, parts.rank, parts.num_ranks, parts.timeout_ms, nullptr);
  parts.memory = elastic ? std::make_unique<HostSegmentMaker>(true)
                         : kind_of(parts.device).make_memory(parts.device.device_id);
  parts.introductions = introduce(ranks, parts, elastic);
  const HostMap hosts(parts.mesh->rails(), parts.mesh->host_names());
  if (elastic && !hosts.all_are_near())
    fail(XD_ERROR_UNSUPPORTED,
         "config.elastic = 1 is not there yet between machines, expected all ranks on one");
  parts.boards =
      share_boards(ranks, HostSegmentMaker(elastic), control_bytes(parts.num_ranks), hosts);
  parts.device_side = share_device_boards(ranks, parts, hosts);
  return std::make_shared<Comm>(std::move(parts));
}

// Whether ranks may be replaced.
bool read_elastic(const xd_comm_config& config, xd_comm_peer_loss on_peer_loss, DLDevice device) {
  XD_REQUIRE(config.elastic == 0 || config.elastic == 1, "config.elastic = ", config.elastic,
             ", expected 0 or 1");
  const bool joins = raw_enum(config.bootstrap) == XD_BOOTSTRAP_JOIN;
  if (config.elastic == 0 && !joins) return false;
  XD_REQUIRE(joins || on_peer_loss == XD_COMM_PEER_LOSS_MASK,
             "config.on_peer_loss = FATAL with elastic = 1, expected MASK: others must outlive a "
             "rank before it can be replaced");
  if (device.device_type != kDLCPU)
    fail(XD_ERROR_UNSUPPORTED, "config.", joins ? "bootstrap = XD_BOOTSTRAP_JOIN" : "elastic = 1",
         " is not there yet for ", kind_of(device).device_in_words, ", expected the CPU");
  return true;
}

// The device that the config asks for: where it names none, that of its NCCL communicator.
DLDevice asked_device(const xd_comm_config& config) {
  DLDevice device = config.device;
  if (config.bootstrap == XD_BOOTSTRAP_NCCL && config.nccl_comm != nullptr &&
      device.device_id == -1) {
    device.device_id = read_nccl_rank(find_nccl(), config).device;
  }
  return resolve_device(device);
}

}  // namespace

std::shared_ptr<Comm> Comm::create(const xd_comm_config& config) {
  const DLDevice device = asked_device(config);
  const int timeout_ms = resolve_timeout(config.timeout_ms);
  const xd_comm_peer_loss on_peer_loss = read_peer_loss(config);
  const std::string host = read_host(config);
  const bool elastic = read_elastic(config, on_peer_loss, device);
  if (raw_enum(config.bootstrap) == XD_BOOTSTRAP_JOIN)
    return join_comm(config, {.device = device, .timeout_ms = timeout_ms, .host = host});
  const MeshOptions options{.host_name = host,
                            .net_interface = interface_wish(config.net_interface),
                            .silence_ms = read_silence(config),
                            .job_secret = env().job_secret,
                            .part_of_host = network().part_of_host(host),
                            .global_ranks = config.global_ranks};
  const std::unique_ptr<Bootstrap> bootstrap = make_bootstrap(config);
  Parts parts{
      .rank = bootstrap->rank(),
      .num_ranks = bootstrap->num_ranks(),
      .name = config.name != nullptr ? config.name : "",
      .device = device,
      .timeout_ms = timeout_ms,
      .on_peer_loss = on_peer_loss,
      .memory = nullptr,
      .introductions = {},
      .boards = {},
      .device_side = nullptr,
      .events = std::make_unique<EventRelay>(bootstrap->num_ranks(), kind_of(device).tick_ms),
      .mesh = Mesh::connect(*bootstrap, Deadline::after_ms(timeout_ms), options),
      .names_interface = !options.net_interface.text.empty()};
  Mesh& mesh = *parts.mesh;  // good also when the communicator owns it
  std::shared_ptr<Comm> comm;
  mesh.start(*parts.events);
  try {
    comm = set_up(parts, elastic);
    if (elastic) comm->open_door(xd::door_secret(mesh.secret()));
    comm->memory_.add(Collective::kCreate, config.heap_bytes);
  } catch (const Error& error) {
    // On one host every rank notices and names a peer that is gone or has failed. On others ranks
    // may still be connecting, and see this one end.
    const bool known = error.status() == XD_ERROR_PEER_LOST || error.status() == XD_ERROR_MISMATCH;
    if (!known || mesh.rails().num_hosts() > 1) mesh.send_failure();
    throw;
  } catch (...) {
    mesh.send_failure();
    throw;
  }
  log_topic("comm", "rank ", comm->rank_, " of ", comm->num_ranks_, " joined '", comm->name_, "', ",
            comm->local_ranks_, " in this process, host ", comm->hosts_.host(), " of ",
            comm->hosts_.num_hosts());
  return comm;
}

Comm::Comm(Parts&& parts)
    : rank_(parts.rank),
      num_ranks_(parts.num_ranks),
      name_(std::move(parts.name)),
      hosts_(parts.mesh->rails(), parts.mesh->host_names()),
      device_(parts.device),
      timeout_ms_(parts.timeout_ms),
      local_ranks_(parts.mesh->local_ranks()),
      names_interface_(parts.names_interface),
      spin_(spin_time(static_cast<int>(hosts_.near().size()))),
      serial_(parts.serial),
      device_memory_(std::move(parts.memory)),
      introductions_(std::move(parts.introductions)),
      device_side_(std::move(parts.device_side)),
      errors_(hosts_, *parts.mesh, std::move(parts.boards), device_side_.get(), parts.on_peer_loss),
      collective_(*parts.mesh, rank_, num_ranks_, timeout_ms_, &errors_),
      views_(hosts_, errors_, parts.serial != 0),
      memory_(rank_, collective_, errors_, *device_memory_, device_side_.get()),
      events_(std::move(parts.events)),
      mesh_(std::move(parts.mesh)) {
  events_->report_to(errors_);
}

Comm::~Comm() { close(); }

void Comm::open_door(const Secret& secret) {
  auto door = std::make_unique<Door>(*this, secret);
  door->open();
  door_ = std::move(door);
}

xd_unique_id Comm::invite() const {
  XD_REQUIRE(door_ != nullptr, "the communicator has elastic = 0, expected 1");
  XD_REQUIRE(num_ranks_ > 1,
             "the communicator has one rank, expected more: nobody could let a new "
             "process in");
  return door_->invite();
}

const Secret& Comm::door_secret() const { return door_->secret(); }

DoorPlace& Comm::door_place(NearRank rank) const {
  return xd::door_place(NearMemory(errors_.segments()[at(rank)]->base()), num_ranks_);
}

AdoptedGroup Comm::next_group(CollectiveCall call) {
  return adopt_group(*this, group_number(), call.name);
}

void Comm::close() {
  if (errors_.in_fork()) {
    errors_.close_silently();
    [[maybe_unused]] const Door* without_thread = door_.release();
    if (kept_remote_puts_) kept_remote_puts_->leave_behind();
    // A fork has the watch thread's state without the thread, so the state cannot be taken down,
    // and a goodbye would be the parent's.
    [[maybe_unused]] const Mesh* left_behind = mesh_.release();
    return;
  }
  if (!errors_.close()) return;
  if (kept_remote_puts_) kept_remote_puts_->close();
  door_.reset();
  mesh_.reset();
  // The caller has promised that no kernel runs any more; one that does is told to go.
  if (device_side_) device_side_->set_finished();
}

void Comm::keep_remote_puts(std::shared_ptr<RemotePuts> puts) noexcept {
  kept_remote_puts_ = std::move(puts);
  remote_puts_.store(kept_remote_puts_.get(), std::memory_order_release);
}

void Comm::require_not_captured(xd_stream stream) const {
  const auto is_captured = kind_of(device_).is_captured;
  XD_REQUIRE(is_captured == nullptr || !is_captured(device_.device_id, stream),
             "stream is captured into a graph, expected one that is not: a replay would not ask "
             "again");
}

int Comm::agree_timeout_ms() const {
  const std::int64_t longest = longest_group_wait_ms_.load(std::memory_order_relaxed);
  return longest == 0 ? timeout_ms_
                      : static_cast<int>(std::min<std::int64_t>(2 * longest + 1000, INT32_MAX));
}

void Comm::note_group_wait(int timeout_ms) {
  int longest = longest_group_wait_ms_.load(std::memory_order_relaxed);
  while (longest < timeout_ms &&
         !longest_group_wait_ms_.compare_exchange_weak(longest, timeout_ms)) {
  }
}

void Comm::require_all_near(const char* what) const {
  if (hosts_.all_are_near()) return;
  std::vector<int> all(at(num_ranks_));
  std::iota(all.begin(), all.end(), 0);
  fail(XD_ERROR_UNSUPPORTED, what, " is not there yet between machines: this communicator has ",
       errors_.names().of(all), ", expected all ranks on one machine");
}

int Comm::ranks_on_device() const {
  return static_cast<int>(
      std::ranges::count(introductions_, introductions_[at(rank_)].id, &DeviceIntroduction::id));
}

int Comm::missing(int peer, const HostWait& site) const {
  if (site.needs_all_ranks && errors_.dead() >= 0) return errors_.dead();
  if ((site.needs_all_ranks || site.needs_first_ranks) && errors_.replaced() >= 0)
    return errors_.replaced();
  return errors_.lost(peer) ? peer : -1;
}

bool Comm::has_ended(int rank) const {
  if (errors_.left(rank) || errors_.incarnation(rank) != 0) return true;
  if (!errors_.lost(rank)) return false;
  const PeerProcess& process = process_of(rank);
  if (!process.pidfd || process.has_ended) return true;
  if (has_process_ended(process.pidfd)) return true;
  // Nothing rings a bell when it does, so this waits for a moment itself; a slower end is seen at
  // the next look of the wait (LongWait), a quarter of a second later at most.
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return has_process_ended(process.pidfd);
}

void Comm::fail_lost(int peer, const HostWait& site) {
  FatalError error = error_at(site, XD_ERROR_PEER_LOST, peer);
  error.left = errors_.left(peer) ? 1 : 0;
  errors_.raise_and_throw(error, Spread::here);
}

// The sentence begins with the rank that this one has waited for. The error is about the last of
// those that wait for one another.
void Comm::fail_timeout(int peer, const HostWait& site, std::uint64_t seen) {
  FatalError error = error_at(site, XD_ERROR_TIMEOUT, peer);
  error.timeout_ms = site.timeout_ms != 0 ? site.timeout_ms : timeout_ms_;
  error.seen_epoch = seen;
  errors_.raise_and_throw(with_waits(errors_, error), Spread::everywhere);
}

FatalError Comm::error_at(const HostWait& site, xd_status status, int peer) const {
  return {.status = status,
          .phase = site.phase,
          .rank = rank_,
          .peer = peer,
          .group = site.group,
          .operation = site.operation,
          .expected_epoch = site.epoch};
}

// The thread yields, since the peer may need this very core.
void Comm::relax() { ::sched_yield(); }

}  // namespace xd
