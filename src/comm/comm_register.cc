// The part of Comm that registers memory which the caller owns.
#include "comm/comm.h"

#include <array>
#include <cstring>

#if XD_CUDA
#include "memory/cuda_registered.h"
#endif

namespace xd {

void Comm::require_device_memory() const {
  if (device_side_ != nullptr) return;
  fail(XD_ERROR_UNSUPPORTED,
       "this communicator computes on the CPU, where memory cannot be shared once it is there: use "
       "xd_mem_alloc");
}

#if XD_CUDA

int Comm::register_memory(void* ptr, std::size_t bytes) {
  require_device_memory();
  int registration = -1;
  collectively(kRegister, [&] { registration = enlist(ptr, bytes); });
  return registration;
}

int Comm::enlist(void* ptr, std::size_t bytes) {
  const std::uint32_t number = agree_on_number(kRegister);
  Segments segments;
  SegmentMaker::Made own;
  auto items = agree(kRegister, [&] {
    XD_REQUIRE(bytes == 0 || ptr != nullptr, "ptr = NULL, expected memory of ", bytes, " bytes");
    if (bytes > 0) own = lend_cuda_memory(device_.device_id, ptr, bytes);
    return Contribution{.blob = own.description, .fd = own.fd.get()};
  });
  agree(kRegister, [&] {
    segments.resize(items.size());
    for (std::size_t r = 0; r < items.size(); ++r) {
      const int rank = static_cast<int>(r);
      if (rank == rank_) {
        segments[r] = own.segment;
      } else if (!items[r].blob.empty()) {
        segments[r] = borrow_cuda_memory(device_.device_id, rank, items[r].blob,
                                         take_descriptor(rank, items[r]));
      }
    }
    heap_.make_room();  // adding must not fail when all ranks have agreed
    device_side_->set_heap(number, segments);
    return Contribution{};
  });
  heap_.add_registered(std::move(segments));
  return static_cast<int>(number);
}

void Comm::deregister_memory(int registration) {
  require_device_memory();
  collectively(kDeregister, [&] { delist(registration); });
}

void Comm::delist(int registration) {
  const auto number = static_cast<std::uint32_t>(registration);
  const auto items = agree(kDeregister, [&] {
    XD_REQUIRE(registration >= 0 && heap_.is_registered(number), "registration = ", registration,
               ", expected one that xd_mem_register gave and that is still there");
    Contribution mine{.blob = Bytes(sizeof(registration))};
    std::memcpy(mine.blob.data(), &registration, sizeof(registration));
    return mine;
  });
  for (std::size_t r = 0; r < items.size(); ++r) {
    if (items[r].blob != items[at(rank_)].blob) {
      fail(XD_ERROR_MISMATCH, "rank ", r, " deregisters another registration than rank ", rank_);
    }
  }
  Segments mapped;
  bool kernels_know = false;
  try {
    // No rank returns, and may free its memory, before all have let go of it.
    agree(kDeregister, [&] {
      mapped = heap_.remove_registered(number);
      device_side_->set_heap(number, {});
      kernels_know = true;
      return Contribution{};
    });
  } catch (...) {
    if (!kernels_know) fail_delisting();
    throw;
  }
}

// Called inside a catch block. This rank's kernels may still find memory that its owner is about to
// free, so none of them may run any more.
void Comm::fail_delisting() {
  std::array<char, 1> no_text;
  const Caught error = caught(no_text);
  FatalError fatal{
      .status = error.status, .phase = XD_PHASE_HOST, .rank = rank_, .peer = rank_, .group = -1};
  fatal.error_number = error.error_number;
  raise(fatal, Spread::everywhere);
}

#else

int Comm::register_memory(void*, std::size_t) {
  require_device_memory();
  return -1;
}
void Comm::deregister_memory(int) { require_device_memory(); }

#endif

}  // namespace xd
