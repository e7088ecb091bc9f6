#include "faults/gate.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <stdexcept>
#include <thread>

namespace xd::test {
namespace {

// The facts about the present gate that the signal handler needs.
std::atomic<std::byte*> gate{nullptr};
std::atomic<std::size_t> gate_bytes{0};
std::atomic<bool> is_open{true}, has_thread{false};

// Of the accesses that are no business of the gate's.
constexpr std::array kSignals{SIGSEGV, SIGBUS};
std::array<struct sigaction, kSignals.size()> before{};

// Async-signal-safe. When it returns, the access is made again.
void hold(int, siginfo_t* info, void*) {
  const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
  std::byte* const begin = gate;
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  if (begin == nullptr || at < first || at >= first + gate_bytes) {
    // The access is made again, and met by whoever was there before.
    for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before[i], nullptr);
    return;
  }
  has_thread = true;
  for (int i = 0; i < 20000 && !is_open; ++i) {
    const timespec moment{0, 1'000'000};
    ::nanosleep(&moment, nullptr);
  }
  ::mprotect(begin, gate_bytes, PROT_READ | PROT_WRITE);
}

}  // namespace

Gate::Gate(std::size_t bytes) : bytes_(bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  bytes_ = (bytes + page - 1) / page * page;
  void* const memory =
      ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap failed");
  data_ = static_cast<std::byte*>(memory);
  gate_bytes = bytes_;
  gate = data_;
  struct sigaction action {};
  action.sa_sigaction = hold;
  action.sa_flags = SA_SIGINFO;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &action, &before[i]);
  }
}

Gate::~Gate() {
  open();
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before[i], nullptr);
  gate = nullptr;
  ::munmap(data_, bytes_);
}

void Gate::close() {
  has_thread = false;
  is_open = false;
  if (::mprotect(data_, bytes_, PROT_NONE) != 0) throw std::runtime_error("mprotect failed");
}

void Gate::open() {
  ::mprotect(data_, bytes_, PROT_READ | PROT_WRITE);
  is_open = true;
}

bool Gate::wait_for_thread(std::chrono::milliseconds limit) const {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!has_thread) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace xd::test
