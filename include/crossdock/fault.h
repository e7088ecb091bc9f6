/* Crossdock: a word on the device that says whether an error has spoiled an operation of low
 * latency, for steps that ask no host.
 */
#ifndef CROSSDOCK_FAULT_H_
#define CROSSDOCK_FAULT_H_

#include <crossdock/low_latency.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The count of xd_ll_group_watch as a word of the device: on CUDA in device memory, on the CPU the
 * very word. An operation that ends with an error of its own, such as the loss of a rank, raises it
 * before its launch ends. So a step that copies the word first and compares it last, by
 * kernels of its own on the stream of the operations, finds by itself that its results may lack a
 * share, and can mark its tokens invalid without a host that waits, also in a captured graph. The
 * word is this rank's: a token is summed where it comes from, so the tokens of a rank whose word
 * has not moved lack nothing, unless the communicator is finished: a fatal error does not move the
 * word, and launches behind it leave their outputs as they were, so a host that uses the results
 * looks at xd_comm_error as well. Operations that are sent without a rank that is masked already
 * report nothing and do not count. The word is only read, starts at 0, and lies at the same address
 * until the group is destroyed. Never blocks. Any thread. */
XD_API xd_status xd_ll_group_fault_word(xd_ll_group* group, const uint64_t** word);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_FAULT_H_ */
