/* A stranger who reaches the data ports of a job, and knows neither its secret nor any key.
 *
 *   net-stranger OWN_ADDRESS ADDRESS PORT tags|messages|nonsense|bytes SECONDS
 *
 * Prints how many of its puts, messages or conversations were taken. */
#include <arpa/inet.h>
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CHECK(call)                                          \
  do {                                                       \
    const long result_ = (call);                             \
    if (result_ != 0) {                                      \
      printf("%s: %s\n", #call, fi_strerror((int)-result_)); \
      exit(1);                                               \
    }                                                        \
  } while (0)

enum { kMany = 1 << 16 };

struct Fabric {
  struct fid_av* addresses;
  struct fid_cq* queue;
  struct fid_ep* endpoint;
  struct fid_mr* memory;
};

static char bytes[16000];
static struct fi_context2 contexts[kMany];

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static struct Fabric open_fabric(const char* own_address) {
  struct fi_info *hints = fi_allocinfo(), *info = NULL;
  hints->caps = FI_MSG | FI_RMA;
  hints->ep_attr->type = FI_EP_RDM;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->addr_format = FI_SOCKADDR_IN;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_VIRT_ADDR | FI_MR_ENDPOINT;
  hints->fabric_attr->prov_name = strdup("tcp;ofi_rxm");
  const uint32_t version = FI_VERSION(1, 17);
  if (fi_getinfo(version, own_address, NULL, FI_SOURCE, hints, &info) != 0) {
    free(hints->fabric_attr->prov_name);
    hints->fabric_attr->prov_name = strdup("tcp");
    CHECK(fi_getinfo(version, own_address, NULL, FI_SOURCE, hints, &info));
  }
  struct fid_fabric* fabric = NULL;
  struct fid_domain* domain = NULL;
  struct Fabric made;
  struct fi_av_attr of_addresses = {.type = info->domain_attr->av_type};
  struct fi_cq_attr of_queue = {.format = FI_CQ_FORMAT_DATA, .size = 1024};
  CHECK(fi_fabric(info->fabric_attr, &fabric, NULL));
  CHECK(fi_domain(fabric, info, &domain, NULL));
  CHECK(fi_av_open(domain, &of_addresses, &made.addresses, NULL));
  CHECK(fi_cq_open(domain, &of_queue, &made.queue, NULL));
  CHECK(fi_endpoint(domain, info, &made.endpoint, NULL));
  CHECK(fi_ep_bind(made.endpoint, &made.addresses->fid, 0));
  CHECK(fi_ep_bind(made.endpoint, &made.queue->fid, FI_TRANSMIT | FI_RECV));
  CHECK(fi_enable(made.endpoint));
  CHECK(fi_mr_reg(domain, bytes, sizeof bytes, FI_SEND | FI_WRITE, 0, 1, 0, &made.memory, NULL));
  return made;
}

/* Puts of no pieces need no key, and their data arrive as a tag; here of all kinds, for slot 0 and
 * neighbour 0. Messages need none either. */
static long post(const struct Fabric* fabric, fi_addr_t to, int is_message, int number) {
  struct fi_context2* const context = &contexts[number % kMany];
  struct fi_msg_rma put = {.addr = to, .context = context, .data = (uint64_t)number << 29};
  if (is_message)
    return fi_send(fabric->endpoint, bytes, sizeof bytes, fi_mr_desc(fabric->memory), to, context);
  return fi_writemsg(fabric->endpoint, &put, FI_REMOTE_CQ_DATA | FI_COMPLETION);
}

static int attack(const struct Fabric* fabric, struct sockaddr_in to, int is_message, double end) {
  fi_addr_t peer = FI_ADDR_UNSPEC;
  if (fi_av_insert(fabric->addresses, &to, 1, &peer, 0, NULL) != 1) return 0;
  int posted = 0, taken = 0;
  while (now() < end) {
    if (posted < taken + 64 && post(fabric, peer, is_message, posted) == 0) ++posted;
    struct fi_cq_data_entry entry;
    struct fi_cq_err_entry error = {0};
    const long count = fi_cq_read(fabric->queue, &entry, 1);
    if (count == 1) ++taken;
    if (count == -FI_EAVAIL && fi_cq_readerr(fabric->queue, &error, 0) == 1) break;
  }
  return taken;
}

/* The words of libfabric 1.17 to a peer when it connects, and the beginning of its packets. */
struct Greeting {
  uint8_t version, endianness, packet_version, put_version;
  uint16_t port;
  uint8_t flow_control, padding;
  uint32_t eager_limit, slots;
  uint64_t connection;
};
struct Packet {
  uint8_t version, kind;
  char rest[94];
};

/* Packets of a kind that is not there, in the language of 1.17's "tcp;ofi_rxm". */
static int talk_nonsense(struct sockaddr_in to, double end) {
  struct fi_info *hints = fi_allocinfo(), *info = NULL;
  hints->caps = FI_MSG;
  hints->ep_attr->type = FI_EP_MSG;
  hints->addr_format = FI_SOCKADDR_IN;
  hints->fabric_attr->prov_name = strdup("tcp");
  char host[64], port[8];
  inet_ntop(AF_INET, &to.sin_addr, host, sizeof host);
  snprintf(port, sizeof port, "%d", ntohs(to.sin_port));
  CHECK(fi_getinfo(FI_VERSION(1, 17), host, port, 0, hints, &info));
  struct fid_fabric* fabric = NULL;
  struct fid_domain* domain = NULL;
  struct fid_eq* events = NULL;
  struct fid_cq* queue = NULL;
  struct fid_ep* endpoint = NULL;
  struct fi_eq_attr of_events = {.wait_obj = FI_WAIT_UNSPEC};
  struct fi_cq_attr of_queue = {.format = FI_CQ_FORMAT_DATA, .size = 64};
  CHECK(fi_fabric(info->fabric_attr, &fabric, NULL));
  CHECK(fi_domain(fabric, info, &domain, NULL));
  CHECK(fi_eq_open(fabric, &of_events, &events, NULL));
  CHECK(fi_cq_open(domain, &of_queue, &queue, NULL));
  CHECK(fi_endpoint(domain, info, &endpoint, NULL));
  CHECK(fi_ep_bind(endpoint, &events->fid, 0));
  CHECK(fi_ep_bind(endpoint, &queue->fid, FI_TRANSMIT | FI_RECV));
  CHECK(fi_enable(endpoint));
  const struct Greeting greeting = {1, 2, 4, 3, 9, 0, 0, 16384, 1024, 77};
  if (fi_connect(endpoint, info->dest_addr, &greeting, sizeof greeting) != 0) return 0;
  static struct Packet packet = {.version = 4, .kind = 99};
  int taken = 0, connected = 0;
  while (now() < end && taken < 20) {
    struct fi_eq_cm_entry entry;
    struct fi_eq_err_entry error = {0};
    struct fi_cq_data_entry sent;
    uint32_t event = 0;
    const long heard = fi_eq_read(events, &event, &entry, sizeof entry, 0);
    if (heard == -FI_EAVAIL && fi_eq_readerr(events, &error, 0) > 0) break;
    if (heard > 0 && event == FI_CONNECTED) connected = 1;
    if (heard > 0 && event == FI_SHUTDOWN) break;
    if (connected) fi_send(endpoint, &packet, sizeof packet, NULL, 0, &contexts[0]);
    if (fi_cq_read(queue, &sent, 1) == 1) ++taken;
  }
  fi_close(&endpoint->fid);
  return taken;
}

/* Conversations of random bytes. */
static int talk(struct sockaddr_in to, double end) {
  int taken = 0;
  while (now() < end) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct pollfd item = {.fd = fd, .events = POLLOUT};
    if (connect(fd, (struct sockaddr*)&to, sizeof to) != 0) poll(&item, 1, 300);
    for (size_t i = 0; i < 400; ++i) bytes[i] = (char)rand();
    if (send(fd, bytes, 1 + (size_t)(rand() % 399), MSG_NOSIGNAL) > 0) ++taken;
    close(fd);
  }
  return taken;
}

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const char* const mode = argv[4];
  const int is_put = strcmp(mode, "tags") == 0, is_message = strcmp(mode, "messages") == 0;
  const uint16_t port = (uint16_t)strtoul(argv[3], NULL, 10);
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
  inet_pton(AF_INET, argv[2], &to.sin_addr);
  const double end = now() + strtod(argv[5], NULL);
  int taken = 0;
  if (is_put || is_message) {
    const struct Fabric fabric = open_fabric(argv[1]);
    taken = attack(&fabric, to, is_message, end);
  } else {
    taken = strcmp(mode, "nonsense") == 0 ? talk_nonsense(to, end) : talk(to, end);
  }
  printf("%d taken\n", taken);
  fflush(stdout);
  _exit(0); /* nobody asks what a stranger and its libfabric leave behind */
}
