/* Crossdock: expert parallelism, and products overlapped with transfers, between ranks, in one
 * include.
 *
 *   status.h       status codes, error text           read first
 *   version.h      version and feature queries
 *   comm.h         communicators, symmetric memory
 *   view.h         which ranks go on together, when others are lost
 *   ep.h           expert parallelism: dispatch tokens to experts, combine the results, and both
 *                  backward
 *   low_latency.h  expert parallelism for few tokens: serving, decode
 *   fault.h        whether an error has spoiled such an operation, as a word on the device
 *   quantise.h     forms in which rows of both travel: quantised, or sums of combine
 *   placement.h    which ranks hold which experts, with replicas of those that are chosen often
 *   gated.h        the gated activation between the two products of experts
 *   grouped.h      these products: of experts' rows, with a matrix for each expert
 *   moe.h          dispatch, experts and combine as one call, and its derivative
 *   gemm.h         products of matrices that are spread over the ranks: tensor and sequence
 *                  parallelism
 *   stats.h        what groups have done so far, for people who look
 *   tensor.h       helpers for callers: tensors in one line, names of element types
 *
 * Conventions that hold for all of them:
 *   - C11 and C++; the only foreign header is DLPack's (struct DLTensor, DLDevice).
 *   - Structs start with `struct_size` and have an XD_..._INIT initialiser: always start from it. A
 *     zero field means its default. Structs grow at their end only, so code compiled against an
 *     older header keeps working. A size that no version has had, as it is no multiple of the
 *     struct's alignment, is XD_ERROR_INVALID_ARGUMENT.
 *   - A NULL handle or output pointer is refused at once: that rank then takes no part in the call.
 *   - Handles are opaque. A handle may be used by one thread at a time unless its functions say
 *     otherwise.
 *   - "Collective" means: all ranks of the communicator call it, in the same order.
 *   - Pointers in argument structs are read during the call only; the caller keeps ownership of
 *     what they point to.
 */
#ifndef CROSSDOCK_CROSSDOCK_H_
#define CROSSDOCK_CROSSDOCK_H_

#include <crossdock/comm.h>
#include <crossdock/ep.h>
#include <crossdock/fault.h>
#include <crossdock/gated.h>
#include <crossdock/gemm.h>
#include <crossdock/grouped.h>
#include <crossdock/low_latency.h>
#include <crossdock/moe.h>
#include <crossdock/placement.h>
#include <crossdock/quantise.h>
#include <crossdock/stats.h>
#include <crossdock/status.h>
#include <crossdock/tensor.h>
#include <crossdock/version.h>
#include <crossdock/view.h>

#endif /* CROSSDOCK_CROSSDOCK_H_ */
