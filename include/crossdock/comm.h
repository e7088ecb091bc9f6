/* Crossdock: communicators and symmetric memory.
 *
 * A communicator is one rank's membership in a set of ranks. Ranks may be threads of one process,
 * processes of one host or of several, or a mixture. One thread may even hold several ranks, as
 * long as each collective call of each rank runs on its own thread. A process may have any number
 * of communicators.
 */
#ifndef CROSSDOCK_COMM_H_
#define CROSSDOCK_COMM_H_

#include <crossdock/status.h>
#include <dlpack/dlpack.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xd_comm xd_comm;

/* A CUDA stream (cudaStream_t, CUstream) of the communicator's device. The CPU executor ignores the
 * stream and has finished when a call returns: pass NULL. */
typedef struct CUstream_st* xd_stream;

/* ---- How ranks meet -------------------------------------------------------------------------- */

/* Meeting point of one communicator: address, port and a random secret. It is plain bytes: copy it
 * to the other ranks by any means that strangers cannot read. It is good for one communicator. */
#define XD_UNIQUE_ID_BYTES 128
typedef struct xd_unique_id {
  unsigned char bytes[XD_UNIQUE_ID_BYTES];
} xd_unique_id;

typedef struct xd_unique_id_config {
  size_t struct_size;
  /* Numeric address or host name to listen on, and on no other; a wildcard, multicast or broadcast
   * address is refused. NULL = "127.0.0.1". */
  const char* address;
  /* TCP port; 0 = any free one. */
  int32_t port;
  /* How long the meeting point waits for all ranks. 0 = XD_TIMEOUT_MS, else 600000. */
  int32_t timeout_ms;
} xd_unique_id_config;
#define XD_UNIQUE_ID_CONFIG_INIT \
  { sizeof(xd_unique_id_config), NULL, 0, 0 }

/* Opens a meeting point in this process and describes it in *id. The caller need not be a rank. A
 * background thread serves the meeting and ends with it, or after timeout_ms. `config` may be NULL.
 * Does not block. Strangers may connect in any number: they do not keep ranks out.
 * Errors: INVALID_ARGUMENT; SYSTEM (the address is not this host's, the port is taken). */
XD_API xd_status xd_unique_id_create(const xd_unique_id_config* config, xd_unique_id* id);

/* Gathers `bytes` bytes from every rank: recv[r * bytes, (r + 1) * bytes) = what rank r sent.
 * Blocking; returns 0 on success. Called a small, fixed number of times (the same on all ranks)
 * with equal `bytes`, during xd_comm_create only. The caller bounds its waiting. The bytes are
 * secret: other users must not be able to read them. */
typedef int (*xd_all_gather_fn)(void* context, const void* send, void* recv, size_t bytes);

typedef enum xd_bootstrap {
  /* The ranks meet at `unique_id`. */
  XD_BOOTSTRAP_UNIQUE_ID = 0,
  /* The ranks meet by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK, as torchrun sets
   * them. */
  XD_BOOTSTRAP_ENVIRONMENT = 1,
  /* The ranks meet through `all_gather`: MPI, or a framework's process group. */
  XD_BOOTSTRAP_ALL_GATHER = 2,
  /* The ranks meet through `nccl_comm`. */
  XD_BOOTSTRAP_NCCL = 3,
  /* The others work already, and this rank takes the place of one whose process has ended:
   * `unique_id` is an invitation (xd_comm_invite). */
  XD_BOOTSTRAP_JOIN = 4
} xd_bootstrap;

/* The most ranks of a communicator. */
#define XD_MAX_RANKS 1024

/* How the others take the end of a rank: its process ends, its connections break, or it leaves by
 * xd_comm_destroy. */
typedef enum xd_comm_peer_loss {
  /* A process that ends finishes the communicator: every call says PEER_LOST. A rank that leaves
   * does so when a call needs it. */
  XD_COMM_PEER_LOSS_FATAL = 0,
  /* A rank that is lost is only remembered (see xd_comm_lost), so that the others can go on where
   * they do not need it. Collective calls of the communicator and of its memory, and
   * xd_ep_group_create, need all ranks: they return PEER_LOST naming it, at once, and finish
   * nothing. An operation that needs all ranks cannot end without it: there PEER_LOST finishes the
   * communicator of the rank that meets it, but for groups with XD_EP_PEER_LOSS_RESUME. */
  XD_COMM_PEER_LOSS_MASK = 1
} xd_comm_peer_loss;

typedef struct xd_comm_config {
  size_t struct_size;
  xd_bootstrap bootstrap;
  /* 0 <= rank < num_ranks <= XD_MAX_RANKS. With num_ranks = 0 ENVIRONMENT takes both from the
   * environment, and NCCL from its communicator. JOIN: rank = the place that is taken, -1 = the
   * lowest that is free; num_ranks = 0 or that of the communicator. */
  int32_t rank;
  int32_t num_ranks;
  /* UNIQUE_ID and JOIN only. */
  const xd_unique_id* unique_id;
  /* ALL_GATHER only: the function, and the context that it gets. */
  xd_all_gather_fn all_gather;
  void* all_gather_context;
  /* The device this rank computes on: {kDLCPU, 0} (any device_id means the same), {kDLCUDA, n}, or
   * {kDLCUDA, -1} for that of `nccl_comm` (NCCL) or of LOCAL_RANK (all others). */
  DLDevice device;
  /* Size of this rank's symmetric memory, rounded up to (huge) pages. It may differ per rank;
   * 0 = none yet. JOIN: 0, as it takes over the memory that is there. */
  size_t heap_bytes;
  /* Longest wait for a peer, here and in every later call. 0 = XD_TIMEOUT_MS, else 600000. */
  int32_t timeout_ms;
  /* Shown in logs and behind error texts; tells apart communicators that meet through the same
   * environment at the same time. Equal on all ranks. NULL = "". */
  const char* name;
  /* NCCL only: this rank's ncclComm_t, which stays the caller's. The ranks meet by one small
   * all-gather on it, on a stream of the library. No other thread may use it meanwhile, and it is
   * not needed afterwards. */
  void* nccl_comm;
  /* Equal on all ranks; JOIN takes it as MASK. */
  xd_comm_peer_loss on_peer_loss;
  /* The host that this rank counts to, by a name of 1 to 63 bytes: ranks that give equal names are
   * on one host, and must be on one machine. It decides the order of sums over ranks
   * (crossdock/ep.h). All ranks name their hosts, or none does. NULL = XD_HOST_ID; where that is
   * not set either, ranks are on one host if they are on one machine (and in one network
   * namespace). */
  const char* host;
  /* Several machines only: the interface ("eth0") or the address at which other machines reach this
   * rank. NULL = XD_NET_IFACE; where that is not set either, the address from which this rank
   * reaches the meeting point, or with ALL_GATHER and NCCL the machine's only address. */
  const char* net_interface;
  /* Several machines only: ranks of a machine that has not answered for so long are lost. At least
   * 1000; 0 = XD_SILENCE_MS, else 10000; -1 = never. */
  int32_t silence_ms;
  /* The numbers by which the caller's program knows the ranks, such as torch.distributed's global
   * ranks: W values by rank, read during the call. Errors that end waits then name "rank 1 (global
   * rank 3)". NULL = the ranks are known by no other numbers. */
  const int32_t* global_ranks;
  /* 1 = a new process may take the place of a rank whose process has ended (xd_comm_invite). Equal
   * on all ranks; JOIN takes it as 1. Needs on_peer_loss = MASK; UNSUPPORTED on CUDA devices and
   * with ranks on several machines. Each process then keeps a descriptor of every rank's shared
   * memory, and has one thread more. */
  int32_t elastic;
} xd_comm_config;
/* clang-format off */
#define XD_COMM_CONFIG_INIT \
  {sizeof(xd_comm_config), XD_BOOTSTRAP_UNIQUE_ID, 0, 0, NULL, NULL, NULL, {kDLCPU, 0}, 0, 0, \
   NULL, NULL, XD_COMM_PEER_LOSS_FATAL, NULL, NULL, 0, NULL, 0}
/* clang-format on */

/* The milliseconds that a timeout_ms of 0 stands for in this process. */
XD_API int32_t xd_default_timeout_ms(void);

/* Joins the communicator: blocks until all ranks have come and have mapped one another's heaps.
 * Collective.
 * Environment: the meeting point is the first free port of MASTER_PORT .. MASTER_PORT + 15 on
 * MASTER_ADDR, one address of rank 0's host (torchrun keeps MASTER_PORT itself busy). Set
 * XD_JOB_SECRET to the same unguessable text on all ranks when the host has other users; on several
 * machines that is required, however the ranks meet. A rank with another secret, or another version
 * of the library, is warned of at once on both sides. Both wait on, since anything that listens on
 * a port may say so, and name it when they end with TIMEOUT.
 * NCCL is looked for when it is needed: first among the libraries that the process has loaded, then
 * as libnccl.so.2. The device may also be the CPU. On TIMEOUT the all-gather is still enqueued:
 * abort NCCL's communicator.
 * A communicator belongs to the process that made it: in a forked child it can be destroyed, and
 * every other call is INVALID_ARGUMENT.
 * Errors: INVALID_ARGUMENT; TIMEOUT naming the ranks that did not come; MISMATCH (another
 * num_ranks, at once on all ranks that have come; another protocol version, kind of device or
 * on_peer_loss, hosts named on some ranks only, a rank taken twice, a peer that failed; but two
 * ranks 0 by environment hold two meetings, and end with TIMEOUT); PEER_LOST (a peer's process
 * ended meanwhile, or the peer gave up); ABORTED (see xd_set_interrupt);
 * UNSUPPORTED (no such executor or device here; CUDA devices that cannot use one another's memory,
 * or more than 72 ranks on them); OUT_OF_MEMORY (as xd_mem_grow); SYSTEM.
 * On error *comm is NULL, nothing is left behind, and the peers get an error: at once if this rank
 * had met them, else TIMEOUT. */
XD_API xd_status xd_comm_create(const xd_comm_config* config, xd_comm** comm);

/* Makes an invitation, by which a new process takes the place of a rank whose process has ended: it
 * calls xd_comm_create with XD_BOOTSTRAP_JOIN. For communicators with `elastic`. Plain bytes like a
 * unique id, and as secret. They serve any number of times, while this rank lives or one of the
 * next three that lived at this call. Local; does not block; any thread.
 *
 * xd_comm_create returns there when all ranks that live have let the process in, each by a thread
 * of the library, whatever its program does. A rank does so when it has agreed on a view without
 * the place (xd_comm_agree), which is waited for. The new rank has the number, the symmetric memory
 * (its size and its bytes, none of which is allocated) and the host's name of the one before. It is
 * a guest: its view has the number 0 and itself as only member, until xd_comm_agree takes it in.
 *
 * xd_ll_group_create on such a rank waits for nobody. It makes the rank's part of the next
 * low-latency group with masks that the others have, in the order in which these were made; its
 * config must be equal. Where the others have no further one it is UNSUPPORTED. It begins with all
 * others masked, so its operations go on alone, until the members of the new view set their masks
 * and reset the group (crossdock/low_latency.h).
 * Once a rank has been replaced, collective calls of the communicator and of its memory are
 * UNSUPPORTED on all ranks, and so is the making of groups and contexts.
 *
 * Errors of this call: INVALID_ARGUMENT (the communicator is not elastic, or has one rank); the
 * fatal errors. Errors of XD_BOOTSTRAP_JOIN, which leave nothing behind at the others:
 * INVALID_ARGUMENT (no invitation; the place does not exist, or its process lives; another device,
 * num_ranks or host); MISMATCH (another version of the library, another secret); PEER_LOST (no rank
 * of the invitation lives, or one has ended meanwhile: try again); TIMEOUT naming the rank that has
 * not let this one in; UNSUPPORTED (the system cannot tell the end of the place's process); SYSTEM,
 * OUT_OF_MEMORY, ABORTED. */
XD_API xd_status xd_comm_invite(xd_comm* comm, xd_unique_id* invitation);

/* Leaves and frees. Local and bounded. It says goodbye and waits for no peer, except at most a
 * second until peers that have not read this rank's earlier messages have room for it, and until
 * other machines have received it. Peers that need this rank later get PEER_LOST ('left'). Call it
 * when no operation of this rank is running: on CUDA, after synchronising the streams of its
 * operations. Their end is bounded: after a fatal error operations end by themselves at once, else
 * with the timeout. Groups that are still alive keep what they need until they are destroyed, but
 * their operations are INVALID_ARGUMENT; pointers from xd_mem_alloc die here. NULL is allowed.
 * Works after fatal errors. */
XD_API xd_status xd_comm_destroy(xd_comm* comm);

/* Gives up: releases every wait of this rank with XD_ERROR_ABORTED, tells the peers, finishes the
 * communicator on all ranks. Any thread, any time before xd_comm_destroy; does not block. */
XD_API xd_status xd_comm_abort(xd_comm* comm);

/* A function that is asked while a call of this thread waits for peers: nonzero = give up. It gets
 * the `context` that was given with it. */
typedef int (*xd_interrupt_fn)(void* context);

/* From now on, calls of this thread that wait on the host ask `ask` every 100 ms while they wait,
 * and give up when it says so. Such a call is ABORTED as by xd_comm_abort, and the communicator is
 * finished on all ranks. xd_comm_create is ABORTED as well, and its peers hear of it as of any
 * error. This is for callers with a user who may want to interrupt them. The function may call the
 * library, but no collective call of a communicator that the thread is waiting in; it must not
 * leave by an exception or longjmp. NULL = none. The call concerns this thread only, and does not
 * block. */
XD_API xd_status xd_set_interrupt(xd_interrupt_fn ask, void* context);

/* Returns when all ranks have called it. Collective. For set-up and tests: no operation needs it.
 * Errors: the fatal ones. */
XD_API xd_status xd_comm_barrier(xd_comm* comm);

/* Gives every rank the bytes of all. Collective, in host memory, also between machines and before
 * any group is made: for agreeing about sizes, exchanging addresses and the like. It is not fast
 * (some ten microseconds on one machine) and moves at most 32 KiB per rank in a round over the
 * control connections, each of which waits no longer than the communicator's timeout.
 *
 * input: `bytes` bytes of this rank, which may be this rank's place in output. output: num_ranks *
 * bytes bytes; rank r's begin at r * bytes. Both are the caller's, used during the call only, and
 * may be NULL if bytes = 0, which is a barrier. bytes: equal on all ranks.
 * Errors: INVALID_ARGUMENT (a pointer is NULL, or bytes that no output can hold from all ranks), of
 * which peers hear as MISMATCH; MISMATCH (bytes
 * differ, or a rank is in another call), on all ranks; the fatal ones. output is written only where
 * the call succeeds. */
XD_API xd_status xd_comm_all_gather(xd_comm* comm, const void* input, void* output, size_t bytes);

typedef struct xd_comm_info {
  size_t struct_size;
  int32_t rank;
  int32_t num_ranks;
  DLDevice device;
  int32_t timeout_ms;
  /* Ranks of this communicator that live in this process. */
  int32_t local_ranks;
  /* Hosts of the ranks, as they have named them (xd_comm_config.host), and the number of this
   * rank's. Hosts are numbered from 0, by their lowest ranks. */
  int32_t num_hosts;
  int32_t host;
  /* Ranks on this rank's machine, which share memory with it; it is one of them. All ranks may be
   * there whatever hosts they have named. */
  int32_t near_ranks;
} xd_comm_info;
#define XD_COMM_INFO_INIT \
  { sizeof(xd_comm_info), 0, 0, {kDLCPU, 0}, 0, 0, 0, 0, 0 }

/* Never blocks. Any thread. */
XD_API xd_status xd_comm_get_info(xd_comm* comm, xd_comm_info* info);

/* Where a wait stood when a fatal error ended it. */
typedef enum xd_phase {
  XD_PHASE_NONE = 0,
  /* A collective host call: creating, growing, barrier. */
  XD_PHASE_HOST = 1,
  /* Waiting for a peer to enter the operation. */
  XD_PHASE_ENTRY = 2,
  /* Waiting for a peer's routing counts. */
  XD_PHASE_COUNTS = 3,
  /* Waiting for a peer to finish with this rank's memory. */
  XD_PHASE_DONE = 4,
  /* CUDA: waiting for rows that a peer brings. */
  XD_PHASE_ROWS = 5,
  /* Waiting for a peer to have taken an earlier operation, whose place is used again. */
  XD_PHASE_CREDIT = 6
} xd_phase;

typedef struct xd_error_info {
  size_t struct_size;
  /* XD_SUCCESS = no fatal error. */
  xd_status status;
  xd_phase phase;
  /* The rank that raised the error. */
  int32_t rank;
  /* The rank that the error is about: lost, waited for, or the one that aborted; -1 = none. */
  int32_t peer;
  /* Number of the group on this communicator, in order of creation; -1 = none. */
  int32_t group;
  /* An xd_ep_operation, xd_ll_operation or xd_gemm_operation; -1 = none. */
  int32_t operation;
  /* TIMEOUT: the epoch waited for, and the last one seen of that peer. */
  uint64_t expected_epoch;
  uint64_t seen_epoch;
  /* All of the above as one sentence. */
  char text[256];
  /* The number of the host that `peer` is on; -1 = none. */
  int32_t host;
} xd_error_info;
/* clang-format off */
#define XD_ERROR_INFO_INIT \
  {sizeof(xd_error_info), XD_SUCCESS, XD_PHASE_NONE, -1, -1, -1, -1, 0, 0, {0}, -1}
/* clang-format on */

/* The fatal error of this communicator, if it has one. Never blocks. Any thread. */
XD_API xd_status xd_comm_error(xd_comm* comm, xd_error_info* info);

/* Tells which ranks take part in nothing any more: their processes have ended, their connections
 * have broken, or they have left. `lost` has room for num_ranks words: lost[r] becomes 1 if rank r
 * is one of them, else 0. A rank that is lost stays lost, unless another process takes its place
 * (xd_comm_invite). Ranks learn of it each by itself, mostly within milliseconds. Never blocks. Any
 * thread. Also works after fatal errors. */
XD_API xd_status xd_comm_lost(xd_comm* comm, int32_t* lost);

/* ---- Network adapters ------------------------------------------------------------------------ */

/* A network adapter or interface of this machine by which rows may go to other machines, as
 * libfabric tells of it. Texts that have no room are cut, and end with 0. */
typedef struct xd_net_adapter {
  /* The name that XD_NET_DEVICE takes: "mlx5_0", "eth0". */
  char name[64];
  /* libfabric's provider for it, the best where there are several: "verbs;ofi_rxm", "tcp". */
  char provider[32];
  /* One of its numeric IP addresses; "" where its network has others. */
  char address[48];
  /* Its place on this machine's PCI buses, as in sysfs: "pci0000:15/0000:15:01.0/0000:17:00.0".
   * "" = not known. */
  char pci_path[256];
  /* The rate of its link; 0 = not known. */
  uint64_t bits_per_second;
  /* The devices {kDLCUDA, d} of this process that take it, bit d for d < 64, if each has one rank
   * in their order; as far as that is known without the address at which ranks will meet. */
  uint64_t cuda_devices;
  /* -1 = not known. */
  int32_t numa_node;
  /* Whether its link is up: 1 or 0; -1 = not known. */
  int32_t is_up;
} xd_net_adapter;

/* Lists them, those of the best provider first. `adapters` has room for *count structs of
 * adapter_bytes = sizeof(xd_net_adapter) each, and may be NULL if *count is 0. As many are written
 * as have room; *count becomes the number that there are. May take some hundred milliseconds. A
 * build with CUDA initialises its driver in this process: children forked later cannot use it.
 * Any thread.
 * Errors: INVALID_ARGUMENT (a pointer is NULL, adapter_bytes; XD_NET_DEVICE or XD_NET_IFACE names
 * none, with those that there are); UNSUPPORTED (no libfabric); SYSTEM. *count is 0 then. */
XD_API xd_status xd_net_adapters(xd_net_adapter* adapters, size_t adapter_bytes, int32_t* count);

/* ---- Symmetric memory ------------------------------------------------------------------------ */
/* Memory that every peer of the host has mapped already, so that operations move rows straight into
 * and out of tensors that lie in it ("zero-copy"): operations find such tensors by address. Other
 * tensors go through the group's staging memory. Symmetric memory belongs to the communicator's
 * device: on the CPU it is anonymous shared memory, on CUDA virtual memory in units of 2 MiB. It
 * has no name, and vanishes with the last process. */

/* Allocates from this rank's heap. Local and cheap; calls need not match across ranks. *ptr is
 * 256-byte aligned, its content undefined. bytes = 0 takes as much as bytes = 1. Any thread.
 * Errors: OUT_OF_MEMORY with asked, largest free and total bytes; nothing is grown. */
XD_API xd_status xd_mem_alloc(xd_comm* comm, size_t bytes, void** ptr);

/* Gives an allocation back, in any order. No operation that uses it may be running on any rank.
 * NULL is allowed. Any thread.
 * Errors: INVALID_ARGUMENT if `ptr` is not the start of a live allocation of this communicator. */
XD_API xd_status xd_mem_free(xd_comm* comm, void* ptr);

/* Adds `bytes` (rounded up to pages; may differ per rank; 0 is allowed) to this rank's heap.
 * Collective, blocking. Nothing moves: old pointers stay good, and operations that run or have been
 * captured are not disturbed. An allocation never spans two growths.
 * Errors: OUT_OF_MEMORY on the rank that has none, MISMATCH naming it on the others; then no heap
 * has grown. On the CPU sizes are compared before any rank allocates, here, in xd_comm_create and
 * in xd_ep_group_create. Ranks whose processes share a limit (control groups v1 and v2, the host)
 * and together ask for more than it leaves all get OUT_OF_MEMORY, with the sum and the limit. */
XD_API xd_status xd_mem_grow(xd_comm* comm, size_t bytes);

/* Makes memory that the caller owns on the communicator's CUDA device part of symmetric memory, so
 * that operations use tensors in it in place. [ptr, ptr + bytes) lies inside one allocation of
 * cudaMalloc, or of virtual memory (cuMemCreate with POSIX file descriptors), or of a pool that is
 * made of either. Ranks may give different sizes; a rank with bytes = 0 gives none. *registration
 * gets the number of the registration, the same on all ranks. Collective, blocking. The memory
 * stays the caller's, and must stay where it is until it has been deregistered, or the communicator
 * destroyed, on all ranks. Peers that use memory of cudaMalloc after its process has ended or freed
 * it fault, and lose their CUDA context. Memory from xd_mem_alloc has no such danger, nor has
 * virtual memory of another process.
 * Errors: INVALID_ARGUMENT (not this device's memory, or beyond its allocation); UNSUPPORTED (it
 * cannot be shared, as memory of cudaMallocAsync; a communicator on the CPU); OUT_OF_MEMORY (on
 * CUDA devices there are at most 4096 growths and registrations together: their table takes 64 KiB
 * of device memory for each rank of the communicator); on the other ranks MISMATCH. After an error
 * nothing is registered.
 * Devices of this process that were given access to the memory keep it. */
XD_API xd_status xd_mem_register(xd_comm* comm, void* ptr, size_t bytes, int32_t* registration);

/* Takes registered memory out again. Collective, blocking; no operation that uses the memory may be
 * running on any rank, or be replayed from a captured graph later. The caller frees the memory
 * after the call.
 * Errors: INVALID_ARGUMENT (no registration has that number) and MISMATCH (the ranks name different
 * ones); nothing has changed then. If a rank's device cannot be told, the communicator is finished.
 * After PEER_LOST the memory is in use until xd_comm_destroy, for some rank perhaps. */
XD_API xd_status xd_mem_deregister(xd_comm* comm, int32_t registration);

typedef struct xd_mem_info {
  size_t struct_size;
  /* Size of this rank's heap. */
  size_t total_bytes;
  /* Allocated bytes, rounding included. */
  size_t used_bytes;
  /* The largest xd_mem_alloc that would succeed now. */
  size_t largest_free_bytes;
  /* Pieces of the heap: one from creation, and one per growth. */
  int32_t segments;
  /* 1 if the whole heap is in huge pages of the host. */
  int32_t huge_pages;
} xd_mem_info;
#define XD_MEM_INFO_INIT \
  { sizeof(xd_mem_info), 0, 0, 0, 0, 0 }

/* Never blocks. Any thread. */
XD_API xd_status xd_mem_get_info(xd_comm* comm, xd_mem_info* info);

/* Name of a place in some rank's symmetric memory, in plain bytes: it is good on every rank of the
 * communicator. */
typedef struct xd_mem_handle {
  int32_t rank;
  int32_t segment;
  uint64_t offset;
} xd_mem_handle;

/* The handle of an address inside this rank's heap. INVALID_ARGUMENT if it is not. Never blocks.
 * Any thread. */
XD_API xd_status xd_mem_export(xd_comm* comm, const void* ptr, xd_mem_handle* handle);

/* The address at which this process sees that place; it stays good until xd_comm_destroy. The
 * caller orders its accesses with the owner's. INVALID_ARGUMENT if the place does not exist,
 * UNSUPPORTED if it is on another machine. Never blocks. Any thread. */
XD_API xd_status xd_mem_import(xd_comm* comm, const xd_mem_handle* handle, void** ptr);

/* Copies bytes out of some rank's symmetric memory to `to`, memory of this rank's device, such as
 * weights of an expert that moves here. No other rank takes part. On the CPU it returns when they
 * are there; on CUDA they are copied in the order of `stream`, by a copy engine, and it may be
 * captured. The caller orders it behind what wrote the bytes, and before what overwrites them; on
 * CUDA the two ranges do not overlap. The owner may have died: its memory stays mapped. bytes = 0
 * is allowed. Any thread.
 * Errors: INVALID_ARGUMENT if [from, from + bytes) does not exist; UNSUPPORTED if it is on another
 * machine; SYSTEM. */
XD_API xd_status xd_mem_copy(xd_comm* comm, void* to, const xd_mem_handle* from, size_t bytes,
                             xd_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_COMM_H_ */
