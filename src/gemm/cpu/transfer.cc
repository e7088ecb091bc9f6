#include <algorithm>
#include <cstring>

#include "gemm/cpu/elements.h"
#include "gemm/cpu/operations.h"

namespace xd::gemm::cpu {

Offer::Offer(const Tools& tools, const Tensor& tensor, std::uint64_t staging)
    : tensor_(tensor), address_(turn::PeerAddress::shared(staging)) {
  if (tensor.bytes() == 0 || tools.context.config().ranks == 1) return;
  if (const auto found = tools.context.comm().heap().find(tensor.data, tensor.bytes())) {
    address_ = turn::PeerAddress::in_heap(found->segment, found->offset);
  } else {
    staged_ = true;
  }
}

void Offer::stage(const Tools& tools) const {
  if (!staged_) return;
  const NearMemory area = tools.lockstep.area_of(tools.context.self(), address_.offset());
  std::memcpy(area.address(), tensor_.data, tensor_.bytes());
}

TransferOp::TransferOp(const Tools& tools, const TransferCall& call)
    : tools_(tools),
      call_(call),
      rows_(tools, call.in,
            call.reduces ? tools.lockstep.map().partials : tools.lockstep.map().rows),
      finish_(tools.scratch) {}

Record TransferOp::record() const {
  Record record = record_of(call_);
  record.rows_in = rows_.address();
  return record;
}

void TransferOp::stage_in() {
  rows_.stage(tools_);
  if (!call_.product) return;
  const ProductCall& product = *call_.product;
  tools_.multiplier.begin();
  finish_.begin(product, {product.bias_grad.as<float>(), at(product.bias_grad ? product.n : 0)});
}

void TransferOp::announce() {
  if (!call_.product || call_.product->a_rows == 0) return;
  const ProductCall& product = *call_.product;
  deferred_.run([&] {
    const Operand a = operand_a(product, product.a.data, product.a_rows,
                                product.a_scale ? product.a_scale.as<const float>() : nullptr);
    const Operand b = operand_b(product);
    tools_.multiplier.product(
        a, product.a_rows, b, product.k, product.n, {}, [&](const Tile& tile) {
          for (std::int64_t r = 0; r < tile.rows; ++r) {
            float* const x = tile.values + r * tile.stride;
            if (product.alpha != 1.0f) scale(x, product.alpha, at(tile.columns));
            finish_.row(x, tile.row + r, tile.column, tile.columns, product.bias_grad.as<float>());
          }
        });
  });
}

const std::byte* TransferOp::rows_of(NearRank source) const {
  if (source == tools_.context.self()) return call_.in.data;
  const std::int64_t rows = call_.reduces ? call_.shares.all() : call_.shares.rows(source);
  return tools_.lockstep
      .tensor_of(source, tools_.lockstep.record_of(source).rows_in, at(rows) * call_.in.row_bytes())
      .address();
}

void TransferOp::gather() const {
  const std::uint64_t row = call_.in.row_bytes();
  for (const NearRank source : tools_.context.near()) {
    const std::uint64_t rows = at(call_.shares.rows(source));
    if (rows == 0) continue;
    std::memcpy(call_.out.data + at(call_.shares.start(source)) * row, rows_of(source), rows * row);
  }
}

void TransferOp::reduce() const {
  const NearRank self = tools_.context.self();
  const std::uint64_t element = dtype_bytes(call_.in.type);
  const std::uint64_t first = at(call_.shares.start(self)) * call_.in.row_bytes();
  const std::int64_t count = call_.shares.rows(self) * call_.in.cols;
  float* const x = tools_.scratch.line();
  float* const term = tools_.scratch.other_line();
  for (std::int64_t i = 0; i < count; i += kTileColumns) {
    const std::size_t n = at(std::min(kTileColumns, count - i));
    bool begun = false;
    for (const NearRank source : tools_.context.near()) {
      widen(call_.in.type, begun ? term : x, rows_of(source) + first + at(i) * element, n);
      if (begun) add(x, term, n);
      begun = true;
    }
    narrow(call_.out.type, call_.out.data + at(i) * element, x, n);
  }
}

void TransferOp::move() {
  deferred_.rethrow();
  if (call_.reduces) {
    reduce();
  } else {
    gather();
  }
}

OperationError TransferOp::complete() {
  if (call_.product) finish_.end();
  return {};
}

}  // namespace xd::gemm::cpu
