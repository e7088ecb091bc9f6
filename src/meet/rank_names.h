// The names of ranks in error texts: where there are several hosts, a rank is named with its host;
// where the caller's program knows it by another number, with that as well.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/math.h"
#include "base/rank_list.h"

namespace xd {

class RankNames {
 public:
  RankNames() = default;  // one host
  // `host_of` is by rank, `names` by host.
  RankNames(std::span<const int> host_of, std::vector<std::string> names)
      : host_of_(host_of.begin(), host_of.end()), names_(std::move(names)) {}

  // Both by rank.
  void set_processes(const std::vector<std::int64_t>& pids) {
    pids_ = std::make_shared<Pids>(pids.size());
    for (std::size_t r = 0; r < pids.size(); ++r) (*pids_)[r] = pids[r];
  }
  void set_numbers(std::vector<int> numbers) { numbers_ = std::move(numbers); }

  // "rank 2", or where there are several hosts "rank 2 of host 1 (node7)". With numbers "rank 2
  // (global rank 6)".
  std::string of(int rank) const { return of({&rank, 1}); }
  // "ranks 0, 1 of host 0 (node6) and rank 2 of host 1 (node7)"
  std::string of(std::span<const int> ranks) const { return with_hosts(ranks, ""); }
  // "rank 2 (pid 4711)": a rank whose process somebody will look for.
  std::string with_process(int rank) const { return with_hosts({&rank, 1}, process_of(rank)); }
  // "pid 4711", or "" where it is not known.
  std::string process_of(int rank) const {
    const std::size_t known = pids_ != nullptr ? pids_->size() : 0;
    return knows(rank, known) ? concat("pid ", (*pids_)[at(rank)].load()) : "";
  }
  // The rank has another process from now on, in all copies of this object. Any thread.
  void replace_process(int rank, std::int64_t pid) const {
    if (pids_ != nullptr) (*pids_)[at(rank)] = pid;
  }
  // "global rank 6", or "" without numbers.
  std::string number_of(int rank) const {
    return knows(rank, numbers_.size()) ? numbers_of({&rank, 1}) : "";
  }

 private:
  static bool knows(int rank, std::size_t count) { return rank >= 0 && at(rank) < count; }

  std::string with_hosts(std::span<const int> ranks, const std::string& more) const {
    if (names_.size() < 2) return listed(ranks, more);
    std::string text;
    for (int host = 0; host < static_cast<int>(names_.size()); ++host) {
      std::vector<int> here;
      std::ranges::copy_if(ranks, std::back_inserter(here),
                           [&](int rank) { return host_of(rank) == host; });
      if (here.empty()) continue;
      text += concat(text.empty() ? "" : " and ", listed(here, more), " of ", host_name(host));
    }
    return text.empty() ? listed(ranks, more) : text;
  }
  std::string listed(std::span<const int> ranks, const std::string& more) const {
    std::string known = numbers_of(ranks);
    if (!known.empty() && !more.empty()) known += ", ";
    known += more;
    return known.empty() ? rank_list(ranks) : concat(rank_list(ranks), " (", known, ")");
  }
  // "global ranks 2, 6", or "" where one of them has no number.
  std::string numbers_of(std::span<const int> ranks) const {
    std::vector<int> numbers;
    for (const int rank : ranks) {
      if (!knows(rank, numbers_.size())) return "";
      numbers.push_back(numbers_[at(rank)]);
    }
    return "global " + rank_list(numbers);
  }

  int host_of(int rank) const { return knows(rank, host_of_.size()) ? host_of_[at(rank)] : -1; }
  std::string host_name(int host) const {
    return concat("host ", host, " (", names_[at(host)], ")");
  }

  std::vector<int> host_of_;
  std::vector<std::string> names_;
  using Pids = std::vector<std::atomic<std::int64_t>>;
  std::shared_ptr<Pids> pids_;
  std::vector<int> numbers_;
};

}  // namespace xd
