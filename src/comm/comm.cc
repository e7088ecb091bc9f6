#include "comm/comm.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/env.h"
#include "base/feature.h"
#include "base/log.h"
#include "base/math.h"

namespace xd {
namespace {

// Spinning pays while every rank has a core of its own; beyond that it only keeps the peer that is
// waited for from running.
std::chrono::nanoseconds spin_time(int ranks_on_host) {
  if (env().spin_us >= 0) return std::chrono::microseconds(env().spin_us);
  cpu_set_t cores;
  const int available = ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return std::chrono::microseconds(ranks_on_host <= available ? 50 : 2);
}

std::string text_of(std::span<const std::byte> body) {
  return {reinterpret_cast<const char*>(body.data()), body.size()};
}

const char* name_of(Comm::Collective what) {
  switch (what) {
    case Comm::Collective::create:
      return "xd_comm_create";
    case Comm::Collective::grow:
      return "xd_mem_grow";
    case Comm::Collective::barrier:
      return "xd_comm_barrier";
    case Comm::Collective::group:
      return "xd_ep_group_create";
  }
  return "an unknown call";
}

// What a contribution travels in: two bytes, the collective and 1 = failed, then the blob or the
// error's text.
constexpr std::size_t kFrameBytes = 2;

Bytes frame(Comm::Collective what, bool failed, std::span<const std::byte> body) {
  Bytes bytes(kFrameBytes + body.size());
  bytes[0] = std::byte{static_cast<std::uint8_t>(what)};
  bytes[1] = std::byte{failed};
  std::ranges::copy(body, bytes.begin() + kFrameBytes);
  return bytes;
}

// Takes the frame off a rank's contribution.
void unframe(Comm::Collective what, int rank, Bytes& bytes) {
  XD_CHECK(bytes.size() >= kFrameBytes);
  const auto theirs = static_cast<Comm::Collective>(bytes[0]);
  if (theirs != what) {
    fail(XD_ERROR_MISMATCH, "rank ", rank, " is in ", name_of(theirs), ", this rank in ",
         name_of(what));
  }
  if (bytes[1] != std::byte{0}) {
    fail(XD_ERROR_MISMATCH, "rank ", rank,
         " failed: ", text_of(std::span(bytes).subspan(kFrameBytes)));
  }
  bytes.erase(bytes.begin(), bytes.begin() + kFrameBytes);
}

}  // namespace

void require_size(const std::shared_ptr<Segment>& segment, std::size_t bytes, int rank) {
  const std::size_t got = segment ? segment->bytes() : 0;
  if (got < bytes) {
    fail(XD_ERROR_MISMATCH, "rank ", rank, " shares ", got, " bytes of memory, expected at least ",
         bytes, ": it runs another version of the library");
  }
}

std::shared_ptr<Comm> Comm::create(const xd_comm_config& config) {
  XD_REQUIRE(config.device.device_type == kDLCPU || config.device.device_type == kDLCUDA,
             "config.device.device_type = ", int{config.device.device_type},
             ", expected kDLCPU or kDLCUDA");
  if (config.device.device_type == kDLCUDA) {
    fail(XD_ERROR_UNSUPPORTED, "config.device is a CUDA device: ", feature(XD_FEATURE_CUDA).reason);
  }
  const std::unique_ptr<Bootstrap> bootstrap = make_bootstrap(config);
  std::shared_ptr<Comm> comm(new Comm(config, *bootstrap));

  comm->mesh_ = Mesh::connect(*bootstrap, comm->deadline());
  comm->local_ranks_ = comm->mesh_->local_ranks();
  comm->mesh_->start(*comm);
  comm->control_segments_ = comm->share(Collective::create, ControlMap::make(comm->num_ranks_).end);
  for (int r = 0; r < comm->num_ranks_; ++r) {
    require_size(comm->control_segments_[at(r)], ControlMap::make(comm->num_ranks_).end, r);
    comm->controls_[at(r)] = Control(comm->control_segments_[at(r)]->base(), comm->num_ranks_);
  }
  comm->connected_.store(true, std::memory_order_release);
  comm->add_to_heap(Collective::create, config.heap_bytes);
  log_topic("comm", "rank ", comm->rank_, " of ", comm->num_ranks_, " joined '", comm->name_, "', ",
            comm->local_ranks_, " in this process");
  return comm;
}

Comm::Comm(const xd_comm_config& config, Bootstrap& bootstrap)
    : rank_(bootstrap.rank()),
      num_ranks_(bootstrap.num_ranks()),
      device_(config.device),
      timeout_ms_(resolve_timeout(config.timeout_ms)),
      name_(config.name != nullptr ? config.name : ""),
      process_(::getpid()),
      spin_(spin_time(bootstrap.num_ranks())),
      controls_(at(bootstrap.num_ranks())),
      left_(at(bootstrap.num_ranks())),
      heap_(bootstrap.rank()) {}

Comm::~Comm() { close(); }

std::vector<Mesh::Item> Comm::gather(std::span<const std::byte> blob, int fd) {
  try {
    return mesh_->all_gather(blob, fd, deadline());
  } catch (const Error& error) {
    throw_if_failed();  // what has been recorded is the cause of this failure
    fail_round(error.status(), error.peer());
    throw;
  } catch (const std::bad_alloc&) {
    fail_round(XD_ERROR_OUT_OF_MEMORY, -1);
    throw;
  }
}

// Some peers may have heard of this round and others not: the ranks are out of step for good.
void Comm::fail_round(xd_status status, int peer) {
  // A loss is recorded by on_lost(), so this is a peer that has left.
  const bool left = status == XD_ERROR_PEER_LOST;
  raise({.status = status,
         .phase = XD_PHASE_HOST,
         .rank = rank_,
         .peer = peer,
         .left = left,
         .timeout_ms = timeout_ms_},
        left ? Spread::here : Spread::everywhere);
}

std::vector<Mesh::Item> Comm::agree(Collective what, const std::function<Contribution()>& work) {
  const std::lock_guard lock(collective_mutex_);
  Contribution mine;
  std::optional<Error> mistake;
  try {
    mine = work();
  } catch (const Error& error) {
    mistake = error;
  } catch (const std::bad_alloc&) {
    mistake = Error(XD_ERROR_OUT_OF_MEMORY, "out of host memory");
  }
  const Bytes framed = mistake ? frame(what, true, std::as_bytes(std::span(mistake->text())))
                               : frame(what, false, mine.blob);
  auto items = gather(framed, mistake ? -1 : mine.fd);
  if (mistake) throw *mistake;
  for (int r = 0; r < num_ranks_; ++r) unframe(what, r, items[at(r)].blob);
  return items;
}

std::vector<std::shared_ptr<Segment>> Comm::share(Collective what, std::size_t bytes) {
  Segment::Created own;
  auto items = agree(what, [&] {
    if (bytes > 0) own = Segment::create(bytes, "this rank's memory");
    const std::uint64_t size = own.segment ? own.segment->bytes() : 0;
    Contribution contribution{.blob = Bytes(sizeof(size)), .fd = own.fd.get()};
    std::memcpy(contribution.blob.data(), &size, sizeof(size));
    return contribution;
  });
  std::vector<std::shared_ptr<Segment>> segments(items.size());
  agree(what, [&] {
    for (std::size_t r = 0; r < items.size(); ++r) {
      std::uint64_t size = 0;
      if (items[r].blob.size() != sizeof(size)) {
        fail(XD_ERROR_MISMATCH, "rank ", r, " sent a malformed segment description");
      }
      std::memcpy(&size, items[r].blob.data(), sizeof(size));
      if (r == at(rank_)) {
        segments[r] = own.segment;
      } else if (size > 0) {
        segments[r] = Segment::open(std::move(items[r].fd), size);
      }
    }
    return Contribution{};
  });
  return segments;
}

void Comm::barrier() {
  agree(Collective::barrier, [] { return Contribution{}; });
}

void Comm::add_to_heap(Collective what, std::size_t bytes) {
  auto segments = share(what, bytes);
  if (std::ranges::any_of(segments, [](const auto& s) { return s != nullptr; })) {
    heap_.add(std::move(segments));
  }
}

}  // namespace xd
