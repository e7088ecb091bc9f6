#include <algorithm>

#include "gemm/cpu/elements.h"
#include "gemm/cpu/operations.h"

namespace xd::gemm::cpu {

void reduce_column_sums(const Tools& tools, const ProductCall& call) {
  const std::uint64_t area = tools.lockstep.map().sums;
  const auto sums_of = [&](NearRank rank) {
    return tools.lockstep.area_of(rank, area).array<float>();
  };
  float* const out = call.bias_grad.as<float>();
  std::copy_n(out, at(call.n), sums_of(tools.context.self()));
  tools.lockstep.tell_all(tools.lockstep.map().summed);
  tools.lockstep.await_all(tools.lockstep.map().summed);
  bool first = true;
  for (const NearRank rank : tools.context.near()) {
    if (first) {
      std::copy_n(sums_of(rank), at(call.n), out);
    } else {
      add(out, sums_of(rank), at(call.n));
    }
    first = false;
  }
}

ReduceOp::ReduceOp(const Tools& tools, const ProductCall& call)
    : tools_(tools), call_(call), finish_(tools.scratch) {}

void ReduceOp::stage_in() {
  tools_.multiplier.begin();
  finish_.begin(call_, {call_.bias_grad.as<float>(), at(call_.bias_grad ? call_.n : 0)});
}

std::byte* ReduceOp::terms_of(NearRank source) const {
  return tools_.lockstep.area_of(source, tools_.lockstep.map().partials).address();
}

void ReduceOp::compute_terms() {
  if (call_.a_rows == 0) return;
  std::byte* const terms = terms_of(tools_.context.self());
  const Operand a = operand_a(call_, call_.a.data, call_.a_rows,
                              call_.a_scale ? call_.a_scale.as<const float>() : nullptr);
  const Operand b = operand_b(call_);
  const DType type = call_.wide_type();
  Results results;
  if (type == DType::f32 && call_.alpha == 1.0f) {
    results = {reinterpret_cast<float*>(terms), call_.n};
  }
  tools_.multiplier.product(a, call_.a_rows, b, call_.k, call_.n, results, [&](const Tile& tile) {
    if (results.values != nullptr) return;
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      float* const x = tile.values + r * tile.stride;
      if (call_.alpha != 1.0f) scale(x, call_.alpha, at(tile.columns));
      std::byte* const row = terms + at(tile.row + r) * row_bytes();
      narrow(type, row + at(tile.column) * dtype_bytes(type), x, at(tile.columns));
    }
  });
}

void ReduceOp::announce() {
  deferred_.run([&] {
    compute_terms();
    tools_.lockstep.tell_all(tools_.lockstep.map().ready);
  });
}

void ReduceOp::sum() {
  const bool all = call_.operation == XD_GEMM_ALL_REDUCE;
  const std::int64_t first_row = all ? 0 : call_.shares.start(tools_.context.self());
  const DType type = call_.wide_type();
  float* const x = tools_.scratch.line();
  float* const term = tools_.scratch.other_line();
  for (std::int64_t column = 0; column < call_.n; column += kTileColumns) {
    const std::int64_t columns = std::min(kTileColumns, call_.n - column);
    for (std::int64_t row = 0; row < call_.d.rows; ++row) {
      const std::uint64_t place =
          at(first_row + row) * row_bytes() + at(column) * dtype_bytes(type);
      bool first = true;
      for (const NearRank source : tools_.context.near()) {
        widen(type, first ? x : term, terms_of(source) + place, at(columns));
        if (!first) add(x, term, at(columns));
        first = false;
      }
      finish_.row(x, row, column, columns, call_.bias_grad.as<float>());
    }
  }
}

// A rank that fails here tells its peers, so that none waits for it or sums what is not there.
void ReduceOp::move() {
  try {
    deferred_.rethrow();
    tools_.lockstep.await_all(tools_.lockstep.map().ready);
    sum();
    if (call_.reduce_bias_grad) reduce_column_sums(tools_, call_);
  } catch (...) {
    tools_.lockstep.tell_all_failed(tools_.lockstep.map().ready);
    if (call_.reduce_bias_grad) tools_.lockstep.tell_all_failed(tools_.lockstep.map().summed);
    throw;
  }
}

OperationError ReduceOp::complete() {
  finish_.end();
  return {};
}

}  // namespace xd::gemm::cpu
