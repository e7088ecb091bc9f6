// Bits depend on the inputs, and not on the modes that the calling thread computes in.
#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "conformance/batch.h"
#include "conformance/image.h"
#include "support/float_modes.h"
#include "support/gtest_main.h"
#include "support/random.h"

namespace xd::test {
namespace {

constexpr xd_ep_operation kOperations[] = {XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_COMBINE_BWD,
                                           XD_EP_DISPATCH_BWD};

// A number of either sign that is denormal, or one of the least normal ones: what products and sums
// of such numbers are depends on every bit of the modes.
std::uint32_t tiny_code(DLDataType type, Random& random) {
  const auto any = static_cast<std::uint32_t>(random.below(std::uint64_t{1} << 32));
  const std::uint32_t sign = any >> 31 << (type.bits - 1);
  const int mantissa = type.bits == 32 ? 23 : type.code == kDLBfloat ? 7 : 10;
  return sign | (any & ((2u << mantissa) - 1));
}

// Weights that bring ordinary numbers into the same range, and some ordinary ones.
float tiny_weight(Random& random) {
  const float magnitude = 0.5f + static_cast<float>(random.below(1024)) / 1024.0f;
  return random.below(2) == 0 ? magnitude : magnitude * 0x1p-126f;
}

void fill_with_tiny_numbers(Batch& batch, std::uint64_t seed) {
  Random random(seed);
  for (const Batch::Field& field : batch.fields()) {
    if (field.output || field.operation == XD_EP_PREPARE) continue;
    Tensor& tensor = *field.tensor;
    const std::string name = field.name;
    const bool weights = name.find("weights") != std::string::npos;
    const auto count =
        static_cast<std::int64_t>(tensor.buffer().bytes() / element_bytes(tensor.type()));
    if (weights) {
      std::vector<float> values;
      for (std::int64_t i = 0; i < count; ++i) values.push_back(tiny_weight(random));
      tensor.write(values);
      continue;
    }
    Image image(1, count, tensor.type(), std::byte{0});
    image.set_row(0, [&](auto, auto) { return tiny_code(tensor.type(), random); });
    tensor.write(image.bytes());
  }
}

using Outputs = std::vector<std::vector<std::byte>>;

Outputs outputs_of(Batch& batch, xd_ep_operation operation) {
  Outputs outputs;
  for (const Batch::Field& field : batch.fields()) {
    if (field.operation == operation && field.output) outputs.push_back(field.tensor->read());
  }
  return outputs;
}

class FloatModes : public testing::TestWithParam<std::tuple<DLDataType, xd_ep_layout, Place>> {};

TEST_P(FloatModes, OfTheCallingThreadChangeNoBitOfAnyOutput) {
  const auto [dtype, layout, place] = GetParam();
  Case c = plain_case(world().num_ranks());
  c.dtype = dtype;
  c.layout = layout;
  on_every_rank([&, rows = place](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c, 0, rows);
    batch.prepare(group.get());
    const std::uint64_t seed = mix(c.seed, 0xF10A7, static_cast<std::uint64_t>(rank.rank));
    SCOPED_TRACE("seed " + std::to_string(c.seed) + ", rank " + std::to_string(rank.rank));
    fill_with_tiny_numbers(batch, seed);
    for (const xd_ep_operation operation : kOperations) {
      SCOPED_TRACE("operation " + std::to_string(operation));
      batch.poison_outputs();
      ok(batch.call(group.get(), operation));
      const Outputs expected = outputs_of(batch, operation);
      for (const FloatMode mode : {FloatMode::flushing, FloatMode::upward}) {
        SCOPED_TRACE(mode == FloatMode::flushing ? "flushing" : "upward");
        batch.poison_outputs();
        xd_status called = XD_SUCCESS;
        {
          const InFloatMode scope(mode);
          called = batch.enqueue(group.get(), operation);
          if (!rank.asynchronous()) {
            EXPECT_TRUE(scope.untouched()) << "the caller's modes";
          }
        }
        ok(finish(rank, group.get(), called));
        EXPECT_TRUE(outputs_of(batch, operation) == expected) << "some bit is another";
      }
    }
  });
}

// A call that fails also leaves the caller's modes as they are.
TEST(FloatModesOfACallThatFails, AreTheCallersAfterwards) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    for (const FloatMode mode : {FloatMode::flushing, FloatMode::upward}) {
      bool untouched = false;
      {
        const InFloatMode scope(mode);
        EXPECT_EQ(xd_ep_join_failed(group.get(), XD_EP_COMBINE, "a mistake", rank.stream()),
                  XD_ERROR_INVALID_ARGUMENT);
        untouched = scope.untouched();
      }
      EXPECT_TRUE(untouched || rank.asynchronous());
      rank.memory->synchronize();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, FloatModes,
                         testing::Combine(testing::Values(kBf16, kF16, kF32),
                                          testing::Values(XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR),
                                          testing::Values(Place::ordinary, Place::symmetric)));

}  // namespace
}  // namespace xd::test
