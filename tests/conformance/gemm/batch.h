// The arguments of one call of a product on one rank, and the check of what it gave.
#pragma once

#include <crossdock/gemm.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "conformance/gemm/case.h"
#include "conformance/gemm/reference.h"
#include "support/gtest_main.h"
#include "support/outcome.h"
#include "support/tensor.h"

namespace xd::test {

inline constexpr xd_gemm_algo kGemmAlgos[] = {XD_GEMM_ALGO_AUTO, XD_GEMM_ALGO_DIRECT,
                                              XD_GEMM_ALGO_SPLIT, XD_GEMM_ALGO_SEQUENTIAL};
inline constexpr xd_gemm_operation kGemmProducts[] = {XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER,
                                                      XD_GEMM_ALL_REDUCE};

const char* name_of(xd_gemm_operation operation);

// Executes body for each product on every rank of this process.
template <class Body>
void for_each_product(Body&& body) {
  for (const xd_gemm_operation operation : kGemmProducts) {
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE(name_of(operation));
      body(rank, operation);
    });
  }
}

xd_status call_product(xd_gemm_context* context, xd_gemm_operation operation,
                       const xd_gemm_args& args, xd_stream stream);

// The numbers that a tensor has must be these. `curved`: they are values of a curve, which float32
// has not exactly. `norm`: the least norm that errors of random data are measured by.
void expect_numbers(const std::string& name, Tensor& tensor, const Matrix& expected,
                    const GemmCase& c, bool curved, double norm = 0);

class GemmBatch {
 public:
  GemmBatch(const Rank& rank, const GemmCase& c, int step);
  GemmBatch(const GemmBatch&) = delete;
  GemmBatch& operator=(const GemmBatch&) = delete;

  xd_gemm_args args = XD_GEMM_ARGS_INIT;

  // One tensor argument.
  struct Field {
    xd_gemm_operation operation;
    const char* name;
    const DLTensor** slot;
    Tensor* tensor;
    bool output;
  };
  std::vector<Field>& fields() { return fields_; }
  Field& field(const std::string& name);

  xd_status enqueue(xd_gemm_context* context) const;
  GemmOutcome call(xd_gemm_context* context) const;
  // Makes the call, expects success, and checks what it has given.
  void call_and_check(xd_gemm_context* context);
  // Whether the call can be made, as all ranks find alike: no executor has every algorithm.
  bool can_call(xd_gemm_context* context) const;
  // Poisons all outputs, and writes c where it is d.
  void reset();
  // The call has succeeded: every element of every output is right, nothing beside them is
  // written, and inputs are as they were.
  void check(xd_gemm_context* context);
  bool guards_intact() const;
  std::vector<std::byte> output_bytes() const;
  const GemmExpected& expected();
  const GemmInputs& inputs() const { return inputs_[static_cast<std::size_t>(rank_.rank)]; }

 private:
  Tensor& add(const char* name, const DLTensor*& slot, DLDataType type,
              std::vector<std::int64_t> shape, bool output);
  void add_input(const char* name, const DLTensor*& slot, DLDataType type, const Matrix& matrix,
                 int extents = 2);
  void add_operands();
  void add_rest(const GemmInputs& mine);
  void check_d();
  void check_kept(xd_gemm_context* context);

  Rank rank_;
  GemmCase c_;
  std::vector<GemmInputs> inputs_;  // of all ranks
  std::optional<GemmExpected> expected_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::vector<Field> fields_;
  std::vector<std::vector<std::byte>> given_;  // bytes of inputs, by field
};

}  // namespace xd::test
