// Measures what a rank that joins or dies costs the others through memory that processes share:
//   exporter   whether memory of a killed process stays whole while it is mapped, and is free
//              behind the last unmapping
//   mapping    mapping a peer's memory beside kernels: how long the calls take, and what launches
//              and a kernel that runs notice of them
//   stores     whether stores of a killed process still arrive when its pidfd says that it has
//              ended
// The other process is on the second device where there is one, and forked before CUDA is in use.
//   crossdock-bench-peer-memory [ROUNDS]
#include <cuda_runtime_api.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/pidfd.h"
#include "cuda/driver.h"
#include "cuda/error.h"
#include "cuda/virtual_memory.h"

namespace {

using xd::cuda::Allocation;
using xd::cuda::Mapping;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMiB = std::size_t{1} << 20;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// ---- Kernels ----

// Stores 1, 2, 3, .. into a word of a peer, without an end.
__global__ void keep_storing(volatile std::uint64_t* word) {
  for (std::uint64_t n = 1;; ++n) *word = n;
}

__global__ void fill(std::uint32_t* words, std::size_t count, std::uint32_t seed) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x)
    words[i] = seed + static_cast<std::uint32_t>(i);
}

__global__ void count_wrong(const std::uint32_t* words, std::size_t count, std::uint32_t seed,
                            unsigned long long* wrong) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x)
    if (words[i] != seed + static_cast<std::uint32_t>(i)) atomicAdd(wrong, 1ull);
}

__global__ void nothing() {}

// The longest time between two looks at the clock, in ns, until somebody sets `stop`.
__global__ void watch_clock(const volatile int* stop, volatile std::uint64_t* longest) {
  std::uint64_t before, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(before));
  while (*stop == 0) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - before > *longest) *longest = now - before;
    before = now;
  }
}

// ---- The other process ----

// A message of one byte, and a descriptor beside it.
struct Parcel {
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};

  Parcel() {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
  }
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;
};

void send_descriptor(int socket, int fd) {
  Parcel parcel;
  cmsghdr* const control = CMSG_FIRSTHDR(&parcel.message);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(control), &fd, sizeof fd);
  if (::sendmsg(socket, &parcel.message, 0) != 1) throw std::runtime_error("sendmsg failed");
}

xd::UniqueFd receive_descriptor(int socket, int timeout_ms = 30'000) {
  pollfd item{socket, POLLIN, 0};
  if (::poll(&item, 1, timeout_ms) != 1) throw std::runtime_error("the other process says nothing");
  Parcel parcel;
  const cmsghdr* control = nullptr;
  if (::recvmsg(socket, &parcel.message, 0) == 1) control = CMSG_FIRSTHDR(&parcel.message);
  if (control == nullptr) throw std::runtime_error("the other process has ended");
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(control), sizeof fd);
  return xd::UniqueFd(fd);
}

// Memory of this or another process that `device` may use.
class Shared {
 public:
  Shared(int device, Allocation allocation, std::size_t bytes)
      : allocation_(std::move(allocation)), mapping_(device, allocation_, bytes) {
    CUmemAccessDesc access{};
    access.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    XD_CUDA_CHECK(xd::cuda::driver().cuMemSetAccess(reinterpret_cast<CUdeviceptr>(mapping_.base()),
                                                    bytes, &access, 1));
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(mapping_.base());
  }
  const Allocation& allocation() const { return allocation_; }

 private:
  Allocation allocation_;
  Mapping mapping_;
};

// A process that can be killed; it ends with this object at the latest.
class Child {
 public:
  template <class Body>
  explicit Child(Body body) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
      throw std::runtime_error("socketpair failed");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      try {
        body(ends[1]);
        for (;;) ::pause();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "the other process: %s\n", error.what());
      }
      ::_exit(1);
    }
    ::close(ends[1]);
    socket_ = xd::UniqueFd(ends[0]);
    pidfd_ = xd::open_pidfd(pid_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() { kill(); }

  int socket() const { return socket_.get(); }
  // Returns the microseconds until its end was noticed.
  double kill() {
    if (pid_ == 0) return 0;
    const auto start = Clock::now();
    ::kill(pid_, SIGKILL);
    while (!xd::has_process_ended(pidfd_) && us_since(start) < 30e6) {
    }
    const double took = us_since(start);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
    return took;
  }

 private:
  pid_t pid_ = 0;
  xd::UniqueFd socket_, pidfd_;
};

int devices() {
  int count = 0;
  XD_CUDA_CHECK(cudaGetDeviceCount(&count));
  return count;
}

// In the other process: its memory, and where it is.
Shared exported(std::size_t bytes) {
  const int device = devices() > 1 ? 1 : 0;
  XD_CUDA_CHECK(cudaSetDevice(device));
  XD_CUDA_CHECK(cudaFree(nullptr));
  return {device, Allocation::create(device, bytes, "the benchmark"), bytes};
}

// ---- The three questions ----

struct Beside {
  std::vector<double> launches;  // microseconds of a launch and its end
  std::uint64_t longest_ns;      // the longest time in which a kernel did not run
};

// Watches launches and a kernel of this process while `work` runs.
template <class Work>
Beside beside(Work work) {
  void* pinned = nullptr;
  XD_CUDA_CHECK(cudaHostAlloc(&pinned, 64, cudaHostAllocMapped));
  std::memset(pinned, 0, 64);
  auto* const stop = static_cast<volatile int*>(pinned);
  auto* const longest = static_cast<volatile std::uint64_t*>(pinned) + 1;
  cudaStream_t watching, launching;
  XD_CUDA_CHECK(cudaStreamCreateWithFlags(&watching, cudaStreamNonBlocking));
  XD_CUDA_CHECK(cudaStreamCreateWithFlags(&launching, cudaStreamNonBlocking));
  watch_clock<<<1, 1, 0, watching>>>(stop, longest);
  Beside seen{};
  std::atomic<bool> over{false};
  std::thread launches([&] {
    while (!over) {
      const auto start = Clock::now();
      nothing<<<1, 1, 0, launching>>>();
      cudaStreamSynchronize(launching);
      seen.launches.push_back(us_since(start));
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  work();
  over = true;
  launches.join();
  *stop = 1;
  XD_CUDA_CHECK(cudaStreamSynchronize(watching));
  seen.longest_ns = *longest;
  XD_CUDA_CHECK(cudaStreamDestroy(watching));
  XD_CUDA_CHECK(cudaStreamDestroy(launching));
  XD_CUDA_CHECK(cudaFreeHost(pinned));
  std::sort(seen.launches.begin(), seen.launches.end());
  return seen;
}

void print(const char* name, const Beside& seen) {
  const std::vector<double>& t = seen.launches;
  std::printf(
      "  %-24s launch p50 %6.1f  p99 %7.1f  longest %8.1f us; kernel stood still %7.1f us\n", name,
      t[t.size() / 2], t[t.size() * 99 / 100], t.back(), seen.longest_ns / 1e3);
}

void measure_mapping(std::size_t bytes, int rounds) {
  Child child([bytes](int socket) {
    const Shared memory = exported(bytes);
    send_descriptor(socket, memory.allocation().share().get());
    for (;;) ::pause();
  });
  const xd::UniqueFd fd = receive_descriptor(child.socket());
  XD_CUDA_CHECK(cudaSetDevice(0));
  std::vector<double> map, unmap;
  const Beside alone = beside([] { std::this_thread::sleep_for(std::chrono::milliseconds(200)); });
  const Beside seen = beside([&] {
    for (int round = 0; round < rounds; ++round) {
      auto start = Clock::now();
      {
        const Shared peer(0, Allocation::import(fd), bytes);
        map.push_back(us_since(start));
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        start = Clock::now();
      }
      unmap.push_back(us_since(start));
    }
  });
  std::sort(map.begin(), map.end());
  std::sort(unmap.begin(), unmap.end());
  std::printf(" %zu MiB: import, map and access %.0f us (longest %.0f), unmap %.0f (%.0f)\n",
              bytes / kMiB, map[map.size() / 2], map.back(), unmap[unmap.size() / 2], unmap.back());
  print("alone", alone);
  print("beside mapping", seen);
}

std::size_t free_bytes(int device) {
  std::size_t free = 0, total = 0;
  XD_CUDA_CHECK(cudaSetDevice(device));
  XD_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return free;
}

unsigned long long wrong_words(const Shared& memory, std::size_t bytes) {
  unsigned long long* wrong = nullptr;
  XD_CUDA_CHECK(cudaMallocManaged(&wrong, sizeof *wrong));
  *wrong = 0;
  count_wrong<<<64, 256>>>(memory.as<std::uint32_t>(), bytes / 4, 7, wrong);
  XD_CUDA_CHECK(cudaDeviceSynchronize());
  const unsigned long long result = *wrong;
  XD_CUDA_CHECK(cudaFree(wrong));
  return result;
}

void measure_exporter() {
  const std::size_t bytes = 1024 * kMiB;
  std::printf("exporter\n");
  Child child([bytes](int socket) {
    const Shared memory = exported(bytes);
    fill<<<64, 256>>>(memory.as<std::uint32_t>(), bytes / 4, 7);
    XD_CUDA_CHECK(cudaDeviceSynchronize());
    send_descriptor(socket, memory.allocation().share().get());
    for (;;) ::pause();
  });
  xd::UniqueFd fd = receive_descriptor(child.socket());
  const int where = devices() > 1 ? 1 : 0;
  XD_CUDA_CHECK(cudaSetDevice(0));
  std::size_t killed = 0;
  {
    const Shared peer(0, Allocation::import(fd), bytes);
    fd.reset();
    const unsigned long long before = wrong_words(peer, bytes);
    const double noticed = child.kill();
    std::this_thread::sleep_for(std::chrono::seconds(1));
    killed = free_bytes(where);
    XD_CUDA_CHECK(cudaSetDevice(0));
    std::printf(" wrong words of %zu: %llu before, %llu behind its end (noticed after %.0f us)\n",
                bytes / 4, before, wrong_words(peer, bytes), noticed);
  }
  const std::size_t unmapped = free_bytes(where);
  std::printf(" free behind the last unmapping: %.0f MiB more, of %zu\n",
              (static_cast<double>(unmapped) - static_cast<double>(killed)) / kMiB, bytes / kMiB);
}

void measure_stores(int rounds) {
  std::printf("stores\n");
  std::vector<std::unique_ptr<Child>> children;  // all of them before CUDA is in use
  for (int round = 0; round < rounds; ++round)
    children.push_back(std::make_unique<Child>([](int socket) {
      const xd::UniqueFd fd = receive_descriptor(socket, 600'000);
      const int device = devices() > 1 ? 1 : 0;
      XD_CUDA_CHECK(cudaSetDevice(device));
      XD_CUDA_CHECK(cudaFree(nullptr));
      const Shared peer(device, Allocation::import(fd), 2 * kMiB);
      keep_storing<<<1, 1>>>(peer.as<std::uint64_t>());
      for (;;) ::pause();
    }));
  XD_CUDA_CHECK(cudaSetDevice(0));
  std::vector<double> noticed;
  int late = 0;
  for (const auto& child : children) {
    const Shared own(0, Allocation::create(0, 2 * kMiB, "the benchmark"), 2 * kMiB);
    XD_CUDA_CHECK(cudaMemset(own.as<char>(), 0, 8));
    send_descriptor(child->socket(), own.allocation().share().get());
    const auto word = [&] {
      std::uint64_t value = 0;
      XD_CUDA_CHECK(cudaMemcpy(&value, own.as<char>(), sizeof value, cudaMemcpyDeviceToHost));
      return value;
    };
    const auto start = Clock::now();
    while (word() < 1000 && us_since(start) < 30e6) {
    }
    noticed.push_back(child->kill());
    const std::uint64_t at_its_end = word();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (at_its_end < 1000) throw std::runtime_error("the other process has stored nothing");
    late += word() != at_its_end ? 1 : 0;
  }
  std::sort(noticed.begin(), noticed.end());
  std::printf(" %d kills: %d with stores behind the end; noticed after %.0f us (longest %.0f)\n",
              rounds, late, noticed[noticed.size() / 2], noticed.back());
}

// In a process of its own, as the measurement before has used CUDA.
template <class Work>
bool apart(Work work) {
  std::fflush(stdout);
  const pid_t pid = ::fork();
  if (pid == 0) {
    int code = 0;
    try {
      work();
    } catch (const std::exception& error) {
      std::printf(" %s\n", error.what());
      code = 1;
    }
    std::fflush(stdout);
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status == 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  if (rounds < 1) {
    std::fprintf(stderr, "crossdock-bench-peer-memory: ROUNDS: expected 1 or more, got '%s'\n",
                 argv[1]);
    return 2;
  }
  // A kernel that is loaded at its first launch would wait for one that runs.
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  bool good = apart([&] { measure_exporter(); });
  std::printf("mapping\n");
  for (const std::size_t bytes : {2 * kMiB, 64 * kMiB, 1024 * kMiB})
    good = apart([&] { measure_mapping(bytes, rounds); }) && good;
  good = apart([&] { measure_stores(rounds); }) && good;
  return good ? 0 : 1;
}
