// How many multiprocessors the groups of a process may use at once. The library cannot know which
// groups run at the same time, so this refuses nothing: XD_LOG=plan shows it.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace xd::ep::cuda {

class SmLedger {
 public:
  struct Sum {
    int groups = 0, sms = 0;
  };

  // That of this process.
  static SmLedger& instance();

  // What the device's groups may use together, afterwards.
  Sum add(int device, int sms);
  void remove(int device, int sms);
  // True once for each device.
  bool first_warning(int device);

 private:
  struct Entry {
    Sum sum;
    bool warned = false;
  };

  std::mutex mutex_;
  std::map<int, Entry> entries_;  // by device
};

// One line. `available`: multiprocessors of the device, less the reserve.
std::string explain(int device, const SmLedger::Sum& sum, int available);

// A group's entry in the process's ledger, while the group lives.
class SmShare {
 public:
  SmShare() = default;
  // Logs the sum; the first time that it is more than `available`, what that means.
  SmShare(int device, int sms, int available);
  ~SmShare() {
    if (sms_ > 0) SmLedger::instance().remove(device_, sms_);
  }
  SmShare(SmShare&& other) noexcept : device_(other.device_), sms_(std::exchange(other.sms_, 0)) {}
  SmShare& operator=(SmShare&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(sms_, other.sms_);
    return *this;
  }

 private:
  int device_ = 0, sms_ = 0;
};

}  // namespace xd::ep::cuda
