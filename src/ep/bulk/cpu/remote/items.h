// An operation's items to other machines: which tokens go to which relay, in which chunks. They are
// listed before the operation is entered, so that its entry can say how many chunks follow.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ep/bulk/chunk.h"
#include "ep/bulk/cpu/remote/answers.h"
#include "ep/plan/plan.h"

namespace xd::ep::cpu {

struct Context;

// The places, machines or hosts, on other machines that some of a token's choices go to, ascending,
// each with the rank of such a choice.
struct RemotePlaces {
  std::array<int, kMaxTopk> list, ranks;
  int count = 0;

  void add(int place, int rank);
};
enum class RemotePlace { machine, host };
RemotePlaces remote_places(const Context& context, std::span<const std::uint32_t> codes,
                           RemotePlace kind);

struct RemoteItems {
  std::vector<std::vector<RequestItem>> of_relay;  // by neighbour, in the order of tokens
  std::vector<std::uint32_t> chunks;               // likewise
  std::size_t in_chunk = 1;
  RemoteAnswers answers{0};  // to requests

  // One item for each token and machine with rows of it, or a request for each token and host.
  // `in_chunk`: at most. Announces the chunks.
  void list(const Context& context, const PlanView& plan, RemotePlace kind, std::size_t in_chunk);
  // The items of one chunk.
  std::span<const RequestItem> of(int relay, std::uint32_t chunk) const {
    const std::span<const RequestItem> all = of_relay[at(relay)];
    const std::size_t first = chunk * in_chunk;
    return all.subspan(first, std::min(in_chunk, all.size() - first));
  }
};

}  // namespace xd::ep::cpu
