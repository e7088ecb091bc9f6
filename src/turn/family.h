// The type that a family of operations (expert parallelism is one) supplies for taking turns. It
// has:
//
//   Record          describes a rank's call: see turn/entry.h
//   Facts           numbers beside the text of a non-fatal error; may be empty
//   Status          the public struct that tells callers of such an error
//   kOperations     the operations' names
//   same_operation  constexpr (const Record&, const Record&): whether two ranks do the same, where
//                   status and operation are equal. Host and device ask
//   difference      (const Record& mine, const Record& theirs): how the second differs, in words,
//                   where same_operation() is false
//   no_error        (): a Status that tells of none; it has status, operation, epoch, rank, text
//   tell            (const Setback<Family>&, Status&): fills in what the family adds to a status
//   tell_caller     likewise, fills in what only the caller of a failed call gets
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace xd::turn {

// A family's operations, numbered from `first`, as error texts name them.
struct Operations {
  const char* prefix;  // prefix of their functions, "xd_ep_"
  const char* type;    // type of their numbers, "an xd_ep_operation"
  std::int32_t first;
  std::span<const char* const> names;

  constexpr bool contains(std::int32_t operation) const {
    return operation >= first && static_cast<std::size_t>(operation - first) < names.size();
  }
  constexpr const char* name(std::int32_t operation) const {
    return contains(operation) ? names[static_cast<std::size_t>(operation - first)] : "?";
  }
};

}  // namespace xd::turn
