// The terms of one token's sum over rows in near ranks' memory and sums of other machines.
#pragma once

#include <array>

#include "ep/bulk/cpu/transfer.h"

namespace xd::ep::cpu {

// A token's sums that have come from hosts of other machines, by ascending host.
struct RemoteTerms {
  std::array<int, kMaxTopk> hosts;
  std::array<const std::byte*, kMaxTopk> rows;
  int count = 0;
};

struct TokenTerms {
  std::array<const void*, kMaxTopk> rows;
  std::array<float, kMaxTopk> weights;
  std::array<int, kMaxTopk> ends;
  std::array<int, kMaxTopk> host_ends;
  int num_rows = 0;
  int num_partials = 0;
  int num_hosts = 0;  // 0: sums are not made by host

  struct Source {
    const std::uint32_t* codes;  // of the token's choices
    int topk;
    std::uint64_t row_bytes;
    bool weighted;  // each row is multiplied by its weight there
  };
  static constexpr int kAllHosts = -1;

  // The rows on one host, or on all, and sums of other machines, if there are some.
  void collect(const Context& context, const Source& source, int only_host = kAllHosts,
               const RemoteTerms* remote = nullptr);
  // Writes the sum, or zeros where there is no term.
  void sum(const Tensor& shape, bool weighted, std::byte* to, rows::Store store,
           std::span<const void* const> next) const;

 private:
  void add_remote(const RemoteTerms& remote, int& next, int before_host);
};

}  // namespace xd::ep::cpu
