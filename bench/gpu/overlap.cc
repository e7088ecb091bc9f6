#include "overlap.h"

namespace bench::gpu {
namespace {

constexpr std::size_t kElement = 2;  // bf16

GemmProblem problem_of(const RankContext& at) {
  const Workload& w = at.workload();
  GemmProblem problem;
  problem.shape = {.name = "beside", .operation = XD_GEMM_ALL_GATHER, .n = w.hidden, .k = w.hidden};
  problem.tokens = std::int64_t{w.tokens} * w.ranks;
  problem.element = Element::bf16;
  problem.ranks = 1;
  return problem;
}

std::size_t bytes_of(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(rows * columns) * kElement;
}

}  // namespace

Overlap::Overlap(const RankContext& context)
    : at_(context),
      a_(nullptr, side_, bytes_of(problem_of(context).tokens, context.workload().hidden)),
      b_(nullptr, side_, bytes_of(context.workload().hidden, context.workload().hidden)),
      d_(nullptr, side_, a_.bytes()),
      product_(problem_of(context), {.a = a_.data(), .b = b_.data(), .d = d_.data()}, side_) {
  for (cudaEvent_t* event : {&start_, &operation_end_, &product_end_}) {
    ok(cudaEventCreate(event), "cudaEventCreate");
  }
}

Overlap::~Overlap() {
  for (cudaEvent_t event : {start_, operation_end_, product_end_}) cudaEventDestroy(event);
}

// Behind what is on the context's stream, which then waits for it.
void Overlap::enqueue_product() {
  ok(cudaStreamWaitEvent(side_, start_), "the product waits for the start");
  product_.enqueue();
  ok(cudaEventRecord(product_end_, side_), "the product's end");
  ok(cudaStreamWaitEvent(at_.stream, product_end_), "the end waits for the product");
}

double Overlap::seconds_between(cudaEvent_t start, cudaEvent_t end) {
  float milliseconds = 0;
  ok(cudaEventElapsedTime(&milliseconds, start, end), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

// The operation is enqueued first and holds its multiprocessors when the product begins.
OverlapTimes Overlap::measure(const std::function<void(int)>& enqueue) {
  std::vector<double> alone, operation, product;
  int done = 0;
  const auto timed = [&] { return done++ >= at_.iterations().warmup; };
  Stopwatch::Part product_alone{[&](int) {
    ok(cudaEventRecord(start_, at_.stream), "start");
    enqueue_product();
  }};
  product_alone.after = [&] {
    if (timed()) alone.push_back(seconds_between(start_, product_end_));
  };
  at_.watch.measure_parts(at_.iterations(), {product_alone});
  done = 0;
  Stopwatch::Part both{[&](int i) {
    ok(cudaEventRecord(start_, at_.stream), "start");
    enqueue(i);
    ok(cudaEventRecord(operation_end_, at_.stream), "the operation's end");
    enqueue_product();
  }};
  both.after = [&] {
    if (!timed()) return;
    operation.push_back(seconds_between(start_, operation_end_));
    product.push_back(seconds_between(start_, product_end_));
  };
  at_.watch.measure_parts(at_.iterations(), {both});
  return {at_.slowest(alone), at_.slowest(operation), at_.slowest(product)};
}

}  // namespace bench::gpu
