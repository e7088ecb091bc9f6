#include "conformance/gemm/batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace xd::test {

const char* name_of(xd_gemm_operation operation) {
  switch (operation) {
    case XD_GEMM_ALL_GATHER:
      return "all_gather";
    case XD_GEMM_REDUCE_SCATTER:
      return "reduce_scatter";
    case XD_GEMM_ALL_REDUCE:
      return "all_reduce";
    case XD_GEMM_BULK:
      return "bulk";
    case XD_GEMM_START_ALL_GATHER:
      return "start_all_gather";
  }
  return "?";
}

xd_status call_product(xd_gemm_context* context, xd_gemm_operation operation,
                       const xd_gemm_args& args, xd_stream stream) {
  if (operation == XD_GEMM_ALL_GATHER) return xd_gemm_all_gather(context, &args, stream);
  if (operation == XD_GEMM_REDUCE_SCATTER) return xd_gemm_reduce_scatter(context, &args, stream);
  return xd_gemm_all_reduce(context, &args, stream);
}

namespace {

// Bounds of the relative error by norm, of random data: some roundings of each number, and of those
// that were summed.
double norm_bound(DLDataType type, bool narrow_sums) {
  if (narrow_sums && type.bits > 8) return std::max(norm_bound(type, false), 2e-4);
  if (type.bits == 32) return 2e-6;
  if (type.bits == 16) return type.code == kDLBfloat ? 2.5e-3 : 4e-4;
  return type.code == kE4m3.code ? 5e-2 : 1e-1;
}

// Tensor cores add products of 8 bits with fewer bits than float32 has.
bool has_narrow_sums(const GemmCase& c, Tensor& tensor) {
  return c.fp8() && tensor.dl()->device.device_type != kDLCPU;
}

// The bound is for many numbers. Few may all be rounded by as much as possible, and those below the
// smallest normal number are, by up to half of `least_step`.
void expect_near_by_norm(const std::string& name, const Matrix& got, const Matrix& expected,
                         DLDataType type, bool narrow_sums, double least_norm) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < got.values.size(); ++i) {
    error += (got.values[i] - expected.values[i]) * (got.values[i] - expected.values[i]);
    norm += expected.values[i] * expected.values[i];
  }
  const double count = static_cast<double>(std::max<std::size_t>(got.values.size(), 1));
  const Format format = number_format(type);
  const double least_step = std::ldexp(1.0, 1 - format.bias() - format.mantissa_bits);
  const double relative = norm_bound(type, narrow_sums) * (1 + 2 / std::sqrt(count));
  EXPECT_LE(std::sqrt(error),
            relative * std::max(std::sqrt(norm), least_norm) + std::sqrt(count) * least_step / 2)
      << name;
}

// One rounding to `type`, and the error of a curve in float32.
double allowed_error(DLDataType type, double value) {
  const Format format = number_format(type);
  const double step = std::ldexp(1.0, -format.mantissa_bits - 1) * 1.001;
  const double least = std::ldexp(1.0, -format.bias() - format.mantissa_bits + 1);
  return std::fabs(value) * step + least + 4e-6 * std::max(1.0, std::fabs(value));
}

}  // namespace

void expect_numbers(const std::string& name, Tensor& tensor, const Matrix& expected,
                    const GemmCase& c, bool curved, double norm) {
  EXPECT_TRUE(tensor.buffer().guards_intact()) << name << ": bytes beside the tensor were written";
  const DLDataType type = tensor.type();
  const bool saturating = type.bits == 8;
  const Matrix got = decoded(tensor.read(), expected.rows, expected.columns, type);
  if (c.values == Values::random) {
    return expect_near_by_norm(name, got, expected, type, has_narrow_sums(c, tensor), norm);
  }
  const Matrix exact =
      decoded(codes_of(expected, type, saturating), expected.rows, expected.columns, type);
  std::size_t wrong = 0, first = 0;
  for (std::size_t i = got.values.size(); i-- > 0;) {
    const double error = std::fabs(got.values[i] - expected.values[i]);
    const bool good = curved ? error <= allowed_error(type, expected.values[i]) ||
                                   got.values[i] == exact.values[i]
                             : got.values[i] == exact.values[i];
    if (good) continue;
    ++wrong;
    first = i;
  }
  if (wrong == 0) return;
  const auto columns = static_cast<std::size_t>(expected.columns);
  ADD_FAILURE() << name << "[" << first / columns << ", " << first % columns
                << "] = " << got.values[first] << ", expected " << exact.values[first] << " ("
                << expected.values[first] << "); " << wrong << " of " << got.values.size()
                << " elements of " << expected.rows << " rows are wrong";
}

GemmBatch::GemmBatch(const Rank& rank, const GemmCase& c, int step) : rank_(rank), c_(c) {
  for (int r = 0; r < c.num_ranks; ++r) inputs_.push_back(gemm_inputs(c, step, r));
  add_operands();
  add_rest(inputs());
  args.alpha = c_.alpha;
  args.beta = c_.beta();
  args.epilogue = c_.epilogue;
  args.reduce_bias_grad = c_.bias_grad == BiasGrad::reduced ? 1 : 0;
  args.transpose_a = c_.transpose_a() ? 1 : 0;
  args.transpose_b = c_.transpose_b() ? 1 : 0;
  if (c_.announces_tokens()) args.tokens_per_rank = inputs().tokens.data();
  reset();
  for (const Field& field : fields_) given_.push_back(field.tensor->buffer().read());
}

Tensor& GemmBatch::add(const char* name, const DLTensor*& slot, DLDataType type,
                       std::vector<std::int64_t> shape, bool output) {
  const Place place = c_.place(static_cast<int>(fields_.size()), rank_.rank);
  tensors_.push_back(std::make_unique<Tensor>(rank_, type, std::move(shape), place));
  slot = tensors_.back()->dl();
  fields_.push_back({c_.operation, name, &slot, tensors_.back().get(), output});
  return *tensors_.back();
}

void GemmBatch::add_input(const char* name, const DLTensor*& slot, DLDataType type,
                          const Matrix& matrix, int extents) {
  std::vector<std::int64_t> shape{matrix.rows, matrix.columns};
  if (extents == 1) shape = {matrix.rows * matrix.columns};
  add(name, slot, type, shape, false).write(codes_of(matrix, type));
}

void GemmBatch::add_operands() {
  const GemmInputs& mine = inputs();
  add_input("a", args.a, c_.a_type(), c_.transpose_a() ? transposed(mine.a) : mine.a);
  add_input("b", args.b, c_.b_type(), c_.transpose_b() ? transposed(mine.b) : mine.b);
  if (c_.scales() == Scaling::none) return;
  const int extents = c_.scales() == Scaling::block ? 2 : 1;
  add_input("a_scale", args.a_scale, kF32, mine.a_scale, extents);
  add_input("b_scale", args.b_scale, kF32, mine.b_scale, extents);
}

void GemmBatch::add_rest(const GemmInputs& mine) {
  const std::int64_t all = sum_of(mine.tokens);
  const std::int64_t own = mine.tokens[static_cast<std::size_t>(rank_.rank)];
  const std::int64_t rows = c_.operation == XD_GEMM_REDUCE_SCATTER ? own : all;
  add("d", args.d, c_.d_type(), {rows, c_.n()}, true);
  if (c_.addend == Addend::in_place) {
    args.c = args.d;
  } else if (c_.addend != Addend::none) {
    add_input("c", args.c, c_.side_type(), mine.c);
  }
  if (c_.bias != Bias::none) {
    add_input("bias", args.bias, c_.bias == Bias::f32 ? kF32 : c_.side_type(), mine.bias, 1);
  }
  if (c_.reads_pre_activation()) {
    add_input("pre_activation", args.pre_activation, c_.side_type(), mine.pre_activation);
  } else if (c_.pre_activation) {
    add("pre_activation", args.pre_activation, c_.side_type(), {rows, c_.n()}, true);
  }
  if (c_.bias_grad != BiasGrad::none) add("bias_grad", args.bias_grad, kF32, {c_.n()}, true);
  if (c_.scaled_output()) {
    Matrix scale(1, 1);
    scale.at(0, 0) = mine.d_scale;
    add_input("d_scale", args.d_scale, kF32, scale, 1);
  }
  if (c_.amax) add("d_amax", args.d_amax, kF32, {1}, true);
  if (!c_.gives_gathered()) return;
  add("gathered", args.gathered, c_.a_type(),
      c_.transpose_a() ? std::vector{c_.k(), all} : std::vector{all, c_.k()}, true);
  if (c_.scales() == Scaling::tensor) {
    add("gathered_scale", args.gathered_scale, kF32, {c_.num_ranks}, true);
  } else if (c_.scales() == Scaling::row) {
    add("gathered_scale", args.gathered_scale, kF32, {all}, true);
  } else if (c_.scales() == Scaling::block) {
    add("gathered_scale", args.gathered_scale, kF32, {all, mine.a_scale.columns}, true);
  }
}

GemmBatch::Field& GemmBatch::field(const std::string& name) {
  for (Field& field : fields_) {
    if (name == field.name) return field;
  }
  throw std::logic_error("no field " + name);
}

xd_status GemmBatch::enqueue(xd_gemm_context* context) const {
  return call_product(context, c_.operation, args, rank_.stream());
}

GemmOutcome GemmBatch::call(xd_gemm_context* context) const {
  return finish(rank_, context, enqueue(context));
}

void GemmBatch::call_and_check(xd_gemm_context* context) {
  ok(call(context));
  check(context);
}

bool GemmBatch::can_call(xd_gemm_context* context) const {
  xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
  return xd_gemm_explain(context, c_.operation, &args, &info) == XD_SUCCESS;
}

void GemmBatch::reset() {
  for (Field& field : fields_) {
    if (field.output) field.tensor->buffer().fill(kPoison);
  }
  if (c_.addend == Addend::in_place) {
    field("d").tensor->write(codes_of(inputs().c, c_.side_type()));
  }
}

const GemmExpected& GemmBatch::expected() {
  if (!expected_) expected_ = gemm_expected(c_, inputs_, rank_.rank);
  return *expected_;
}

bool GemmBatch::guards_intact() const {
  return std::ranges::all_of(
      fields_, [](const Field& field) { return field.tensor->buffer().guards_intact(); });
}

std::vector<std::byte> GemmBatch::output_bytes() const {
  std::vector<std::byte> all;
  for (const Field& field : fields_) {
    if (!field.output) continue;
    const std::vector<std::byte> bytes = field.tensor->read();
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

void GemmBatch::check(xd_gemm_context* context) {
  check_d();
  const GemmExpected& want = expected();
  if (c_.pre_activation && !c_.reads_pre_activation()) {
    expect_numbers("pre_activation", *field("pre_activation").tensor, want.x, c_, false, want.norm);
  }
  if (c_.gives_gathered()) {
    const Matrix rows = c_.transpose_a() ? transposed(want.gathered) : want.gathered;
    EXPECT_EQ(field("gathered").tensor->read(), codes_of(rows, c_.a_type())) << "gathered";
    if (!want.gathered_scale.values.empty()) {
      EXPECT_EQ(field("gathered_scale").tensor->read(), codes_of(want.gathered_scale, kF32))
          << "gathered_scale";
    }
  }
  if (c_.keeps_gathered()) check_kept(context);
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    EXPECT_TRUE(fields_[i].tensor->buffer().guards_intact())
        << fields_[i].name << ": bytes beside the tensor were written";
    if (fields_[i].output) continue;
    EXPECT_EQ(fields_[i].tensor->buffer().read(), given_[i]) << fields_[i].name << " was changed";
  }
}

void GemmBatch::check_d() {
  const GemmExpected& want = expected();
  Matrix scaled = want.d;
  for (double& value : scaled.values) value *= inputs().d_scale;
  expect_numbers("d", *field("d").tensor, scaled, c_, c_.curved(), want.norm * inputs().d_scale);
  // Column sums of random numbers may be near zero; the sums of their magnitudes are the measure.
  const auto expect_sums = [&](const char* name, const Matrix& sums, double magnitude) {
    const Matrix got = decoded(field(name).tensor->read(), 1, sums.columns, kF32);
    const bool narrow_sums = has_narrow_sums(c_, *field(name).tensor);
    const double bound =
        c_.values == Values::random ? norm_bound(c_.side_type(), narrow_sums) : 4e-6;
    for (std::int64_t n = 0; n < sums.columns; ++n) {
      const double allowed = c_.values == Values::random || c_.curved() ? bound * magnitude : 0;
      EXPECT_NEAR(got.at(0, n), sums.at(0, n), allowed) << name << " of column " << n;
    }
  };
  if (c_.bias_grad != BiasGrad::none) {
    const auto rows = static_cast<double>(sum_of(inputs().tokens) * c_.num_ranks);
    expect_sums("bias_grad", want.bias_grad, rows * std::max(1.0, want.amax));
  }
  if (c_.amax) {
    Matrix amax(1, 1);
    amax.at(0, 0) = want.amax;
    expect_sums("d_amax", amax, std::max(1.0, want.amax));
  }
}

void GemmBatch::check_kept(xd_gemm_context* context) {
  xd_gemm_view view = XD_GEMM_VIEW_INIT;
  ok(xd_gemm_gathered(context, &view));
  const Matrix& want = expected().gathered;
  const Matrix rows = c_.transpose_a() ? transposed(want) : want;
  ASSERT_EQ(view.rows, rows.rows);
  ASSERT_EQ(view.columns, rows.columns);
  EXPECT_EQ(view.dtype.code, c_.a_type().code);
  EXPECT_EQ(view.dtype.bits, c_.a_type().bits);
  EXPECT_EQ(view.dtype.lanes, 1);
  const std::vector<std::byte> codes = codes_of(rows, c_.a_type());
  const std::size_t row_bytes = static_cast<std::size_t>(rows.columns) * element_bytes(c_.a_type());
  if (rows.rows > 1) {
    ASSERT_GE(view.pitch_bytes, row_bytes);
  }
  std::vector<std::byte> got(codes.size());
  for (std::int64_t i = 0; i < rows.rows && row_bytes > 0; ++i) {
    const auto at = static_cast<std::size_t>(i);
    rank_.memory->copy_out(&got[at * row_bytes],
                           static_cast<const std::byte*>(view.data) + at * view.pitch_bytes,
                           row_bytes);
  }
  EXPECT_EQ(got, codes) << "what the context keeps";
}

}  // namespace xd::test
