#include "conformance/gemm/case.h"

#include <array>
#include <sstream>

#include "conformance/dimensions.h"
#include "support/random.h"

namespace xd::test {
namespace {

constexpr std::array kOperations{XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER, XD_GEMM_ALL_REDUCE};
constexpr std::array kOperands{Operands::bf16, Operands::f16,       Operands::f32,
                               Operands::e4m3, Operands::e4m3_e5m2, Operands::e5m2_e4m3};
constexpr std::array kResults{Output::like_operands, Output::f32, Output::other_half, Output::e4m3,
                              Output::e5m2};
constexpr std::array kScalings{Scaling::none, Scaling::tensor, Scaling::row, Scaling::block};
constexpr std::array kStored{Stored::nt, Stored::nn, Stored::tn};
constexpr std::array kAlphas{1.0f, 0.5f, -0.25f};
constexpr std::array kAddends{Addend::none, Addend::added, Addend::in_place, Addend::unscaled};
constexpr std::array kBiases{Bias::none, Bias::like_d, Bias::f32};
// GELU and RELU with and without pre_activation.
struct Activation {
  xd_gemm_epilogue epilogue;
  bool pre_activation;
};
constexpr Activation kActivations[] = {
    {XD_GEMM_EPILOGUE_NONE, false}, {XD_GEMM_EPILOGUE_GELU, false}, {XD_GEMM_EPILOGUE_GELU, true},
    {XD_GEMM_EPILOGUE_DGELU, true}, {XD_GEMM_EPILOGUE_RELU, false}, {XD_GEMM_EPILOGUE_RELU, true},
    {XD_GEMM_EPILOGUE_DRELU, true},
};
constexpr std::array kBiasGrads{BiasGrad::none, BiasGrad::own, BiasGrad::reduced};
constexpr std::array kFlags{false, true};
constexpr std::array kTokens{TokenCounts::equal, TokenCounts::announced, TokenCounts::uneven,
                             TokenCounts::holes, TokenCounts::few,       TokenCounts::one,
                             TokenCounts::none,  TokenCounts::most};
constexpr std::array kGathered{Gathered::none, Gathered::given, Gathered::kept, Gathered::both};
constexpr std::array kValues{Values::integers, Values::random};
constexpr std::array kSpots{Spots::ordinary, Spots::symmetric, Spots::mixed};
constexpr std::array<std::int64_t, 5> kUnits{1, 3, 5, 9, 17};

}  // namespace

// Calls visit(field, table) for every dimension, always in the same order.
template <class Visit>
static void for_each_dimension(GemmCase& c, Visit&& visit) {
  visit(c.operation, kOperations);
  visit(c.operands, kOperands);
  visit(c.result, kResults);
  visit(c.scaling, kScalings);
  visit(c.stored, kStored);
  visit(c.alpha, kAlphas);
  visit(c.addend, kAddends);
  visit(c.bias, kBiases);
  Activation activation{};
  visit(activation, kActivations);
  c.epilogue = activation.epilogue;
  c.pre_activation = activation.pre_activation;
  visit(c.bias_grad, kBiasGrads);
  visit(c.amax, kFlags);
  visit(c.tokens, kTokens);
  visit(c.gathered, kGathered);
  visit(c.values, kValues);
  visit(c.spots, kSpots);
  visit(c.n_units, kUnits);
  visit(c.k_units, kUnits);
}

namespace {

GemmCase make_case(int num_ranks, const std::vector<int>& row, std::uint64_t seed) {
  GemmCase c;
  c.seed = seed;
  c.num_ranks = num_ranks;
  set_values(c, row);
  // c cannot be d where their types differ; sums over ranks of what all ranks have are refused.
  if (c.scaled_output() && c.addend == Addend::in_place) c.addend = Addend::added;
  if (c.operation == XD_GEMM_ALL_REDUCE && c.bias_grad == BiasGrad::reduced) {
    c.bias_grad = BiasGrad::own;
  }
  if (c.curved()) c.alpha /= 64;  // most sums then lie where the curve is not straight
  return c;
}

DLDataType type_of(Operands operands, bool first) {
  switch (operands) {
    case Operands::bf16:
      return kBf16;
    case Operands::f16:
      return kF16;
    case Operands::f32:
      return kF32;
    case Operands::e4m3:
      return kE4m3;
    case Operands::e4m3_e5m2:
      return first ? kE4m3 : kE5m2;
    case Operands::e5m2_e4m3:
      return first ? kE5m2 : kE4m3;
  }
  return kBf16;
}

}  // namespace

DLDataType GemmCase::a_type() const { return type_of(operands, true); }
DLDataType GemmCase::b_type() const { return type_of(operands, false); }

DLDataType GemmCase::d_type() const {
  switch (result) {
    case Output::like_operands:
      return fp8() ? kBf16 : a_type();
    case Output::f32:
      return kF32;
    case Output::other_half:
      return operands == Operands::bf16 ? kF16 : kBf16;
    case Output::e4m3:
      return kE4m3;
    case Output::e5m2:
      return kE5m2;
  }
  return kBf16;
}

DLDataType GemmCase::side_type() const { return scaled_output() ? kBf16 : d_type(); }

float GemmCase::beta() const {
  constexpr float kBetas[] = {1.0f, -2.0f, 0.5f};
  if (addend == Addend::none || addend == Addend::unscaled) return 0;
  return kBetas[mix(seed, 0xBE) % std::size(kBetas)];
}

bool GemmCase::curved() const {
  return epilogue == XD_GEMM_EPILOGUE_GELU || epilogue == XD_GEMM_EPILOGUE_DGELU;
}

bool GemmCase::reads_pre_activation() const {
  return epilogue == XD_GEMM_EPILOGUE_DGELU || epilogue == XD_GEMM_EPILOGUE_DRELU;
}

std::int64_t GemmCase::unit() const {
  return fp8() || scaled_output()                                       ? 16
         : operands == Operands::f32 && result == Output::like_operands ? 4
                                                                        : 8;
}

std::int64_t GemmCase::token_unit() const {
  if (!transpose_a()) return 1;
  return 16 / static_cast<std::int64_t>(element_bytes(a_type()));
}

std::vector<std::int64_t> GemmCase::tokens_of(int step) const {
  const auto ranks = static_cast<std::uint64_t>(num_ranks);
  const auto bound = static_cast<std::uint64_t>(token_units);
  std::vector<std::int64_t> units(ranks);
  const auto chance = [&](std::uint64_t what) {
    return mix(seed, 0x70, static_cast<std::uint64_t>(step), what);
  };
  for (std::uint64_t r = 0; r < ranks; ++r) {
    std::uint64_t value = 0;
    switch (tokens) {
      case TokenCounts::equal:
      case TokenCounts::announced:
        value = 1 + chance(0) % bound;
        break;
      case TokenCounts::uneven:
        value = 1 + chance(r) % bound;
        break;
      case TokenCounts::holes:
        value = (r + chance(0)) % 2 == 0 ? 1 + chance(r) % bound : 0;
        break;
      case TokenCounts::few:
        value = r % 2 == 1 || ranks == 1 ? 0 : chance(r) % 2;
        break;
      case TokenCounts::one:
        value = chance(0) % ranks == r ? 1 : 0;
        break;
      case TokenCounts::none:
        value = 0;
        break;
      case TokenCounts::most:
        value = bound;
        break;
    }
    units[r] = static_cast<std::int64_t>(value) * token_unit();
  }
  return units;
}

Place GemmCase::place(int tensor, int rank) const {
  if (spots != Spots::mixed) {
    return spots == Spots::symmetric ? Place::symmetric : Place::ordinary;
  }
  const std::uint64_t chance =
      mix(seed, 0x91, static_cast<std::uint64_t>(tensor), static_cast<std::uint64_t>(rank));
  return chance % 2 == 0 ? Place::ordinary : Place::symmetric;
}

xd_gemm_config GemmCase::config() const {
  xd_gemm_config config = XD_GEMM_CONFIG_INIT;
  config.num_ranks = num_ranks;
  config.operations = XD_GEMM_BIT(operation);
  config.max_tokens = max_tokens();
  config.max_k = k();
  config.max_n = n();
  // all_gather transfers a, the others transfer sums.
  config.dtype = gathers() ? a_type() : side_type();
  config.keep_gathered = keeps_gathered() ? 1 : 0;
  config.algo = algo;
  return config;
}

std::string GemmCase::description() const {
  constexpr const char* kOperandNames[] = {"bf16", "f16", "f32", "e4m3", "e4m3*e5m2", "e5m2*e4m3"};
  constexpr const char* kResultNames[] = {"same", "f32", "other half", "e4m3", "e5m2"};
  constexpr const char* kScalingNames[] = {"none", "tensor", "row", "block"};
  constexpr const char* kStoredNames[] = {"NT", "NN", "TN"};
  constexpr const char* kAddendNames[] = {"none", "added", "in place", "unscaled"};
  constexpr const char* kBiasNames[] = {"none", "like d", "f32"};
  constexpr const char* kBiasGradNames[] = {"none", "own", "reduced"};
  constexpr const char* kEpilogueNames[] = {"none", "gelu", "dgelu", "relu", "drelu"};
  constexpr const char* kGatheredNames[] = {"none", "given", "kept", "both"};
  constexpr const char* kSpotNames[] = {"ordinary", "symmetric", "mixed"};
  const auto name = [](const auto& names, auto value) { return names[static_cast<int>(value)]; };
  std::ostringstream text;
  text << "seed " << seed << ": W=" << num_ranks
       << (gathers()                             ? " all_gather"
           : operation == XD_GEMM_REDUCE_SCATTER ? " reduce_scatter"
                                                 : " all_reduce")
       << " N=" << n() << " K=" << k() << " " << name(kOperandNames, operands) << " to "
       << name(kResultNames, result) << ", scales " << name(kScalingNames, scales()) << ", "
       << name(kStoredNames, stored) << ", alpha " << alpha << ", c " << name(kAddendNames, addend)
       << " beta " << beta() << ", bias " << name(kBiasNames, bias) << ", epilogue "
       << name(kEpilogueNames, epilogue) << (pre_activation ? " with" : " without")
       << " pre_activation, bias_grad " << name(kBiasGradNames, bias_grad) << (amax ? ", amax" : "")
       << ", gathered " << name(kGatheredNames, gathers() ? gathered : Gathered::none) << ", "
       << (values == Values::integers ? "integers" : "random")
       << (exact_terms ? ", exact terms" : "") << ", memory " << name(kSpotNames, spots);
  for (int step = 0; step < kSteps; ++step) {
    text << (step == 0 ? ", tokens" : ", then");
    for (const std::int64_t count : tokens_of(step)) text << " " << count;
  }
  return text.str();
}

std::vector<GemmCase> all_gemm_cases(int num_ranks, bool threads) {
  const std::uint64_t seed = test_seed();
  const auto values =
      value_rows(dimension_sizes<GemmCase>(), {seed, mix(seed, 0x6E), full_tests() ? 400 : 8});
  const std::size_t stride = num_ranks > 4 && !full_tests() ? 3 : 1;
  std::vector<GemmCase> cases;
  for (std::size_t i = threads ? stride - 1 : 0; i < values.size(); i += stride) {
    cases.push_back(make_case(num_ranks, values[i], mix(seed, 0x6E, i)));
  }
  return cases;
}

GemmCase plain_gemm_case(int num_ranks, xd_gemm_operation operation) {
  GemmCase c;
  c.seed = test_seed();
  c.num_ranks = num_ranks;
  c.operation = operation;
  c.n_units = 5;
  c.k_units = 3;
  c.tokens = TokenCounts::uneven;
  return c;
}

void ask_for_everything(GemmCase& c) {
  c.bias = Bias::like_d;
  c.epilogue = XD_GEMM_EPILOGUE_RELU;
  c.pre_activation = true;
  c.bias_grad = c.operation == XD_GEMM_ALL_REDUCE ? BiasGrad::own : BiasGrad::reduced;
  c.amax = true;
  c.gathered = Gathered::both;
}

GemmCase block_gemm_case(int num_ranks, xd_gemm_operation operation) {
  GemmCase c = plain_gemm_case(num_ranks, operation);
  c.operands = Operands::e4m3;
  c.scaling = Scaling::block;
  c.n_units = 24;
  c.k_units = 24;
  c.token_units = 37;
  return c;
}

}  // namespace xd::test
