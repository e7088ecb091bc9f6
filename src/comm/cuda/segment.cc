#include "comm/cuda/segment.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "cuda/device.h"
#include "cuda/error.h"
#include "cuda/stream.h"
#include "cuda/virtual_memory.h"
#include "memory/process_token.h"

namespace xd {
namespace {

// The identity of an allocation, the same in all processes.
struct Identity {
  std::uint64_t process;  // a process_token()
  std::uint64_t serial;   // within it

  auto operator<=>(const Identity&) const = default;
};

// The description that peers get.
struct Description {
  std::uint64_t bytes;
  Identity identity;
  cuda::Uuid device;
};

Identity new_identity() {
  static std::atomic<std::uint64_t> serial{0};
  return {process_token(), ++serial};
}

// A mapping, as a segment.
class CudaSegment final : private cuda::Mapping, public Segment {
 public:
  CudaSegment(int device, const cuda::Allocation& allocation, std::size_t bytes)
      : Mapping(device, allocation, bytes),
        Segment(Mapping::base(), bytes, false),
        device_(device) {}

  void make_accessible_from(int device) { cuda::allow_access(Segment::base(), bytes(), device); }

  // Zeroes on a stream of the library, which waits for nothing that runs on the device.
  void zero() {
    const cuda::Stream stream(device_);
    XD_CUDA_CHECK(cudaMemsetAsync(Segment::base(), 0, bytes(), stream.get()));
    stream.synchronize();
  }

 private:
  int device_;
};

// The mappings of this process. Entries are weak: a mapping lives as long as some rank holds it.
class CudaSegmentTable {
 public:
  // The table is never destroyed, since other static destructors may drop segments.
  static CudaSegmentTable& instance() {
    static CudaSegmentTable& table = *new CudaSegmentTable;
    return table;
  }

  // The one mapping of an allocation, made with `make` if there is none, accessible from `device`.
  template <class Make>
  std::shared_ptr<CudaSegment> map(Identity identity, int device, Make&& make) {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
    auto segment = entries_[identity].lock();
    if (!segment) segment = make();
    segment->make_accessible_from(device);
    entries_[identity] = segment;
    return segment;
  }

 private:
  std::mutex mutex_;
  std::map<Identity, std::weak_ptr<CudaSegment>> entries_;
};

Description read_description(int owner, std::span<const std::byte> bytes) {
  Description description{};
  if (bytes.size() != sizeof(description)) {
    fail(XD_ERROR_MISMATCH, "rank ", owner, " sent a malformed segment description");
  }
  std::memcpy(&description, bytes.data(), sizeof(description));
  return description;
}

}  // namespace

SegmentMaker::Made CudaSegmentMaker::create(std::size_t bytes, const char* what) const {
  XD_REQUIRE(bytes > 0, what, ": bytes = 0, expected more");
  const cuda::DeviceGuard guard(device_);
  const auto allocation = cuda::Allocation::create(device_, bytes, what);
  Made made;
  made.fd = allocation.share();
  const Description description{.bytes = allocation.bytes(),
                                .identity = new_identity(),
                                .device = cuda::require_device(device_).uuid};
  auto segment = CudaSegmentTable::instance().map(description.identity, device_, [&] {
    return std::make_shared<CudaSegment>(device_, allocation, allocation.bytes());
  });
  segment->zero();
  made.segment = std::move(segment);
  made.description.resize(sizeof(description));
  std::memcpy(made.description.data(), &description, sizeof(description));
  return made;
}

std::shared_ptr<Segment> CudaSegmentMaker::open(int owner, std::span<const std::byte> description,
                                                UniqueFd fd) const {
  const Description d = read_description(owner, description);
  const cuda::DeviceGuard guard(device_);
  // Memory of a device that this process does not see may be used all the same.
  if (const int there = cuda::find_device(d.device); there >= 0) {
    cuda::require_peer_access(device_, there);
  }
  return CudaSegmentTable::instance().map(d.identity, device_, [&] {
    const auto allocation = cuda::Allocation::import(fd);
    return std::make_shared<CudaSegment>(device_, allocation, d.bytes);
  });
}

}  // namespace xd
