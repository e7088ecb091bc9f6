// Grouped products: exact sums where sums are exact, float32 sums elsewhere, from the rows of the
// range's zones and no others, into their own rows and no others.
#include <crossdock/grouped.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "conformance/said.h"
#include "conformance/spread3.h"
#include "support/gtest_main.h"
#include "support/random.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

struct Zones {
  std::int64_t rows;
  std::vector<std::int64_t> offsets;

  std::int64_t experts() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
  std::int64_t bound(std::int64_t e) const {
    return std::min(offsets[static_cast<std::size_t>(e)], rows);
  }
};
struct Sizes {
  std::int64_t k, n;
};

// Zones, and the sizes that they are multiplied with. Tiles of CUDA have 64 or 128 rows, and 128 or
// 256 columns.
struct Shapes {
  Zones zones;
  std::vector<Sizes> sizes;
};
const std::vector<Shapes>& all_shapes() {
  const std::vector<Sizes> some = {{64, 256}, {13, 5}, {72, 520}, {1, 1}};
  std::vector<std::int64_t> steps(41);  // tiles behind those of a warp's lanes
  std::iota(steps.begin(), steps.end(), 0);
  static const std::vector<Shapes> all = {
      {{9, {0, 0, 1, 3, 6, 6}}, some},                 // 0 to 3 rows, and rows behind them
      {{20, {0, 10, 30, 40}}, some},                   // a plan that overflows
      {{145, {5, 135, 135, 140, 142}}, {{200, 24}}},   // begins inside
      {{192, {0, 64, 192}}, {{64, 256}}},              // whole tiles
      {{290, {3, 86, 281}}, {{840, 16}, {300, 264}}},  // cut tiles, many stages and columns
      {{420, {7, 330, 415}}, {{40, 136}}},             // sums over many rows
      {{9, {0, 2, 5, 9}}, {{1000, 40}, {300, 520}, {8, 300}}},
      {{41, steps}, {{24, 136}}},
      {{40, std::vector<std::int64_t>(41, 7)}, {{13, 5}}},  // empty zones alone
  };
  return all;
}

struct Range {
  std::int32_t first, count;  // count 0 = to the end
};

struct Type {
  const char* name;
  DLDataType dl;
  bool has_blocks = false;  // scales of blocks
};
// The first three are those of both calls.
constexpr Type kTypes[] = {
    {"bf16", kBf16}, {"f16", kF16}, {"f32", kF32}, {"e4m3", kE4m3}, {"e4m3_blocks", kE4m3, true}};
void PrintTo(const Type& type, std::ostream* out) { *out << type.name; }

struct Way {
  bool transposed = false;  // b or nothing
  DLDataType d_type = kF32;
  bool accumulate = false;
  Range range = {0, 0};
};

std::string name_of(const Zones& zones, const Sizes& sizes, const Way& way) {
  return "rows " + std::to_string(zones.rows) + ", k " + std::to_string(sizes.k) + ", n " +
         std::to_string(sizes.n) + (way.transposed ? ", transposed" : "") + ", d of " +
         std::to_string(way.d_type.bits) + " bits" + (way.accumulate ? ", accumulated" : "") +
         ", from expert " + std::to_string(way.range.first);
}

// Small whole numbers, whose sums are exact in any order.
double whole(std::uint64_t what, std::int64_t i) {
  return static_cast<double>(mix(what, static_cast<std::uint64_t>(i)) % 7) - 3;
}
// In [-1, 1).
double fraction(std::uint64_t what, std::int64_t i) {
  return static_cast<double>(mix(what, static_cast<std::uint64_t>(i)) >> 40) * 0x1p-23 - 1;
}
// In [1, 2).
double positive(std::uint64_t what, std::int64_t i) { return 1.5 + fraction(what, i) / 2; }
// Between the rows of inputs lies NaN, whatever their type.
constexpr std::byte kNans{0xFF};
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class Case {
 public:
  using Number = double (*)(std::uint64_t, std::int64_t);

  Case(const Rank& rank, const Type& type, const Zones& zones, const Way& way)
      : rank_(rank),
        type_(type),
        zones_(zones),
        way_(way),
        offsets_(rank, way.transposed ? kI64 : kI32, {zones.experts() + 1}) {
    if (way.transposed) {
      offsets_.write(zones.offsets);
    } else {
      offsets_.write(std::vector<std::int32_t>(zones.offsets.begin(), zones.offsets.end()));
    }
  }

 protected:
  std::int64_t last() const {
    return way_.range.count == 0 ? zones_.experts() : way_.range.first + way_.range.count;
  }
  bool in_range(std::int64_t e) const { return e >= way_.range.first && e < last(); }
  // True if the row lies in a zone of the range.
  bool counts(std::int64_t row) const {
    return row >= zones_.bound(way_.range.first) && row < zones_.bound(last());
  }
  // Numbers in the range's rows, and NaN in all others.
  void fill_rows(Spread3& rows, Number number, std::uint64_t what) const {
    const std::int64_t columns = rows.columns();
    rows.fill([&](std::int64_t i) { return counts(i / columns) ? number(what, i) : kNan; });
    rows.upload();
  }
  template <class Args>
  void set_common(Args& args) {
    args.offsets = offsets_.dl();
    args.first_expert = way_.range.first;
    args.num_experts = way_.range.count;
    args.accumulate = way_.accumulate ? 1 : 0;
  }
  // Fills d before the call with numbers to add to, or with poison.
  void prepare(Spread3& d) const {
    if (way_.accumulate) d.fill([](std::int64_t i) { return whole(9, i); });
    d.upload();
  }

  const Rank& rank_;
  const Type type_;
  const Zones& zones_;
  const Way way_;
  Tensor offsets_;
};

class ProductCase : Case {
 public:
  ProductCase(const Rank& rank, const Type& type, const Zones& zones, const Sizes& sizes,
              const Way& way, Number number)
      : Case(rank, type, zones, way),
        sizes_(sizes),
        a_(rank, type.dl, {zones.rows, sizes.k}, kNans),
        b_(rank, type.dl,
           way.transposed ? std::vector{zones.experts(), sizes.n, sizes.k}
                          : std::vector{zones.experts(), sizes.k, sizes.n},
           kNans),
        d_(rank, way.d_type, {zones.rows, sizes.n}),
        a_scale_(rank, kF32, {zones.rows}),
        b_scale_(rank, kF32, {zones.experts(), sizes.n}),
        a_blocks_(rank, kF32, {zones.rows, blocks(sizes.k)}, kNans),
        b_blocks_(rank, kF32, {zones.experts(), blocks(sizes.n), blocks(sizes.k)}, kNans) {
    fill_rows(a_, number, 1);
    if (way.transposed) b_.transpose();
    const std::int64_t each = sizes.k * sizes.n;
    b_.fill([&](std::int64_t i) { return in_range(i / each) ? number(2, i) : kNan; });
    b_.upload();
    prepare(d_);
    std::vector<float> rows, columns;
    for (std::int64_t i = 0; i < zones.rows; ++i) rows.push_back(scale(3, i));
    for (std::int64_t i = 0; i < zones.experts() * sizes.n; ++i) columns.push_back(scale(4, i));
    a_scale_.write(rows);
    b_scale_.write(columns);
    fill_rows(a_blocks_, power, 5);
    const std::int64_t of_expert = blocks(sizes.n) * blocks(sizes.k);
    b_blocks_.fill([&](std::int64_t i) { return in_range(i / of_expert) ? power(6, i) : kNan; });
    b_blocks_.upload();
  }

  xd_status call() {
    xd_grouped_product_args args = XD_GROUPED_PRODUCT_ARGS_INIT;
    set_common(args);
    args.a = a_.dl();
    args.b = b_.dl();
    args.d = d_.dl();
    if (scaled()) {
      args.a_scale = type_.has_blocks ? a_blocks_.dl() : a_scale_.dl();
      args.b_scale = type_.has_blocks ? b_blocks_.dl() : b_scale_.dl();
    }
    const xd_status status = xd_grouped_product(rank_.comm, &args, rank_.stream());
    rank_.memory->synchronize();
    return status;
  }

  // `exact`: sums are; else each may be off by a rounding of every addition.
  void check(bool exact) {
    const std::vector<std::byte> before = d_.bytes();
    d_.download();
    for (std::int64_t e = way_.range.first; e < last(); ++e) {
      for (std::int64_t r = zones_.bound(e); r < zones_.bound(e + 1); ++r) {
        for (std::int64_t c = 0; c < sizes_.n; ++c) {
          check_element(e, r, c, exact);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
    // All other bytes of d are as they were.
    std::vector<std::byte> expected = before;
    const std::size_t pitch = before.size() / static_cast<std::size_t>(zones_.rows);
    const std::size_t width = static_cast<std::size_t>(sizes_.n) * element_bytes(way_.d_type);
    for (std::int64_t r = 0; r < zones_.rows; ++r) {
      if (!counts(r)) continue;
      const auto at = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(r) * pitch);
      std::copy_n(d_.bytes().begin() + at, width, expected.begin() + at);
    }
    EXPECT_TRUE(d_.bytes() == expected) << "d was written where it should not be";
    EXPECT_TRUE(d_.guards_intact());
  }

  const std::vector<std::byte>& result() {
    d_.download();
    return d_.bytes();
  }

 private:
  bool scaled() const { return type_.dl.bits == 8; }
  static float scale(std::uint64_t what, std::int64_t i) {
    return static_cast<float>(0.3 + static_cast<double>(mix(what, at(i)) % 7) / 3);
  }
  // Under which sums stay exact.
  static double power(std::uint64_t what, std::int64_t i) {
    return std::ldexp(1, static_cast<int>(mix(what, at(i)) % 4) - 2);
  }
  static std::int64_t blocks(std::int64_t extent) { return (extent + 127) / 128; }
  static std::uint64_t at(std::int64_t i) { return static_cast<std::uint64_t>(i); }
  double factor(std::int64_t e, std::int64_t r, std::int64_t c, std::int64_t k) const {
    if (!type_.has_blocks) return 1;
    const std::int64_t along = blocks(sizes_.k);
    return a_blocks_.value(r * along + k / 128) *
           b_blocks_.value((e * blocks(sizes_.n) + c / 128) * along + k / 128);
  }
  void check_element(std::int64_t e, std::int64_t r, std::int64_t c, bool exact) {
    double sum = 0, size = 0;
    for (std::int64_t k = 0; k < sizes_.k; ++k) {
      const double product =
          a_.value(r * sizes_.k + k) * b_.value((e * sizes_.k + k) * sizes_.n + c);
      const double term = product * factor(e, r, c, k);
      sum += term;
      size += std::abs(term);
    }
    if (scaled() && !type_.has_blocks) {
      const float of_row = scale(3, r), of_column = scale(4, e * sizes_.n + c);
      const volatile float once = static_cast<float>(sum) * of_row;  // each step is rounded
      const volatile float twice = once * of_column;
      sum = static_cast<double>(twice);
      size *= static_cast<double>(of_row) * of_column;
    }
    if (way_.accumulate) sum += whole(9, r * sizes_.n + c);
    const double got = d_.get(r * sizes_.n + c), expected = d_.rounded(sum);
    if (exact) {
      ASSERT_EQ(got, expected) << "row " << r << ", column " << c;
    } else {
      // Tensor cores keep some bits less of 128 products of fp8. Of all products, it would show.
      const double of_sum = scaled() ? 0x1p-10 : static_cast<double>(sizes_.k) * 0x1p-24;
      const double bound = size * of_sum + std::abs(sum) * (way_.d_type.bits == 32 ? 0 : 0x1p-8);
      ASSERT_NEAR(got, sum, bound) << "row " << r << ", column " << c;
    }
  }

  const Sizes sizes_;
  Spread3 a_, b_, d_;
  Tensor a_scale_, b_scale_;
  Spread3 a_blocks_, b_blocks_;
};

class OuterCase : Case {
 public:
  OuterCase(const Rank& rank, const Type& type, const Zones& zones, const Sizes& sizes,
            const Way& way, Number number)
      : Case(rank, type, zones, way),
        sizes_(sizes),
        a_(rank, type.dl, {zones.rows, sizes.k}, kNans),
        b_(rank, type.dl, {zones.rows, sizes.n}, kNans),
        d_(rank, way.d_type, {zones.experts(), sizes.k, sizes.n}) {
    fill_rows(a_, number, 1);
    fill_rows(b_, number, 2);
    prepare(d_);
  }

  xd_status call() {
    xd_grouped_outer_args args = XD_GROUPED_OUTER_ARGS_INIT;
    set_common(args);
    args.a = a_.dl();
    args.b = b_.dl();
    args.d = d_.dl();
    const xd_status status = xd_grouped_outer(rank_.comm, &args, rank_.stream());
    rank_.memory->synchronize();
    return status;
  }

  void check() {
    const std::vector<std::byte> before = d_.bytes();
    d_.download();
    for (std::int64_t e = way_.range.first; e < last(); ++e) {
      for (std::int64_t k = 0; k < sizes_.k; ++k) {
        for (std::int64_t n = 0; n < sizes_.n; ++n) {
          const std::int64_t i = (e * sizes_.k + k) * sizes_.n + n;
          double sum = way_.accumulate ? whole(9, i) : 0;
          for (std::int64_t r = zones_.bound(e); r < zones_.bound(e + 1); ++r) {
            sum += a_.value(r * sizes_.k + k) * b_.value(r * sizes_.n + n);
          }
          ASSERT_EQ(d_.get(i), d_.rounded(sum)) << "expert " << e << ", " << k << ", " << n;
        }
      }
    }
    expect_rest(before);
    EXPECT_TRUE(d_.guards_intact());
  }

 private:
  // All bytes but those of the range's matrices are as they were.
  void expect_rest(std::vector<std::byte> expected) const {
    const std::int64_t rows = zones_.experts() * sizes_.k;
    const auto pitch = static_cast<std::ptrdiff_t>(expected.size()) / rows;
    const auto width = static_cast<std::ptrdiff_t>(sizes_.n) * way_.d_type.bits / 8;
    for (std::int64_t row = 0; row < rows; ++row) {
      if (!in_range(row / sizes_.k)) continue;
      std::copy_n(d_.bytes().begin() + row * pitch, width, expected.begin() + row * pitch);
    }
    EXPECT_TRUE(d_.bytes() == expected) << "d was written where it should not be";
  }

  const Sizes sizes_;
  Spread3 a_, b_, d_;
};

class Grouped : public testing::TestWithParam<Type> {
 protected:
  // Runs a case; on CUDA there is no float32, which is said.
  template <class Run>
  void run(const Rank& rank, Run&& one, const std::function<void()>& check) const {
    if (rank.asynchronous() && GetParam().dl.bits == 32) {
      expect_error(one.call(), XD_ERROR_UNSUPPORTED, "float32");
      return;
    }
    ASSERT_EQ(one.call(), XD_SUCCESS) << xd_last_error();
    check();
  }
  // Calls body(zones, sizes, way) for all cases.
  using Body = std::function<void(const Zones&, const Sizes&, const Way&)>;
  void for_cases(const Body& body) const {
    for (const auto& [zones, all_sizes] : all_shapes()) {
      for (const Sizes& sizes : all_sizes) {
        for_ways(zones.experts(), [&](const Way& way) {
          SCOPED_TRACE(name_of(zones, sizes, way));
          body(zones, sizes, way);
        });
        if (HasFatalFailure()) return;
      }
    }
  }

 private:
  void for_ways(std::int64_t experts, const std::function<void(const Way&)>& body) const {
    const DLDataType narrow = GetParam().dl.bits == 8 ? kBf16 : GetParam().dl;
    const auto some = static_cast<std::int32_t>(std::min<std::int64_t>(2, experts - 1));
    const bool eight_bits = GetParam().dl.bits == 8;  // of which columns of b are packed
    std::vector<Way> ways = {{.transposed = true, .d_type = narrow},
                             {.transposed = true, .accumulate = true},
                             {.transposed = true, .d_type = narrow, .range = {1, some}}};
    if (!eight_bits) {
      ways.push_back({.d_type = narrow});
      ways.push_back({.accumulate = true, .range = {1, some}});
    }
    for (const Way& way : ways) {
      body(way);
      if (HasFatalFailure()) return;
    }
  }
};

// The types of both calls.
class GroupedWide : public Grouped {};

TEST_P(Grouped, ProductsAreExactWhereSumsAre) {
  on_every_rank([this](Rank& rank) {
    if (rank.rank + 1 < rank.num_ranks) return;  // one is enough, and takes a second
    for_cases([&](const Zones& zones, const Sizes& sizes, const Way& way) {
      ProductCase one(rank, GetParam(), zones, sizes, way, whole);
      run(rank, one, [&] { one.check(true); });
    });
  });
}

TEST_P(GroupedWide, OuterProductsAreExactWhereSumsAre) {
  on_every_rank([this](Rank& rank) {
    if (rank.rank + 1 < rank.num_ranks) return;  // one is enough, and takes a second
    for_cases([&](const Zones& zones, const Sizes& sizes, const Way& way) {
      OuterCase one(rank, GetParam(), zones, sizes, way, whole);
      run(rank, one, [&] { one.check(); });
    });
  });
}

TEST_P(Grouped, SumsAreFloat32) {
  on_every_rank([this](Rank& rank) {
    const bool narrow = GetParam().dl.bits == 8;
    const Zones zones{20, {2, 12, 19}};
    for (const bool transposed : {false, true}) {
      if (narrow && !transposed) continue;
      const Way way{.transposed = transposed};
      const Sizes sizes{narrow ? 8192 : 1100, 40};
      ProductCase one(rank, GetParam(), zones, sizes, way, narrow ? positive : fraction);
      run(rank, one, [&] { one.check(false); });
    }
  });
}

TEST_P(Grouped, HasEqualBitsInEveryCallAndRange) {
  on_every_rank([](Rank& rank) {
    if (rank.asynchronous() && GetParam().dl.bits == 32) return;  // is refused: see above
    const Zones zones{150, {2, 12, 14, 149}};
    const auto bits = [&](const Range& range, std::int64_t row) {
      const Way way{.transposed = true, .range = range};
      ProductCase one(rank, GetParam(), zones, {300, 40}, way, fraction);
      EXPECT_EQ(one.call(), XD_SUCCESS) << xd_last_error();
      const std::vector<std::byte> all = one.result();
      const auto pitch = static_cast<std::ptrdiff_t>(all.size()) / zones.rows;
      return std::vector<std::byte>(all.begin() + row * pitch, all.begin() + (row + 1) * pitch);
    };
    const std::int64_t row_of[] = {5, 13, 148};
    for (std::int32_t e = 0; e < 3; ++e) {
      EXPECT_TRUE(bits({0, 0}, row_of[e]) == bits({e, 1}, row_of[e])) << "expert " << e;
    }
  });
}

std::string type_name(const testing::TestParamInfo<Type>& instance) { return instance.param.name; }
INSTANTIATE_TEST_SUITE_P(Types, Grouped, testing::ValuesIn(kTypes), type_name);
INSTANTIATE_TEST_SUITE_P(Types, GroupedWide, testing::ValuesIn(kTypes, kTypes + 3), type_name);

TEST(GroupedCalls, ProductRefusesByNameWhatDoesNotFit) {
  on_every_rank([](Rank& rank) {
    Tensor a(rank, kBf16, {4, 16}), b(rank, kBf16, {2, 16, 8}), d(rank, kBf16, {4, 8});
    Tensor offsets(rank, kI32, {3}), fewer(rank, kI32, {2}), floats(rank, kF32, {3});
    Tensor narrow(rank, kBf16, {4, 7}), wide(rank, kF32, {4, 8}), half(rank, kF16, {4, 8});
    Tensor other(rank, kBf16, {2, 15, 8}), halves(rank, kF16, {2, 16, 8});
    Tensor rows(rank, kF32, {4}), columns(rank, kF32, {2, 8});
    Tensor a8(rank, kE4m3, {4, 16}), b8(rank, kE4m3, {2, 16, 8});
    offsets.write(std::vector<std::int32_t>{0, 0, 0});
    xd_grouped_product_args args = XD_GROUPED_PRODUCT_ARGS_INIT;
    args.a = a.dl();
    args.b = b.dl();
    args.d = d.dl();
    args.offsets = offsets.dl();
    const xd_grouped_product_args good = args;
    const auto refused = [&](const char* named) {
      expect_error(xd_grouped_product(rank.comm, &args, rank.stream()), XD_ERROR_INVALID_ARGUMENT,
                   named);
      args = good;
    };
    args.a = nullptr, refused("a = NULL");
    args.a = narrow.dl(), refused("b: has matrices [16, 8], expected [7, 8]");
    args.b = nullptr, refused("b = NULL");
    args.b = d.dl(), refused("b: has 2 dimensions, expected 3");
    args.b = other.dl(), refused("b: has matrices [15, 8], expected [16, 8]");
    args.b = halves.dl(), refused("b: is float16, expected bfloat16");
    args.d = nullptr, refused("d = NULL");
    args.d = narrow.dl(), refused("d: has 7 columns, expected 8");
    args.d = half.dl(), refused("d: is float16, expected bfloat16 or float32");
    args.d = a.dl(), refused("d: has 16 columns");
    args.offsets = nullptr, refused("offsets = NULL");
    args.offsets = fewer.dl(), refused("offsets: has 2 elements, expected 3");
    args.offsets = floats.dl(), refused("offsets: is float32");
    args.a_scale = rows.dl(), refused("a_scale: is given, expected NULL");
    args.b_scale = columns.dl(), refused("b_scale: is given, expected NULL");
    args.first_expert = 2, refused("first_expert = 2, expected 0 to 1");
    args.first_expert = -1, refused("first_expert = -1");
    args.first_expert = 1, args.num_experts = 2;
    refused("num_experts = 2, expected 0 to 1 from expert 1 on");
    args.accumulate = 1, refused("d: is bfloat16, expected float32 where accumulate = 1");
    args.accumulate = 2, refused("accumulate = 2");
    args.struct_size = 0, refused("struct_size");

    DLTensor strided = *b.dl();
    std::int64_t strides[] = {512, 32, 2};
    strided.strides = strides;
    args.b = &strided, refused("b: has strides 512, 32 and 2, expected packed rows or packed");
    DLTensor inside = *d.dl();  // d in the memory of b
    inside.data = b.dl()->data;
    args.d = &inside, refused("d: lies at");

    // fp8 wants scales, and columns of b.
    args.a = a8.dl(), args.b = b8.dl(), refused("a_scale = NULL");
    args.a = a8.dl(), args.b = b8.dl(), args.a_scale = rows.dl();
    refused("b_scale = NULL");
    args.a = a8.dl(), args.b = b8.dl(), args.a_scale = rows.dl(), args.b_scale = columns.dl();
    refused("b: has stride 8 along K, expected 1");
    Tensor a_blocks(rank, kF32, {4, 1}), b_blocks(rank, kF32, {2, 1, 1});
    Tensor more(rank, kF32, {4, 2}), one(rank, kF32, {1, 1, 1}), high(rank, kF32, {2, 2, 1});
    const auto in_blocks = [&](Tensor& of_a, const DLTensor* of_b) {
      args.a = a8.dl(), args.b = b8.dl(), args.a_scale = of_a.dl(), args.b_scale = of_b;
    };
    in_blocks(a_blocks, columns.dl()), refused("b_scale: has 2 dimensions, expected 3");
    in_blocks(a_blocks, nullptr), refused("b_scale = NULL");
    in_blocks(rows, b_blocks.dl()), refused("b_scale: has 3 dimensions, expected 2");
    in_blocks(more, b_blocks.dl()), refused("a_scale: has 2 columns, expected 1 (ceil(K / 128))");
    in_blocks(a_blocks, one.dl()), refused("b_scale: has 1 matrices, expected 2, as b");
    in_blocks(a_blocks, high.dl()), refused("b_scale: has matrices [2, 1], expected [1, 1]");
    in_blocks(a_blocks, b_blocks.dl()), refused("b: has stride 8 along K, expected 1");
    args.a_scale = a_blocks.dl(), refused("a_scale: is given, expected NULL");
    EXPECT_TRUE(d.untouched());
    EXPECT_TRUE(wide.untouched());
    ok(xd_grouped_product(rank.comm, &args, rank.stream()));  // empty zones
    rank.memory->synchronize();
    EXPECT_TRUE(d.untouched());
  });
}

// Copies of boxes want them aligned, which no other executor does.
TEST(GroupedCalls, RowsAtOddAddressesAreRefusedOnCudaAlone) {
  on_every_rank([](Rank& rank) {
    Tensor a(rank, kBf16, {2, 13}), b(rank, kBf16, {1, 13, 8}), d(rank, kBf16, {2, 8});
    Tensor a8(rank, kE4m3, {2, 1}), b8(rank, kE4m3, {1, 1, 8});  // columns of one element
    Tensor a_scale(rank, kF32, {2}), b_scale(rank, kF32, {1, 8}), offsets(rank, kI32, {2});
    offsets.write(std::vector<std::int32_t>{0, 0});
    xd_grouped_product_args args = XD_GROUPED_PRODUCT_ARGS_INIT;
    args.d = d.dl();
    args.offsets = offsets.dl();
    const auto refused_on_cuda = [&] {
      const xd_status status = xd_grouped_product(rank.comm, &args, rank.stream());
      if (!rank.asynchronous()) return ok(status);
      expect_error(status, XD_ERROR_INVALID_ARGUMENT, "bytes, expected multiples of 16");
    };
    args.a = a.dl();
    args.b = b.dl();
    refused_on_cuda();
    args.a = a8.dl();
    args.b = b8.dl();
    args.a_scale = a_scale.dl();
    args.b_scale = b_scale.dl();
    refused_on_cuda();
  });
}

TEST(GroupedCalls, OuterRefusesByNameWhatDoesNotFit) {
  on_every_rank([](Rank& rank) {
    Tensor a(rank, kBf16, {4, 16}), b(rank, kBf16, {4, 8}), d(rank, kBf16, {2, 16, 8});
    Tensor offsets(rank, kI32, {3}), fewer(rank, kBf16, {3, 8}), half(rank, kF16, {4, 8});
    Tensor other(rank, kBf16, {2, 16, 7}), bytes(rank, kE4m3, {4, 16});
    offsets.write(std::vector<std::int32_t>{0, 0, 0});
    xd_grouped_outer_args args = XD_GROUPED_OUTER_ARGS_INIT;
    args.a = a.dl();
    args.b = b.dl();
    args.d = d.dl();
    args.offsets = offsets.dl();
    const xd_grouped_outer_args good = args;
    const auto refused = [&](const char* named) {
      expect_error(xd_grouped_outer(rank.comm, &args, rank.stream()), XD_ERROR_INVALID_ARGUMENT,
                   named);
      args = good;
    };
    args.a = nullptr, refused("a = NULL");
    args.a = bytes.dl(), refused("a: is float8_e4m3fn");
    args.b = fewer.dl(), refused("b: has 3 rows, expected 4 (rows of a)");
    args.b = half.dl(), refused("b: is float16, expected bfloat16, as a");
    args.d = nullptr, refused("d = NULL");
    args.d = other.dl(), refused("d: has matrices [16, 7], expected [16, 8]");
    args.num_experts = 3, refused("num_experts = 3, expected 0 to 2");
    DLTensor turned = *d.dl();
    std::int64_t strides[] = {128, 1, 16};
    turned.strides = strides;
    args.d = &turned, refused("d: has strides 128, 1 and 16, expected packed rows");
    EXPECT_TRUE(d.untouched());
  });
}

}  // namespace
}  // namespace xd::test
