/* Tokens go to their experts and come back: one dispatch and one combine between N ranks.
 *
 *   crossdock-run -n 4 ./round_trip
 *
 * Expert e multiplies its tokens by e + 1, so every rank knows what must come back.
 */
#include <crossdock/crossdock.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 8, HIDDEN = 64, TOPK = 2, LOCAL_EXPERTS = 2 };

static const DLDataType kFloat = {kDLFloat, 32, 1};
static const DLDataType kInt = {kDLInt, 32, 1};

static void check(xd_status status) {
  if (status == XD_SUCCESS) return;
  fprintf(stderr, "%s: %s\n", xd_status_name(status), xd_last_error());
  exit(1);
}

/* A dense tensor on the CPU. One dimension if columns = 0. */
typedef struct tensor {
  DLTensor dl;
  int64_t shape[2];
} tensor;

static const DLTensor* view(tensor* t, void* data, DLDataType type, int64_t rows, int64_t columns) {
  t->shape[0] = rows;
  t->shape[1] = columns;
  t->dl = (DLTensor){.data = data,
                     .device = {kDLCPU, 0},
                     .ndim = columns > 0 ? 2 : 1,
                     .dtype = type,
                     .shape = t->shape};
  return &t->dl;
}

static void* allocate(xd_comm* comm, size_t bytes) {
  void* memory = NULL;
  check(xd_mem_alloc(comm, bytes, &memory));
  return memory;
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
  config.dtype = kFloat;
  xd_ep_group* group = NULL;
  check(xd_ep_group_create(comm, &config, &group));
  int64_t rows = 0;
  check(xd_ep_recv_bound(&config, &rows));
  size_t plan_bytes = 0;
  check(xd_ep_plan_size(&config, &plan_bytes));

  /* This rank's tokens, and the experts that a router has chosen for them. */
  float(*tokens)[HIDDEN] = allocate(comm, sizeof(float[TOKENS][HIDDEN]));
  float(*out)[HIDDEN] = allocate(comm, sizeof(float[TOKENS][HIDDEN]));
  float(*topk_weights)[TOPK] = allocate(comm, sizeof(float[TOKENS][TOPK]));
  int32_t(*topk_idx)[TOPK] = allocate(comm, sizeof(int32_t[TOKENS][TOPK]));
  for (int t = 0; t < TOKENS; ++t) {
    for (int h = 0; h < HIDDEN; ++h) tokens[t][h] = (float)(1000 * info.rank + 10 * t + h % 10);
    for (int k = 0; k < TOPK; ++k) {
      topk_idx[t][k] = (info.rank + 3 * t + k) % config.num_experts;
      topk_weights[t][k] = k == 0 ? 0.75f : 0.25f;
    }
  }

  /* What this rank receives: rows by expert; expert e has rows offsets[e] to offsets[e + 1] - 1. */
  void* plan = allocate(comm, plan_bytes);
  int32_t* offsets = allocate(comm, sizeof(int32_t[LOCAL_EXPERTS + 1]));
  float(*recv)[HIDDEN] = allocate(comm, (size_t)rows * sizeof(float[HIDDEN]));
  float* recv_weights = allocate(comm, (size_t)rows * sizeof(float));
  tensor views[6];

  xd_ep_prepare_args prepare = XD_EP_PREPARE_ARGS_INIT;
  prepare.topk_idx = view(&views[0], topk_idx, kInt, TOKENS, TOPK);
  prepare.plan = plan;
  prepare.plan_bytes = plan_bytes;
  prepare.offsets = view(&views[1], offsets, kInt, LOCAL_EXPERTS + 1, 0);
  check(xd_ep_prepare(group, &prepare, NULL));

  xd_ep_dispatch_args dispatch = XD_EP_DISPATCH_ARGS_INIT;
  dispatch.plan = plan;
  dispatch.plan_bytes = plan_bytes;
  dispatch.tokens = view(&views[2], tokens, kFloat, TOKENS, HIDDEN);
  dispatch.topk_weights = view(&views[3], topk_weights, kFloat, TOKENS, TOPK);
  dispatch.recv_tokens = view(&views[4], recv, kFloat, rows, HIDDEN);
  dispatch.recv_weights = view(&views[5], recv_weights, kFloat, rows, 0);
  check(xd_ep_dispatch(group, &dispatch, NULL));

  for (int e = 0; e < LOCAL_EXPERTS; ++e) {
    const float factor = (float)(info.rank * LOCAL_EXPERTS + e + 1);
    for (int32_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      for (int h = 0; h < HIDDEN; ++h) recv[r][h] *= factor;
    }
  }

  xd_ep_combine_args combine = XD_EP_COMBINE_ARGS_INIT;
  combine.plan = plan;
  combine.plan_bytes = plan_bytes;
  combine.expert_out = dispatch.recv_tokens;
  combine.weights = dispatch.recv_weights;
  combine.out = view(&views[2], out, kFloat, TOKENS, HIDDEN);
  check(xd_ep_combine(group, &combine, NULL));

  int wrong = 0;
  for (int t = 0; t < TOKENS; ++t) {
    float factor = 0;
    for (int k = 0; k < TOPK; ++k) factor += topk_weights[t][k] * (float)(topk_idx[t][k] + 1);
    for (int h = 0; h < HIDDEN; ++h) wrong += out[t][h] != tokens[t][h] * factor;
  }
  printf("rank %d of %d: %d tokens out and back, %d rows here, %d wrong elements\n", (int)info.rank,
         (int)info.num_ranks, TOKENS, (int)offsets[LOCAL_EXPERTS], wrong);

  check(xd_ep_group_destroy(group));
  check(xd_comm_destroy(comm));
  return wrong == 0 ? 0 : 1;
}
