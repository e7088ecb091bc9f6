/* Crossdock: which ranks hold which experts, and replicas of those that are chosen often.
 *
 * A rank has room for the weights of some experts: its slots. N logical experts, which a router
 * chooses among, are placed in the E = W * slots_per_rank slots of W ranks; slot s is on rank
 * s / slots_per_rank. An expert that stands in several slots is replicated, and its load is split
 * evenly between them. A placement is a table [E] with the expert of each slot, -1 = empty.
 *
 * A group with num_logical_experts = N routes by such a table: a router's ids name logical experts,
 * and the library makes slots of them. The group's experts are then the slots: its counts, zones
 * and tensors are by slot, and stay what they are when the table changes.
 */
#ifndef CROSSDOCK_PLACEMENT_H_
#define CROSSDOCK_PLACEMENT_H_

#include <crossdock/low_latency.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Groups with logical experts ------------------------------------------------------------- */

typedef struct xd_ep_placement {
  size_t struct_size;
  /* In [E]: the logical expert in each slot, 0 to N - 1; -1 = the slot is empty. Slot s is the
   * group's expert s, wherever expert_ranks puts it. An expert may have no slot: choices of it
   * count as -1, and are counted in the group's status. */
  const int32_t* expert_of_slot;
  /* In [W * N + 1], optional, with choice_slots: tokens of rank s that choose expert e go to the
   * slots choice_slots[choice_first[s * N + e]] up to, without, choice_first[s * N + e + 1]. It
   * begins with 0 and never falls. */
  const int32_t* choice_first;
  /* In [choice_first[W * N]]: slots that hold that expert; one that stands n times in a list gets n
   * shares. CUDA: the lists of a rank have at most 65536 slots together. */
  const int32_t* choice_slots;
} xd_ep_placement;
#define XD_EP_PLACEMENT_INIT \
  { sizeof(xd_ep_placement), NULL, NULL, NULL }

/* Makes the group route by another table. Until the first call expert e is in slot e.
 *
 * Token t of rank s, which chooses expert e, goes to entry (t + s) mod n of a list of n slots. The
 * list is the one that choice_first gives, or where that has none or an empty one: the slots of e
 * on rank s, and where there are none all slots of e, ascending. t counts the rows of topk_idx, or
 * is the token's replica_hint; t + s is taken modulo 2^64.
 *
 * An operation in which all ranks take a turn with equal tables, which are read during the call
 * only. When it ends no rank routes by the old table any more: what a rank had done before its
 * call, such as copying weights to slots of its own, has been done for every later batch. Plans
 * made before stay good, as they hold slots. The weights of a slot may be overwritten only when no
 * batch that was prepared under the old table still waits for its experts; the library does not
 * know of that. It may stand between the parts of operations wherever a prepare may. In a
 * low-latency group it takes its turn among dispatches.
 *
 * Errors, after which the old table is in force on all ranks: INVALID_ARGUMENT on a rank with a bad
 * table, and MISMATCH on the others; MISMATCH where tables differ; OUT_OF_MEMORY on one rank, and
 * MISMATCH on the others; in low-latency groups BUSY while dispatches of this rank are between
 * their halves, of which peers do not hear. INVALID_ARGUMENT in groups without logical experts.
 * PEER_LOST in a group with masks tells of ranks that are lost; the new table is in force then. In
 * a group that resumes (xd_ep_group_enter_view) the old one is, also behind its next view.
 * Ranks that are masked meanwhile do not hear of the call, and where masks differ one rank may end
 * with MISMATCH and another with success. No batch is sent under tables that differ: prepare and
 * xd_ll_dispatch compare them, and are a MISMATCH until all ranks have set equal ones.
 * CUDA: in the order of `stream`, which must not be captured (INVALID_ARGUMENT, of which peers do
 * not hear); errors that need the peers come by the group's status. Graphs that have been captured
 * route by the table that is in force when they run.
 * xd_stats does not count these calls. */
XD_API xd_status xd_ep_group_set_placement(xd_ep_group* group, const xd_ep_placement* placement,
                                           xd_stream stream);
XD_API xd_status xd_ll_group_set_placement(xd_ll_group* group, const xd_ep_placement* placement,
                                           xd_stream stream);

/* Tells how often each logical expert has been chosen, in all plans that this rank has made since
 * the group was made, or since `clear`. Choices that have no row are not counted (-1, bad ids,
 * experts without a slot); rows that were dropped are.
 *   loads   out int64 [W, N], by the rank of the tokens; or [N], over all ranks
 *   clear   1 = count anew from 0
 * Equal on all ranks behind the same prepare, so that they may plan by it without a message. A
 * local call, as those of ep.h: any thread, also beside operations; on CUDA in the order of
 * `stream`, by which the caller orders it with prepares. Low-latency groups count by
 * expert_load of xd_ll_dispatch instead. INVALID_ARGUMENT in groups without logical experts. */
XD_API xd_status xd_ep_group_loads(xd_ep_group* group, const DLTensor* loads, int32_t clear,
                                   xd_stream stream);

/* ---- Plans of placements --------------------------------------------------------------------- */
/* The functions below are pure: they need no communicator and no device, may be called from any
 * thread, and give equal results for equal arguments on all machines, as all their arithmetic is on
 * integers. So ranks that know the same loads plan alike without a message. */

typedef struct xd_ep_planner_args {
  size_t struct_size;
  /* W, 1 to XD_MAX_RANKS. */
  int32_t num_ranks;
  /* N, from 1 on. */
  int32_t num_logical_experts;
  /* Slots of each rank; all slots together are at most XD_EP_MAX_EXPERTS. */
  int32_t slots_per_rank;
  /* A placement is good enough whose busiest rank has at most so many thousandths of the mean load;
   * at least 1000; 0 = 1010. With `current` it says how much better another placement has to be. */
  int32_t good_enough_permille;
  /* In [N]: what each expert has to do, in any unit, such as rows of the last 100 steps; from 0 on,
   * and together below 2^62. Only their proportions count. All 0 counts as all equal. */
  const int64_t* loads;
  /* In [W], optional: how many of its slots a rank may use, the first ones; 0 = the rank holds
   * nothing. Together at least N. NULL = all slots. */
  const int32_t* rank_slots;
  /* In [W], optional: the host of each rank, any numbers from 0 to W - 1. Replicas of an expert are
   * then spread over hosts as evenly as these have room. NULL = all ranks are on one host. */
  const int32_t* rank_hosts;
  /* In [E], optional: today's placement, from which few experts are moved. NULL = there is none. */
  const int32_t* current;
  /* With `current`: the most slots that may get an expert which their rank does not hold yet,
   * beside those for experts that no usable slot holds. 0 = any number. */
  int32_t max_moves;
} xd_ep_planner_args;
#define XD_EP_PLANNER_ARGS_INIT \
  { sizeof(xd_ep_planner_args), 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0 }

typedef struct xd_ep_placement_info {
  size_t struct_size;
  /* The load of the busiest rank over the mean of ranks that have slots. */
  double busiest_rank;
  /* The same by host: over what a host's ranks would have at the mean. */
  double busiest_host;
  /* The same as busiest_rank, of `current`, where its usable slots hold every expert; else 0. */
  double busiest_rank_before;
  /* Slots that get an expert which their rank did not hold in `current`; without `current` 0. */
  int32_t moves;
  /* Slots with an expert that a lower slot of their rank holds as well. */
  int32_t doubles;
} xd_ep_placement_info;
#define XD_EP_PLACEMENT_INFO_INIT \
  { sizeof(xd_ep_placement_info), 0, 0, 0, 0, 0 }

/* Computes a placement: every expert has at least one slot.
 *
 * expert_of_slot: out [E]; it may be `current`. info: out, may be NULL.
 * Without `current` all usable slots are filled, as far as a rank need not hold an expert twice for
 * that. Without `rank_hosts` as well, the busiest rank is never busier, but for a millionth of
 * rounding, than under the greedy method of EPLB (github.com/deepseek-ai/EPLB) without groups. With
 * one of them it may be busier by what good_enough_permille allows, and by what max_moves forbids.
 * A slot keeps its expert wherever the rank keeps it. Slots may stay empty where `current` leaves
 * them so and filling them helps little.
 *
 * Errors: INVALID_ARGUMENT for a size or number out of its range, naming it; OUT_OF_MEMORY. Nothing
 * has been written then. */
XD_API xd_status xd_ep_plan_placement(const xd_ep_planner_args* args, int32_t* expert_of_slot,
                                      xd_ep_placement_info* info);

/* One slot that gets another expert. */
typedef struct xd_ep_move {
  int32_t expert;
  /* The slot of the old placement to copy from: of the same rank if that holds the expert, else of
   * the rank that has been read from least so far in the list; -1 = no slot holds it. */
  int32_t from_slot;
  int32_t to_slot;
} xd_ep_move;

/* Lists the slots that get another expert on the way from one placement to another, by ascending
 * to_slot. Slots that become empty are not listed.
 *
 * from, to: in [E], E = num_ranks * slots_per_rank. moves: out, room for E of them. num_moves: out.
 * Every from_slot means what that slot holds before the first move: a slot may be read by one move
 * and be overwritten by another.
 *
 * Errors: INVALID_ARGUMENT for sizes out of range, and for an expert below -1. */
XD_API xd_status xd_ep_placement_moves(int32_t num_ranks, int32_t slots_per_rank,
                                       const int32_t* from, const int32_t* to, xd_ep_move* moves,
                                       int32_t* num_moves);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_PLACEMENT_H_ */
