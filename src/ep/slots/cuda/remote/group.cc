#include "ep/slots/cuda/remote/group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/math.h"
#include "comm/remote/routes.h"
#include "cuda/error.h"
#include "cuda/stream.h"
#include "ep/slots/family.h"

namespace xd::ep::cuda {
namespace {

// The longest message, whose items are rows or sums as they lie in the memory of near ranks.
std::size_t longest_message(const LlConfig& config, const LlWordsMap& map) {
  const LlIdWords ids = LlIdWords::make(config.experts, config.max_topk);
  const auto longest = [&](LlRemoteKind kind, std::uint64_t item) {
    return LlMessageMap::make(kind, ids, config.max_tokens).items + at(config.max_tokens) * item;
  };
  return std::max({longest(LlRemoteKind::dispatch, kLlItemHead + map.row_stride),
                   longest(LlRemoteKind::sums, kLlItemHead + map.partial_stride),
                   longest(LlRemoteKind::combine, at(config.max_topk) * sizeof(float))});
}

std::uint64_t seen(std::uint64_t& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}

// Memory into which messages may still come. It never ends, so whoever looks for leaks finds it.
void keep_for_good(xd::cuda::PinnedBlock&& frames) {
  static std::mutex mutex;
  static auto& all = *new std::vector<xd::cuda::PinnedBlock>;
  const std::scoped_lock lock(mutex);
  all.push_back(std::move(frames));
}

}  // namespace

LlRemoteGroup::LlRemoteGroup(const LlGroup& group, std::span<const HeapRange> areas,
                             const LlWordsMap& map)
    : comm_(group.comm()),
      num_ranks_(group.config().ranks),
      ranks_(RemoteRoutes(comm_.machines()).remote_ranks()),
      map_{.neighbours = ranks_.size(),
           .frames = LlFrames{static_cast<std::uint32_t>(group.config().in_flight)}.of_neighbour(),
           .frame_bytes = longest_message(group.config(), map)},
      proxied_(comm_, group.number(), group.subject().counters()) {
  comm_.collective().agree(LlFamily::kCreate, [&] {
    allocate(map);
    return Collective::Contribution{};
  });
  links_ = std::make_unique<RemoteLinks>(
      comm_, LlFamily::kCreate,
      RemoteLinks::Config{.neighbours = ranks_,
                          .frames = static_cast<int>(map_.frames),
                          .frame_bytes = map_.frame_bytes,
                          .memory = std::span(frames_.data(), map_.bytes())});
  comm_.collective().agree(LlFamily::kCreate, [&] {
    describe(areas, map, group.config().in_flight);
    proxy_ = std::make_unique<net::Proxy>(links_->links(), words(), proxied_.calls());
    return Collective::Contribution{};
  });
}

net::FrameWords LlRemoteGroup::words() const {
  return net::FrameWords::in(words_.as<std::uint64_t>(), map_.num_frames());
}

void LlRemoteGroup::allocate(const LlWordsMap& map) {
  const int device = comm_.device().device_id;
  frames_ = xd::cuda::PinnedBlock(device, map_.bytes());
  words_ = xd::cuda::PinnedBlock(device,
                                 net::FrameWords::words(map_.num_frames()) * sizeof(std::uint64_t));
  state_ = xd::cuda::DeviceBuffer(device, sizeof(LlRemoteState), "the state of a group's links");
  // Up to the rows, behind which nothing is stored for a remote rank in combine.
  stand_ins_ =
      xd::cuda::DeviceBuffer(device, ranks_.size() * map.rows, "memory in place of remote ranks'");
  areas_ = xd::cuda::DeviceBuffer(device, 2 * at(num_ranks_) * sizeof(HeapRange),
                                  "a group's tables of memory");
  table_ = xd::cuda::DeviceBuffer(device, sizeof(LlRemoteDevice), "a group's table of machines");
}

void LlRemoteGroup::describe(std::span<const HeapRange> areas, const LlWordsMap& map,
                             int in_flight) {
  const xd::cuda::DeviceGuard guard(comm_.device().device_id);
  LlRemoteDevice d{};
  d.links = map_;
  d.words = words();
  d.frames_at = frames_.data();
  d.state = state();
  d.frames = {static_cast<std::uint32_t>(in_flight)};
  d.num_neighbours = static_cast<int>(ranks_.size());
  std::ranges::copy(ranks_, d.rank_of);
  std::ranges::fill(d.neighbour_of, -1);
  d.stand_ins = stand_ins_.data();
  d.stand_in_bytes = map.rows;
  std::vector<HeapRange> tables(areas.begin(), areas.end());
  tables.insert(tables.end(), areas.begin(), areas.end());
  for (std::size_t n = 0; n < ranks_.size(); ++n) {
    d.neighbour_of[ranks_[n]] = static_cast<std::int32_t>(n);
    tables[at(ranks_[n])] = areas[at(comm_.rank())];
    tables[at(num_ranks_ + ranks_[n])] = {d.stand_in(static_cast<int>(n)), d.stand_in_bytes};
  }
  areas_.write(0, tables.data(), std::span(tables).size_bytes());
  table_.write(0, &d, sizeof(d));
  // No sum lies there yet.
  const xd::cuda::Stream stream(comm_.device().device_id);
  XD_CUDA_CHECK(cudaMemsetAsync(stand_ins_.data(), 0xFF, stand_ins_.bytes(), stream.get()));
  stream.synchronize();
}

LlRemoteGroup::~LlRemoteGroup() {
  if (comm_.errors().in_fork()) {
    // The thread is the other process's, and so are the connections.
    [[maybe_unused]] const net::Proxy* proxy = proxy_.release();
    links_->leave_behind();
    return;
  }
  linger();
  proxy_.reset();
  // libfabric's providers for TCP may crash where they are closed while a long message arrives.
  if (is_over() && links_->links().at_rest()) return;
  links_->keep_for_good();
  keep_for_good(std::move(frames_));
}

// Nothing that comes is of use any more.
void LlRemoteGroup::read_all() const {
  constexpr std::uint32_t kAhead = std::uint32_t{1} << 30;
  const net::FrameWords all = words();
  for (std::size_t f = 0; f < map_.num_frames(); ++f) {
    const std::uint32_t use = net::use_of(seen(all.landed[f])) + kAhead;
    std::atomic_ref(all.read[f]).store(net::frame_word(use, 0), std::memory_order_release);
  }
}

// True if all that this rank has sent was read, and what its peers send in the same operations has
// come: each rank sends as many messages as the others, but for weights.
bool LlRemoteGroup::is_over() const {
  const net::FrameWords all = words();
  const std::size_t weights =
      map_.frames / kLlRemoteKinds * (static_cast<std::size_t>(LlRemoteKind::combine) - 1);
  for (std::size_t f = 0; f < map_.num_frames(); ++f) {
    const std::uint32_t sent = net::use_of(seen(all.filled[f]));
    if (net::use_of(seen(all.freed[f])) != sent) return false;
    const std::size_t place = f % map_.frames;
    const bool is_weights = place >= weights && place < weights + map_.frames / kLlRemoteKinds;
    if (!is_weights && !ll_is_told(net::use_of(seen(all.landed[f])), sent)) return false;
  }
  return true;
}

void LlRemoteGroup::linger() const noexcept {
  constexpr int kForPeersMs = 5000, kForWeightsMs = 100;
  const auto deadline = Deadline::after_ms(std::min(kForPeersMs, comm_.timeout_ms()));
  // Nobody knows how many weights are to come: those leave before the peer's sums.
  const bool may_come = may_leave_weights_.load(std::memory_order_relaxed);
  const auto weights = Deadline::after_ms(may_come ? kForWeightsMs : 0);
  read_all();
  const Errors& errors = comm_.errors();
  const auto in_vain = [&] {
    return errors.fatal_error() != nullptr ||
           std::ranges::any_of(ranks_, [&](int r) { return errors.lost(r); });
  };
  while (!(is_over() && weights.passed()) && !in_vain() && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

}  // namespace xd::ep::cuda
