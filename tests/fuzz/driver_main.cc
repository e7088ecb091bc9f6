// main() of a fuzz target where libFuzzer is absent: mutations of the target's valid inputs, and
// random bytes.   <target> [seconds = 5] [seed = random]
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "fuzz/seeds.h"

namespace {

using Input = std::vector<std::byte>;
using Random = std::mt19937_64;

constexpr std::size_t kMaxRandomBytes = 512;
constexpr std::size_t kMaxInputBytes = 65536;

Input current;

// A crash leaves the input behind in hexadecimal, in a form that a signal handler may write.
void print_input(int signal) {
  const auto put = [](const char* text, std::size_t size) {
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, size);
  };
  put("input: ", 7);
  for (const std::byte byte : current) {
    const char digits[]{"0123456789abcdef"[std::to_integer<unsigned>(byte) >> 4],
                        "0123456789abcdef"[std::to_integer<unsigned>(byte) & 15]};
    put(digits, 2);
  }
  put("\n", 1);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

std::size_t below(Random& random, std::size_t limit) {
  return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random);
}

void mutate_once(Input& input, Random& random) {
  static constexpr unsigned char kNotable[]{0, 1, 0x7f, 0x80, 0xff};
  const std::size_t at = input.empty() ? 0 : below(random, input.size());
  const auto here = input.begin() + static_cast<std::ptrdiff_t>(at);
  switch (input.empty() ? 3 : below(random, 6)) {
    case 0:
      *here ^= std::byte{1} << below(random, 8);
      break;
    case 1:
      *here = std::byte{kNotable[below(random, std::size(kNotable))]};
      break;
    case 2:
      input.resize(at);
      break;
    case 3:
      input.insert(here, below(random, 64) + 1, std::byte(below(random, 256)));
      break;
    case 4:
      input.erase(here);
      break;
    default: {
      const Input tail(here, input.end());
      input.insert(input.end(), tail.begin(), tail.end());
    }
  }
  if (input.size() > kMaxInputBytes) input.resize(kMaxInputBytes);
}

Input next_input(const std::vector<Input>& seeds, Random& random) {
  if (seeds.empty() || below(random, 8) == 0) {
    Input input(below(random, kMaxRandomBytes));
    std::generate(input.begin(), input.end(), [&] { return std::byte(below(random, 256)); });
    return input;
  }
  Input input = seeds[below(random, seeds.size())];
  for (std::size_t left = below(random, 5); left > 0; --left) mutate_once(input, random);
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::strtod(argv[1], nullptr) : 5;
  const std::uint64_t seed =
      argc > 2 ? std::strtoull(argv[2], nullptr, 0) : std::uint64_t{std::random_device()()};
  std::printf("%s: %g s, seed %llu\n", argv[0], seconds, static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  std::signal(SIGABRT, print_input);
  std::signal(SIGSEGV, print_input);

  Random random(seed);
  const std::vector<Input> seeds = xd::fuzz::seeds();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::uint64_t runs = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    current = next_input(seeds, random);
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(current.data()), current.size());
  }
  std::printf("%llu inputs, no promise broken\n", static_cast<unsigned long long>(runs));
  return 0;
}
