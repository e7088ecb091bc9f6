// What is measured: sizes, routing and payload of one EP batch. The library's benchmark and its MPI
// peer both take it from the same command line, so that they move the same rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace bench {

enum class Layout { expert, rank };
enum class Element { bf16, fp16, fp32 };

struct Workload {
  int ranks = 0;  // of the launch; not on the command line
  int tokens = 1024;
  int hidden = 4096;
  int topk = 8;
  int experts = 64;
  int alignment = 1;
  Layout layout = Layout::expert;
  Element element = Element::bf16;
  std::string routing = "uniform";  // uniform, zipf, zipf:EXPONENT, file:PATH
  std::uint64_t seed = 1;
  int iters = 30;
  int warmup = 5;

  int local_experts() const { return experts / ranks; }
  std::size_t element_bytes() const { return element == Element::fp32 ? 4 : 2; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(hidden) * element_bytes(); }
};

// What only the driver looks at; the peer is started with the same arguments and ignores these.
struct DriverOptions {
  bool staged = false;
  bool zero_copy = false;
  bool peer = true;
  std::string json;  // file; empty: none
};

struct Options {
  Workload workload;
  DriverOptions driver;
};

const char* options_help();

// Throws std::invalid_argument naming the option, what was expected and what came.
Options parse_options(const std::vector<std::string>& arguments, int ranks);

const char* name_of(Layout layout);
const char* name_of(Element element);

// Payload elements are multiples of 1/128 in [-1, 1), exact in every type; they depend on the seed,
// the rank, the token and the column only.
void fill_tokens(const Workload& workload, int rank, void* tokens);

// A checksum of bytes, 8 at a time, that sees their order.
std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t start);

}  // namespace bench
