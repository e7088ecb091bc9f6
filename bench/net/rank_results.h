// A file that all ranks of a measurement between network namespaces have mapped: namespaces are
// those of one machine, and keep memory and clocks in common. So ranks start together, and bring
// their numbers together, without a byte on the network that is measured.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace bench::net {

class RankResults {
 public:
  // The driver has made the file, of zeros and kBytes. Throws std::runtime_error.
  RankResults(const std::string& path, int rank, int ranks);
  ~RankResults();
  RankResults(const RankResults&) = delete;
  RankResults& operator=(const RankResults&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // Collective, each in a bounded time. The common start is a moment that all ranks go on to wait
  // for; barrier() says that what ranks wrote before can be read.
  void barrier();
  std::int64_t common_start();

  // A rank's numbers, and its words for others.
  static constexpr std::size_t kNumbers = 4096, kWordBytes = 4096;
  std::span<double> numbers(int rank) const;
  std::span<std::byte> words(int rank) const;

  static constexpr int kMaxRanks = 16;
  static std::size_t bytes();

 private:
  struct Head;
  struct Area;
  Area& area(int rank) const;

  const int rank_, ranks_;
  Head* head_;
  std::uint64_t rounds_ = 0;
};

}  // namespace bench::net
