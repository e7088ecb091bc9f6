/* Crossdock: status codes and error text. Every fallible function returns an xd_status; none
 * throws, exits or aborts. */
#ifndef CROSSDOCK_STATUS_H_
#define CROSSDOCK_STATUS_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define XD_API __attribute__((visibility("default")))
#else
#define XD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* A number once given keeps its meaning for ever; new codes are appended. "Fatal" errors finish the
 * communicator: every later operation and collective call on it returns the same error; local calls
 * (queries, memory, routing layouts, experts of rows, destroying) still work. Any error of an
 * operation is fatal in a group made with XD_EP_ON_ERROR_FATAL. After any other error nothing is
 * lost, started or leaked and the next call works. */
typedef enum xd_status {
  XD_SUCCESS = 0,
  /* An argument of this rank is wrong; the text says argument, expected and got. */
  XD_ERROR_INVALID_ARGUMENT = 1,
  /* Ranks disagree on operation, plan, shapes, dtypes or version, or a peer's call failed. */
  XD_ERROR_MISMATCH = 2,
  /* A rank would receive more rows than its capacity, under XD_EP_OVERFLOW_ERROR. */
  XD_ERROR_OVERFLOW = 3,
  /* A bounded wait ran out (fatal, except while a communicator is being created). */
  XD_ERROR_TIMEOUT = 4,
  /* A peer's process ended, or the peer has left (fatal, except in groups that mask ranks: see
   * low_latency.h). */
  XD_ERROR_PEER_LOST = 5,
  /* Some rank called xd_comm_abort, or was interrupted (fatal). */
  XD_ERROR_ABORTED = 6,
  /* Two threads, or on CUDA two streams, used one group at once (fatal); or a low-latency group
   * has as many operations between their halves as it may (not fatal). */
  XD_ERROR_BUSY = 7,
  /* Memory is exhausted; the text has the sizes (fatal if it kept the library from watching the
   * peers). */
  XD_ERROR_OUT_OF_MEMORY = 8,
  /* Not built in, or not possible on this machine; the text says which need is missing. */
  XD_ERROR_UNSUPPORTED = 9,
  /* An operating system call failed; the text has the call and the reason (fatal if it kept the
   * library from watching the peers). */
  XD_ERROR_SYSTEM = 10,
  /* A bug in the library: please report it with the text. */
  XD_ERROR_INTERNAL = 11
} xd_status;

/* "XD_ERROR_TIMEOUT" and so on; "XD_UNKNOWN_STATUS" for a number that this library does not know.
 * Static text. */
XD_API const char* xd_status_name(xd_status status);

/* Text of the calling thread's last failed call: function, argument, expected, got, rank. Empty if
 * none failed. Valid until this thread's next call into the library; a call that succeeds leaves it
 * as it is. Never NULL. */
XD_API const char* xd_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_STATUS_H_ */
