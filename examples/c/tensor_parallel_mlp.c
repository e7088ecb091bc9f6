/* One layer of a transformer's MLP, spread over N ranks: forward, backward, and the gradients of
 * its weights, with every transfer beside a product.
 *
 *   crossdock-run -n 4 ./tensor_parallel_mlp
 *
 *   forward    y = gelu(x * w1^T + b1)       column-parallel: each rank has some rows of w1
 *              z = y * w2^T + b2             row-parallel: each rank has some columns of w2
 *   backward   dy = (dz * w2) * gelu'(..)    dx = dy * w1
 *              dw2 = dz^T * y                dw1 = dy^T * x
 *
 * Between layers each rank has some of the tokens ("sequence parallelism"), not all ranks equally
 * many: so x and dz are gathered on their way into a product, and z and dx are summed on their way
 * out. Each rank then checks its part against plain loops over the whole layer.
 */
#include <crossdock/crossdock.h>
#include <crossdock/gemm.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_TOKENS = 8, HIDDEN = 16, INNER_PER_RANK = 12, MAX_RANKS = 16 };

static const DLDevice kCpu = {kDLCPU, 0};

static void check(xd_status status) {
  if (status == XD_SUCCESS) return;
  fprintf(stderr, "%s: %s\n", xd_status_name(status), xd_last_error());
  exit(1);
}

/* ---- Matrices ------------------------------------------------------------------------------- */

/* A matrix in symmetric memory, into and out of which peers move rows without copies. */
typedef struct matrix {
  int64_t rows, columns;
  float* at;
  xd_tensor tensor;
} matrix;

static matrix new_matrix(xd_comm* comm, int64_t rows, int64_t columns) {
  matrix m = {.rows = rows, .columns = columns};
  void* memory = NULL;
  check(xd_mem_alloc(comm, (size_t)(rows * columns) * sizeof(float), &memory));
  m.at = memory;
  m.tensor = xd_tensor_2d(m.at, XD_DTYPE_FLOAT32, kCpu, rows, columns);
  return m;
}

static matrix new_vector(xd_comm* comm, int64_t size) {
  matrix m = new_matrix(comm, 1, size);
  m.tensor = xd_tensor_1d(m.at, XD_DTYPE_FLOAT32, kCpu, size);
  return m;
}

static const DLTensor* view(matrix* m) { return xd_tensor_view(&m->tensor); }

/* Element (row, column) of a tensor of the whole layer: every rank knows every number. */
static float number(int tensor, int64_t row, int64_t column) {
  const int64_t mixed = ((int64_t)tensor * 7919 + row * 104729 + column * 1299709) % 1009;
  return (float)(mixed - 504) / 1009.0f;
}

/* Fills m with the elements of a tensor from (row, column) on. */
static void fill(matrix* m, int tensor, int64_t row, int64_t column) {
  for (int64_t i = 0; i < m->rows; ++i) {
    for (int64_t j = 0; j < m->columns; ++j) {
      m->at[i * m->columns + j] = number(tensor, row + i, column + j);
    }
  }
}

/* ---- The layer on one rank ------------------------------------------------------------------ */

enum { X, W1, B1, W2, B2, DZ };

typedef struct layer {
  int64_t tokens_per_rank[MAX_RANKS];
  int64_t tokens, all_tokens, first_token; /* of this rank, of all, of this rank among all */
  int64_t inner, first_inner;              /* this rank's rows of w1 and columns of w2 */
  matrix x, w1, b1, w2, b2, z, dz, dx;
  matrix y, before_gelu, dy;    /* all tokens, this rank's columns */
  matrix dw1, db1, dw2;         /* this rank's weights */
  matrix all_x, all_dz, all_dx; /* gathered */
} layer;

static layer make_layer(xd_comm* comm, const xd_comm_info* info) {
  layer l = {0};
  for (int r = 0; r < info->num_ranks; ++r) {
    l.tokens_per_rank[r] = MAX_TOKENS - r % 4;
    if (r < info->rank) l.first_token += l.tokens_per_rank[r];
    l.all_tokens += l.tokens_per_rank[r];
  }
  l.tokens = l.tokens_per_rank[info->rank];
  check(xd_gemm_local_size((int64_t)INNER_PER_RANK * info->num_ranks, info->rank, info->num_ranks,
                           &l.inner));
  l.first_inner = (int64_t)INNER_PER_RANK * info->rank;
  l.x = new_matrix(comm, l.tokens, HIDDEN);
  l.w1 = new_matrix(comm, l.inner, HIDDEN);
  l.b1 = new_vector(comm, l.inner);
  l.w2 = new_matrix(comm, HIDDEN, l.inner);
  l.b2 = new_vector(comm, HIDDEN);
  l.z = new_matrix(comm, l.tokens, HIDDEN);
  l.dz = new_matrix(comm, l.tokens, HIDDEN);
  l.dx = new_matrix(comm, l.tokens, HIDDEN);
  l.y = new_matrix(comm, l.all_tokens, l.inner);
  l.before_gelu = new_matrix(comm, l.all_tokens, l.inner);
  l.dy = new_matrix(comm, l.all_tokens, l.inner);
  l.dw1 = new_matrix(comm, l.inner, HIDDEN);
  l.db1 = new_vector(comm, l.inner);
  l.dw2 = new_matrix(comm, HIDDEN, l.inner);
  l.all_x = new_matrix(comm, l.all_tokens, HIDDEN);
  l.all_dz = new_matrix(comm, l.all_tokens, HIDDEN);
  l.all_dx = new_matrix(comm, l.all_tokens, HIDDEN);
  fill(&l.x, X, l.first_token, 0);
  fill(&l.w1, W1, l.first_inner, 0);
  fill(&l.b1, B1, 0, l.first_inner);
  fill(&l.w2, W2, 0, l.first_inner);
  fill(&l.b2, B2, 0, 0);
  fill(&l.dz, DZ, l.first_token, 0);
  return l;
}

static void forward(xd_gemm_context* context, layer* l) {
  /* y = gelu(x * w1^T + b1): tokens of all ranks come in while those of this rank are computed. */
  xd_gemm_args up = XD_GEMM_ARGS_INIT;
  up.a = view(&l->x);
  up.b = view(&l->w1);
  up.d = view(&l->y);
  up.bias = view(&l->b1);
  up.epilogue = XD_GEMM_EPILOGUE_GELU;
  up.pre_activation = view(&l->before_gelu);
  up.tokens_per_rank = l->tokens_per_rank;
  check(xd_gemm_all_gather(context, &up, NULL));

  /* z = y * w2^T + b2: each rank's tokens are summed over the ranks. */
  xd_gemm_args down = XD_GEMM_ARGS_INIT;
  down.a = view(&l->y);
  down.b = view(&l->w2);
  down.d = view(&l->z);
  down.bias = view(&l->b2);
  down.tokens_per_rank = l->tokens_per_rank;
  check(xd_gemm_reduce_scatter(context, &down, NULL));
}

static void backward(xd_gemm_context* context, layer* l) {
  /* dy = (dz * w2) * gelu'(before_gelu): w2 as it is stored. Rows that are gathered stay, for dw2.
   * */
  xd_gemm_args down = XD_GEMM_ARGS_INIT;
  down.a = view(&l->dz);
  down.b = view(&l->w2);
  down.transpose_b = 0;
  down.d = view(&l->dy);
  down.epilogue = XD_GEMM_EPILOGUE_DGELU;
  down.pre_activation = view(&l->before_gelu);
  down.bias_grad = view(&l->db1);
  down.gathered = view(&l->all_dz);
  down.tokens_per_rank = l->tokens_per_rank;
  check(xd_gemm_all_gather(context, &down, NULL));

  /* dw2 = dz^T * y, beside the gather of x, which the forward pass did not keep. */
  xd_gemm_args gradient = XD_GEMM_ARGS_INIT;
  gradient.a = view(&l->all_dz);
  gradient.transpose_a = 1;
  gradient.b = view(&l->y);
  gradient.transpose_b = 0;
  gradient.d = view(&l->dw2);
  xd_gemm_bulk_args bulk = XD_GEMM_BULK_ARGS_INIT;
  bulk.product = &gradient;
  bulk.collective = XD_GEMM_ALL_GATHER;
  bulk.in = view(&l->x);
  bulk.out = view(&l->all_x);
  bulk.tokens_per_rank = l->tokens_per_rank;
  check(xd_gemm_bulk(context, &bulk, NULL));

  /* dx = dy * w1, summed over the ranks. */
  xd_gemm_args up = XD_GEMM_ARGS_INIT;
  up.a = view(&l->dy);
  up.b = view(&l->w1);
  up.transpose_b = 0;
  up.d = view(&l->dx);
  up.tokens_per_rank = l->tokens_per_rank;
  check(xd_gemm_reduce_scatter(context, &up, NULL));

  /* dw1 = dy^T * x, beside the gather of dx, which the layer below will want. */
  gradient.a = view(&l->dy);
  gradient.b = view(&l->all_x);
  gradient.d = view(&l->dw1);
  bulk.in = view(&l->dx);
  bulk.out = view(&l->all_dx);
  check(xd_gemm_bulk(context, &bulk, NULL));
}

/* ---- The whole layer by plain loops ---------------------------------------------------------- */

static double gelu(double x) {
  return x / 2 * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

static double gelu_slope(double x) {
  const double t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
  return (1 + t) / 2 + x / 2 * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

/* x * w1^T + b1 of one token. */
static double sum_before_gelu(int64_t token, int64_t inner) {
  double sum = number(B1, 0, inner);
  for (int h = 0; h < HIDDEN; ++h) sum += (double)number(X, token, h) * number(W1, inner, h);
  return sum;
}

static double dy_of(int64_t token, int64_t inner) {
  double sum = 0;
  for (int h = 0; h < HIDDEN; ++h) sum += (double)number(DZ, token, h) * number(W2, h, inner);
  return sum * gelu_slope(sum_before_gelu(token, inner));
}

static double z_of(int64_t token, int h, int64_t all_inner) {
  double sum = number(B2, 0, h);
  for (int64_t f = 0; f < all_inner; ++f) {
    sum += gelu(sum_before_gelu(token, f)) * number(W2, h, f);
  }
  return sum;
}

static double dx_of(int64_t token, int h, int64_t all_inner) {
  double sum = 0;
  for (int64_t f = 0; f < all_inner; ++f) sum += dy_of(token, f) * number(W1, f, h);
  return sum;
}

static int wrong(double got, double expected) {
  return !(fabs(got - expected) <= 1e-4 * (1 + fabs(expected)));
}

static int count_wrong_tokens(const layer* l, int64_t all_inner) {
  int count = 0;
  for (int64_t t = 0; t < l->all_tokens; ++t) {
    const int64_t own = t - l->first_token;
    for (int h = 0; h < HIDDEN; ++h) {
      const double dx = dx_of(t, h, all_inner);
      count += wrong(l->all_dx.at[t * HIDDEN + h], dx);
      if (own < 0 || own >= l->tokens) continue;
      count += wrong(l->z.at[own * HIDDEN + h], z_of(t, h, all_inner));
      count += wrong(l->dx.at[own * HIDDEN + h], dx);
    }
  }
  return count;
}

static int count_wrong_weights(const layer* l) {
  int count = 0;
  for (int64_t f = 0; f < l->inner; ++f) {
    const int64_t inner = l->first_inner + f;
    double db1 = 0;
    for (int64_t t = 0; t < l->all_tokens; ++t) db1 += dy_of(t, inner);
    count += wrong(l->db1.at[f], db1);
    for (int h = 0; h < HIDDEN; ++h) {
      double dw1 = 0, dw2 = 0;
      for (int64_t t = 0; t < l->all_tokens; ++t) {
        dw1 += dy_of(t, inner) * number(X, t, h);
        dw2 += (double)number(DZ, t, h) * gelu(sum_before_gelu(t, inner));
      }
      count += wrong(l->dw1.at[f * HIDDEN + h], dw1);
      count += wrong(l->dw2.at[h * l->inner + f], dw2);
    }
  }
  return count;
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
  if (info.num_ranks > MAX_RANKS) {
    fprintf(stderr, "%d ranks, expected at most %d\n", (int)info.num_ranks, MAX_RANKS);
    return 1;
  }

  /* A context: the bounds of the products. */
  xd_gemm_config config = XD_GEMM_CONFIG_INIT;
  config.operations = XD_GEMM_BIT(XD_GEMM_ALL_GATHER) | XD_GEMM_BIT(XD_GEMM_REDUCE_SCATTER) |
                      XD_GEMM_BIT(XD_GEMM_BULK);
  config.max_tokens = MAX_TOKENS;
  config.max_k = HIDDEN;
  config.max_n = HIDDEN > INNER_PER_RANK ? HIDDEN : INNER_PER_RANK;
  config.dtype = XD_DTYPE_FLOAT32;
  xd_gemm_context* context = NULL;
  check(xd_gemm_context_create(comm, &config, &context));

  layer l = make_layer(comm, &info);
  forward(context, &l);
  backward(context, &l);
  const int64_t all_inner = (int64_t)INNER_PER_RANK * info.num_ranks;
  const int bad = count_wrong_tokens(&l, all_inner) + count_wrong_weights(&l);
  printf("rank %d of %d: %d of %d tokens, %d of %d inner columns, %d wrong elements\n",
         (int)info.rank, (int)info.num_ranks, (int)l.tokens, (int)l.all_tokens, (int)l.inner,
         (int)all_inner, bad);

  check(xd_gemm_context_destroy(context));
  check(xd_comm_destroy(comm));
  return bad == 0 ? 0 : 1;
}
