#include "wire_floor.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "../report.h"

namespace bench::gpu {
namespace {

constexpr DLDataType kByte{kDLUInt, 8, 1};
constexpr int kBlocks[] = {6, 8, 10, 12, 16, 24, 32, 64, 128};

int columns_of(const Workload& w) { return static_cast<int>(w.wire_row_bytes()); }

}  // namespace

std::uint64_t WireFloor::incoming_offset(int source, int destination) const {
  std::int64_t rows = 0;
  for (int s = 0; s < source; ++s) {
    if (s != destination) rows += at_.batch.rows[std::size_t(s)][std::size_t(destination)];
  }
  return static_cast<std::uint64_t>(rows) * at_.workload().wire_row_bytes();
}

std::size_t WireFloor::landing_bytes(const Batch& batch) {
  std::int64_t most = 1;
  for (std::size_t d = 0; d < batch.rows.size(); ++d) {
    std::int64_t rows = 0;
    for (std::size_t s = 0; s < batch.rows.size(); ++s) rows += s == d ? 0 : batch.rows[s][d];
    most = std::max(most, rows);
  }
  return static_cast<std::size_t>(most) * batch.workload.wire_row_bytes();
}

WireFloor::WireFloor(const RankContext& context)
    : at_(context),
      payload_{Cell::byte, columns_of(context.workload()), context.workload().seed + 77},
      source_(nullptr, context.stream, kByte,
              {context.workload().tokens, columns_of(context.workload())},
              copies_against_cache(context.workload(),
                                   static_cast<std::size_t>(context.workload().tokens) *
                                       context.workload().wire_row_bytes(),
                                   context.device.dl().device_id)) {
  for (int copy = 0; copy < source_.copies(); ++copy) {
    fill_rows(payload_, at_.rank, source_.data(copy), at_.workload().tokens, at_.stream);
  }
  pieces_.emplace(at_.stream, cut_pieces());
  prepare_movers();
}

// Pieces of all destinations in turn, each in proportion to its bytes, so that no link idles while
// another is still busy. Destination d gets the first rows of the source.
std::vector<Piece> WireFloor::cut_pieces() const {
  struct Placed {
    double turn;
    std::size_t order;  // order of destinations, where turns are equal
    Piece piece;
  };
  std::vector<Placed> placed;
  for (int step = 1; step < at_.ranks; ++step) {
    const int d = (at_.rank + step) % at_.ranks;
    const auto rows = at_.batch.rows[std::size_t(at_.rank)][std::size_t(d)];
    const std::uint64_t bytes = static_cast<std::uint64_t>(rows) * at_.workload().wire_row_bytes();
    std::byte* const to = at_.landing.of(d) + incoming_offset(at_.rank, d);
    const std::uint64_t count = (bytes + kPieceBytes - 1) / kPieceBytes;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t from = i * kPieceBytes;
      const auto size = std::min<std::uint64_t>(bytes - from, kPieceBytes);
      placed.push_back({(static_cast<double>(i) + 0.5) / static_cast<double>(count),
                        placed.size(),
                        {to + from, from, static_cast<std::uint32_t>(size)}});
    }
  }
  std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
    return std::tie(a.turn, a.order) < std::tie(b.turn, b.order);
  });
  std::vector<Piece> pieces;
  for (const Placed& one : placed) pieces.push_back(one.piece);
  return pieces;
}

std::byte* WireFloor::source(int iteration) const {
  return static_cast<std::byte*>(source_.data(iteration));
}

void WireFloor::check_arrivals() const {
  std::vector<Origin> origins;
  for (int s = 0; s < at_.ranks; ++s) {
    if (s == at_.rank) continue;
    const auto rows = at_.batch.rows[std::size_t(s)][std::size_t(at_.rank)];
    for (std::int32_t row = 0; row < rows; ++row) origins.push_back({s, row, 1});
  }
  const DeviceArray<Origin> expected(at_.stream, origins);
  const WrongElements wrong(at_.stream);
  check_rows(payload_, at_.landing.of(at_.rank), expected.data(), expected.size(), wrong.counter(),
             at_.stream);
  wrong.expect_none("the floor");
}

WireFloor::Result WireFloor::measure_kernels() const {
  Result best;
  const auto run = [&](Mover mover, int blocks, int i) {
    if (pieces_->size() == 0) return;
    launch_pieces(mover, blocks, pieces_->data(), pieces_->size(), source(i), at_.stream);
  };
  for (const Mover mover : {Mover::bulk, Mover::stores}) {
    at_.settle("before the floor");
    ok(cudaMemsetAsync(at_.landing.of(at_.rank), 0, landing_bytes(at_.batch), at_.stream),
       "poison");
    at_.settle("before the floor");
    run(mover, 16, 0);
    at_.settle("the floor");
    check_arrivals();
    for (const int blocks : kBlocks) {
      at_.settle("before the floor");
      const std::vector<double> seconds =
          at_.time({.warmup = 3, .timed = std::min(at_.workload().iters, 40)},
                   [&](int i) { run(mover, blocks, i); });
      if (at_.rank != 0) continue;
      if (!best.seconds.empty() && percentile(seconds, 0.5) >= percentile(best.seconds, 0.5)) {
        continue;
      }
      best = {.seconds = seconds,
              .by = std::string(mover == Mover::bulk ? "bulk copies" : "stores") + ", " +
                    std::to_string(blocks) + " SMs"};
    }
  }
  return best;
}

WireFloor::Result WireFloor::measure_copy_engine() const {
  const auto push = [&](int i) {
    for (int step = 1; step < at_.ranks; ++step) {
      const int d = (at_.rank + step) % at_.ranks;
      const auto rows = at_.batch.rows[std::size_t(at_.rank)][std::size_t(d)];
      const std::size_t bytes = static_cast<std::size_t>(rows) * at_.workload().wire_row_bytes();
      if (bytes == 0) continue;
      ok(cudaMemcpyAsync(at_.landing.of(d) + incoming_offset(at_.rank, d), source(i), bytes,
                         cudaMemcpyDeviceToDevice, at_.stream),
         "copy engine");
    }
  };
  at_.settle("before the copy engine");
  std::vector<double> seconds =
      at_.time({.warmup = 3, .timed = std::min(at_.workload().iters, 40)}, push);
  return {.seconds = std::move(seconds), .by = "copy engine"};
}

}  // namespace bench::gpu
