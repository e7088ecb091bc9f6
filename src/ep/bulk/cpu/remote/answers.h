// The answers that a source waits for. It asks for those of one token after another, so the places
// of a token's answers follow one another.
#pragma once

#include <cstdint>
#include <vector>

#include "base/math.h"
#include "ep/bulk/chunk.h"

namespace xd::ep::cpu {

class RemoteAnswers {
 public:
  explicit RemoteAnswers(std::int64_t tokens) : tokens_(at(tokens)) {}

  // Expects `count` answers of a token, at most 32; returns the place of the first one.
  std::uint32_t expect(std::int64_t token, int count) {
    const std::uint32_t first = next_place_;
    const std::uint64_t missing = (std::uint64_t{1} << count) - 1;
    tokens_[at(token)] = {.first_place = first, .missing = static_cast<std::uint32_t>(missing)};
    next_place_ += static_cast<std::uint32_t>(count);
    return first;
  }

  // Takes in the request that an answer brings back. False = it answers nothing that is asked for.
  bool take(const RequestItem& request) {
    if (request.token >= tokens_.size()) return false;
    Token& token = tokens_[request.token];
    // A place before the first one becomes a large number here.
    const std::uint32_t answer = request.place - token.first_place;
    if (answer >= 32 || (token.missing >> answer & 1) == 0) return false;
    token.missing &= ~(std::uint32_t{1} << answer);
    return true;
  }

  // Of all answers that are expected.
  std::size_t places() const { return next_place_; }
  bool has_all(std::int64_t token) const { return tokens_[at(token)].missing == 0; }
  std::uint32_t first_place(std::int64_t token) const { return tokens_[at(token)].first_place; }

 private:
  struct Token {
    std::uint32_t first_place = 0;
    std::uint32_t missing = 0;  // a bit for each answer, by place
  };

  std::vector<Token> tokens_;
  std::uint32_t next_place_ = 0;
};

}  // namespace xd::ep::cpu
