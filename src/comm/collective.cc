#include "comm/collective.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <new>
#include <optional>
#include <string_view>

#include "base/math.h"
#include "comm/errors.h"
#include "comm/long_wait.h"

namespace xd {
namespace {

std::string_view text_of(std::span<const std::byte> body) {
  return {reinterpret_cast<const char*>(body.data()), body.size()};
}

// The packet of a contribution: the name of the call with its zero, a byte (1 = failed), then the
// blob or the error's text.
Bytes frame(CollectiveCall call, std::span<const std::byte> blob) {
  const std::size_t name_bytes = std::strlen(call.name) + 1;
  Bytes bytes(name_bytes + 1 + blob.size());
  std::memcpy(bytes.data(), call.name, name_bytes);
  std::ranges::copy(blob, bytes.begin() + static_cast<std::ptrdiff_t>(name_bytes) + 1);
  return bytes;
}

// The packet of a rank that has failed: the exception in flight, which may be that there is no
// memory.
class FailureFrame {
 public:
  explicit FailureFrame(CollectiveCall call) noexcept : head_(std::strlen(call.name) + 2) {
    std::memcpy(bytes_.data(), call.name, head_ - 1);
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

// The packet of a rank that is in an operation, and waits there for ranks that are in this call: no
// name and its zero, a 2, the operation, then the text.
constexpr std::byte kOutOfStep{2};
constexpr std::size_t kOutOfStepText = 2 + sizeof(OutOfStep);

Bytes out_of_step_frame(const OutOfStep& what, std::string_view text) {
  Bytes bytes(kOutOfStepText + text.size());
  bytes[1] = kOutOfStep;
  std::memcpy(bytes.data() + 2, &what, sizeof(what));
  std::memcpy(bytes.data() + kOutOfStepText, text.data(), text.size());
  return bytes;
}

bool is_out_of_step(std::span<const std::byte> bytes) {
  return bytes.size() >= kOutOfStepText && bytes[0] == std::byte{0} && bytes[1] == kOutOfStep;
}

// Takes the frame off a rank's contribution. Allocates only to throw: a rank that failed here would
// have its peers wait in the next round.
void unframe(CollectiveCall call, int rank, Bytes& bytes) {
  const auto end = std::ranges::find(bytes, std::byte{0});
  XD_CHECK(bytes.end() - end >= 2);
  const std::string_view theirs = text_of(std::span(bytes.begin(), end));
  if (theirs != call.name) {
    fail(XD_ERROR_MISMATCH, "rank ", rank, " is in ", theirs, ", this rank in ", call.name);
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

Collective::Collective(Mesh& mesh, int rank, int num_ranks, int timeout_ms, Errors* errors)
    : mesh_(mesh), rank_(rank), num_ranks_(num_ranks), timeout_ms_(timeout_ms), errors_(errors) {
  if (errors_ == nullptr) return;
  errors_->notes().set_fail_round([this](const OutOfStep& what, std::uint64_t round,
                                         const std::string& text,
                                         std::optional<Deadline> deadline) {
    fail_round_of_peers(what, round, text, deadline);
  });
}

std::string Collective::call_text(CollectiveCall call) const {
  return sizes_.empty() ? call.name : concat(call.name, " (", sizes_, ")");
}

void Collective::gather(CollectiveCall call, std::span<const std::byte> blob, int fd,
                        std::span<Mesh::Item> items, std::optional<Deadline> deadline) {
  // A function that refers to one thing takes no memory: a rank that failed here would have its
  // peers wait.
  struct {
    const Collective& collective;
    const CollectiveCall call;
    std::optional<LongWait> wait;
  } watched{*this, call, {}};
  Mesh::Look look;
  if (errors_ != nullptr) {
    errors_->require_all_ranks();
    watched.wait.emplace(*errors_);
    if (items.empty()) watched.wait->never_joins();
    look = [&watched](std::uint64_t round, int missing) {
      watched.wait->look_in_call(
          round, [&watched] { return watched.collective.call_text(watched.call); }, missing);
    };
  }
  try {
    mesh_.all_gather(blob, fd, deadline.value_or(Deadline::after_ms(timeout_ms_)), items, look);
  } catch (const Error& error) {
    if (errors_ != nullptr) errors_->throw_if_failed();  // the cause of this failure
    if (is_masked_loss(error)) {
      errors_->require_all_ranks();  // throws with the words that later calls have, too
      throw;
    }
    fail_round(call, {error.status(), error.error_number()}, error.peer());
    throw;
  } catch (const std::bad_alloc&) {
    fail_round(call, {XD_ERROR_OUT_OF_MEMORY, 0}, -1);
    throw;
  }
}

// The ranks are out of step for good then, but every later call fails before its first step.
bool Collective::is_masked_loss(const Error& error) const {
  return errors_ != nullptr && errors_->masks_losses() && error.status() == XD_ERROR_PEER_LOST;
}

// Some peers may have heard of this round and others not: the ranks are out of step for good.
void Collective::fail_round(CollectiveCall call, const Caught& error, int peer) {
  if (errors_ == nullptr) return;
  // A loss is recorded by Errors::on_lost(), so this is a peer that has left.
  const bool left = error.status == XD_ERROR_PEER_LOST;
  FatalError fatal{.status = error.status,
                   .phase = XD_PHASE_HOST,
                   .rank = rank_,
                   .peer = error.status == XD_ERROR_ABORTED ? rank_ : peer,
                   .left = left,
                   .timeout_ms = timeout_ms_};
  fatal.error_number = error.error_number;
  ToldError told = error.status == XD_ERROR_TIMEOUT ? with_waits(*errors_, fatal) : fatal;
  try {
    told.set_call(call_text(call));
  } catch (const std::bad_alloc&) {
    told.set_call(call.name);
  }
  errors_->raise(told, left ? Spread::here : Spread::everywhere);
}

// Takes this rank's part in a step with a failure. `items` may be none.
void Collective::bring(CollectiveCall call, std::span<const std::byte> failure,
                       std::span<Mesh::Item> items) {
  peers_know_ = true;
  gather(call, failure, -1, items);
  try {
    join_operation(items);
  } catch (const Error&) {
    errors_->throw_if_failed();  // or else this rank's own failure is told
  }
}

// Inside a catch block: takes this rank's part in the next step of its peers with the exception in
// flight. If that fails as well the communicator is finished, and the exception still the cause.
void Collective::bring_failure(CollectiveCall call) noexcept {
  const FailureFrame failure(call);
  try {
    const std::lock_guard lock(mutex_);
    if (errors_ != nullptr && errors_->fatal_error() != nullptr) return;
    std::vector<Mesh::Item> items;
    try {
      items.resize(at(num_ranks_));
    } catch (const std::bad_alloc&) {
    }
    bring(call, failure.bytes(), items);
  } catch (...) {
  }
}

// Takes this rank's part in the host call in which its peers wait for it, while it waits for them
// in an operation; unless another thread has taken it.
void Collective::fail_round_of_peers(const OutOfStep& what, std::uint64_t round,
                                     const std::string& text, std::optional<Deadline> deadline) {
  const std::lock_guard lock(mutex_);
  if (mesh_.rounds_begun() != round) return;
  gather({"a host call of its peers"}, out_of_step_frame(what, text), -1, {}, deadline);
}

// Where ranks wait in operations for this one: takes its turns there with a failure, and throws.
void Collective::join_operation(std::span<const Mesh::Item> items) {
  if (errors_ == nullptr) return;  // there are no operations yet
  std::string first;
  for (const Mesh::Item& item : items) {
    if (!is_out_of_step(item.blob)) continue;
    out_of_step_ = peers_know_ = true;
    OutOfStep what{};
    std::memcpy(&what, item.blob.data() + 2, sizeof(what));
    const std::string text(text_of(std::span(item.blob).subspan(kOutOfStepText)));
    if (first.empty()) first = text;
    WaitNote theirs{.epoch = what.epoch, .group = what.group, .operation = what.operation};
    theirs.phase = XD_PHASE_ENTRY;
    // All ranks that wait there have said so, and one turn is for all of them.
    if (!errors_->notes().can_join(theirs)) continue;
    try {
      errors_->notes().join(what, text.c_str());
    } catch (const Error&) {
      errors_->throw_if_failed();
    }
  }
  if (!first.empty()) fail(XD_ERROR_MISMATCH, first);
}

std::vector<Mesh::Item> Collective::agree(CollectiveCall call,
                                          const std::function<Contribution()>& work) {
  const std::lock_guard lock(mutex_);
  Contribution mine;
  std::vector<Mesh::Item> items;
  try {
    // All memory of this step is taken before it begins.
    items.resize(at(num_ranks_));
    mine = work();
    items[at(rank_)].blob = frame(call, mine.blob);
  } catch (...) {
    bring(call, FailureFrame(call).bytes(), items);
    throw;
  }
  try {
    gather(call, items[at(rank_)].blob, mine.fd, items);
    join_operation(items);
    for (int r = 0; r < num_ranks_; ++r) unframe(call, r, items[at(r)].blob);
  } catch (...) {
    peers_know_ = true;  // they have failed like this rank
    throw;
  }
  return items;
}

// Each round has the size in front of a part, and only the first can find that sizes differ.
void Collective::all_gather(const void* input, void* output, std::size_t bytes) {
  constexpr std::size_t kMostInRound = Mesh::kMaxBlob - 64;  // beside the call's name and the size
  std::vector<std::byte> gathered;
  const auto round = [&](std::size_t begin) {
    const std::size_t part = std::min(bytes - begin, kMostInRound);
    const auto items = agree(kAllGather, [&] {
      XD_REQUIRE(bytes <= PTRDIFF_MAX / at(num_ranks_), "bytes = ", bytes, ", expected at most ",
                 PTRDIFF_MAX / at(num_ranks_), ", as output has those of all ranks");
      XD_REQUIRE(bytes == 0 || input != nullptr, "input = NULL, expected ", bytes, " bytes");
      XD_REQUIRE(bytes == 0 || output != nullptr, "output = NULL, expected ", num_ranks_, " * ",
                 bytes, " bytes");
      if (begin == 0) gathered.resize(at(num_ranks_) * bytes);
      Contribution mine{.blob = Bytes(sizeof(bytes) + part)};
      std::memcpy(mine.blob.data(), &bytes, sizeof(bytes));
      if (part > 0)
        std::memcpy(mine.blob.data() + sizeof(bytes), static_cast<const std::byte*>(input) + begin,
                    part);
      return mine;
    });
    for (std::size_t r = 0; r < items.size(); ++r) {
      std::size_t theirs = 0;
      if (items[r].blob.size() >= sizeof(theirs))
        std::memcpy(&theirs, items[r].blob.data(), sizeof(theirs));
      if (theirs != bytes)
        fail(XD_ERROR_MISMATCH, "bytes = ", bytes, " on rank ", rank_, " and ", theirs, " on rank ",
             r, ", expected equal values");
      if (items[r].blob.size() != sizeof(theirs) + part)
        fail(XD_ERROR_MISMATCH, "rank ", r, " runs another version of the library");
      if (part > 0)
        std::memcpy(gathered.data() + r * bytes + begin, items[r].blob.data() + sizeof(theirs),
                    part);
    }
  };
  run(kAllGather, [&] {
    std::size_t begin = 0;
    do {
      round(begin);
      begin += kMostInRound;
    } while (begin < bytes);
  });
  if (bytes > 0) std::memcpy(output, gathered.data(), gathered.size());
}

UniqueFd Collective::take_descriptor(int rank, Mesh::Item& item) {
  if (item.fd_discarded)
    fail_errno(concat("descriptor of the memory that rank ", rank, " shares"), EMFILE);
  return std::move(item.fd);
}

// Ranks exchange sizes before any of them allocates, so that ranks which share a limit on memory
// and together ask for too much all get an error, and none is killed.
void Collective::compare_demands(const SegmentMaker& memory, CollectiveCall call,
                                 std::size_t bytes) {
  OwnDemand own;
  auto of_rank = agree_on(call, [&] {
    own = memory.demand(bytes, "this rank's memory");
    return own.demand;
  });
  // Limits are known by numbers that other hosts use as well.
  MemoryDemand elsewhere;
  elsewhere.huge_pages = UINT64_MAX;
  for (std::size_t r = 0; r < of_rank.size(); ++r)
    if (!is_near(static_cast<int>(r))) of_rank[r] = elsewhere;
  require_together(of_rank, rank_, own);
}

Segments Collective::share(const SegmentMaker& memory, CollectiveCall call, std::size_t bytes,
                           const std::function<void(const Segments&)>& use) {
  if (memory.must_compare()) compare_demands(memory, call, bytes);
  SegmentMaker::Made own;
  auto items = agree(call, [&] {
    if (bytes > 0) own = memory.create(bytes, "this rank's memory");
    return Contribution{.blob = own.description, .fd = own.fd.get()};
  });
  Segments segments;
  agree(call, [&] {
    segments.resize(items.size());
    for (std::size_t r = 0; r < items.size(); ++r) {
      const int rank = static_cast<int>(r);
      if (rank == rank_) {
        segments[r] = own.segment;
      } else if (is_near(rank) && !items[r].blob.empty()) {
        segments[r] = memory.open(rank, items[r].blob, take_descriptor(rank, items[r]));
      }
    }
    if (use) use(segments);
    return Contribution{};
  });
  return segments;
}

}  // namespace xd
