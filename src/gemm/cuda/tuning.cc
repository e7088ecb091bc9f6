#include "gemm/cuda/tuning.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "base/error.h"
#include "base/math.h"
#include "cuda/error.h"
#include "gemm/cuda/call_shape.h"
#include "gemm/cuda/fill.h"
#include "gemm/cuda/kernel_loader.h"
#include "gemm/cuda/products.h"

namespace xd::gemm::cuda {
namespace {

using xd::cuda::Product;
using xd::cuda::ProductShape;
using xd::cuda::lt::Algorithm;

// Another algorithm than the first must be better by more than what times differ by themselves.
constexpr double kBetter = 0.985;
constexpr std::size_t kMostCandidates = 8;
constexpr int kRounds = 5;
// Products between these, by the cost model. Long ones heat the device, and what is fastest alone
// is not fastest then.
constexpr double kLeastUs = 12, kMostUs = 1500;

// Events around launches.
class Stamps {
 public:
  Stamps(int device, std::size_t count) {
    events_.reserve(count);
    while (events_.size() < count) events_.emplace_back(device, cudaEventDefault);
  }

  void record(std::size_t i, cudaStream_t stream) const {
    XD_CUDA_CHECK(cudaEventRecord(events_[i].get(), stream));
  }
  double us_between(std::size_t begin, std::size_t end) const {
    float ms = 0;
    XD_CUDA_CHECK(cudaEventElapsedTime(&ms, events_[begin].get(), events_[end].get()));
    return static_cast<double>(ms) * 1e3;
  }

 private:
  std::vector<xd::cuda::Event> events_;
};

// Numbers of magnitude 1/2 to 1 with random signs and fractions, which draw the power of ordinary
// data.
std::vector<std::uint64_t> some_numbers(DType type, std::size_t words) {
  const auto bits = [&](std::uint64_t keep, std::uint64_t set) {
    std::vector<std::uint64_t> numbers(words);
    std::uint64_t x = 1;
    for (std::uint64_t& number : numbers) {
      x = x * 6364136223846793005u + 1442695040888963407u;
      number = ((x ^ x >> 29) & keep) | set;
    }
    return numbers;
  };
  switch (type) {
    case DType::f32:
      return bits(0x807fffff807fffffu, 0x3f0000003f000000u);
    case DType::f16:
      return bits(0x83ff83ff83ff83ffu, 0x3800380038003800u);
    case DType::e4m3:
      return bits(0x8787878787878787u, 0x3030303030303030u);
    case DType::e5m2:
      return bits(0x8383838383838383u, 0x3838383838383838u);
    default:
      return bits(0x807f807f807f807fu, 0x3f003f003f003f00u);
  }
}

std::uint64_t elements(std::int64_t rows, std::int64_t columns) { return at(rows) * at(columns); }

}  // namespace

Tuner::Tuner(int device, const Config& config, const TuningMemory& memory)
    : device_(device), config_(config), memory_(memory), stream_(device) {}

// Its operands are given to another stream when all products have ended.
Tuner::~Tuner() {
  xd::cuda::try_on_device(device_, [this] { stream_.synchronize(); });
}

std::vector<TunedProduct> Tuner::measure() {
  std::vector<TunedProduct> found;
  try {
    ProductShape before;
    for (const ProductShape& shape : usual_shapes(config_)) {
      // Products that cuBLASLt finishes otherwise take the algorithm of the plain one.
      const bool same = !found.empty() && shape.transpose_a == before.transpose_a &&
                        shape.transpose_b == before.transpose_b;
      if (!same && !shape.transpose_a) measure_order(shape, found);
      before = shape;
    }
  } catch (const Error& error) {
    if (error.status() != XD_ERROR_OUT_OF_MEMORY) throw;
  }
  return found;
}

void Tuner::measure_order(ProductShape shape, std::vector<TunedProduct>& found) {
  const std::int64_t all = config_.all_tokens();
  const std::uint64_t d_bytes = config_.summed_bytes();
  for (std::int64_t rows = 16, last = 0; last < all; last = rows, rows = row_class(rows + 1)) {
    shape.m = std::min(rows, all);
    shape.a_pitch = shape.k;
    shape.b_pitch = shape.transpose_b ? shape.k : shape.n;
    shape.d_pitch = shape.n;
    shape.stores_at_peers = false;
    if (!is_worth_it(shape)) continue;
    const std::uint64_t element = config_.gathered_bytes();
    fill_operands(elements(all, shape.k) * element, elements(shape.n, shape.k) * element);
    if (elements(shape.m, shape.n) * d_bytes <= memory_.scratch_bytes) {
      measure_one(shape, memory_.scratch, found);
    }
    const bool stitched = memory_.stitched != nullptr && shape.transpose_b && !shape.transpose_a;
    if (!stitched || shape.m % config_.ranks != 0) continue;
    shape.d_pitch = cell_pitch(shape.m / config_.ranks, shape.n, static_cast<int>(d_bytes),
                               memory_.cell_bytes, memory_.cell_bytes);
    shape.stores_at_peers = true;
    if (shape.d_pitch != 0) measure_one(shape, memory_.stitched, found);
  }
}

bool Tuner::is_worth_it(const ProductShape& shape) const {
  const bool fp8 = config_.gathered_bytes() == 1;
  const Problem problem{.input_bytes = static_cast<int>(config_.gathered_bytes()),
                        .partial_bytes = static_cast<int>(config_.summed_bytes()),
                        .speed = fp8                          ? 1.7
                                 : config_.type == DType::f32 ? 0.06
                                                              : 1};
  const double us = product_us(Machine{}, shape.m, shape.n, shape.k, problem);
  return us >= kLeastUs && us <= kMostUs;
}

// Once for a tuner: all its products have operands of the same sizes.
void Tuner::fill_operands(std::uint64_t a_bytes, std::uint64_t b_bytes) {
  if (operands_.bytes() != 0) return;
  const std::uint64_t a_end = round_up(a_bytes, 256), all = a_end + round_up(b_bytes, 256);
  operands_ = xd::cuda::DeviceBuffer(device_, all, "operands of timed products");
  b_ = operands_.data() + a_end;
  constexpr std::uint64_t kPiece = std::uint64_t{1} << 20;
  const auto numbers = some_numbers(config_.type, kPiece / sizeof(std::uint64_t));
  fill(operands_, std::as_bytes(std::span(numbers)), stream_);
}

void Tuner::measure_one(const ProductShape& shape, std::byte* d, std::vector<TunedProduct>& found) {
  try {
    Product product(library_, shape, Products::kWorkspaceBytes);
    const std::vector<Algorithm> candidates = product.candidates();
    const std::size_t count = std::min(candidates.size(), kMostCandidates);
    const std::vector<double> us = time(product, count, d);
    std::size_t best = 0;
    for (std::size_t i = 1; i < count; ++i) {
      const double bound = best == 0 ? us[0] * kBetter : us[best];
      if (us[i] < bound) best = i;
    }
    if (std::isfinite(us[best])) found.push_back({class_of(shape), candidates[best], us[best]});
  } catch (const Error& error) {
    if (error.status() != XD_ERROR_UNSUPPORTED) throw;
  }
}

// The median of some rounds, in which the candidates take turns; infinite where one cannot be
// chosen. Before, each has run once: that has loaded its kernels.
std::vector<double> Tuner::time(Product& product, std::size_t candidates, std::byte* d) {
  const auto run = [&](std::size_t i) {
    if (!product.choose(product.candidates()[i])) return false;
    product.run({.a = operands_.data(), .b = b_, .d = d}, 1.0f, 0.0f, memory_.workspace,
                stream_.get());
    return true;
  };
  std::vector<bool> runs;
  for (std::size_t i = 0; i < candidates; ++i) {
    runs.push_back(run(i));
    if (runs[i]) KernelLoader::note(device_, product.shape(), product.candidates()[i]);
  }
  const Stamps stamps(device_, candidates * kRounds * 2);
  for (std::size_t round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < candidates; ++i) {
      const std::size_t stamp = 2 * (round * candidates + i);
      stamps.record(stamp, stream_.get());
      run(i);
      stamps.record(stamp + 1, stream_.get());
    }
  }
  stream_.synchronize();
  std::vector<double> medians;
  for (std::size_t i = 0; i < candidates; ++i) {
    if (!runs[i]) {
      medians.push_back(std::numeric_limits<double>::infinity());
      continue;
    }
    std::array<double, kRounds> us{};
    for (std::size_t round = 0; round < kRounds; ++round) {
      const std::size_t stamp = 2 * (round * candidates + i);
      us[round] = stamps.us_between(stamp, stamp + 1);
    }
    std::ranges::nth_element(us, us.begin() + kRounds / 2);
    medians.push_back(us[kRounds / 2]);
  }
  return medians;
}

}  // namespace xd::gemm::cuda
