// The measurement of products on the host: oneDNN's product, the library's collectives.
#include "gemm/cpu/onednn.h"
#include "run.h"

namespace bench {
namespace {

namespace cpu = xd::gemm::cpu;

// Rows of the sum between the two steps of an all-reduce.
std::int64_t part_rows(const GemmProblem& p, int rank) {
  return p.shape.operation == XD_GEMM_ALL_REDUCE ? p.tokens_of(rank) : 0;
}

class HostSteps : public GemmSteps {
 public:
  HostSteps(const GemmProblem& p, const Rank& at, const GemmTensors& tensors,
            xd_gemm_context* context)
      : p_(p),
        t_(tensors),
        context_(context),
        part_(at.comm, host(), payload_type(p.element), {part_rows(p, at.rank), p.shape.n}),
        nothing_(nullptr, host(), payload_type(p.element), {0, p.shape.n}),
        shares_(p.tokens_per_rank()) {}

  bool has_transfer() const override { return true; }
  Sums sums() const override { return Sums::rounded_once; }

  void product() override {
    const Tensor& a = p_.gathers() ? t_.whole : t_.a;
    const Tensor& d = p_.gathers() ? t_.d : t_.whole;
    if (p_.element == Element::fp32) {
      const cpu::Threads threads(cpu::cores_per_rank(p_.ranks));
      cpu::run(cpu::Sgemm{.transpose_a = 'N',
                          .transpose_b = 'T',
                          .m = p_.tokens,
                          .n = p_.shape.n,
                          .k = p_.shape.k,
                          .a = static_cast<const float*>(a.data()),
                          .lda = p_.shape.k,
                          .b = static_cast<const float*>(t_.b.data()),
                          .ldb = p_.shape.k,
                          .beta = 0,
                          .c = static_cast<float*>(d.data()),
                          .ldc = p_.shape.n});
      return;
    }
    // oneDNN's products are of float32: those of other types are the library's, beside a gather of
    // nothing.
    const std::vector<std::int64_t> none(shares_.size(), 0);
    xd_gemm_args product = XD_GEMM_ARGS_INIT;
    product.a = a.dl();
    product.b = t_.b.dl();
    product.d = d.dl();
    xd_gemm_bulk_args args = XD_GEMM_BULK_ARGS_INIT;
    args.product = &product;
    args.in = args.out = nothing_.dl();
    args.tokens_per_rank = none.data();
    ok(xd_gemm_bulk(context_, &args, nullptr));
  }

  void transfer() override {
    if (p_.gathers()) return move(XD_GEMM_ALL_GATHER, t_.a, t_.whole);
    if (p_.scatters()) return move(XD_GEMM_REDUCE_SCATTER, t_.whole, t_.d);
    move(XD_GEMM_REDUCE_SCATTER, t_.whole, part_);
    move(XD_GEMM_ALL_GATHER, part_, t_.d);
  }

 private:
  void move(xd_gemm_operation collective, const Tensor& in, const Tensor& out) const {
    xd_gemm_bulk_args args = XD_GEMM_BULK_ARGS_INIT;
    args.collective = collective;
    args.in = in.dl();
    args.out = out.dl();
    args.tokens_per_rank = shares_.data();
    ok(xd_gemm_bulk(context_, &args, nullptr));
  }

  const GemmProblem& p_;
  const GemmTensors& t_;
  xd_gemm_context* const context_;
  const Tensor part_, nothing_;
  const std::vector<std::int64_t> shares_;
};

}  // namespace

GemmResults run_gemm(const Launch& launch, int rank, const GemmProblem& p) {
  const std::string name = "bench-gemm-" + p.shape.name + std::to_string(p.tokens);
  const std::size_t part =
      static_cast<std::size_t>(part_rows(p, rank) * p.shape.n) * p.element_bytes();
  const std::size_t heap =
      HostStopwatch::kHeapBytes + GemmTensors::heap_bytes(p, rank) + part + (std::size_t{1} << 20);
  const Comm comm = make_comm(launch, rank, {.name = name.c_str(), .heap_bytes = heap});
  HostStopwatch watch(comm.get(), rank);
  const Rank at{rank, p.ranks, comm.get(), host(), watch};
  return measure_gemm(p, at, comm.get(), [&](const GemmTensors& tensors, xd_gemm_context* context) {
    return std::make_unique<HostSteps>(p, at, tensors, context);
  });
}

}  // namespace bench
