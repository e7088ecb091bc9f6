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
 * Between machines, channels are connected when they are made, and all those of a communicator
 * share one engine, which takes tens of MB and some ten descriptors until the communicator is
 * destroyed. There a put progresses only while both ranks are in put, wait, test or flush of any
 * channel of the communicator, so put and flush may wait until the peer is in one of these. A put
 * that has been flushed needs no more calls of its own rank. Flush before a barrier or any other
 * collective call, xd_channel_create included: otherwise the put may not progress, and both ranks
 * wait until the timeout.
 *
 * Channels are there for communicators on the CPU. Calls of one channel are made by one thread at a
 * time; channels may have a thread each. Waits of put, wait and flush are bounded by the
 * communicator's timeout. XD_ERROR_TIMEOUT leaves channel and communicator as they are: a put that
 * ended so has not been made, and may be repeated. Put, wait and test notice the loss of the peer,
 * on this machine or another, as XD_ERROR_PEER_LOST, which finishes the communicator as everywhere.
 * Where the communicator masks losses (XD_COMM_PEER_LOSS_MASK) the loss finishes nothing, and every
 * later call that needs this peer says the same. A put may have succeeded before the loss was
 * noticed. XD_ERROR_SYSTEM says that the network has failed between both ends, maybe for an earlier
 * put; no channel between them is of use any more, and this communicator can make no other. A rank
 * is not notified when its peer destroys its end.
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

/* Makes one end of a channel, and connects it. Collective over the communicator: every rank calls
 * it and names its peer, which must name it; a rank may name itself. `symmetric`, of `bytes` bytes,
 * lies in one allocation of this rank's symmetric memory, which may be up to 255 bytes larger than
 * asked for. It stays allocated as long as either end is there: the peer puts into it, and this
 * rank puts from it. Sizes may differ between both ends. `counters`, from 1 to 65536, is the number
 * of counters here; they begin at 0.
 *
 * Errors: INVALID_ARGUMENT, which is MISMATCH on all other ranks, at once (with a `comm` that is
 * NULL the others miss this rank); MISMATCH where ranks do not name one another; UNSUPPORTED on
 * CUDA and, between machines, without libfabric, and where a rank has had 65535 channels to other
 * machines; TIMEOUT or SYSTEM where the peer's machine is reached by control messages and not by
 * data, which finishes nothing; TIMEOUT where ranks do not come, which finishes the communicator.
 */
XD_API xd_status xd_channel_create(xd_comm* comm, int32_t peer, const void* symmetric, size_t bytes,
                                   uint32_t counters, xd_channel** channel);

/* Puts `bytes` bytes, maybe none, to byte `to` of the peer's memory of the channel. When they can
 * be read there, counter `counter` grows by 1 there. `from` lies in this rank's memory of the
 * channel, and stays as it is until a flush. INVALID_ARGUMENT where bytes do not lie in both
 * memories, the peer has no such counter, or, between machines, bytes are more than the network
 * takes in one put; the text says how many that is. Such a put has not been made, and the channel
 * goes on. */
XD_API xd_status xd_channel_put(xd_channel* channel, size_t to, const void* from, size_t bytes,
                                uint32_t counter);

/* Waits until counter `counter` here is at least `count`. */
XD_API xd_status xd_channel_wait(xd_channel* channel, uint32_t counter, uint64_t count);

/* Tells whether counter `counter` here is at least `count`: *reached becomes 1, else 0. It never
 * waits. Puts of this rank's channels get on and are taken in, as in a wait, so a rank that has
 * other work may call this time and again instead. Errors are those of a wait but for TIMEOUT. */
XD_API xd_status xd_channel_test(xd_channel* channel, uint32_t counter, uint64_t count,
                                 int32_t* reached);

/* Waits until the sources of all puts so far may change again. */
XD_API xd_status xd_channel_flush(xd_channel* channel);

/* Local. Puts of and to this end that are under way still need the memory of both ends, and need
 * not arrive any more. To lose none, wait for the counts of all puts on both ends, with a barrier
 * behind that. The memory of a channel may be freed, or used for something else, when all puts of
 * either end have been waited for, or else with the communicator alone. NULL is allowed. */
XD_API xd_status xd_channel_destroy(xd_channel* channel);

#ifdef __cplusplus
}
#endif

#endif /* XD_EXPERIMENTAL */

#endif /* CROSSDOCK_CHANNEL_H_ */
