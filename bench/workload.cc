#include "workload.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>

#include "routing.h"

namespace bench {
namespace {

template <class T>
T whole_number(const std::string& option, const std::string& text, T least, T most) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < least || value > most) {
    throw std::invalid_argument(option + " " + text + ": expected a whole number from " +
                                std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

template <class T>
T one_of(const std::string& option, const std::string& text, const std::vector<T>& choices) {
  std::string expected;
  for (const T choice : choices) {
    if (text == name_of(choice)) return choice;
    expected += std::string(expected.empty() ? "" : ", ") + name_of(choice);
  }
  throw std::invalid_argument(option + " " + text + ": expected one of " + expected);
}

void check(const Workload& w) {
  if (w.experts % w.ranks != 0) {
    throw std::invalid_argument("--experts " + std::to_string(w.experts) +
                                ": expected a multiple of " + std::to_string(w.ranks) +
                                ", the number of ranks");
  }
  if (w.topk > w.experts) throw std::invalid_argument("--topk is larger than --experts");
  if (w.row_bytes() % 16 != 0) {
    throw std::invalid_argument("--hidden " + std::to_string(w.hidden) +
                                ": expected rows of a multiple of 16 bytes");
  }
  if ((w.alignment & (w.alignment - 1)) != 0) {
    throw std::invalid_argument("--alignment " + std::to_string(w.alignment) +
                                ": expected a power of two");
  }
}

// Bits of i / 128 - 1 in each type.
std::uint32_t element_bits(Element element, int i) {
  const float value = static_cast<float>(i) / 128.0f - 1.0f;
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  if (element == Element::fp32) return bits;
  if (element == Element::bf16) return bits >> 16;
  // The value is 0 or a normal number of fp16: its exponent only needs another bias.
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  return sign | (value == 0 ? 0 : ((bits & 0x7fffffffu) >> 13) - (112u << 10));
}

}  // namespace

const char* name_of(Layout layout) { return layout == Layout::expert ? "expert" : "rank"; }

const char* name_of(Element element) {
  switch (element) {
    case Element::bf16:
      return "bf16";
    case Element::fp16:
      return "fp16";
    case Element::fp32:
      return "fp32";
  }
  return "?";
}

const char* options_help() {
  return R"(usage: crossdock-run -n N [--threads] crossdock-bench ep [options]

Times prepare, dispatch, combine and both backward operations, every iteration
with a common start; a time is the maximum over the ranks. Beside it: the same
dispatch and combine through MPI_Alltoallv, and a plain copy of the same bytes.

  --tokens N      per rank (1024)            --experts N     in all (64)
  --hidden N      elements of a row (4096)   --topk N        experts of a token (8)
  --layout L      expert or rank (expert)    --dtype D       bf16, fp16, fp32 (bf16)
  --alignment N   of expert zones (1)        --seed N        of routing and data (1)
  --routing R     uniform; zipf or zipf:S, expert e with weight 1/(e+1)^S; file:PATH,
                  lines of --topk expert ids, tokens of rank 0 first (uniform)
  --zero-copy     tensors in symmetric memory (default)
  --staged        tensors in ordinary memory; with --zero-copy: both, one after another
  --iters N       timed iterations (30)      --warmup N      before them (5)
  --json FILE     write the table's rows     --no-peer       leave MPI out
)";
}

Options parse_options(const std::vector<std::string>& arguments, int ranks) {
  Options options;
  Workload& w = options.workload;
  DriverOptions& driver = options.driver;
  w.ranks = ranks;
  using Take = std::function<void(const std::string&, const std::string&)>;
  const auto number = [](int& field, int least) -> Take {
    return [&field, least](const auto& option, const auto& text) {
      field = whole_number(option, text, least, 1 << 24);
    };
  };
  const std::map<std::string, Take> valued{
      {"--tokens", number(w.tokens, 0)},
      {"--hidden", number(w.hidden, 1)},
      {"--topk", number(w.topk, 1)},
      {"--experts", number(w.experts, 1)},
      {"--alignment", number(w.alignment, 1)},
      {"--iters", number(w.iters, 1)},
      {"--warmup", number(w.warmup, 0)},
      {"--seed",
       [&](const auto& option, const auto& text) {
         w.seed = whole_number<std::uint64_t>(option, text, 0, UINT64_MAX);
       }},
      {"--layout",
       [&](const auto& option, const auto& text) {
         w.layout = one_of<Layout>(option, text, {Layout::expert, Layout::rank});
       }},
      {"--dtype",
       [&](const auto& option, const auto& text) {
         w.element = one_of<Element>(option, text, {Element::bf16, Element::fp16, Element::fp32});
       }},
      {"--routing", [&](const auto&, const auto& text) { w.routing = text; }},
      {"--json", [&](const auto&, const auto& text) { driver.json = text; }},
  };
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& option = arguments[i];
    if (option == "--staged") {
      driver.staged = true;
    } else if (option == "--zero-copy") {
      driver.zero_copy = true;
    } else if (option == "--no-peer") {
      driver.peer = false;
    } else if (const auto take = valued.find(option); take == valued.end()) {
      throw std::invalid_argument("unknown option '" + option + "'");
    } else if (++i == arguments.size()) {
      throw std::invalid_argument(option + " needs a value");
    } else {
      take->second(option, arguments[i]);
    }
  }
  if (!driver.staged) driver.zero_copy = true;
  check(w);
  return options;
}

void fill_tokens(const Workload& w, int rank, void* tokens) {
  std::array<std::uint32_t, 256> table{};
  for (int i = 0; i < 256; ++i) table[static_cast<std::size_t>(i)] = element_bits(w.element, i);
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
