// The workload of a measurement: sizes, routing and payload of one EP batch. The library's
// benchmark and its MPI peer both take it from the same command line, so that they move the same
// rows.
#pragma once

#include <crossdock/quantise.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace bench {

enum class Layout { expert, rank };
enum class Receive { slots, by_expert, by_rank };  // of low latency
// The last two are fp8 rows with a float32 scale per 128 columns: rows that are given as fp8, and
// rows that are quantised on the way.
enum class Element { bf16, fp16, fp32, fp8, bf16_to_fp8 };
enum class Device { cpu, cuda };
inline constexpr xd_ep_wire kWires[] = {XD_EP_WIRE_SAME, XD_EP_WIRE_FLOAT32,
                                        XD_EP_WIRE_FP8_BLOCK128, XD_EP_WIRE_FP8_BLOCK128_POW2,
                                        XD_EP_WIRE_FP8_BLOCK128_E8M0};

struct Workload {
  int ranks = 0;  // ranks of the launch; not on the command line
  int tokens = 1024;
  int hidden = 4096;
  int topk = 8;
  int experts = 64;
  int alignment = 1;
  bool weighted = false;  // choices have weights
  bool tables = false;    // ids name logical experts, as many, each in the slot of its number
  Layout layout = Layout::expert;
  Receive receive = Receive::slots;  // of low latency alone; `layout` is the one that fits it
  int sms = 0;                       // CUDA, likewise: the group's budget; 0 = the library's choice
  Element element = Element::bf16;
  xd_ep_wire combine_wire = XD_EP_WIRE_SAME;
  std::string routing = "uniform";  // uniform, zipf, zipf:EXPONENT, hot, file:PATH
  std::uint64_t seed = 1;
  int iters = 0;  // 0: by device
  int warmup = -1;

  int local_experts() const { return experts / ranks; }
  // combine multiplies rows by their weights.
  bool is_scaled() const { return weighted && layout == Layout::expert; }
  // The weight of a token's choice k. Sums of 32 times any payload are exact in every type.
  static int weight_of(int k) { return k == 0 ? 2 : 1; }
  bool is_fp8() const { return element == Element::fp8 || element == Element::bf16_to_fp8; }
  // Bytes of an element of the tokens.
  std::size_t element_bytes() const {
    return element == Element::fp8 ? 1 : element == Element::fp32 ? 4 : 2;
  }
  std::size_t row_bytes() const { return static_cast<std::size_t>(hidden) * element_bytes(); }
  bool has_codes() const { return combine_wire > XD_EP_WIRE_FLOAT32; }
  // Bytes of a row that crosses, scales included: of combine, if it has a wire.
  std::size_t wire_row_bytes() const {
    const auto columns = static_cast<std::size_t>(hidden);
    if (combine_wire == XD_EP_WIRE_FLOAT32) return columns * sizeof(float);
    return is_fp8() || has_codes() ? columns + columns / 128 * sizeof(float) : row_bytes();
  }
};

// Options of the driver alone; the peer is started with the same arguments and ignores these.
struct DriverOptions {
  Device device = Device::cpu;
  std::string preset;     // CUDA: cases to measure instead of one workload
  int ranks = 0;          // CUDA without a launcher: threads of this process; 0 = one per device
  int ranks_per_gpu = 0;  // 0 = as few as possible
  std::vector<int> sms{
      0};                // CUDA: budgets of the group, one after another; 0 = the library's choice
  bool graph = false;    // CUDA: each operation is a captured graph
  bool overlap = false;  // CUDA: also beside a product
  int chain = 0;         // batches of a chain; 0 = none: single operations
  std::vector<std::string> operations;  // CUDA; empty: all that the dtype allows
  bool staged = false;
  bool zero_copy = false;
  bool no_peer = false;
  std::string json;  // file; empty: none
};

struct Options {
  Workload workload;
  DriverOptions driver;
};

const char* options_help();

// Throws std::invalid_argument naming the option, what was expected and what came. The number of
// ranks stays open.
Options parse_options(std::vector<std::string> arguments);

// Parses options that are complete, and checks them.
Options parse_options(std::vector<std::string> arguments, int ranks);

// The bits of a number that the type has exactly, and that is no subnormal one.
std::uint32_t bits_of(Element element, float value);

// Throws std::invalid_argument if sizes do not go together.
void check(const Workload& workload);

const char* name_of(Layout layout);
const char* name_of(Receive receive);
const char* name_of(Element element);
const char* name_of(xd_ep_wire wire);
const char* name_of(Device device);

// Payload elements are multiples of 1/128 in [-1, 1), exact in every type; they depend on the seed,
// the rank, the token and the column only.
void fill_tokens(const Workload& workload, int rank, void* tokens);

// A checksum of bytes, 8 at a time, that sees their order.
std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t start);

}  // namespace bench
