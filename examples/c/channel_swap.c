/* EXPERIMENTAL: ranks swap numbers through channels.
 *
 *   crossdock-run -n 4 ./channel_swap
 *
 * The first half of the ranks swaps what it holds with the second, round after round: each rank
 * puts its number into the other's memory and waits for the count that says that the other's has
 * come. With an odd number of ranks the last one is its own peer. It works alike on one machine and
 * on several, between which all pairs lie if there are two.
 */
#define XD_EXPERIMENTAL 1
#include <crossdock/channel.h>
#include <crossdock/crossdock.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROUNDS = 100 };

/* A number from here and one from the peer, by parity of the round: the next number may come while
 * this one is read. */
typedef struct mailbox {
  int64_t sent, came[2];
} mailbox;

static void check(xd_status status) {
  if (status == XD_SUCCESS) return;
  fprintf(stderr, "%s: %s\n", xd_status_name(status), xd_last_error());
  exit(1);
}

static int from_environment(const char* name) {
  const char* text = getenv(name);
  if (text != NULL) return (int)strtol(text, NULL, 10);
  fprintf(stderr, "%s is not set: start this program with crossdock-run\n", name);
  exit(1);
}

int main(void) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
  config.rank = from_environment("RANK");
  config.num_ranks = from_environment("WORLD_SIZE");
  config.heap_bytes = 1 << 16;
  xd_comm* comm = NULL;
  check(xd_comm_create(&config, &comm));
  xd_comm_info info = XD_COMM_INFO_INIT;
  check(xd_comm_get_info(comm, &info));
  const int half = info.num_ranks / 2;
  const int peer = info.rank < half       ? info.rank + half
                   : info.rank < 2 * half ? info.rank - half
                                          : info.rank;

  void* memory = NULL;
  check(xd_mem_alloc(comm, sizeof(mailbox), &memory));
  mailbox* const box = memory;
  xd_channel* channel = NULL;
  check(xd_channel_create(comm, peer, box, sizeof(*box), 2, &channel));

  int64_t number = info.rank;
  for (int round = 0; round < ROUNDS; ++round) {
    const uint32_t counter = round % 2;
    box->sent = number;
    check(xd_channel_put(channel, offsetof(mailbox, came) + counter * sizeof(number), &box->sent,
                         sizeof(number), counter));
    check(xd_channel_wait(channel, counter, (uint64_t)round / 2 + 1));
    check(xd_channel_flush(channel)); /* box->sent may change again */
    number = box->came[counter] + 1;
  }
  const int64_t expected = (ROUNDS % 2 == 0 ? info.rank : peer) + ROUNDS;
  const int wrong = number != expected;
  printf("rank %d of %d: %d rounds, %d wrong elements\n", info.rank, info.num_ranks, ROUNDS, wrong);
  check(xd_comm_barrier(comm)); /* nothing is under way any more */
  check(xd_channel_destroy(channel));
  check(xd_comm_destroy(comm));
  return wrong;
}
