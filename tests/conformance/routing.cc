#include "conformance/routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/random.h"

namespace xd::test {
namespace {

int token_count(const RoutingShape& shape, int rank, Random& random) {
  switch (shape.tokens) {
    case Tokens::full:
      return shape.max_tokens;
    case Tokens::differ:
      return static_cast<int>(random.below(static_cast<std::uint64_t>(shape.max_tokens) + 1));
    case Tokens::some_zero:
      return rank % 2 == 0 ? 0 : shape.max_tokens;
    case Tokens::all_zero:
      return 0;
  }
  return 0;
}

// Draws `count` distinct numbers of `candidates`, in random order.
std::vector<std::int64_t> draw_uniform(std::vector<std::int64_t> candidates, std::size_t count,
                                       Random& random) {
  count = std::min(count, candidates.size());
  for (std::size_t i = 0; i < count; ++i) {
    std::swap(candidates[i], candidates[i + random.below(candidates.size() - i)]);
  }
  candidates.resize(count);
  return candidates;
}

std::vector<std::int64_t> range(std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// Inverse of the continuous 1/x distribution on [1, E + 1), without repetition.
std::vector<std::int64_t> draw_zipf(int num_experts, std::size_t count, Random& random) {
  std::vector<std::int64_t> chosen;
  while (chosen.size() < std::min(count, static_cast<std::size_t>(num_experts))) {
    const double x = std::pow(num_experts + 1.0, random.unit());
    const std::int64_t id =
        std::min(static_cast<std::int64_t>(x) - 1, std::int64_t{num_experts} - 1);
    if (std::ranges::find(chosen, id) == chosen.end()) chosen.push_back(id);
  }
  return chosen;
}

std::vector<std::int64_t> experts_of_token(const RoutingShape& shape, Random& random) {
  const auto topk = static_cast<std::size_t>(shape.topk);
  const auto owner_of = [&](std::int64_t id) {
    return shape.expert_ranks.empty() ? id / (shape.num_experts / shape.num_ranks)
                                      : shape.expert_ranks[static_cast<std::size_t>(id)];
  };
  switch (shape.pattern) {
    case Pattern::uniform:
    case Pattern::holes:
      return draw_uniform(range(0, shape.num_experts), topk, random);
    case Pattern::zipf:
      return draw_zipf(shape.num_experts, topk, random);
    case Pattern::one_hot:
      return {shape.num_experts / 2};
    case Pattern::one_rank: {
      const auto owner =
          static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(shape.num_ranks)));
      std::vector<std::int64_t> candidates = range(0, shape.num_experts);
      std::erase_if(candidates, [&](std::int64_t id) { return owner_of(id) != owner; });
      return draw_uniform(std::move(candidates), topk, random);
    }
    case Pattern::empty_ranks: {
      std::vector<std::int64_t> candidates = range(0, shape.num_experts);
      std::erase_if(candidates, [&](std::int64_t id) { return owner_of(id) % 2 == 1; });
      return draw_uniform(std::move(candidates), topk, random);
    }
    case Pattern::nobody:
      return {};
  }
  return {};
}

}  // namespace

std::vector<Choices> make_routing(const RoutingShape& shape, std::uint64_t seed) {
  std::vector<Choices> ranks;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    Random random(mix(seed, static_cast<std::uint64_t>(rank)));
    Choices choices{token_count(shape, rank, random), shape.topk, {}};
    for (int token = 0; token < choices.tokens; ++token) {
      std::vector<std::int64_t> experts = experts_of_token(shape, random);
      // Where there are fewer experts than choices, the missing ones lie anywhere in the row.
      while (experts.size() < static_cast<std::size_t>(shape.topk)) {
        experts.insert(
            experts.begin() + static_cast<std::ptrdiff_t>(random.below(experts.size() + 1)), -1);
      }
      for (std::int64_t& id : experts) {
        if (shape.pattern == Pattern::holes && random.one_in(3)) id = -1;
      }
      choices.ids.insert(choices.ids.end(), experts.begin(), experts.end());
    }
    ranks.push_back(std::move(choices));
  }
  return ranks;
}

void repeat_ids(std::vector<Choices>& ranks, std::uint64_t seed) {
  Random random(seed);
  for (Choices& choices : ranks) {
    const auto topk = static_cast<std::uint64_t>(choices.topk);
    for (std::size_t i = 1; i < choices.ids.size(); ++i) {
      const std::uint64_t back = 1 + random.below(std::min<std::uint64_t>(i, topk));
      if (random.one_in(4)) choices.ids[i] = choices.ids[i - back];
    }
  }
}

void spoil_ids(std::vector<Choices>& ranks, std::int64_t experts, std::uint64_t seed) {
  Random random(seed);
  for (Choices& choices : ranks) {
    for (std::size_t i = 1; i < choices.ids.size(); ++i) {
      const std::int64_t bad[] = {experts, -2, choices.ids[i - 1], INT32_MAX};
      if (random.one_in(5)) choices.ids[i] = bad[random.below(std::size(bad))];
    }
  }
}

const char* name_of(Pattern pattern) {
  constexpr const char* kNames[] = {"uniform",  "zipf",        "holes", "one_hot",
                                    "one_rank", "empty_ranks", "nobody"};
  return kNames[static_cast<std::size_t>(pattern)];
}

const char* name_of(Tokens tokens) {
  constexpr const char* kNames[] = {"full", "differ", "some_zero", "all_zero"};
  return kNames[static_cast<std::size_t>(tokens)];
}

}  // namespace xd::test
