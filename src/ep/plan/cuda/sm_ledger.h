// Counts the multiprocessors that the groups of a process may use at once. The library cannot know
// which groups run at the same time, so the ledger refuses nothing; XD_LOG=plan shows it.
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

  // The ledger of this process.
  static SmLedger& instance();

  // Adds a group, and returns the sum over the device's groups.
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

// The sum in words, as one line. `available`: multiprocessors of the device, less the reserve.
std::string explain(int device, const SmLedger::Sum& sum, int available);

// A group's entry in the process's ledger, for as long as the group lives.
class SmShare {
 public:
  SmShare() = default;
  // Logs the sum, and the first time that it exceeds `available`, a remark on the consequences.
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
