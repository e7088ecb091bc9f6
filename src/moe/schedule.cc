#include "moe/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/dtype.h"
#include "base/error.h"
#include "base/math.h"
#include "ep/plan/config.h"

namespace xd::moe {
namespace {

struct Sizes {
  ep::Config config;
  std::int64_t hidden = 0, ffn = 0;
  std::uint64_t element_bytes = 0;
};

Sizes read_sizes(const xd_ep_config* config, std::int32_t ffn) {
  Sizes sizes{.config = ep::read_config(config, 0), .ffn = ffn};
  const DType type = *dtype_of(config->dtype);
  XD_REQUIRE(sizes.config.layout.has_zones, "config.layout: is ", sizes.config.layout.name,
             ", expected EXPERT_MAJOR");
  XD_REQUIRE(type == DType::bf16 || type == DType::f16 || type == DType::f32, "config.dtype: is ",
             dtype_name(type), ", expected bfloat16, float16 or float32");
  sizes.element_bytes = dtype_bytes(type);
  sizes.hidden = config->hidden;
  XD_REQUIRE(ffn >= 1 && ffn <= (1 << 24) && at(ffn) * sizes.element_bytes % kRowAlignment == 0,
             "ffn = ", ffn, ", expected 1 to 16777216, with rows of a multiple of ", kRowAlignment,
             " bytes");
  return sizes;
}

// An H200 device among others of one machine, as measured: bytes and operations per microsecond.
//
// Devices that work without pauses run at their limit of power, and multiply more slowly, least so
// where they cool down while rows travel. A schedule in parts has no such pauses.
struct Device {
  double link = 353e3;                   // to all peers, each way
  double memory = 4.2e6;                 // reads
  double products = 664e6;               // bf16, zones of `full_zone` rows or more
  double full_zone = 512;                // smaller zones leave tiles empty
  double small_zone_loss = 0.176;        // for half of it
  double moved_by_sm[2] = {32e3, 43e3};  // by a multiprocessor in parts of dispatch, and of combine
  double multiprocessors = 132;
  double prepare = 25;          // microseconds
  double tail = 0.033;          // of products, for each launch more
  double slowed = 0.177;        // of products, without pauses
  double cooled_share = 0.566;  // of products in a serial layer that slows none down
};

constexpr double kWorthIt = 0.97;
constexpr int kLeastSms = 16;  // fewer were measured not to keep up
constexpr int kMostRanks = 8;  // a machine's devices; between machines one part moves all rows

// Times of a batch, in microseconds: docs/overlap.md has the formula.
class Times {
 public:
  Times(const Sizes& sizes, std::int64_t tokens) : sizes_(sizes) {
    const double ranks = sizes.config.ranks, topk = sizes.config.max_topk;
    const double row_bytes = static_cast<double>(at(sizes.hidden) * sizes.element_bytes);
    const double rows = static_cast<double>(tokens) * topk;
    const double crossing = static_cast<double>(tokens) * (ranks - 1) * held_by(1);
    const double wire = crossing * row_bytes, local = rows * row_bytes;
    transfer_ = wire / device_.link + local / (2 * device_.memory);
    for (const double rate : device_.moved_by_sm) sm_time_ += (local + 1.5 * wire) / rate;
    const double elements = 3 * static_cast<double>(sizes.hidden) * static_cast<double>(sizes.ffn);
    const double experts = static_cast<double>(sizes.config.experts) / ranks;
    const double fill = std::max(device_.full_zone * experts / std::max(rows, 1.0), 1.0);
    const double computed =
        2 * rows * elements / device_.products * (1 + device_.small_zone_loss * (fill - 1));
    const double weights = experts * elements * static_cast<double>(sizes.element_bytes);
    products_ = std::max(computed, weights / device_.memory);
  }

  double serial() const {
    const double cool = device_.prepare + 2 * transfer_ + products_;
    const double heat = (products_ / cool - device_.cooled_share) / (1 - device_.cooled_share);
    return cool + products_ * device_.slowed * std::max(heat, 0.0);
  }
  double in_parts(int parts) const {
    const double first = held_by(parts) / held_by(1);  // the share of rows that cross with part 1
    return device_.prepare + first * 2 * transfer_ +
           products_ * (1 + device_.slowed + device_.tail * (parts - 1)) +
           (1 - first) * sm_time_ / device_.multiprocessors;
  }
  // Multiprocessors that keep up with the products beside them.
  int sms() const {
    const int wanted = static_cast<int>(std::ceil(sm_time_ / products_));
    return std::max(kLeastSms, std::min(wanted, static_cast<int>(device_.multiprocessors / 2)));
  }

 private:
  // The chance that a token has an expert in one part of `parts` of a rank.
  double held_by(int parts) const {
    const double share = 1.0 / (static_cast<double>(sizes_.config.ranks) * parts);
    double none = 1;  // a product and no power, whose last bit libraries give differently
    for (int choice = 0; choice < sizes_.config.max_topk; ++choice) none *= 1 - share;
    return 1 - none;
  }

  const Sizes& sizes_;
  const Device device_;
  double transfer_ = 0;  // of dispatch, and of combine
  double sm_time_ = 0;   // multiprocessors times microseconds, of both
  double products_ = 0;
};

}  // namespace

xd_moe_memory memory_of(const xd_ep_config* config, std::int32_t ffn) {
  const Sizes sizes = read_sizes(config, ffn);
  const std::uint64_t rows = at(sizes.config.capacity);
  const std::uint64_t row = at(sizes.hidden) * sizes.element_bytes;
  const std::uint64_t inner = at(3 * sizes.ffn) * sizes.element_bytes;  // with activated
  xd_moe_memory memory XD_MOE_MEMORY_INIT;
  memory.rows = sizes.config.capacity;
  memory.kept_bytes = rows * (2 * row + inner + sizeof(float));
  memory.backward_bytes = memory.kept_bytes;
  memory.row_tensor_bytes = rows * row;
  return memory;
}

xd_moe_overlap choose_schedule(const xd_ep_config* config, std::int32_t ffn, std::int32_t tokens) {
  const Sizes sizes = read_sizes(config, ffn);
  XD_REQUIRE(tokens >= 0 && tokens <= sizes.config.max_tokens, "tokens = ", tokens,
             ", expected 0 to max_tokens_per_rank = ", sizes.config.max_tokens);
  xd_moe_overlap best XD_MOE_OVERLAP_INIT;
  const int ranks = sizes.config.ranks;
  const bool multiplied = dtype_of(config->dtype) != DType::f32;  // by kernels of CUDA
  if (sizes.config.device_type != kDLCUDA || ranks == 1 || ranks > kMostRanks || !multiplied) {
    return best;
  }
  const Times times(sizes, tokens != 0 ? tokens : sizes.config.max_tokens);
  for (const int parts : {2, 4, 8, 16}) {
    if (parts > sizes.config.most_parts()) break;
    const double ratio = times.in_parts(parts) / times.serial();
    if (ratio > kWorthIt || ratio >= best.predicted_ratio) continue;
    best.parts = parts;
    best.predicted_ratio = ratio;
  }
  if (best.parts == 0) return best;
  best.num_sms = times.sms();
  if (sizes.config.num_sms > 0) best.num_sms = std::min(best.num_sms, sizes.config.num_sms);
  return best;
}

}  // namespace xd::moe
