/* Crossdock: views, by which ranks agree on who is left.
 *
 * A view is a number and a set of ranks that go on together. A communicator begins with view 0, all
 * of its ranks. When ranks end, hang or return, those that live call xd_comm_agree, which gives
 * all of them the same next view. Ranks keep their numbers. A view changes nothing by itself: the
 * masks of low-latency groups are set by xd_ll_mask_set and xd_ll_reset, as it says, and groups of
 * ep.h enter it by xd_ep_group_enter_view.
 */
#ifndef CROSSDOCK_VIEW_H_
#define CROSSDOCK_VIEW_H_

#include <crossdock/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Words of a set of ranks: bit r % 64 of word r / 64 stands for rank r. */
#define XD_VIEW_WORDS 16

typedef struct xd_view {
  size_t struct_size;
  /* 0 = the view of creation; else one more than that of the view before. */
  uint64_t number;
  int32_t num_members;
  /* 1 = all members have voted with ok = 1. Ranks that are `gone` do not count, and may have voted
   * 0 or not at all. */
  int32_t all_ok;
  /* The lowest and the highest step of the members' votes; 0 in view 0. Of members that have
   * `joined`, neither step nor ok counts, unless the view before has no members left. */
  int64_t first_step;
  int64_t last_step;
  uint64_t members[XD_VIEW_WORDS];
  /* Members that were not in the view of this rank's last call that succeeded, and the reverse. */
  uint64_t joined[XD_VIEW_WORDS];
  uint64_t gone[XD_VIEW_WORDS];
} xd_view;
#define XD_VIEW_INIT                                \
  {                                                 \
    sizeof(xd_view), 0, 0, 0, 0, 0, {0}, {0}, { 0 } \
  }

typedef struct xd_comm_agree_args {
  size_t struct_size;
  /* How long votes of members that live are waited for. 0 = a second more than twice the longest
   * wait of groups of this rank that outlive losses, since peers may still wait in an operation:
   * wait_timeout_ms of low-latency groups with masks, the communicator's timeout of groups that
   * resume. Without such groups 0 = the communicator's timeout. */
  int32_t timeout_ms;
  /* 1 = this rank has what it needs, as its program understands that; 0 = it has not. The view says
   * whether all members have voted 1. */
  int32_t ok;
  /* 1 = this rank wants to be no member of the next view. */
  int32_t leave;
  /* Any number, such as that of the next step of this rank. */
  int64_t step;
  /* Ranks that shall not be members, though they live and vote, as a set of XD_VIEW_WORDS words;
   * NULL = none. It has no effect if this rank leaves, or is a guest. This rank itself is
   * INVALID_ARGUMENT: it sets `leave`. */
  const uint64_t* leave_out;
  /* CUDA: the stream in whose order the program works, if it may be captured. The call does nothing
   * on it, and refuses while it is captured: a replay would not ask again. */
  xd_stream stream;
} xd_comm_agree_args;
#define XD_COMM_AGREE_ARGS_INIT \
  { sizeof(xd_comm_agree_args), 0, 1, 0, 0, NULL, NULL }

/* Decides on the next view together with the other members of the current one: all ranks that get
 * a view of a number get the same one, whatever ranks end during the call. For communicators with
 * on_peer_loss = XD_COMM_PEER_LOSS_MASK, in host memory, on CPU and CUDA communicators.
 *
 * A rank votes and waits until every member has voted, or is lost (see xd_comm_lost), or until
 * timeout_ms are over. The members of the next view are then those that have voted, without those
 * that are lost, leave, or are named in leave_out. These sets are taken by ascending rank of the
 * voter, and a rank that a lower one has left out has no say. So a rank that votes is in, whoever
 * has masked it. One rank's count is taken by all: a rank that votes too late may find that it has
 * been left out. Such a rank may call again, and votes then as a guest: nobody waits for it, but
 * the next view that is decided while it waits has it as a member. A guest that leaves has success
 * at once. A call that fails takes its vote back; where others have counted it all the same, the
 * next call of this rank does not return their view, but votes for the one behind it.
 *
 * On one machine the decision is one compare-and-swap in shared memory, so a single rank that is
 * left decides alone, also a guest when all members have ended. Between machines more than half of
 * the current view's members have to agree, or half of them with the lowest one, so of two parts of
 * the ranks that cannot reach each other one at most goes on; for that the call may take up to
 * timeout_ms longer, at least 1 s and at most 10 s. Where too many members have ended there, or all
 * leave, no call decides any more: the ranks that are left make a new communicator.
 *
 * A rank that has met a loss in an operation of a low-latency group makes the others of its step
 * all the same before it calls: a rank that has met none waits for it there, up to its
 * wait_timeout_ms. In groups that resume nobody waits for it.
 *
 * Blocking and bounded. It needs no operation of any group, and may be called while operations of
 * other ranks still wait for a rank that is gone. One thread per rank at a time.
 * `view` may be NULL. It is written only on success.
 * Errors: INVALID_ARGUMENT; BUSY (another thread of this rank is in the call); PEER_LOST about this
 * rank itself: the others have gone on without it, or it was a guest and nobody took it in, or
 * between machines it has reached too few members. None of these finishes the communicator, and
 * the call may be made again. The view of xd_comm_get_view has this rank in the last case alone. A
 * rank that leaves has success, with a view that it is not in. The fatal errors; ABORTED also when
 * the function of xd_set_interrupt asks for it. */
XD_API xd_status xd_comm_agree(xd_comm* comm, const xd_comm_agree_args* args, xd_view* view);

/* The latest view that a call of this rank has found, also one that this rank is not in. Never
 * blocks. Any thread. Also works after fatal errors. */
XD_API xd_status xd_comm_get_view(xd_comm* comm, xd_view* view);

/* A group of ep.h. */
typedef struct xd_ep_group xd_ep_group;

/* How such a group takes the end of a rank that an operation needs (xd_ep_config.on_peer_loss). */
typedef enum xd_ep_peer_loss {
  /* The loss finishes the communicator. */
  XD_EP_PEER_LOSS_FATAL = 0,
  /* The operation ends with PEER_LOST on all ranks that are left, and finishes nothing; the group
   * goes on without the rank when they have entered a view: see xd_ep_group_enter_view. Needs a
   * communicator with XD_COMM_PEER_LOSS_MASK. UNSUPPORTED on CUDA devices and between machines. */
  XD_EP_PEER_LOSS_RESUME = 1
} xd_ep_peer_loss;

/* Makes a group with on_peer_loss = XD_EP_PEER_LOSS_RESUME go on with the members of the
 * communicator's view, the latest that a call of xd_comm_agree has given this rank.
 *
 * Losses. An operation in which a rank is lost (see xd_comm_lost) ends with PEER_LOST on all ranks
 * that are left, which finishes nothing. All get it from the same operation: the last one that
 * ended well did so on all of them. (A rank that does not come to that operation any more is not
 * waited for.) It names one of those lost, which need not be the same one everywhere: the view says
 * who is gone. No rank touches the tensors of another then. Each further call returns PEER_LOST at
 * once, xd_ep_join_failed included, until the group has entered a view without the lost. So every
 * rank goes on like this, with no barrier between:
 *   xd_comm_agree           one view for all
 *   xd_ep_group_enter_view  once for each group, in the same order; PEER_LOST: agree again
 *   xd_ll_mask_set, xd_ll_reset, where there are low-latency groups with masks
 *   xd_ep_group_set_placement, or a router that chooses no expert of ranks that are gone
 *   xd_ep_prepare           the step is made again, from view.first_step for instance
 * A rank that hears of a further loss before it has entered its last group, in whatever call, may
 * agree anew at once: the end of a member ends the waits of all others there. Without such an end
 * they wait for that rank. A rank that is late is no loss: TIMEOUT, which is fatal.
 *
 * Behind it. All sizes stay those of W ranks. A rank that is gone has no tokens, receives none, and
 * its numbers in outputs are 0. Choices of its experts count as -1; xd_ep_group_status counts
 * them as unplaced_choices. In groups with logical experts so do choices that fall to a slot on it,
 * though a replica lives elsewhere, until xd_ep_group_set_placement sets a table without the rank.
 * Plans that were made with other ranks are INVALID_ARGUMENT. Operations in parts begin anew. Sums
 * have the same order of ranks, so equal inputs give equal bits, as in a group where the others
 * choose no expert of the rank and it has no tokens. A rank that is gone does not return to the
 * group, also not where another process takes its place in the communicator.
 *
 * Collective over the members, an operation of the group; when it returns all are in step again.
 * It waits until ranks that were in the group and are no members have ended or left, so a rank that
 * has only been left out of the view has to be killed: that wait, and that for each member, is
 * bounded by the communicator's timeout. In the view that the group has entered already it does
 * nothing. xd_stats does not count these calls.
 * Errors: INVALID_ARGUMENT in a group with XD_EP_PEER_LOSS_FATAL; PEER_LOST, which finishes
 * nothing: a member has been lost meanwhile (a member that had come to all others may still enter,
 * and meets the loss in its next operation), or this rank is not in the view; the fatal errors,
 * TIMEOUT among them. */
XD_API xd_status xd_ep_group_enter_view(xd_ep_group* group, xd_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_VIEW_H_ */
