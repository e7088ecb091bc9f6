// The words of a new process and the ranks of a communicator at doors (comm/join/door.h), behind
// the handshake: a question and its answer, one packet each. An answer may have a descriptor, and
// bytes behind the struct.
#pragma once

#include <crossdock/status.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "comm/views/view.h"

namespace xd {

enum class Ask : std::uint32_t {
  enter = 1,    // -> the place that it may try to take, and the number of ranks
  control = 2,  // `rank`'s control segment -> a descriptor, and its description
  claim = 3,    // the place `rank` -> it is held for the process; ranks that are here, or ended
  heap = 4,     // segment `number` of rank's symmetric memory -> as of control, or nothing
  group = 5,    // the next group behind `number`; the call behind the struct -> its terms
  group_memory = 6,  // of rank and group `number` -> as of control
  ready = 7,         // the process works in the place that it has claimed
  withdraw = 8,      // it uses nothing any more, also behind `ready`; no answer
};

struct Question {
  Ask ask;
  std::int32_t rank = -1;  // enter: the place that is wanted, -1 = any
  // enter: num_ranks, 0 = as the communicator has it; claim: the milliseconds for which the process
  // goes on trying, -1 = the communicator's timeout
  std::int32_t number = -1;
  std::int32_t unused = 0;
};

// `status` is the reason of a refusal, whose words stand behind the struct.
struct Reply {
  std::int32_t status = XD_SUCCESS;
  std::int32_t rank = -1;
  std::int32_t number = 0;  // enter: of ranks; claim: of segments of symmetric memory; group
  std::int32_t unused = 0;
  Members::Words here{};   // claim: ranks that take part
  Members::Words ended{};  // claim: ranks whose place no process has or claims
};

static_assert(std::has_unique_object_representations_v<Question> &&
              std::has_unique_object_representations_v<Reply>);
static_assert(sizeof(Question) != sizeof(Reply));

}  // namespace xd
