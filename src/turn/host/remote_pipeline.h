// The needs of a pipeline on the host that has ranks on other machines.
//
// A remote rank's memory has no address here. Each remote rank sends this one its part of an
// operation, with its entry, as a message into memory of this rank; whoever takes the message in
// stores the entry where a near rank would have stored it (HostPipeline::bring_entry). The memory
// of a message is free again when its reader has left the operation.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/comm.h"

namespace xd::turn {

class RemotePipeline {
 public:
  virtual const std::vector<int>& ranks() const = 0;  // all remote ranks
  // Brings their messages, and takes this rank's to them.
  virtual Progress& progress() = 0;
  // The credit for operation `epoch`: the memory that its messages take in the rank is free.
  virtual bool has_place(int rank, std::uint64_t epoch) const = 0;
  // This rank has taken the operation, and reads no message of it any more. Waits for nobody.
  virtual void leave(std::uint64_t epoch) = 0;
  // Whether the rank's message of the operation arrives also if this rank does nothing more. A rank
  // that waits for its message helps it to arrive.
  virtual bool has_sent(int rank, std::uint64_t epoch) const = 0;
  // Whether the rank's message with its entry is here; it stays until leave().
  virtual bool holds(int rank, std::uint64_t epoch) const = 0;
  // Tells a rank that is not of the company that this one goes on without it, as soon as that can
  // be done.
  virtual void tell_outsider(int rank) = 0;
  // Whether this rank leaves that one out from this very operation on, and the message that tells
  // it of that may not arrive if this rank does nothing more.
  virtual bool is_telling(int rank, std::uint64_t epoch) const = 0;
  // Whether the rank has told that it leaves this one out of the operation.
  virtual bool leaves_out(int rank, std::uint64_t epoch) const = 0;
  // The pipeline counts on from `epoch`: messages of operations up to it are of no use any more.
  virtual void restart(std::uint64_t epoch) = 0;

 protected:
  ~RemotePipeline() = default;
};

}  // namespace xd::turn
