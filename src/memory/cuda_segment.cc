#include "memory/cuda_segment.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/error.h"
#include "cuda/stream.h"
#include "memory/process_token.h"

namespace xd {
namespace {

using cuda::driver;

// Of an allocation, in all processes.
struct Identity {
  std::uint64_t process;  // a process_token()
  std::uint64_t serial;   // within it

  auto operator<=>(const Identity&) const = default;
};

// What peers are told.
struct Description {
  std::uint64_t bytes;
  Identity identity;
  cuda::Uuid device;
};

Identity new_identity() {
  static std::atomic<std::uint64_t> serial{0};
  return {process_token(), ++serial};
}

CUmemAllocationProp allocation_on(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

// The mapping keeps the memory; the handle is only needed to make it.
class Allocation {
 public:
  Allocation() = default;
  ~Allocation() {
    if (handle_ != 0) driver().cuMemRelease(handle_);
  }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  CUmemGenericAllocationHandle get() const { return handle_; }
  CUmemGenericAllocationHandle* receive() { return &handle_; }

 private:
  CUmemGenericAllocationHandle handle_ = 0;
};

std::byte* map_allocation(const Allocation& allocation, std::size_t bytes) {
  CUdeviceptr base = 0;
  XD_CUDA_CHECK(driver().cuMemAddressReserve(&base, bytes, 0, 0, 0));
  const CUresult error = driver().cuMemMap(base, bytes, 0, allocation.get(), 0);
  if (error != CUDA_SUCCESS) {
    driver().cuMemAddressFree(base, bytes);
    cuda::check(error, "cuMemMap");
  }
  return cuda::as_pointer(base);
}

class CudaSegment final : public Segment {
 public:
  CudaSegment(int device, const Allocation& allocation, std::size_t bytes)
      : Segment(map_allocation(allocation, bytes), bytes, false), device_(device) {}

  ~CudaSegment() override {
    cuda::try_on_device(device_, [this] {
      driver().cuMemUnmap(address(), bytes());
      driver().cuMemAddressFree(address(), bytes());
    });
  }

  // Calls exclude each other: see the table.
  void make_accessible_from(int device) {
    if (accessible_from_.contains(device)) return;
    CUmemAccessDesc access{};
    access.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    XD_CUDA_CHECK(driver().cuMemSetAccess(address(), bytes(), &access, 1));
    accessible_from_.insert(device);
  }

  // On a stream of its own: it waits for nothing that runs on the device.
  void zero() {
    const cuda::Stream stream(device_);
    XD_CUDA_CHECK(cudaMemsetAsync(base(), 0, bytes(), stream.get()));
    stream.synchronize();
  }

 private:
  CUdeviceptr address() const { return reinterpret_cast<CUdeviceptr>(base()); }

  int device_;
  std::set<int> accessible_from_;
};

// What this process has mapped. Entries are weak: a mapping lives as long as some rank holds it.
class CudaSegmentTable {
 public:
  // Never destroyed: segments may be dropped by other static destructors.
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

std::uint64_t granularity_of(const CUmemAllocationProp& properties) {
  std::size_t granularity = 0;
  XD_CUDA_CHECK(driver().cuMemGetAllocationGranularity(&granularity, &properties,
                                                       CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  return granularity;
}

void allocate(Allocation& allocation, const CUmemAllocationProp& properties, std::size_t bytes,
              std::size_t asked, const char* what) {
  // Rounding up may have wrapped.
  const CUresult error = bytes < asked
                             ? CUDA_ERROR_OUT_OF_MEMORY
                             : driver().cuMemCreate(allocation.receive(), bytes, &properties, 0);
  if (error == CUDA_ERROR_OUT_OF_MEMORY) {
    std::size_t available = 0, total = 0;
    XD_CUDA_CHECK(cudaMemGetInfo(&available, &total));
    fail(XD_ERROR_OUT_OF_MEMORY, what, ": asked ", asked, " bytes of ",
         cuda::describe_device(properties.location.id), ", available ", available);
  }
  cuda::check(error, "cuMemCreate");
}

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
  const CUmemAllocationProp properties = allocation_on(device_);
  const std::uint64_t size = round_up(bytes, granularity_of(properties));
  Allocation allocation;
  allocate(allocation, properties, size, bytes, what);

  int fd = -1;
  XD_CUDA_CHECK(driver().cuMemExportToShareableHandle(&fd, allocation.get(),
                                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  Made made;
  made.fd.reset(fd);
  const Description description{
      .bytes = size, .identity = new_identity(), .device = cuda::require_device(device_).uuid};
  auto segment = CudaSegmentTable::instance().map(description.identity, device_, [&] {
    return std::make_shared<CudaSegment>(device_, allocation, size);
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
  // A device that this process does not see may be used all the same.
  if (const int there = cuda::find_device(d.device); there >= 0) {
    cuda::require_peer_access(device_, there);
  }
  return CudaSegmentTable::instance().map(d.identity, device_, [&] {
    Allocation allocation;
    XD_CUDA_CHECK(driver().cuMemImportFromShareableHandle(
        allocation.receive(), cuda::as_pointer(static_cast<std::uint64_t>(fd.get())),
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    return std::make_shared<CudaSegment>(device_, allocation, d.bytes);
  });
}

}  // namespace xd
