// Real text as tokens: a token is one byte and the byte before it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace demo {

struct Text {
  std::string path;
  std::string bytes;
};

// The file at `path`; if that is empty, the first that exists of some that most machines have.
// Throws std::runtime_error if there is none, or it is too short to have a next byte.
Text read_text(const std::string& path);

// Fills `tokens` and `targets`, rows of `hidden` floats each, from the text at `first` on, starting
// over at its end. Token i is the embedding of byte i and, at half strength, of the one before it;
// its target is the embedding of the byte that comes next.
struct Batch {
  std::span<float> tokens, targets;
  int hidden;
};
void embed(const Text& text, std::size_t first, const Batch& batch);

}  // namespace demo
