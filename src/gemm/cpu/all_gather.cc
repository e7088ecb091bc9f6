#include <algorithm>
#include <cstring>

#include "gemm/cpu/elements.h"
#include "gemm/cpu/operations.h"

namespace xd::gemm::cpu {

AllGatherOp::AllGatherOp(const Tools& tools, const ProductCall& call, xd_gemm_algo algo)
    : tools_(tools),
      call_(call),
      algo_(algo),
      rows_(tools, call.a, tools.lockstep.map().rows),
      finish_(tools.scratch) {}

Record AllGatherOp::record() const {
  Record record = record_of(call_, algo_);
  record.rows_in = rows_.address();
  record.scales_in = turn::PeerAddress::shared(tools_.lockstep.map().scales);
  return record;
}

bool AllGatherOp::gathers() const {
  return call_.gathered || tools_.context.config().keep_gathered ||
         algo_ == XD_GEMM_ALGO_SEQUENTIAL;
}

std::byte* AllGatherOp::destination() const {
  return call_.gathered ? call_.gathered.data : tools_.scratch.gathered();
}

std::uint64_t AllGatherOp::scale_count(NearRank source) const {
  if (call_.scaling == Scaling::tensor) return 1;
  const std::uint64_t rows = at(call_.shares.rows(source));
  return call_.scaling == Scaling::blocks ? rows * at(scale_blocks(call_.k)) : rows;
}

void AllGatherOp::stage_in() {
  rows_.stage(tools_);
  if (call_.a_scale) {
    const NearMemory area =
        tools_.lockstep.area_of(tools_.context.self(), tools_.lockstep.map().scales);
    std::copy_n(call_.a_scale.as<const float>(), scale_count(tools_.context.self()),
                area.array<float>());
  }
  tools_.multiplier.begin();
  finish_.begin(call_,
                {tools_.scratch.column_sums(), at(call_.n) * at(tools_.context.config().ranks)});
}

void AllGatherOp::announce() {
  if (algo_ == XD_GEMM_ALGO_SEQUENTIAL) return;
  deferred_.run([&] { multiply(tools_.context.self()); });
}

const std::byte* AllGatherOp::rows_of(NearRank source) const {
  if (source == tools_.context.self()) return call_.a.data;
  const std::uint64_t bytes =
      at(call_.shares.rows(source)) * at(call_.k) * dtype_bytes(call_.a.type);
  return tools_.lockstep.tensor_of(source, tools_.lockstep.record_of(source).rows_in, bytes)
      .address();
}

const float* AllGatherOp::scales_of(NearRank source) const {
  if (!call_.a_scale) return nullptr;
  if (source == tools_.context.self()) return call_.a_scale.as<const float>();
  const std::uint64_t bytes = scale_count(source) * sizeof(float);
  return tools_.lockstep.tensor_of(source, tools_.lockstep.record_of(source).scales_in, bytes)
      .array<const float>();
}

void AllGatherOp::gather(NearRank source) const {
  const std::uint64_t element = dtype_bytes(call_.a.type);
  const std::uint64_t rows = at(call_.shares.rows(source)), start = at(call_.shares.start(source));
  const std::uint64_t k = at(call_.k), all = at(call_.shares.all());
  if (rows == 0) return;
  const std::byte* const from = rows_of(source);
  std::byte* const to = destination();
  if (!call_.transpose_a) {
    std::memcpy(to + start * k * element, from, rows * k * element);
    return;
  }
  for (std::uint64_t i = 0; i < k; ++i) {
    std::memcpy(to + (i * all + start) * element, from + i * rows * element, rows * element);
  }
}

void AllGatherOp::gather_scales(NearRank source) const {
  if (!call_.a_scale) return;
  const float* const scales = scales_of(source);
  const std::uint64_t count = scale_count(source);
  const std::int64_t start = call_.shares.start(source);
  const std::int64_t columns = call_.scaling == Scaling::blocks ? scale_blocks(call_.k) : 1;
  const bool single = call_.scaling == Scaling::tensor;
  if (call_.gathered_scale) {
    std::copy_n(scales, count,
                call_.gathered_scale.as<float>() + (single ? int{source} : start * columns));
  }
  if (algo_ != XD_GEMM_ALGO_SEQUENTIAL) return;
  float* const of_rows = tools_.scratch.gathered_scales() + start * columns;
  if (single) {
    std::fill_n(of_rows, call_.shares.rows(source), scales[0]);
  } else {
    std::copy_n(scales, count, of_rows);
  }
}

void AllGatherOp::multiply(NearRank source) {
  const std::int64_t rows = call_.shares.rows(source);
  if (rows == 0) return;
  multiply(operand_a(call_, rows_of(source), rows, scales_of(source)), call_.shares.start(source),
           rows);
}

void AllGatherOp::multiply_gathered() {
  const std::int64_t rows = call_.shares.all();
  Operand a = operand_a(call_, destination(), rows,
                        call_.a_scale ? tools_.scratch.gathered_scales() : nullptr);
  // Every rank has a number of its own, which is that of its rows.
  if (a.scaling == Scaling::tensor) a.scaling = Scaling::rows;
  multiply(a, 0, rows);
}

// Rows [first, first + rows) of D are those of `a`.
void AllGatherOp::multiply(const Operand& a, std::int64_t first, std::int64_t rows) {
  const Operand b = operand_b(call_);
  Results results;
  if (is_plain(call_)) results = {call_.d.as<float>() + first * call_.n, call_.n};
  tools_.multiplier.product(a, rows, b, call_.k, call_.n, results, [&](const Tile& tile) {
    if (results.values != nullptr) return;
    int source = 0;
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const std::int64_t row = first + tile.row + r;
      while (row >= call_.shares.start(source + 1)) ++source;
      float* const x = tile.values + r * tile.stride;
      if (call_.alpha != 1.0f) scale(x, call_.alpha, at(tile.columns));
      finish_.row(x, row, tile.column, tile.columns,
                  tools_.scratch.column_sums() + at(source) * at(call_.n));
    }
  });
}

void AllGatherOp::move_all() {
  deferred_.rethrow();
  const bool first_all = algo_ == XD_GEMM_ALGO_SEQUENTIAL;
  if (gathers()) gather(tools_.context.self());
  gather_scales(tools_.context.self());
  for (const NearRank peer : tools_.lockstep.peers()) {
    if (gathers()) gather(peer);
    gather_scales(peer);
    if (!first_all) multiply(peer);
  }
  if (first_all) multiply_gathered();
  if (!call_.bias_grad) return;
  float* const sums = tools_.scratch.column_sums();
  for (int r = 1; r < tools_.context.config().ranks; ++r) {
    add(sums, sums + at(r) * at(call_.n), at(call_.n));
  }
  std::copy_n(sums, at(call_.n), call_.bias_grad.as<float>());
  if (call_.reduce_bias_grad) reduce_column_sums(tools_, call_);
}

// A rank that fails here tells its peers, so that none waits for it or sums what is not there.
void AllGatherOp::move() {
  try {
    move_all();
  } catch (...) {
    if (call_.reduce_bias_grad) tools_.lockstep.tell_all_failed(tools_.lockstep.map().summed);
    throw;
  }
}

OperationError AllGatherOp::complete() {
  finish_.end();
  return {};
}

Gathered AllGatherOp::gathered() const {
  if (!gathers()) return {};
  const std::int64_t all = call_.shares.all();
  return {.data = destination(),
          .rows = call_.transpose_a ? call_.k : all,
          .columns = call_.transpose_a ? all : call_.k,
          .type = call_.a.type};
}

}  // namespace xd::gemm::cpu
