/* Tokens go to their experts and come back: one dispatch and one combine between N ranks, and then
 * both again in parts.
 *
 *   crossdock-run -n 4 ./round_trip
 *
 * Expert e multiplies its tokens by e + 1, so every rank knows what must come back.
 */
#include <crossdock/crossdock.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 8, HIDDEN = 64, TOPK = 2, LOCAL_EXPERTS = 2, PARTS = 2 };

static const DLDevice kCpu = {kDLCPU, 0};

static void check(xd_status status) {
  if (status == XD_SUCCESS) return;
  fprintf(stderr, "%s: %s\n", xd_status_name(status), xd_last_error());
  exit(1);
}

static void* allocate(xd_comm* comm, int64_t count, size_t bytes) {
  void* memory = NULL;
  check(xd_mem_alloc(comm, (size_t)count * bytes, &memory));
  return memory;
}

/* One batch: this rank's tokens and their experts, and the rows that this rank receives. */
typedef struct batch {
  float (*tokens)[HIDDEN];
  float (*out)[HIDDEN];
  float (*topk_weights)[TOPK];
  int32_t (*topk_idx)[TOPK];
  int64_t rows; /* of recv */
  float (*recv)[HIDDEN];
  float* recv_weights;
  int32_t* offsets; /* expert e has rows offsets[e] to offsets[e + 1] - 1 */
  void* plan;
  size_t plan_bytes;
} batch;

static batch make_batch(xd_comm* comm, const xd_ep_config* config, int rank) {
  batch b = {0};
  check(xd_ep_recv_bound(config, &b.rows));
  check(xd_ep_plan_size(config, &b.plan_bytes));
  b.tokens = allocate(comm, TOKENS, sizeof(*b.tokens));
  b.out = allocate(comm, TOKENS, sizeof(*b.out));
  b.topk_weights = allocate(comm, TOKENS, sizeof(*b.topk_weights));
  b.topk_idx = allocate(comm, TOKENS, sizeof(*b.topk_idx));
  b.recv = allocate(comm, b.rows, sizeof(*b.recv));
  b.recv_weights = allocate(comm, b.rows, sizeof(*b.recv_weights));
  b.offsets = allocate(comm, LOCAL_EXPERTS + 1, sizeof(*b.offsets));
  b.plan = allocate(comm, 1, b.plan_bytes);
  for (int t = 0; t < TOKENS; ++t) {
    for (int h = 0; h < HIDDEN; ++h) b.tokens[t][h] = (float)(1000 * rank + 10 * t + h % 10);
    for (int k = 0; k < TOPK; ++k) {
      b.topk_idx[t][k] = (rank + 3 * t + k) % config->num_experts;
      b.topk_weights[t][k] = k == 0 ? 0.75f : 0.25f;
    }
  }
  return b;
}

/* Of this rank the local experts from `first` to `end` - 1. */
static void run_experts(batch* b, int rank, int first, int end) {
  for (int e = first; e < end; ++e) {
    const float factor = (float)(rank * LOCAL_EXPERTS + e + 1);
    for (int32_t r = b->offsets[e]; r < b->offsets[e + 1]; ++r) {
      for (int h = 0; h < HIDDEN; ++h) b->recv[r][h] *= factor;
    }
  }
}

static int count_wrong(const batch* b) {
  int wrong = 0;
  for (int t = 0; t < TOKENS; ++t) {
    float factor = 0;
    for (int k = 0; k < TOPK; ++k) {
      factor += b->topk_weights[t][k] * (float)(b->topk_idx[t][k] + 1);
    }
    for (int h = 0; h < HIDDEN; ++h) wrong += b->out[t][h] != b->tokens[t][h] * factor;
  }
  return wrong;
}

/* The same calls for some of the experts of each rank at a time. */
static void in_parts(xd_ep_group* group, batch* b, int rank, xd_ep_prepare_args prepare,
                     xd_ep_dispatch_args dispatch, xd_ep_combine_args combine) {
  prepare.parts = PARTS;
  check(xd_ep_prepare(group, &prepare, NULL));
  for (dispatch.part = 1; dispatch.part <= PARTS; ++dispatch.part) {
    check(xd_ep_dispatch(group, &dispatch, NULL));
    /* The rows of part p are here. On a GPU its experts run on another stream, beside the next. */
    const int first = (dispatch.part - 1) * LOCAL_EXPERTS / PARTS;
    run_experts(b, rank, first, dispatch.part * LOCAL_EXPERTS / PARTS);
  }
  for (combine.part = 1; combine.part <= PARTS; ++combine.part) {
    check(xd_ep_combine(group, &combine, NULL));
  }
}

/* Returns the number of wrong elements. */
static int round_trip(xd_ep_group* group, batch* b, int rank) {
  xd_tensor topk_idx = xd_tensor_2d(b->topk_idx, XD_DTYPE_INT32, kCpu, TOKENS, TOPK);
  xd_tensor offsets = xd_tensor_1d(b->offsets, XD_DTYPE_INT32, kCpu, LOCAL_EXPERTS + 1);
  xd_tensor tokens = xd_tensor_2d(b->tokens, XD_DTYPE_FLOAT32, kCpu, TOKENS, HIDDEN);
  xd_tensor weights = xd_tensor_2d(b->topk_weights, XD_DTYPE_FLOAT32, kCpu, TOKENS, TOPK);
  xd_tensor recv = xd_tensor_2d(b->recv, XD_DTYPE_FLOAT32, kCpu, b->rows, HIDDEN);
  xd_tensor recv_weights = xd_tensor_1d(b->recv_weights, XD_DTYPE_FLOAT32, kCpu, b->rows);
  xd_tensor out = xd_tensor_2d(b->out, XD_DTYPE_FLOAT32, kCpu, TOKENS, HIDDEN);

  /* Where will every row go? */
  xd_ep_prepare_args prepare = XD_EP_PREPARE_ARGS_INIT;
  prepare.topk_idx = xd_tensor_view(&topk_idx);
  prepare.plan = b->plan;
  prepare.plan_bytes = b->plan_bytes;
  prepare.offsets = xd_tensor_view(&offsets);
  check(xd_ep_prepare(group, &prepare, NULL));

  /* Tokens go to their experts, */
  xd_ep_dispatch_args dispatch = XD_EP_DISPATCH_ARGS_INIT;
  dispatch.plan = b->plan;
  dispatch.plan_bytes = b->plan_bytes;
  dispatch.tokens = xd_tensor_view(&tokens);
  dispatch.topk_weights = xd_tensor_view(&weights);
  dispatch.recv_tokens = xd_tensor_view(&recv);
  dispatch.recv_weights = xd_tensor_view(&recv_weights);
  check(xd_ep_dispatch(group, &dispatch, NULL));

  run_experts(b, rank, 0, LOCAL_EXPERTS);

  /* and the results come back, weighted and summed per token. */
  xd_ep_combine_args combine = XD_EP_COMBINE_ARGS_INIT;
  combine.plan = b->plan;
  combine.plan_bytes = b->plan_bytes;
  combine.expert_out = dispatch.recv_tokens;
  combine.weights = dispatch.recv_weights;
  combine.out = xd_tensor_view(&out);
  check(xd_ep_combine(group, &combine, NULL));
  const int wrong = count_wrong(b);

  memset(b->out, 0xff, TOKENS * sizeof(*b->out));
  in_parts(group, b, rank, prepare, dispatch, combine);
  return wrong + count_wrong(b);
}

int main(void) {
  /* Join the ranks that were started together. */
  xd_comm_config comm_config = XD_COMM_CONFIG_INIT;
  comm_config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
  comm_config.heap_bytes = 1 << 20;
  xd_comm* comm = NULL;
  check(xd_comm_create(&comm_config, &comm));
  xd_comm_info info = XD_COMM_INFO_INIT;
  check(xd_comm_get_info(comm, &info));

  /* A group: the sizes of this traffic. */
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = info.num_ranks;
  config.num_experts = info.num_ranks * LOCAL_EXPERTS;
  config.max_topk = TOPK;
  config.max_tokens_per_rank = TOKENS;
  config.hidden = HIDDEN;
  config.dtype = XD_DTYPE_FLOAT32;
  xd_ep_group* group = NULL;
  check(xd_ep_group_create(comm, &config, &group));

  batch b = make_batch(comm, &config, info.rank);
  const int wrong = round_trip(group, &b, info.rank);
  printf("rank %d of %d: %d tokens out and back, %d rows here, %d wrong elements\n", (int)info.rank,
         (int)info.num_ranks, TOKENS, (int)b.offsets[LOCAL_EXPERTS], wrong);

  check(xd_ep_group_destroy(group));
  check(xd_comm_destroy(comm));
  return wrong == 0 ? 0 : 1;
}
