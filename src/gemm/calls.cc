#include "gemm/calls.h"

#include <array>

#include "base/error.h"
#include "base/hash.h"
#include "base/options.h"

namespace xd::gemm {
namespace {

constexpr std::array kOperandTypes = {DType::bf16, DType::f16, DType::f32, DType::e4m3,
                                      DType::e5m2};
constexpr std::array kWideTypes = {DType::bf16, DType::f16, DType::f32};
constexpr std::array kFloatTypes = {DType::f32};
constexpr std::array kAllTypes = {DType::bf16, DType::f16,  DType::f32,    DType::i32,
                                  DType::i64,  DType::i8,   DType::u8,     DType::e4m3,
                                  DType::e5m2, DType::e8m0, DType::boolean};

bool is_fp8(DType type) { return type == DType::e4m3 || type == DType::e5m2; }

void require_flag(const char* name, std::int32_t value) {
  XD_REQUIRE(value == 0 || value == 1, name, " = ", value, ", expected 0 or 1");
}

void require_shape(const Tensor& tensor, std::int64_t rows, const char* what_rows,
                   std::int64_t cols, const char* what_cols) {
  require_rows(tensor, rows, what_rows);
  require_cols(tensor, cols, what_cols);
}

// Reads the tensors of one call, which differ in name, dimensions and types only.
class Reader {
 public:
  explicit Reader(const CallContext& context) : context_(context) {}

  Tensor matrix(const DLTensor* t, const char* name, std::span<const DType> types,
                bool optional = false) const {
    const Tensor tensor = read(t, name, 2, types, Fit::rows, optional);
    XD_REQUIRE(tensor.row_bytes() % kRowAlignment == 0, name, ": a row has ", tensor.row_bytes(),
               " bytes, expected a multiple of ", kRowAlignment);
    return tensor;
  }
  Tensor vector(const DLTensor* t, const char* name, std::span<const DType> types) const {
    return read(t, name, 1, types, Fit::elements, true);
  }
  // A single number.
  Tensor number(const DLTensor* t, const char* name) const {
    const Tensor tensor = vector(t, name, kFloatTypes);
    if (tensor) require_rows(tensor, 1, "a single number");
    return tensor;
  }
  // A tensor of one or two dimensions.
  Tensor scales(const DLTensor* t, const char* name) const {
    return read(t, name, t != nullptr && t->ndim == 2 ? 2 : 1, kFloatTypes, Fit::elements, true);
  }

 private:
  Tensor read(const DLTensor* t, const char* name, int ndim, std::span<const DType> types, Fit fit,
              bool optional) const {
    return read_tensor(t, {.name = name,
                           .ndim = ndim,
                           .types = types,
                           .device = context_.device,
                           .fit = fit,
                           .optional = optional,
                           .shape_only = context_.shape_only});
  }

  const CallContext& context_;
};

void require_configured(const Config& config, xd_gemm_operation operation) {
  if (config.has(operation)) return;
  fail(XD_ERROR_UNSUPPORTED, "config.operations = ", config.operations, ", expected the bit of ",
       Family::kOperations.name(operation), ": the context has no memory for it");
}

// Fills in the first row of each rank. `equal`: the tokens of each where the caller names none.
Shares read_shares(const std::int64_t* tokens, std::int64_t equal, const CallContext& context) {
  std::int64_t start = 0;
  for (int r = 0; r < context.config->ranks; ++r) {
    const std::int64_t rows = tokens != nullptr ? tokens[r] : equal;
    if (tokens != nullptr) {
      XD_REQUIRE(rows >= 0 && rows <= context.config->max_tokens, "tokens_per_rank[", r,
                 "] = ", rows, ", expected 0 to max_tokens = ", context.config->max_tokens);
    }
    context.starts[at(r)] = start;
    start += rows;
  }
  context.starts[at(context.config->ranks)] = start;
  return Shares(context.starts.first(at(context.config->ranks) + 1));
}

// The shares where `own` is a tensor of this rank's rows and so many they are.
Shares read_own_shares(const std::int64_t* tokens, const char* own, std::int64_t rows,
                       const CallContext& context) {
  XD_REQUIRE(rows <= context.config->max_tokens, own, ": has ", rows,
             " tokens, expected at most max_tokens = ", context.config->max_tokens);
  const Shares shares = read_shares(tokens, rows, context);
  XD_REQUIRE(shares.rows(context.rank) == rows, "tokens_per_rank[", context.rank,
             "] = ", shares.rows(context.rank), ", expected ", rows, " (tokens of ", own, ")");
  return shares;
}

// The shares where `all` is a tensor of all ranks' rows.
Shares read_all_shares(const std::int64_t* tokens, const char* all, std::int64_t rows,
                       const CallContext& context) {
  const int ranks = context.config->ranks;
  if (tokens == nullptr) {
    XD_REQUIRE(rows % ranks == 0, all, ": has ", rows, " tokens, expected a multiple of ", ranks,
               " ranks, or tokens_per_rank");
    XD_REQUIRE(rows / ranks <= context.config->max_tokens, all, ": has ", rows,
               " tokens, expected at most num_ranks * max_tokens = ", context.config->all_tokens());
  }
  const Shares shares = read_shares(tokens, rows / ranks, context);
  XD_REQUIRE(shares.all() == rows, all, ": has ", rows, " tokens, expected ", shares.all(),
             " (sum of tokens_per_rank)");
  return shares;
}

void read_options(const xd_gemm_args& a, const Config& config, ProductCall& call) {
  require_flag("transpose_a", a.transpose_a);
  require_flag("transpose_b", a.transpose_b);
  require_flag("reduce_bias_grad", a.reduce_bias_grad);
  require_flag("fast_accumulate", a.fast_accumulate);
  require_flag("allow_tf32", a.allow_tf32);
  XD_REQUIRE(a.transpose_a == 0 || a.transpose_b == 0,
             "transpose_a = 1 and transpose_b = 1, expected at most one of them");
  const int epilogue = raw_enum(a.epilogue);
  XD_REQUIRE(epilogue >= XD_GEMM_EPILOGUE_NONE && epilogue <= XD_GEMM_EPILOGUE_DRELU,
             "epilogue = ", epilogue, ", expected an xd_gemm_epilogue, 0 to ",
             int{XD_GEMM_EPILOGUE_DRELU});
  const xd_gemm_algo algo = read_algo("algo", raw_enum(a.algo));
  call.transpose_a = a.transpose_a != 0;
  call.transpose_b = a.transpose_b != 0;
  call.reduce_bias_grad = a.reduce_bias_grad != 0;
  call.fast_accumulate = a.fast_accumulate != 0;
  call.allow_tf32 = a.allow_tf32 != 0;
  call.alpha = a.alpha;
  call.beta = a.beta;
  call.epilogue = static_cast<xd_gemm_epilogue>(epilogue);
  call.algo = algo != XD_GEMM_ALGO_AUTO ? algo : config.algo;
  call.tag = a.tag;
}

void read_operands(const xd_gemm_args& a, const Reader& reader, ProductCall& call) {
  call.a = reader.matrix(a.a, "a", kOperandTypes);
  call.b = reader.matrix(a.b, "b", kOperandTypes);
  call.d = reader.matrix(a.d, "d", kOperandTypes);
  call.a_rows = call.transpose_a ? call.a.cols : call.a.rows;
  call.k = call.transpose_a ? call.a.rows : call.a.cols;
  call.n = call.transpose_b ? call.b.rows : call.b.cols;
  XD_REQUIRE(call.k > 0, "a: has K = 0, expected 1 or more");
  XD_REQUIRE(call.n > 0, "b: has N = 0, expected 1 or more");
  const std::int64_t b_k = call.transpose_b ? call.b.cols : call.b.rows;
  XD_REQUIRE(b_k == call.k, "b: has K = ", b_k, ", expected ", call.k, " (K of a)");
  if (is_fp8(call.a.type)) {
    XD_REQUIRE(is_fp8(call.b.type), "b: is ", dtype_name(call.b.type),
               ", expected float8_e4m3fn or float8_e5m2, as a is ", dtype_name(call.a.type));
    XD_REQUIRE(call.a.type == DType::e4m3 || call.b.type == DType::e4m3,
               "a and b: are both float8_e5m2, expected float8_e4m3fn for one of them");
  } else {
    require_same_type(call.b, call.a);
  }
}

void read_epilogue(const xd_gemm_args& a, const Reader& reader, ProductCall& call) {
  const std::array wide = {call.wide_type()};
  const std::array bias_types = {call.wide_type(), DType::f32};
  call.c = reader.matrix(a.c, "c", wide, true);
  if (call.c) require_shape(call.c, call.d.rows, "rows of d", call.n, "N");
  call.bias = reader.vector(a.bias, "bias", bias_types);
  if (call.bias) require_rows(call.bias, call.n, "N");
  call.pre_activation =
      reader.matrix(a.pre_activation, "pre_activation", kWideTypes, !call.has_activation_input());
  if (call.pre_activation) {
    XD_REQUIRE(call.epilogue != XD_GEMM_EPILOGUE_NONE,
               "pre_activation: given with XD_GEMM_EPILOGUE_NONE, expected NULL");
    require_shape(call.pre_activation, call.d.rows, "rows of d", call.n, "N");
  }
  call.bias_grad = reader.vector(a.bias_grad, "bias_grad", kFloatTypes);
  if (call.bias_grad) require_rows(call.bias_grad, call.n, "N");
  XD_REQUIRE(!call.reduce_bias_grad || call.bias_grad,
             "bias_grad = NULL with reduce_bias_grad = 1, expected a tensor");
  call.d_amax = reader.number(a.d_amax, "d_amax");
  call.d_scale = reader.number(a.d_scale, "d_scale");
  XD_REQUIRE(!call.d_scale || is_fp8(call.d.type), "d_scale: given with d of ",
             dtype_name(call.d.type), ", expected NULL: it is for fp8");
}

// b has rows enough to tell one number from one per row. Rows of a may be a single one, on some
// ranks only: so they have numbers of their own where those of b have.
Scaling scaling_of(const xd_gemm_args& a, const ProductCall& call) {
  if (!call.a_scale && !call.b_scale) return Scaling::none;
  const DLTensor& user = call.b_scale ? *a.b_scale : *a.a_scale;
  if (user.ndim == 2) return Scaling::blocks;
  return call.b_scale && call.b_scale.rows != 1 ? Scaling::rows : Scaling::tensor;
}

// Checks scales of `rows` rows of tokens of a.
void require_row_scales(const Tensor& scales, const ProductCall& call, std::int64_t rows) {
  if (!scales) return;
  const std::int64_t columns = call.scaling == Scaling::blocks ? scale_blocks(call.k) : 1;
  require_shape(scales, rows, "one per row of tokens", columns,
                call.scaling == Scaling::blocks ? "ceil(K / 128)" : "one dimension, as b_scale");
}

void read_scales(const xd_gemm_args& a, const Reader& reader, ProductCall& call) {
  call.a_scale = reader.scales(a.a_scale, "a_scale");
  call.b_scale = reader.scales(a.b_scale, "b_scale");
  call.scaling = scaling_of(a, call);
  if (call.scaling == Scaling::none) return;
  XD_REQUIRE(is_fp8(call.a.type), call.a_scale ? "a_scale" : "b_scale", ": given with a of ",
             dtype_name(call.a.type), ", expected NULL: scales are for fp8");
  if (call.scaling == Scaling::tensor) {
    if (call.a_scale) {
      require_shape(call.a_scale, 1,
                    call.b_scale ? "a single number, as b_scale"
                                 : "a single number: one per row goes with one per row of b_scale",
                    1, "");
    }
    return;
  }
  require_row_scales(call.a_scale, call, call.a_rows);
  if (!call.b_scale) return;
  if (call.scaling == Scaling::blocks) {
    require_shape(call.b_scale, scale_blocks(call.n), "ceil(N / 128)", scale_blocks(call.k),
                  "ceil(K / 128)");
  } else {
    require_rows(call.b_scale, call.n, "N");
  }
}

void read_gathered(const xd_gemm_args& a, const Reader& reader, int ranks, ProductCall& call) {
  const bool gathers = call.operation == XD_GEMM_ALL_GATHER;
  XD_REQUIRE(gathers || (a.gathered == nullptr && a.gathered_scale == nullptr),
             "gathered or gathered_scale: given, expected NULL: they are for all_gather");
  const std::array type = {call.a.type};
  call.gathered = reader.matrix(a.gathered, "gathered", type, true);
  call.gathered_scale = reader.scales(a.gathered_scale, "gathered_scale");
  if (call.gathered && call.transpose_a) {
    require_shape(call.gathered, call.k, "K", call.shares.all(), "tokens of all ranks");
  } else if (call.gathered) {
    require_shape(call.gathered, call.shares.all(), "tokens of all ranks", call.k, "K");
  }
  if (!call.gathered_scale) return;
  XD_REQUIRE(call.a_scale, "gathered_scale: given, expected NULL as a_scale is");
  if (call.scaling == Scaling::tensor) {
    require_rows(call.gathered_scale, ranks, "one per rank");
  } else {
    require_row_scales(call.gathered_scale, call, call.shares.all());
  }
}

void require_element_fits(const char* name, std::uint64_t bytes, std::uint64_t most) {
  XD_REQUIRE(bytes <= most, name, ": has elements of ", bytes,
             " bytes, expected at most those of config.dtype, ", most);
}

// Checks the sizes of the operation against the context's bounds, and reads who has which rows.
void read_sizes(const xd_gemm_args& a, const CallContext& context, ProductCall& call) {
  const Config& config = *context.config;
  std::int64_t d_rows = call.a_rows;
  if (call.operation == XD_GEMM_ALL_GATHER) {
    call.shares = read_own_shares(a.tokens_per_rank, "a", call.a_rows, context);
    XD_REQUIRE(call.k <= config.max_k, "a: has K = ", call.k,
               ", expected at most max_k = ", config.max_k);
    require_element_fits("a", dtype_bytes(call.a.type), config.gathered_bytes());
    d_rows = call.shares.all();
  } else if (call.operation == XD_GEMM_REDUCE_SCATTER) {
    call.shares = read_all_shares(a.tokens_per_rank, "a", call.a_rows, context);
    d_rows = call.shares.rows(context.rank);
  } else if (call.operation == XD_GEMM_ALL_REDUCE) {
    XD_REQUIRE(call.a_rows <= config.all_tokens(), "a: has ", call.a_rows,
               " tokens, expected at most num_ranks * max_tokens = ", config.all_tokens());
  }
  require_shape(call.d, d_rows, "tokens of d", call.n, "N");
  if (call.operation == XD_GEMM_BULK) return;
  XD_REQUIRE(call.n <= config.max_n, "b: has N = ", call.n,
             ", expected at most max_n = ", config.max_n);
  if (call.operation != XD_GEMM_ALL_GATHER) {
    require_element_fits("d", dtype_bytes(call.wide_type()), config.summed_bytes());
  }
}

// The tensors of a call, by what happens to them.
class Uses {
 public:
  void reads(const Tensor& tensor) { inputs_.at(input_count_++) = &tensor; }
  void writes(const Tensor& tensor) { outputs_.at(output_count_++) = &tensor; }
  void uses(const ProductCall& call) {
    for (const Tensor* t :
         {&call.a, &call.b, &call.bias, &call.a_scale, &call.b_scale, &call.d_scale}) {
      reads(*t);
    }
    for (const Tensor* t :
         {&call.d, &call.bias_grad, &call.d_amax, &call.gathered, &call.gathered_scale}) {
      writes(*t);
    }
    if (call.c.data != call.d.data) reads(call.c);
    call.has_activation_input() ? reads(call.pre_activation) : writes(call.pre_activation);
  }

  // Outputs share no memory with anything else, but that c may be d.
  void require_apart() const {
    for (std::size_t i = 0; i < output_count_; ++i) {
      for (std::size_t j = 0; j < i; ++j) xd::require_apart(*outputs_[i], *outputs_[j]);
      for (std::size_t j = 0; j < input_count_; ++j) xd::require_apart(*outputs_[i], *inputs_[j]);
    }
  }

 private:
  std::array<const Tensor*, 10> inputs_{}, outputs_{};
  std::size_t input_count_ = 0, output_count_ = 0;
};

ProductCall read_args(xd_gemm_operation operation, const xd_gemm_args& a,
                      const CallContext& context) {
  const Reader reader(context);
  ProductCall call{.operation = operation};
  read_options(a, *context.config, call);
  read_operands(a, reader, call);
  read_sizes(a, context, call);
  read_epilogue(a, reader, call);
  read_scales(a, reader, call);
  read_gathered(a, reader, context.config->ranks, call);
  if (!context.shape_only) {
    Uses uses;
    uses.uses(call);
    uses.require_apart();
  }
  if (call.beta == 0) call.c = {};  // as in BLAS: it may be uninitialised memory
  if (call.reduce_bias_grad && operation == XD_GEMM_ALL_REDUCE) {
    fail(XD_ERROR_UNSUPPORTED,
         "reduce_bias_grad = 1, expected 0 in all_reduce: all ranks have all rows");
  }
  XD_REQUIRE(!call.reduce_bias_grad || operation != XD_GEMM_BULK,
             "product.reduce_bias_grad = 1, expected 0: the product is this rank's alone");
  return call;
}

void read_transfer(const DLTensor* in, const DLTensor* out, const std::int64_t* tokens,
                   const CallContext& context, TransferCall& call) {
  const Reader reader(context);
  const Config& config = *context.config;
  const std::span<const DType> types =
      call.reduces ? std::span<const DType>(kWideTypes) : std::span<const DType>(kAllTypes);
  call.in = reader.matrix(in, "in", types);
  call.out = reader.matrix(out, "out", types);
  require_same_type(call.out, call.in);
  require_cols(call.out, call.in.cols, "columns of in");
  const Tensor& own = call.reduces ? call.out : call.in;
  const Tensor& all = call.reduces ? call.in : call.out;
  call.shares = read_own_shares(tokens, own.name, own.rows, context);
  require_rows(all, call.shares.all(), "tokens of all ranks");
  const std::uint64_t most = call.reduces ? at(config.max_n) * config.summed_bytes()
                                          : at(config.max_k) * config.gathered_bytes();
  XD_REQUIRE(call.in.row_bytes() > 0 && call.in.row_bytes() <= most, "in: a row has ",
             call.in.row_bytes(), " bytes, expected 1 to ", most, " (",
             call.reduces ? "max_n" : "max_k", " elements of the context)");
}

}  // namespace

std::uint64_t Shares::fingerprint() const {
  std::uint64_t hash = starts_.size();
  for (const std::int64_t start : starts_) {
    hash = hash_combine(hash, static_cast<std::uint64_t>(start));
  }
  return hash;
}

ProductCall read_product(xd_gemm_operation operation, const xd_gemm_args* args,
                         const CallContext& context) {
  require_configured(*context.config, operation);
  const auto a = read_struct("args", args, xd_gemm_args XD_GEMM_ARGS_INIT);
  return read_args(operation, a, context);
}

TransferCall read_bulk(const xd_gemm_bulk_args* args, const CallContext& context) {
  require_configured(*context.config, XD_GEMM_BULK);
  const auto a = read_struct("args", args, xd_gemm_bulk_args XD_GEMM_BULK_ARGS_INIT);
  const int collective = raw_enum(a.collective);
  XD_REQUIRE(collective == XD_GEMM_ALL_GATHER || collective == XD_GEMM_REDUCE_SCATTER,
             "collective = ", collective,
             ", expected XD_GEMM_ALL_GATHER or XD_GEMM_REDUCE_SCATTER");
  TransferCall call{
      .operation = XD_GEMM_BULK, .reduces = collective == XD_GEMM_REDUCE_SCATTER, .tag = a.tag};
  read_transfer(a.in, a.out, a.tokens_per_rank, context, call);
  if (a.product != nullptr) {
    const auto product = read_struct("product", a.product, xd_gemm_args XD_GEMM_ARGS_INIT);
    call.product = read_args(XD_GEMM_BULK, product, context);
  }
  Uses uses;
  uses.reads(call.in);
  uses.writes(call.out);
  if (call.product) uses.uses(*call.product);
  uses.require_apart();
  return call;
}

TransferCall read_gather(const xd_gemm_gather_args* args, const CallContext& context) {
  require_configured(*context.config, XD_GEMM_START_ALL_GATHER);
  const auto a = read_struct("args", args, xd_gemm_gather_args XD_GEMM_GATHER_ARGS_INIT);
  TransferCall call{.operation = XD_GEMM_START_ALL_GATHER, .tag = a.tag};
  read_transfer(a.in, a.out, a.tokens_per_rank, context, call);
  require_apart(call.out, call.in);
  return call;
}

namespace {

std::uint8_t flags_of(const ProductCall& call) {
  int flags = (call.transpose_a ? kTransposeA : 0) | (call.transpose_b ? kTransposeB : 0) |
              (call.reduce_bias_grad ? kReduceBiasGrad : 0) |
              (call.allow_tf32 && call.a.type == DType::f32 ? kAllowTf32 : 0);
  if (call.operation == XD_GEMM_ALL_REDUCE) {
    flags |= (call.d_amax ? kWantsAmax : 0) | (call.bias_grad ? kWantsBiasGrad : 0) |
             (call.writes_pre_activation() ? kWantsPreActivation : 0);
  }
  return static_cast<std::uint8_t>(flags);
}

std::uint8_t given_in(const ProductCall& call) {
  return static_cast<std::uint8_t>(
      (call.c ? kGivesC : 0) | (call.bias ? kGivesBias : 0) |
      (call.pre_activation ? kGivesPreActivation : 0) | (call.bias_grad ? kGivesBiasGrad : 0) |
      (call.d_amax ? kGivesAmax : 0) | (call.b_scale ? kGivesBScale : 0));
}

}  // namespace

Record record_of(const ProductCall& call, xd_gemm_algo algo) {
  Record record;
  record.call.operation = static_cast<std::uint8_t>(call.operation);
  record.algo = static_cast<std::uint8_t>(algo);
  record.a_type = static_cast<std::uint8_t>(call.a.type);
  record.b_type = static_cast<std::uint8_t>(call.b.type);
  record.d_type = static_cast<std::uint8_t>(call.d.type);
  record.epilogue = static_cast<std::uint8_t>(call.epilogue);
  record.flags = flags_of(call);
  record.k = static_cast<std::uint32_t>(call.k);
  record.n = static_cast<std::uint32_t>(call.n);
  record.fingerprint =
      call.operation == XD_GEMM_ALL_REDUCE ? at(call.a_rows) : call.shares.fingerprint();
  record.scaling =
      static_cast<std::uint16_t>(static_cast<int>(call.scaling) << 1 | (call.a_scale ? 1 : 0));
  if (is_cublasmp(algo)) record.given = given_in(call);
  record.tag = call.tag;
  return record;
}

Record record_of(const TransferCall& call) {
  Record record;
  record.call.operation = static_cast<std::uint8_t>(call.operation);
  record.a_type = static_cast<std::uint8_t>(call.in.type);
  record.flags = static_cast<std::uint8_t>(call.reduces ? kBulkReduces : 0);
  record.k = static_cast<std::uint32_t>(call.in.row_bytes());
  record.fingerprint = call.shares.fingerprint();
  record.tag = call.tag;
  return record;
}

}  // namespace xd::gemm
