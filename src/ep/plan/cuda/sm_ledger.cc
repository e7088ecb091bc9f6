#include "ep/plan/cuda/sm_ledger.h"

#include "base/error.h"
#include "base/log.h"

namespace xd::ep::cuda {

// The ledger is never destroyed, since other static destructors may drop groups.
SmLedger& SmLedger::instance() {
  static SmLedger& ledger = *new SmLedger;
  return ledger;
}

SmLedger::Sum SmLedger::add(int device, int sms) {
  const std::lock_guard lock(mutex_);
  Sum& sum = entries_[device].sum;
  ++sum.groups;
  sum.sms += sms;
  return sum;
}

void SmLedger::remove(int device, int sms) {
  const std::lock_guard lock(mutex_);
  Sum& sum = entries_[device].sum;
  --sum.groups;
  sum.sms -= sms;
}

bool SmLedger::first_warning(int device) {
  const std::lock_guard lock(mutex_);
  return !std::exchange(entries_[device].warned, true);
}

std::string explain(int device, const SmLedger::Sum& sum, int available) {
  return concat("CUDA device ", device, ": ", sum.groups, sum.groups == 1 ? " group" : " groups",
                " of this process may use ", sum.sms, " of ", available,
                " multiprocessors at once");
}

SmShare::SmShare(int device, int sms, int available) : device_(device), sms_(sms) {
  const SmLedger::Sum sum = SmLedger::instance().add(device, sms);
  if (!log_enabled("plan")) return;
  log_topic("plan", explain(device, sum, available));
  if (sum.sms <= available || !SmLedger::instance().first_warning(device)) return;
  log_topic("plan",
            "that is too many for all of them: operations of groups that run at the same time, on "
            "different streams, may wait for one another until the timeout. Give such groups "
            "config.num_sms of a smaller sum; groups whose operations stand in one order on one "
            "stream do not add up");
}

}  // namespace xd::ep::cuda
