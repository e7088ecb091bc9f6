#include "workload.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "option.h"
#include "routing.h"

namespace bench {
namespace {

void add_options(CLI::App& app, Workload& w, DriverOptions& driver) {
  number(app, "--tokens", w.tokens, 0, kMost);
  number(app, "--hidden", w.hidden, 1, kMost);
  number(app, "--topk", w.topk, 1, kMost);
  number(app, "--experts", w.experts, 1, kMost);
  number(app, "--alignment", w.alignment, 1, kMost);
  number(app, "--iters", w.iters, 1, kMost);
  number(app, "--warmup", w.warmup, 0, kMost);
  number(app, "--seed", w.seed, std::uint64_t{0}, UINT64_MAX);
  word(app, "--layout", w.layout, {Layout::expert, Layout::rank});
  word(app, "--dtype", w.element,
       {Element::bf16, Element::fp16, Element::fp32, Element::fp8, Element::bf16_to_fp8});
  word(app, "--combine-wire", w.combine_wire, {std::begin(kWires), std::end(kWires)});
  app.add_option("--routing", w.routing);
  app.add_flag("--weighted", w.weighted);
  app.add_flag("--tables", w.tables);

  word(app, "--device", driver.device, {Device::cpu, Device::cuda});
  app.add_option("--preset", driver.preset);
  app.add_option("--json", driver.json);
  number(app, "--ranks", driver.ranks, 1, kMost);
  number(app, "--ranks-per-gpu", driver.ranks_per_gpu, 1, kMost);
  app.add_option("--operations", driver.operations)->delimiter(',');
  app.add_option("--sms", driver.sms)->delimiter(',')->check(CLI::Range(0, 1024));
  number(app, "--chain", driver.chain, 2, kMost);
  app.add_flag("--graph", driver.graph);
  app.add_flag("--overlap", driver.overlap);
  app.add_flag("--staged", driver.staged);
  app.add_flag("--zero-copy", driver.zero_copy);
  app.add_flag("--no-peer", driver.no_peer);
}

}  // namespace

std::uint32_t bits_of(Element element, float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  if (element == Element::fp32) return bits;
  if (element == Element::bf16) return bits >> 16;
  // The value is 0 or a normal number of fp16: its exponent only needs another bias.
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  return sign | (value == 0 ? 0 : ((bits & 0x7fffffffu) >> 13) - (112u << 10));
}

void check(const Workload& w) {
  if (w.experts % w.ranks != 0) {
    throw std::invalid_argument("--experts " + std::to_string(w.experts) +
                                ": expected a multiple of " + std::to_string(w.ranks) +
                                ", the number of ranks");
  }
  if (w.topk > w.experts) throw std::invalid_argument("--topk is larger than --experts");
  if (w.is_fp8() && w.combine_wire != XD_EP_WIRE_SAME) {
    throw std::invalid_argument("--combine-wire: expected same where --dtype is fp8 or bf16-fp8");
  }
  if ((w.is_fp8() || w.has_codes()) && w.hidden % 128 != 0) {
    throw std::invalid_argument("--hidden " + std::to_string(w.hidden) +
                                ": expected a multiple of 128, the columns of one scale");
  }
  if (w.row_bytes() % 16 != 0) {
    throw std::invalid_argument("--hidden " + std::to_string(w.hidden) +
                                ": expected rows of a multiple of 16 bytes");
  }
  if ((w.alignment & (w.alignment - 1)) != 0) {
    throw std::invalid_argument("--alignment " + std::to_string(w.alignment) +
                                ": expected a power of two");
  }
}

const char* name_of(Layout layout) { return layout == Layout::expert ? "expert" : "rank"; }

const char* name_of(Receive receive) {
  return receive == Receive::slots       ? "slots"
         : receive == Receive::by_expert ? "by_expert"
                                         : "by_rank";
}

const char* name_of(Element element) {
  switch (element) {
    case Element::bf16:
      return "bf16";
    case Element::fp16:
      return "fp16";
    case Element::fp32:
      return "fp32";
    case Element::fp8:
      return "fp8";
    case Element::bf16_to_fp8:
      return "bf16-fp8";
  }
  return "?";
}

const char* name_of(xd_ep_wire wire) {
  switch (wire) {
    case XD_EP_WIRE_SAME:
      return "same";
    case XD_EP_WIRE_FLOAT32:
      return "float32";
    case XD_EP_WIRE_FP8_BLOCK128:
      return "fp8_block128";
    case XD_EP_WIRE_FP8_BLOCK128_POW2:
      return "fp8_block128_pow2";
    case XD_EP_WIRE_FP8_BLOCK128_E8M0:
      return "fp8_block128_e8m0";
  }
  return "?";
}

const char* name_of(Device device) { return device == Device::cuda ? "cuda" : "cpu"; }

const char* options_help() {
  return R"(usage: crossdock-run -n N [--threads] crossdock-bench ep [options]
       crossdock-bench ep --device cuda [options]

Times prepare, dispatch, combine and both backward operations, every iteration
with a common start; a time is the maximum over the ranks. Beside it: the same
bytes as plain copies, and through MPI_Alltoallv (CUDA: NCCL's all-to-all).

  --tokens N      per rank (1024)            --experts N     in all (64)
  --hidden N      elements of a row (4096)   --topk N        experts of a token (8)
  --layout L      expert or rank (expert)    --dtype D       bf16, fp16, fp32 (bf16);
  --alignment N   of expert zones (1)                        CUDA also fp8, bf16-fp8
  --routing R     uniform; zipf or zipf:S, expert e with weight 1/(e+1)^S; hot, expert 0
                  for every token; file:PATH, lines of --topk expert ids, tokens of
                  rank 0 first (uniform)
  --combine-wire W  CUDA: combine also under a wire: float32, fp8_block128, or that with
                  _pow2 or _e8m0 behind it; its sums are not compared
  --weighted      choices have weights, which combine multiplies by in layout expert, and
                  which have gradients (else none)
  --tables        a table of slots stands between ids and experts
  --zero-copy     tensors in symmetric memory (default)
  --staged        tensors in ordinary memory; with --zero-copy: both, one after another
  --iters N       timed iterations           --warmup N      before them
                  (CPU 30, CUDA 100)                         (CPU 5, CUDA 10)
  --json FILE     write the table's rows     --no-peer       leave MPI or NCCL out
  --chain N       the period of a batch in streams of N (20) times prepare, dispatch
                  and combine, beside the times of these alone
  --seed N        of routing and data (1)

With --device cuda ranks are threads, one per GPU, or those of crossdock-run:
  --ranks N          how many threads        --ranks-per-gpu N  that share one (1)
  --sms N,N,...      budgets to try, 0 = the library's choice (0)
  --graph            time each operation as a captured graph
  --overlap          also beside a product of all ranks' tokens, [W*T,H] times [H,H],
                     on the multiprocessors that are left: the times of both
  --operations O,O   of prepare, dispatch, combine, dispatch_bwd, combine_bwd
  --preset budget    the operations that have a target, in one table
  --preset wires     combine under each wire, of 4096 and of 128 tokens, in both layouts,
                     with each budget of --sms
  --preset sweep     a table for each of tokens, topk, experts, skew, gpus, sms;
                     sweep:tokens and so on: only that one
)";
}

Options parse_options(std::vector<std::string> arguments) {
  Options options;
  Workload& w = options.workload;
  DriverOptions& driver = options.driver;
  CLI::App app;
  app.set_help_flag();  // its text is options_help()
  add_options(app, w, driver);
  parse_all(app, std::move(arguments));
  if (!driver.staged) driver.zero_copy = true;
  const bool cuda = driver.device == Device::cuda;
  if (w.iters == 0) w.iters = cuda ? 100 : 30;
  if (w.warmup < 0) w.warmup = cuda ? 10 : 5;
  if (!cuda && w.is_fp8()) {
    throw std::invalid_argument(std::string("--dtype ") + name_of(w.element) +
                                " needs --device cuda");
  }
  if (driver.chain != 0 && (w.is_fp8() || !driver.preset.empty() || driver.graph ||
                            driver.overlap || !driver.operations.empty())) {
    throw std::invalid_argument(
        "--chain: expected bf16, fp16 or fp32 without --preset, --graph, --overlap and "
        "--operations, which it does not go with");
  }
  return options;
}

Options parse_options(std::vector<std::string> arguments, int ranks) {
  Options options = parse_options(std::move(arguments));
  options.workload.ranks = ranks;
  check(options.workload);
  return options;
}

void fill_tokens(const Workload& w, int rank, void* tokens) {
  std::array<std::uint32_t, 256> table{};
  for (int i = 0; i < 256; ++i) {
    table[static_cast<std::size_t>(i)] = bits_of(w.element, static_cast<float>(i) / 128.0f - 1.0f);
  }
  const std::size_t count = static_cast<std::size_t>(w.tokens) * static_cast<std::size_t>(w.hidden);
  Random random(w.seed * 1'000'003 + static_cast<std::uint64_t>(rank) + 1);
  auto* out = static_cast<unsigned char*>(tokens);
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < count; ++i, bits >>= 8, out += w.element_bytes()) {
    if (i % 8 == 0) bits = random.next();
    std::memcpy(out, &table[bits & 0xff], w.element_bytes());  // little endian
  }
}

std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t start) {
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint64_t sum = start;
  for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, at + i, sizeof(word));
    sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
    sum ^= sum >> 29;
  }
  return sum;
}

}  // namespace bench
