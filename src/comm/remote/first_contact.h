// How ranks of a communicator meet their neighbours over an engine of src/net before they rely on
// it.
#pragma once

#include <string>
#include <utility>

#include "comm/comm.h"

namespace xd {

// The greetings with which an engine's connections are made: of two neighbours the lower rank puts
// a tag without bytes, and the other one answers. Control messages reach neighbours already; data
// need not. Work of a collective step.
class FirstContact {
 public:
  explicit FirstContact(Comm& comm);

  // Waits for greetings. Where the watch loses a rank meanwhile (Waited::lost), this rank goes on
  // to the collective step, which fails with its name.
  template <class AllHere>
  Waited wait(Progress& progress, AllHere&& all_here) const {
    return comm_.wait(comm_.rank(), site(&progress), std::forward<AllHere>(all_here));
  }
  // The engine has failed towards a rank. True = that rank is lost.
  bool is_lost(int rank) const { return comm_.is_lost_by_verdict(rank, site(nullptr)); }

  // `place`: where the engine reaches the rank.
  [[noreturn]] void fail_data(xd_status status, int rank, const std::string& place,
                              const std::string& why) const;
  [[noreturn]] void fail_silent(int rank, const std::string& place) const;

 private:
  HostWait site(Progress* progress) const;

  Comm& comm_;
  const int ms_;
};

}  // namespace xd
