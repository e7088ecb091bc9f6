// The groups of this rank that a process which takes a lost rank's place can have a part in.
//
// Such a process takes over the memory of the rank before it, so all that the others have of their
// groups stays as it is.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/wire.h"
#include "comm/hosts.h"
#include "memory/segment.h"

namespace xd {

// A group as a new process takes it over.
struct AdoptedGroup {
  int number = -1;
  Bytes terms;                                   // sizes on which its ranks agree
  std::vector<std::shared_ptr<Segment>> memory;  // by rank
};

class Catalogue {
 public:
  struct Group {
    std::string call;  // the function that has made it
    Bytes terms;
    std::vector<std::shared_ptr<Segment>> memory;  // by rank, with descriptors
    std::function<void(NearRank)> mask;            // leaves a rank out; any thread
  };

  // A group's object lists it when it is made, and calls unlist() before it ends, from which on
  // nothing of it is called.
  void list(int number, Group group);
  void unlist(int number);

  // The group with the lowest number above `number` that `call` has made, without its memory.
  std::optional<AdoptedGroup> next(int number, const std::string& call) const;
  // Null where there is no such group or memory.
  std::shared_ptr<Segment> memory(int number, int rank) const;
  // Masks a rank in all groups.
  void mask(NearRank rank) const;

 private:
  mutable std::mutex mutex_;
  std::map<int, Group> groups_;  // by number
};

}  // namespace xd
