// A process that has reached a limit on its address space or its threads when it computes products:
// whatever the limit, every call returns a status, and the process goes on. Each limit has a
// process of its own, a fork of this one, which itself never enters the library.
#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "support/handles.h"

namespace xd::test {
namespace {

constexpr std::int64_t kSize = 256;  // so many rows and columns that all threads compute
constexpr rlim_t kMiB = rlim_t{1} << 20;

// A matrix of float32 that holds `value` everywhere.
struct Square {
  explicit Square(float value) : values(kSize * kSize, value) {}
  DLTensor dl() {
    return {.data = values.data(),
            .device = {kDLCPU, 0},
            .ndim = 2,
            .dtype = {kDLFloat, 32, 1},
            .shape = shape,
            .strides = nullptr,
            .byte_offset = 0};
  }
  bool is(float value) const {
    return std::ranges::all_of(values, [value](float v) { return v == value; });
  }
  std::vector<float> values;
  std::int64_t shape[2] = {kSize, kSize};
};

// How a child ends, if it ends by itself: the status of the call that failed, or one of these.
enum Ended : std::uint8_t { kFine = 0, kNoRoomInTest = 100, kWrong = 101, kNoUser = 102 };

// On any thread: its operands, too, may find no memory.
int multiply(xd_gemm_context* context, Square& d) try {
  Square one(1), two(2);
  const DLTensor a = one.dl(), b = two.dl(), out = d.dl();
  xd_gemm_args args = XD_GEMM_ARGS_INIT;
  args.a = &a;
  args.b = &b;
  args.d = &out;
  return xd_gemm_all_gather(context, &args, nullptr);
} catch (const std::bad_alloc&) {
  return kNoRoomInTest;
}

// Products of one rank on this thread and on another one, under a limit that `limit` sets.
int compute_under(const std::function<bool()>& limit) {
  xd_unique_id id;
  if (const xd_status status = xd_unique_id_create(nullptr, &id)) return status;
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.num_ranks = 1;
  config.unique_id = &id;
  xd_comm* comm = nullptr;
  if (const xd_status status = xd_comm_create(&config, &comm)) return status;
  if (!limit()) return kNoUser;
  xd_gemm_config bounds = XD_GEMM_CONFIG_INIT;
  bounds.max_tokens = bounds.max_k = bounds.max_n = kSize;
  bounds.dtype = {kDLFloat, 32, 1};
  xd_gemm_context* context = nullptr;
  if (const xd_status status = xd_gemm_context_create(comm, &bounds, &context)) return status;
  try {
    Square here(0), there(0);
    if (const int end = multiply(context, here)) return end;
    int elsewhere = kFine;
    std::thread([&] { elsewhere = multiply(context, there); }).join();
    if (elsewhere != kFine) return elsewhere;
    return here.is(2 * kSize) && there.is(2 * kSize) ? kFine : kWrong;
  } catch (const std::bad_alloc&) {
    return kNoRoomInTest;
  } catch (const std::system_error&) {  // no other thread
    return kNoRoomInTest;
  }
}

// How a process ends that computes under the limit.
int end_under(const std::function<bool()>& limit) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    ::_exit(compute_under(limit));
  }
  int ended = 0;
  EXPECT_EQ(::waitpid(child, &ended, 0), child);
  EXPECT_TRUE(WIFEXITED(ended)) << "signal " << WTERMSIG(ended);
  return WIFEXITED(ended) ? WEXITSTATUS(ended) : -1;
}

bool set(__rlimit_resource_t resource, rlim_t amount) {
  const rlimit limit{amount, amount};
  return ::setrlimit(resource, &limit) == 0;
}

rlim_t address_space() {
  std::ifstream file("/proc/self/statm");
  rlim_t pages = 0;
  file >> pages;
  return pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
}

// libgomp's exit has the code of a status: it is told from one by what a call can return.
void expect_statuses(const std::map<int, int>& ends, const std::vector<int>& allowed) {
  for (const auto& [code, count] : ends) {
    EXPECT_NE(std::ranges::find(allowed, code), allowed.end())
        << count << " processes ended with " << code << ", "
        << xd_status_name(static_cast<xd_status>(code));
  }
  EXPECT_TRUE(ends.contains(kFine)) << "the limits are all too low to test anything";
  EXPECT_GT(ends.size(), 1u) << "the limits are all too high to test anything";
}

TEST(ProductLimits, OfAddressSpaceEndInAStatus) {
  std::map<int, int> ends;
  for (rlim_t more = 0; more < 256 * kMiB; more += 2 * kMiB) {
    SCOPED_TRACE("room for " + std::to_string(more / kMiB) + " MiB");
    ++ends[end_under([more] { return set(RLIMIT_AS, address_space() + more); })];
  }
  expect_statuses(
      ends, {kFine, kNoRoomInTest, XD_ERROR_OUT_OF_MEMORY, XD_ERROR_SYSTEM, XD_ERROR_UNSUPPORTED});
}

TEST(ProductLimits, OfThreadsEndInAStatus) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root becomes a user without other processes";
  std::map<int, int> ends;
  const auto cores = static_cast<rlim_t>(std::thread::hardware_concurrency());
  const rlim_t enough = 2 * cores + 8, step = 1 + cores / 8;
  for (rlim_t threads = 2; threads < enough + step; threads += step) {
    SCOPED_TRACE("room for " + std::to_string(threads) + " threads");
    ++ends[end_under([threads] {
      const auto user = static_cast<uid_t>(30000 + ::getpid() % 30000);
      return set(RLIMIT_NPROC, threads) && ::setresuid(user, user, user) == 0;
    })];
  }
  expect_statuses(ends, {kFine, kNoRoomInTest, XD_ERROR_SYSTEM});
}

}  // namespace
}  // namespace xd::test
