/* Crossdock: what groups and contexts have done so far, for people who look.
 *
 * Every group of ep.h and low_latency.h, and every context of gemm.h, counts its calls. Counting
 * costs two looks at the clock per call. The numbers lie in memory that other processes of the same
 * user may read (see xd_monitor), so a job can be looked at while it runs, also when it hangs:
 * `crossdock top` does. XD_LOG=stats prints them when a group or context goes.
 *
 * Numbers grow from when the group was made. Each is whole, but they are read one after another
 * while operations go on. On CUDA a call is counted when it has been enqueued; replays of graphs
 * are not counted.
 */
#ifndef CROSSDOCK_STATS_H_
#define CROSSDOCK_STATS_H_

#include <crossdock/ep.h>
#include <crossdock/gemm.h>
#include <crossdock/low_latency.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The most operations of a kind of groups. */
#define XD_STATS_OPERATIONS 8
/* The longest name and detail of xd_stats_source, with the zero behind it. */
#define XD_STATS_TEXT_BYTES 64

typedef struct xd_stats {
  size_t struct_size;
  /* Calls by operation, also those that returned an error; a half is a call. Of groups by
   * xd_ep_operation, or by xd_ll_operation from XD_LL_DISPATCH on; of contexts by
   * xd_gemm_operation, from XD_GEMM_ALL_GATHER on. */
  uint64_t calls[XD_STATS_OPERATIONS];
  /* Nanoseconds that these calls have lasted: on the CPU the operations, on CUDA their launches. */
  uint64_t call_ns[XD_STATS_OPERATIONS];
  /* Calls that have returned an error. */
  uint64_t failed_calls;
  /* Groups: tokens [T,H] of this rank that dispatch and combine_bwd have sent, and combine and
   * dispatch_bwd made, those in parts with the first; their bytes, without scales and weights. */
  uint64_t tokens;
  uint64_t token_bytes;
  /* Groups on the CPU: rows of this rank's receive tensors in these operations, without padding,
   * and their bytes. */
  uint64_t rows;
  uint64_t row_bytes;
  /* Groups: as in their status, but never cleared. On CUDA as of operations that have ended. */
  uint64_t bad_ids;
  uint64_t dropped_rows;
  /* 1 = rows and row_bytes are counted here; 0 = they are not, and stay 0. */
  int32_t counts_rows;
  /* 1 = waits are measured here; 0 = they are not, and stay 0. On CUDA kernels wait, and
   * low-latency calls alone measure it, where they are given wait_ns. */
  int32_t measures_waits;
  /* Groups with ranks on several machines: puts that this rank has made into memory of
   * other machines, and their bytes, with all that travels beside rows but what the network adds.
   * A put without bytes says that a chunk was read. */
  uint64_t net_puts;
  uint64_t net_bytes;
  /* Groups of ep.h: tensors of rows [R,H] that calls were given outside symmetric memory, and that
   * have gone through staging memory of the group. Each costs a pass over its rows. */
  uint64_t staged_tensors;
} xd_stats;
/* clang-format off */
#define XD_STATS_INIT \
  {sizeof(xd_stats), {0, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 0}, 0, 0, 0, 0, 0, 0, 0, 0, \
   0, 0, 0, 0}
/* clang-format on */

/* Reads the numbers of a group. wait_ns: out [W] in host memory, or NULL: for each rank, the
 * nanoseconds from when this rank had begun to wait for its peers' entries into operations until
 * that rank had entered; 0 for this rank, and for an operation that a rank had entered before. So a
 * rank that is always late stands out. (A low-latency call that is given wait_ns itself measures
 * from the beginning of its receive half, and the same number is added here.) Local; never blocks;
 * any thread; also after fatal errors. */
XD_API xd_status xd_ep_group_stats(xd_ep_group* group, xd_stats* stats, int64_t* wait_ns);
XD_API xd_status xd_ll_group_stats(xd_ll_group* group, xd_stats* stats, int64_t* wait_ns);

/* The same of a context. */
XD_API xd_status xd_gemm_context_stats(xd_gemm_context* context, xd_stats* stats, int64_t* wait_ns);

/* Names a group, or a context, for people who look: in `crossdock top`, in XD_LOG=stats, in traces
 * (XD_TRACE) and in the ranges that profilers show. Local, any thread; a name longer than
 * XD_STATS_TEXT_BYTES - 1 bytes is cut. */
XD_API xd_status xd_ep_group_set_name(xd_ep_group* group, const char* name);
XD_API xd_status xd_ll_group_set_name(xd_ll_group* group, const char* name);
XD_API xd_status xd_gemm_context_set_name(xd_gemm_context* context, const char* name);

/* ---- Looking at other processes -------------------------------------------------------------- */
/* A monitor reads the numbers of all groups and contexts of one process of this machine, its own or
 * another one of the same user, which does not notice. A process must have been made by a library
 * that lays out its numbers alike. A process has room for 512 groups and contexts at once; those
 * beyond are not seen, nor those for which there was no memory or descriptor. */

typedef struct xd_monitor xd_monitor;

/* Where numbers come from. */
typedef struct xd_stats_source {
  size_t struct_size;
  /* 1 = a group or context, which `stats` is about; 0 = the place is free. */
  int32_t in_use;
  int32_t rank;
  int32_t num_ranks;
  /* The operation that calls[0] counts, which tells its kind: XD_EP_PREPARE for a group of ep.h,
   * XD_LL_DISPATCH for one of low_latency.h, XD_GEMM_ALL_GATHER for a context of gemm.h. */
  int32_t first_operation;
  /* Its number in its communicator. */
  int32_t number;
  /* The communicator's device: kDLCPU or kDLCUDA. */
  int32_t device_type;
  /* The operation whose call has begun and not returned: an xd_ep_operation, xd_ll_operation or
   * xd_gemm_operation; -1 = none. */
  int32_t operation;
  /* The rank that it waits for, where waits are measured; -1 = none. */
  int32_t waits_for;
  /* How long it has lasted, in nanoseconds. */
  uint64_t operation_ns;
  /* The beginning of the communicator's name, the name of the group, and what it is. */
  char comm[XD_STATS_TEXT_BYTES];
  char name[XD_STATS_TEXT_BYTES];
  char detail[XD_STATS_TEXT_BYTES];
} xd_stats_source;
/* clang-format off */
#define XD_STATS_SOURCE_INIT \
  {sizeof(xd_stats_source), 0, 0, 0, 0, 0, 0, -1, -1, 0, {0}, {0}, {0}}
/* clang-format on */

/* Begins to look at a process. INVALID_ARGUMENT where it has no groups or is none of this user's;
 * UNSUPPORTED where its library lays out its numbers otherwise; SYSTEM. */
XD_API xd_status xd_monitor_open(int32_t pid, xd_monitor** monitor);

/* NULL is allowed. */
XD_API xd_status xd_monitor_close(xd_monitor* monitor);

/* The number of places for groups and contexts, which does not change. */
XD_API xd_status xd_monitor_places(xd_monitor* monitor, int32_t* places);

/* Reads one place. wait_ns: out, as above, for as many ranks as `max_ranks`; may be NULL with 0. Of
 * a process that has ended it tells what was last. */
XD_API xd_status xd_monitor_read(xd_monitor* monitor, int32_t place, xd_stats_source* source,
                                 xd_stats* stats, int64_t* wait_ns, int32_t max_ranks);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_STATS_H_ */
