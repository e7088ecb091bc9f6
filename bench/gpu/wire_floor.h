// The wire floor: every GPU, all at once, stores into each peer's memory exactly the bytes that a
// dispatch of the batch sends there, by a plain kernel without flags or by the copy engines.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "rank.h"

namespace bench::gpu {

class WireFloor {
 public:
  // The context's landing must have as many bytes as this says.
  static std::size_t landing_bytes(const Batch& batch);
  explicit WireFloor(const RankContext& context);

  struct Result {
    std::vector<double> seconds;  // empty: nothing crosses
    std::string by;               // "bulk copies, 8 SMs"
  };
  // The fastest kind and number of SMs. Collective; complete on rank 0.
  Result measure_kernels() const;
  Result measure_copy_engine() const;

 private:
  std::uint64_t incoming_offset(int source, int destination) const;
  std::vector<Piece> cut_pieces() const;
  void check_arrivals() const;
  std::byte* source(int iteration) const;

  const RankContext& at_;
  const Payload payload_;
  const Tensor source_;
  std::optional<DeviceArray<Piece>> pieces_;
};

}  // namespace bench::gpu
