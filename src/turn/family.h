// The type that a family of operations (expert parallelism is one) supplies for taking turns. It
// has:
//
//   Record          describes a rank's call: see turn/entry.h
//   Facts           numbers beside the text of a non-fatal error; may be empty
//   Status          the public struct that tells callers of such an error
//   kOperations     the operations' names (comm/operations.h)
//   same_operation  constexpr (const Record&, const Record&): whether two ranks do the same, where
//                   status and operation are equal. Host and device ask
//   difference      (const Record& mine, const Record& theirs): how the second differs, in words,
//                   where same_operation() is false
//   no_error        (): a Status that tells of none; it has status, operation, epoch, rank, text
//   tell            (const OperationError<Family>&, Status&): fills in what the family adds to a
//                   status
//   tell_caller     likewise, fills in what only the caller of a failed call gets
#pragma once

#include "comm/operations.h"
