// A rank whose products run out of memory between two operations of a layer. The launch puts a
// library of the tests into oneDNN's place.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "conformance/moe/layer.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

void fail_after(int products) {
  void* const fake = ::dlopen("libdnnl.so.3", RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(fake, nullptr) << ::dlerror();
  const auto tell = reinterpret_cast<void (*)(int)>(::dlsym(fake, "fake_fail_after"));
  ASSERT_NE(tell, nullptr) << "the launch found another oneDNN";
  tell(products);
}

constexpr int kGuilty = 1;
// More than either pass has: a rank has 5 experts with rows.
constexpr int kMostProducts = 24;

// Lets more and more products of a pass succeed, until all do. Returns how many failures the peers
// have heard of.
template <class Pass>
int fail_in_each_product(const Rank& rank, const char* next, Pass&& pass) {
  int heard = 0;
  for (int products = 0; products <= kMostProducts; ++products) {
    SCOPED_TRACE("product " + std::to_string(products));
    if (rank.rank == kGuilty) fail_after(products);
    const Outcome outcome = pass();
    fail_after(-1);
    if (products == kMostProducts) ok(outcome);
    if (outcome == XD_SUCCESS) continue;
    ++heard;
    EXPECT_EQ(outcome, rank.rank == kGuilty ? XD_ERROR_OUT_OF_MEMORY : XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions(rank.rank == kGuilty ? "oneDNN" : "rank 1: its call failed"))
        << outcome.text;
    EXPECT_TRUE(outcome.mentions(next)) << outcome.text;
  }
  return heard;
}

TEST(WithoutMemory, ALayerFailsOnAllRanksInTheOperationThatComesNext) {
  for (const int parts : {1, 2}) {
    on_every_rank([&](Rank& rank) {
      const Case c = layer_case(rank.num_ranks, parts);
      const Group group = make_group(rank.comm, c.config(rank.rank));
      Batch batch(rank, c);
      batch.prepare_args.parts = parts;
      batch.prepare(group.get());
      Layer layer(rank, c, batch, {}), sound(rank, c, batch, {});
      sound.forward_by_calls(group.get());
      sound.backward_by_calls(group.get());
      EXPECT_EQ(fail_in_each_product(rank, "xd_moe_forward",
                                     [&] { return layer.forward(group.get(), parts); }),
                10);
      // Nobody waits for products for weights, so their failure is the rank's alone.
      EXPECT_EQ(fail_in_each_product(rank, "xd_moe_backward",
                                     [&] { return layer.backward(group.get(), parts); }),
                rank.rank == kGuilty ? 20 : 10);
      layer.expect_equal(sound);
    });
  }
}

}  // namespace
}  // namespace xd::test
