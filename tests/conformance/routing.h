// Routing of a batch: which experts the tokens of every rank choose. Each rank generates all ranks'
// routing from the seed, so that it knows what it must receive.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace xd::test {

enum class Pattern {
  uniform,      // distinct experts, all equally likely
  zipf,         // distinct experts, expert e with probability ~ 1 / (e + 1)
  holes,        // uniform, with random -1 entries
  one_hot,      // all tokens of all ranks choose expert E / 2, and nothing else
  one_rank,     // all experts of a token lie on one rank, another for each token
  empty_ranks,  // only experts of the even ranks are chosen
  nobody,       // all -1
};

enum class Tokens {
  full,       // T = max_tokens on all ranks
  differ,     // T differs per rank and per step
  some_zero,  // T = 0 on every other rank
  all_zero,
};

struct RoutingShape {
  int num_ranks = 1;
  int num_experts = 1;
  int topk = 1;
  int max_tokens = 1;
  Pattern pattern = Pattern::uniform;
  Tokens tokens = Tokens::full;
  std::vector<std::int32_t> expert_ranks =
      {};  // rank of each expert; empty = equally many, in order
};

// The choices of one rank's tokens, [tokens, topk].
struct Choices {
  int tokens = 0;
  int topk = 1;
  std::vector<std::int64_t> ids;

  std::size_t index(int token, int k) const {
    return static_cast<std::size_t>(token) * static_cast<std::size_t>(topk) +
           static_cast<std::size_t>(k);
  }
  std::int64_t id(int token, int k) const { return ids[index(token, k)]; }
};

// result[r] = choices of rank r.
std::vector<Choices> make_routing(const RoutingShape& shape, std::uint64_t seed);

// Makes about every fourth id equal to one that may be its row's or the row's before.
void repeat_ids(std::vector<Choices>& ranks, std::uint64_t seed);
// Makes about every fifth id bad: too large, too small, or equal to the one before it.
void spoil_ids(std::vector<Choices>& ranks, std::int64_t experts, std::uint64_t seed);

const char* name_of(Pattern pattern);
const char* name_of(Tokens tokens);

}  // namespace xd::test
