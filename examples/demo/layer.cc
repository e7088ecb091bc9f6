#include "layer.h"

namespace demo {

float seeded(std::uint64_t seed, std::uint64_t index, float scale) {
  std::uint64_t x = (seed << 40) + index + 0x9E3779B97F4A7C15u;  // splitmix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return (static_cast<float>(x >> 40) * 0x1p-23f - 1.0f) * scale;
}

void fill_seeded(std::span<float> values, std::uint64_t seed, float scale) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = seeded(seed, i, scale);
}

}  // namespace demo
