#include "text.h"

#include <fstream>
#include <sstream>
#include <stdexcept>

#include "layer.h"

namespace demo {
namespace {

constexpr std::uint64_t kEmbeddingSeed = 1, kContextSeed = 2;

float embedding(std::uint64_t seed, char byte, int hidden, int column) {
  const auto row = static_cast<std::uint64_t>(static_cast<unsigned char>(byte));
  const auto columns = static_cast<std::uint64_t>(hidden);
  return seeded(seed, row * columns + static_cast<std::uint64_t>(column), 1.0f);
}

}  // namespace

Text read_text(const std::string& path) {
  const std::vector<std::string> candidates =
      path.empty() ? std::vector<std::string>{"/usr/share/common-licenses/GPL-3",
                                              CROSSDOCK_SOURCE_DIR "/LICENSE",
                                              CROSSDOCK_SOURCE_DIR "/README.md"}
                   : std::vector<std::string>{path};
  for (const std::string& candidate : candidates) {
    std::ifstream file(candidate, std::ios::binary);
    std::ostringstream bytes;
    if (!file || !(bytes << file.rdbuf()) || bytes.str().size() < 3) continue;
    return {candidate, bytes.str()};
  }
  throw std::runtime_error("no text of at least 3 bytes in " + candidates.front() +
                           (candidates.size() > 1 ? " or its stand-ins" : "") +
                           ": name one with --text FILE");
}

void embed(const Text& text, std::size_t first, const Batch& batch) {
  const auto byte = [&](std::size_t i) { return text.bytes[i % text.bytes.size()]; };
  const auto hidden = static_cast<std::size_t>(batch.hidden);
  for (std::size_t t = 0; t < batch.tokens.size() / hidden; ++t) {
    const std::size_t at = first + t + 1;  // there is a byte before the first token
    for (int column = 0; column < batch.hidden; ++column) {
      const std::size_t i = t * hidden + static_cast<std::size_t>(column);
      batch.tokens[i] = embedding(kEmbeddingSeed, byte(at), batch.hidden, column) +
                        0.5f * embedding(kContextSeed, byte(at - 1), batch.hidden, column);
      batch.targets[i] = embedding(kEmbeddingSeed, byte(at + 1), batch.hidden, column);
    }
  }
}

}  // namespace demo
