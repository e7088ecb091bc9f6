// Bad tensors of one rank, in every operation of every family.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "conformance/families/mistakes.h"

namespace xd::test {
namespace {

template <class F>
class BadTensor : public testing::Test {};
TYPED_TEST_SUITE(BadTensor, Families, FamilyName);

// Runs `visit` with every tensor argument of the cases that together have all.
template <class F, class Visit>
void for_each_field(Visit&& visit) {
  for (const typename F::Case& c : F::full_cases()) {
    on_every_rank([&](Rank& rank) {
      SCOPED_TRACE(c.description());
      const auto handle = F::make(rank, c);
      Scene<F> scene(rank, handle.get(), c);
      for (auto& field : scene.batch.fields()) {
        SCOPED_TRACE(std::string(field.name) + " of operation " + std::to_string(field.operation));
        visit(scene, field);
      }
      F::expect_works(rank, c, handle.get());
    });
  }
}

TYPED_TEST(BadTensor, IsRefusedByNameAndNamesTheRankToPeers) {
  using F = TypeParam;
  const std::vector<Damage> damages = F::damages();
  for_each_field<F>([&](Scene<F>& scene, const auto& field) {
    const auto at = static_cast<std::size_t>(&field - scene.batch.fields().data());
    for (std::size_t number = 0; number < damages.size(); ++number) {
      // On two ranks every field has every damage, on others one of them.
      if (scene.rank.num_ranks != 2 && number != at % damages.size()) continue;
      const Damage& damage = damages[number];
      if (F::takes(field, damage)) continue;
      SCOPED_TRACE(damage.name);
      Words names{field.name};
      if (damage.of_sizes) {
        names.insert(names.end(), {"a: ", "b: ", "d: ", "tokens_per_rank", "max_"});
      }
      scene.expect_refused(
          field.operation, {}, [&](auto& s) { damage.apply(s.damage(*field.slot)); },
          XD_ERROR_INVALID_ARGUMENT, names);
    }
  });
}

TYPED_TEST(BadTensor, ThatIsMissingIsRefused) {
  using F = TypeParam;
  for_each_field<F>([](Scene<F>& scene, const auto& field) {
    if (F::may_be_missing(field)) return;
    scene.expect_refused(field.operation, {field.name, "NULL"},
                         [&](auto&) { *field.slot = nullptr; });
  });
}

}  // namespace
}  // namespace xd::test
