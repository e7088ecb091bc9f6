#include "comm/comm.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <string_view>

#include "base/env.h"
#include "base/log.h"
#include "base/math.h"

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

std::string_view text_of(std::span<const std::byte> body) {
  return {reinterpret_cast<const char*>(body.data()), body.size()};
}

// What a contribution travels in: the name of the call with its zero, a byte (1 = failed), then the
// blob or the error's text.
Bytes frame(CollectiveCall what, std::span<const std::byte> blob) {
  const std::size_t name_bytes = std::strlen(what.name) + 1;
  Bytes bytes(name_bytes + 1 + blob.size());
  std::memcpy(bytes.data(), what.name, name_bytes);
  std::ranges::copy(blob, bytes.begin() + static_cast<std::ptrdiff_t>(name_bytes) + 1);
  return bytes;
}

// The same of the exception in flight, which may be that there is no memory.
class FailureFrame {
 public:
  explicit FailureFrame(CollectiveCall what) noexcept : head_(std::strlen(what.name) + 2) {
    std::memcpy(bytes_.data(), what.name, head_ - 1);
    bytes_[head_ - 1] = 1;
    caught(std::span(bytes_).subspan(head_));
  }
  std::span<const std::byte> bytes() const {
    return std::as_bytes(std::span(bytes_)).first(head_ + std::strlen(bytes_.data() + head_));
  }

 private:
  const std::size_t head_;
  std::array<char, 1024> bytes_;
};

// Takes the frame off a rank's contribution.
void unframe(CollectiveCall what, int rank, Bytes& bytes) {
  const auto end = std::ranges::find(bytes, std::byte{0});
  XD_CHECK(bytes.end() - end >= 2);
  const std::string_view theirs = text_of(std::span(bytes.begin(), end));
  if (theirs != what.name) {
    fail(XD_ERROR_MISMATCH, "rank ", rank, " is in ", theirs, ", this rank in ", what.name);
  }
  const auto blob = end + 2;
  if (blob[-1] != std::byte{0}) {
    fail(XD_ERROR_MISMATCH, "rank ", rank, " failed: ", text_of(std::span(blob, bytes.end())));
  }
  bytes.erase(bytes.begin(), blob);
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
  xd_comm_config resolved = config;
  resolved.device = resolve_device(config.device);
  const std::unique_ptr<Bootstrap> bootstrap = make_bootstrap(config);
  std::shared_ptr<Comm> comm(new Comm(resolved, *bootstrap));

  comm->mesh_ = Mesh::connect(*bootstrap, comm->deadline());
  comm->mesh_for_watch_ = comm->mesh_.get();
  comm->local_ranks_ = comm->mesh_->local_ranks();
  comm->mesh_->start(*comm);
  try {
    comm->set_up(config.heap_bytes);
  } catch (const Error& error) {
    // Every rank notices and names a peer that is gone or has failed.
    const bool known = error.status() == XD_ERROR_PEER_LOST || error.status() == XD_ERROR_MISMATCH;
    if (!known) comm->mesh_->send_failure();
    throw;
  } catch (...) {
    comm->mesh_->send_failure();
    throw;
  }
  log_topic("comm", "rank ", comm->rank_, " of ", comm->num_ranks_, " joined '", comm->name_, "', ",
            comm->local_ranks_, " in this process");
  return comm;
}

void Comm::set_up(std::size_t heap_bytes) {
  introduce();
  make_controls();
  make_device_side();
  // From now on on_left() tells kernels which ranks leave.
  connected_.store(true);
  for (int r = 0; r < num_ranks_; ++r) {
    if (device_side_ && left(r)) device_side_->set_left(r);
  }
  add_to_heap(kCreate, heap_bytes);
}

// The ranks compare their devices, so all come to the same verdict.
void Comm::introduce() {
  const auto items = agree(kCreate, [&] {
    if (device_.device_type == kDLCUDA && num_ranks_ > kMaxDeviceRanks) {
      fail(XD_ERROR_UNSUPPORTED, "num_ranks = ", num_ranks_, ", expected at most ", kMaxDeviceRanks,
           " on CUDA devices");
    }
    const DeviceIntroduction mine = introduce_device(device_);
    Contribution contribution{.blob = Bytes(sizeof(mine))};
    std::memcpy(contribution.blob.data(), &mine, sizeof(mine));
    return contribution;
  });
  const auto kind = [](std::int32_t type) { return type == kDLCUDA ? "a CUDA device" : "the CPU"; };
  for (std::size_t r = 0; r < items.size(); ++r) {
    DeviceIntroduction& theirs = introductions_.emplace_back();
    if (items[r].blob.size() != sizeof(theirs)) {
      fail(XD_ERROR_MISMATCH, "rank ", r, " runs another version of the library");
    }
    std::memcpy(&theirs, items[r].blob.data(), sizeof(theirs));
    if (theirs.type != introductions_[0].type) {
      fail(XD_ERROR_MISMATCH, "config.device is ", kind(introductions_[0].type), " on rank 0 and ",
           kind(theirs.type), " on rank ", r, ", expected the same kind");
    }
  }
}

void Comm::make_controls() {
  const std::size_t bytes = ControlMap::make(num_ranks_).end;
  control_segments_ = share_host(kCreate, bytes);
  for (int r = 0; r < num_ranks_; ++r) {
    require_size(control_segments_[at(r)], bytes, r);
    controls_[at(r)] = Control(control_segments_[at(r)]->base(), num_ranks_);
  }
}

void Comm::make_device_side() {
  const std::size_t bytes = device_board_bytes(device_);
  if (bytes == 0) return;
  auto boards = share(kCreate, bytes);
  for (int r = 0; r < num_ranks_; ++r) require_size(boards[at(r)], bytes, r);
  agree(kCreate, [&] {
    device_side_ = xd::make_device_side(
        device_, {.rank = rank_, .num_ranks = num_ranks_, .timeout_ms = timeout_ms_},
        std::move(boards));
    return Contribution{};
  });
}

int Comm::ranks_on_device() const {
  return static_cast<int>(
      std::ranges::count(introductions_, introductions_[at(rank_)].id, &DeviceIntroduction::id));
}

Comm::Comm(const xd_comm_config& config, Bootstrap& bootstrap)
    : rank_(bootstrap.rank()),
      num_ranks_(bootstrap.num_ranks()),
      device_(config.device),
      timeout_ms_(resolve_timeout(config.timeout_ms)),
      name_(config.name != nullptr ? config.name : ""),
      process_(::getpid()),
      spin_(spin_time(bootstrap.num_ranks())),
      device_memory_(make_segment_maker(device_)),
      controls_(at(bootstrap.num_ranks())),
      left_(at(bootstrap.num_ranks())),
      heap_(bootstrap.rank()) {}

Comm::~Comm() { close(); }

void Comm::gather(std::span<const std::byte> blob, int fd, std::span<Mesh::Item> items) {
  try {
    mesh_->all_gather(blob, fd, deadline(), items);
  } catch (const Error& error) {
    throw_if_failed();  // the recorded error is the cause of this failure
    fail_round({error.status(), error.error_number()}, error.peer());
    throw;
  } catch (const std::bad_alloc&) {
    fail_round({XD_ERROR_OUT_OF_MEMORY, 0}, -1);
    throw;
  }
}

// Some peers may have heard of this round and others not: the ranks are out of step for good.
void Comm::fail_round(const Caught& error, int peer) {
  // A loss is recorded by on_lost(), so this is a peer that has left.
  const bool left = error.status == XD_ERROR_PEER_LOST;
  FatalError fatal{.status = error.status,
                   .phase = XD_PHASE_HOST,
                   .rank = rank_,
                   .peer = error.status == XD_ERROR_ABORTED ? rank_ : peer,
                   .left = left,
                   .timeout_ms = timeout_ms_};
  fatal.error_number = error.error_number;
  raise(fatal, left ? Spread::here : Spread::everywhere);
}

// Inside a catch block: takes this rank's part in the next step of its peers with the exception in
// flight. If that fails as well the communicator is finished, and the exception still the cause.
void Comm::bring_failure(CollectiveCall what) noexcept {
  const FailureFrame failure(what);
  try {
    const std::lock_guard lock(collective_mutex_);
    if (fatal_error() == nullptr) gather(failure.bytes(), -1, {});
  } catch (...) {
  }
}

std::vector<Mesh::Item> Comm::agree(CollectiveCall what,
                                    const std::function<Contribution()>& work) {
  const std::lock_guard lock(collective_mutex_);
  Contribution mine;
  std::vector<Mesh::Item> items;
  try {
    mine = work();
    // All memory of this step is taken before it begins.
    items.resize(at(num_ranks_));
    items[at(rank_)].blob = frame(what, mine.blob);
  } catch (...) {
    const FailureFrame failure(what);
    peers_know_ = true;
    gather(failure.bytes(), -1, {});
    throw;
  }
  try {
    gather(items[at(rank_)].blob, mine.fd, items);
    for (int r = 0; r < num_ranks_; ++r) unframe(what, r, items[at(r)].blob);
  } catch (...) {
    peers_know_ = true;  // they have failed like this rank
    throw;
  }
  return items;
}

UniqueFd Comm::take_descriptor(int rank, Mesh::Item& item) {
  if (item.fd_discarded)
    fail_errno(concat("descriptor of the memory that rank ", rank, " shares"), EMFILE);
  return std::move(item.fd);
}

// Ranks exchange sizes before any of them allocates, so that ranks which share a limit on memory
// and together ask for too much all get an error, and none is killed.
void Comm::compare_demands(const SegmentMaker& memory, CollectiveCall what, std::size_t bytes) {
  OwnDemand own;
  const auto items = agree(what, [&] {
    own = memory.demand(bytes, "this rank's memory");
    Contribution contribution{.blob = Bytes(sizeof(own.demand))};
    std::memcpy(contribution.blob.data(), &own.demand, sizeof(own.demand));
    return contribution;
  });
  std::vector<MemoryDemand> of_rank(items.size());
  for (std::size_t r = 0; r < items.size(); ++r) {
    if (items[r].blob.size() != sizeof(MemoryDemand)) {
      fail(XD_ERROR_MISMATCH, "rank ", r, " runs another version of the library");
    }
    std::memcpy(&of_rank[r], items[r].blob.data(), sizeof(MemoryDemand));
  }
  require_together(of_rank, rank_, own);
}

Comm::Segments Comm::share_on(const SegmentMaker& memory, CollectiveCall what, std::size_t bytes,
                              const std::function<void(const Segments&)>& use) {
  if (memory.must_compare()) compare_demands(memory, what, bytes);
  SegmentMaker::Made own;
  auto items = agree(what, [&] {
    if (bytes > 0) own = memory.create(bytes, "this rank's memory");
    return Contribution{.blob = own.description, .fd = own.fd.get()};
  });
  Segments segments;
  agree(what, [&] {
    segments.resize(items.size());
    for (std::size_t r = 0; r < items.size(); ++r) {
      const int rank = static_cast<int>(r);
      if (rank == rank_) {
        segments[r] = own.segment;
      } else if (!items[r].blob.empty()) {
        segments[r] = memory.open(rank, items[r].blob, take_descriptor(rank, items[r]));
      }
    }
    if (use) use(segments);
    return Contribution{};
  });
  return segments;
}

void Comm::barrier() {
  agree(kBarrier, [] { return Contribution{}; });
}

// The number of the next segment of symmetric memory. Ranks tell one another by such numbers where
// their tensors lie, so all must count alike.
std::uint32_t Comm::agree_on_number(CollectiveCall what) {
  const auto items = agree(what, [&] {
    if (device_side_) heap_.require_room();
    const std::uint32_t number = heap_.next_number();
    Contribution mine{.blob = Bytes(sizeof(number))};
    std::memcpy(mine.blob.data(), &number, sizeof(number));
    return mine;
  });
  for (std::size_t r = 0; r < items.size(); ++r) {
    if (items[r].blob == items[at(rank_)].blob) continue;
    fail(XD_ERROR_MISMATCH, "rank ", r, " has other segments of symmetric memory than rank ", rank_,
         ": it would give the next one another number");
  }
  return heap_.next_number();
}

void Comm::add_to_heap(CollectiveCall what, std::size_t bytes) {
  const std::uint32_t number = agree_on_number(what);
  const auto any = [](const Segments& segments) {
    return std::ranges::any_of(segments, [](const auto& s) { return s != nullptr; });
  };
  auto segments = share_on(*device_memory_, what, bytes, [&](const Segments& mapped) {
    if (any(mapped)) heap_.make_room();  // adding must not fail when all ranks have agreed
    // This comes before any rank's call returns, since its kernels and its peers' kernels may use
    // the memory at once.
    if (device_side_) device_side_->set_heap(number, mapped);
  });
  if (any(segments)) heap_.add(std::move(segments));
}

}  // namespace xd
