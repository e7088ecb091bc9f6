// Collective steps of the ranks on the host, over the mesh.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/wire.h"
#include "comm/operations.h"
#include "comm/wait_notes.h"
#include "meet/mesh.h"
#include "memory/segment.h"

namespace xd {

class Errors;

using Segments = std::vector<std::shared_ptr<Segment>>;  // by rank; null for a rank that has none

// Throws MISMATCH unless a rank's segment is there and has at least `bytes`. A rank that runs
// another version of the library may lay its memory out differently.
void require_size(const std::shared_ptr<Segment>& segment, std::size_t bytes, int rank);

class Collective {
 public:
  static constexpr CollectiveCall kCreate{"xd_comm_create"}, kGrow{"xd_mem_grow"},
      kBarrier{"xd_comm_barrier"}, kAllGather{"xd_comm_all_gather"}, kRegister{"xd_mem_register"},
      kDeregister{"xd_mem_deregister"};

  struct Contribution {
    Bytes blob;
    int fd = -1;
  };

  // A step that ends half-way leaves the ranks out of step for good, which is a fatal error for
  // `errors`, except by the loss of a rank that `errors` masks. `errors` is nullptr while the
  // communicator is being made. `mesh` and `errors` must outlive the object.
  Collective(Mesh& mesh, int rank, int num_ranks, int timeout_ms, Errors* errors);

  // Every rank does `work` and gives its contribution to all. If it throws on some rank, that rank
  // rethrows and all others throw MISMATCH naming the lowest such rank and its text; so do ranks
  // that are in different calls. After agree() has returned, `work` has succeeded everywhere.
  std::vector<Mesh::Item> agree(CollectiveCall call, const std::function<Contribution()>& work);

  // Calls agree() with plain values as contributions, and returns the results of `make` on all
  // ranks.
  template <class Make, class T = std::invoke_result_t<Make>>
  std::vector<T> agree_on(CollectiveCall call, Make&& make);

  // A collective call as a whole: `body` goes through one or more agree(), and nothing can fail
  // after the last. If this rank fails between two of them (mostly for want of memory), the failure
  // is its contribution to the next one, for which the peers wait.
  template <class Body>
  void run(CollectiveCall call, Body&& body) {
    peers_know_ = out_of_step_ = false;
    try {
      std::forward<Body>(body)();
      sizes_.clear();
    } catch (...) {
      if (!peers_know_) bring_failure(call);
      sizes_.clear();
      throw;
    }
  }
  // True if the call that has failed was one that not all ranks have made.
  bool out_of_step() const { return out_of_step_; }

  // Allocates `bytes` of shared memory here (0 = none), and maps that of every rank of this host;
  // others have none here. `use` is called with all segments, in the last step that may fail on
  // some rank.
  Segments share(const SegmentMaker& memory, CollectiveCall call, std::size_t bytes,
                 const std::function<void(const Segments&)>& use = {});

  // The sizes of the call under way, for texts about it. Called by its `work`.
  void describe(std::string sizes) { sizes_ = std::move(sizes); }

  void barrier() {
    agree(kBarrier, [] { return Contribution{}; });
  }
  // Collective, with `bytes` equal on all ranks; rank r's are at output + r * bytes.
  void all_gather(const void* input, void* output, std::size_t bytes);

 private:
  // The descriptor that a rank has sent; throws SYSTEM if this process had no room for it.
  static UniqueFd take_descriptor(int rank, Mesh::Item& item);
  // `deadline`: none = the communicator's timeout from now on.
  void gather(CollectiveCall call, std::span<const std::byte> blob, int fd,
              std::span<Mesh::Item> items, std::optional<Deadline> deadline = {});
  std::string call_text(CollectiveCall call) const;
  bool is_near(int rank) const { return mesh_.rails().is_near(rank); }
  bool is_masked_loss(const Error& error) const;
  void fail_round(CollectiveCall call, const Caught& error, int peer);
  void bring_failure(CollectiveCall call) noexcept;
  void bring(CollectiveCall call, std::span<const std::byte> failure, std::span<Mesh::Item> items);
  void fail_round_of_peers(const OutOfStep& what, std::uint64_t round, const std::string& text,
                           std::optional<Deadline> deadline);
  void join_operation(std::span<const Mesh::Item> items);
  void compare_demands(const SegmentMaker& memory, CollectiveCall call, std::size_t bytes);

  Mesh& mesh_;
  const int rank_;
  const int num_ranks_;
  const int timeout_ms_;
  Errors* const errors_;
  std::mutex mutex_;
  bool peers_know_ = false;  // true: peers know that the current collective call has failed
  bool out_of_step_ = false;
  std::string sizes_;
};

template <class Make, class T>
std::vector<T> Collective::agree_on(CollectiveCall call, Make&& make) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto items = agree(call, [&] {
    const T mine = make();
    Contribution contribution{.blob = Bytes(sizeof(mine))};
    std::memcpy(contribution.blob.data(), &mine, sizeof(mine));
    return contribution;
  });
  std::vector<T> of_rank(items.size());
  for (std::size_t r = 0; r < items.size(); ++r) {
    if (items[r].blob.size() != sizeof(T)) {
      fail(XD_ERROR_MISMATCH, "rank ", r, " runs another version of the library");
    }
    std::memcpy(&of_rank[r], items[r].blob.data(), sizeof(T));
  }
  return of_rank;
}

}  // namespace xd
