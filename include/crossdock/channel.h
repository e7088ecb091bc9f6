/* Crossdock: EXPERIMENTAL. Channels: puts into the memory of one rank, with counts there.
 *
 * This header declares nothing unless XD_EXPERIMENTAL is defined before it is included. It is not
 * frozen: any version may change or remove it, and crossdock.h does not include it.
 *
 * A channel is weak on purpose, as networks are, whether its peer is on this machine or on another
 * one. A count says that the bytes of the puts that it counts can be read, and nothing about any
 * other put, also one that was made before. Counts only grow. A flush says that sources may change
 * again, and nothing about the peer.
 *
 * Puts between machines get on, and are taken in, in calls of both ends of this channel alone. So
 * between machines put and flush may wait until the peer calls something of the channel: have no
 * barrier, and no wait of another channel, between a put here and the peer's wait for it. A put
 * that was flushed needs no more calls of the rank that made it. Each channel has an engine of its
 * own there, which takes tens of MB and some ten descriptors: make few.
 *
 * Channels are there for communicators on the CPU. Calls of one channel are made by one thread at a
 * time. Waits of put, wait and flush are bounded by the communicator's timeout, which is
 * XD_ERROR_TIMEOUT and leaves channel and communicator as they are: a put that ended so has not
 * been made, and may be repeated. Calls that wait notice the loss of the peer, as
 * XD_ERROR_PEER_LOST, which finishes the communicator as everywhere. XD_ERROR_SYSTEM says that the
 * network has failed between both ends, maybe for an earlier put, or that the peer has destroyed
 * its end; the channel is of no use any more.
 */
#ifndef CROSSDOCK_CHANNEL_H_
#define CROSSDOCK_CHANNEL_H_

#include <crossdock/comm.h>
#include <stddef.h>
#include <stdint.h>

#ifdef XD_EXPERIMENTAL

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xd_channel xd_channel;

/* Makes one end of a channel. Collective over the communicator: every rank calls it and names its
 * peer, which must name it; a rank may name itself. `symmetric`, of `bytes` bytes, lies in this
 * rank's symmetric memory and stays allocated as long as either end is there: the peer puts into
 * it, and this rank puts from it. Sizes may differ between both ends. `slots`, from 1 to 65536, are
 * the counts here; they begin at 0. Errors: INVALID_ARGUMENT, MISMATCH where ranks do not name one
 * another, UNSUPPORTED on CUDA and, between machines, without libfabric; TIMEOUT where ranks do not
 * come, which finishes the communicator. */
XD_API xd_status xd_channel_create(xd_comm* comm, int32_t peer, const void* symmetric, size_t bytes,
                                   uint32_t slots, xd_channel** channel);

/* Puts `bytes` bytes, maybe none, to byte `to` of the peer's memory of the channel. When they can
 * be read there, count `slot` grows by 1 there. `from` lies in this rank's memory of the channel,
 * and stays as it is until a flush. INVALID_ARGUMENT where bytes do not lie in both memories, or
 * the peer has no such slot. */
XD_API xd_status xd_channel_put(xd_channel* channel, size_t to, const void* from, size_t bytes,
                                uint32_t slot);

/* Waits until count `slot` here is at least `count`. */
XD_API xd_status xd_channel_wait(xd_channel* channel, uint32_t slot, uint64_t count);

/* Waits until the sources of all puts so far may change again. */
XD_API xd_status xd_channel_flush(xd_channel* channel);

/* Local. Puts towards either end that are under way may not arrive any more, flushed or not: lose
 * none by waiting for the counts of all puts on both ends, with a barrier behind that. NULL is
 * allowed. */
XD_API xd_status xd_channel_destroy(xd_channel* channel);

#ifdef __cplusplus
}
#endif

#endif /* XD_EXPERIMENTAL */

#endif /* CROSSDOCK_CHANNEL_H_ */
