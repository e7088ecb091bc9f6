// The terms of one token's sum over rows in near ranks' memory and sums of other machines.
#pragma once

#include <array>

#include "ep/bulk/cpu/transfer.h"

namespace xd::ep::cpu {

// A token's sums that have come from hosts of other machines, by ascending host.
struct RemoteTerms {
  std::array<int, kMaxTopk> hosts;
  std::array<const std::byte*, kMaxTopk> rows;
  std::array<rows::PartialForm, kMaxTopk> forms;
  int count = 0;
};

struct TokenTerms {
  std::array<const void*, kMaxTopk> rows;
  std::array<float, kMaxTopk> weights;
  std::array<int, kMaxTopk> ends;
  std::array<rows::PartialForm, kMaxTopk> forms;  // of partials
  std::array<int, kMaxTopk> host_ends;
  int num_rows = 0;
  int num_partials = 0;
  int num_hosts = 0;  // 0: sums are not made by host

  struct Source {
    const std::uint32_t* codes;  // of the token's choices
    int topk;
    std::uint64_t row_bytes;
    bool weighted;       // each row is multiplied by its weight there
    bool coded = false;  // owners that have added up rows have put them into the wire's form
  };
  static constexpr int kAllHosts = -1;

  // The rows on one host, or on all, and sums of other machines, if there are some.
  void collect(const Context& context, const Source& source, int only_host = kAllHosts,
               const RemoteTerms* remote = nullptr);
  // The sums that are wanted: of the shape and type of a tensor's rows.
  struct Shape {
    const Tensor& rows;
    bool weighted;
    WireFormat wire;
  };
  // Writes the sum, or zeros where there is no term.
  void sum(const Shape& shape, std::byte* to, rows::Store store,
           std::span<const void* const> next) const;
  // Writes it in the wire's form; for one partial sum, or where the wire is FLOAT32.
  void encode(const Shape& shape, std::byte* to) const;

 private:
  rows::Terms terms(bool weighted, std::span<const void* const> next) const;
  void add_remote(const RemoteTerms& remote, int& next, int before_host);
};

}  // namespace xd::ep::cpu
