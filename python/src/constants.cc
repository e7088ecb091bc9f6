#include "constants.h"

#include <crossdock/crossdock.h>
#include <crossdock/tensor.h>

#include <array>
#include <initializer_list>
#include <utility>

namespace xdpy {

namespace nb = nanobind;

namespace {

// Every xd_ep_operation and xd_ll_operation, by its number.
constexpr std::array kOperations = {
    "prepare",    "dispatch", "combine",       "dispatch_bwd",     "combine_bwd", "ll_dispatch",
    "ll_combine", "ll_reset", "set_placement", "ll_set_placement", "enter_view"};
static_assert(XD_EP_PREPARE == 0 && XD_EP_DISPATCH == 1 && XD_EP_COMBINE == 2 &&
              XD_EP_DISPATCH_BWD == 3 && XD_EP_COMBINE_BWD == 4 && XD_LL_DISPATCH == 5 &&
              XD_LL_COMBINE == 6 && XD_LL_RESET == 7 && XD_EP_SET_PLACEMENT == 8 &&
              XD_LL_SET_PLACEMENT == 9 && XD_EP_ENTER_VIEW == 10);

// By the words that Python's arguments have for them.
nb::dict words(std::initializer_list<std::pair<const char*, int>> known) {
  nb::dict numbers;
  for (const auto& [word, number] : known) numbers[word] = number;
  return numbers;
}

// As data_type() takes it.
int packed(DLDataType type) { return type.code << 8 | type.bits; }

nb::dict dtypes() {
  return words({{"int8", packed(XD_DTYPE_INT8)},
                {"int32", packed(XD_DTYPE_INT32)},
                {"int64", packed(XD_DTYPE_INT64)},
                {"uint8", packed(XD_DTYPE_UINT8)},
                {"float16", packed(XD_DTYPE_FLOAT16)},
                {"float32", packed(XD_DTYPE_FLOAT32)},
                {"bfloat16", packed(XD_DTYPE_BFLOAT16)},
                {"float8_e4m3fn", packed(XD_DTYPE_FLOAT8_E4M3FN)},
                {"float8_e5m2", packed(XD_DTYPE_FLOAT8_E5M2)},
                {"float8_e8m0fnu", packed(XD_DTYPE_FLOAT8_E8M0FNU)},
                {"float4_e2m1fn_x2", packed(XD_DTYPE_FLOAT4_E2M1FN_X2)}});
}

// By name (number, columns that share a scale, dtype of the scales).
nb::dict quantise_ways() {
  nb::dict ways;
  const auto add = [&](const char* name, xd_ep_quantise way, const char* scales) {
    ways[name] = nb::make_tuple(static_cast<int>(way), XD_EP_QUANTISE_BLOCK(way), scales);
  };
  add("fp8_block128", XD_EP_QUANTISE_FP8_BLOCK128, "float32");
  add("fp8_block128_pow2", XD_EP_QUANTISE_FP8_BLOCK128_POW2, "float32");
  add("fp8_block128_e8m0", XD_EP_QUANTISE_FP8_BLOCK128_E8M0, "float8_e8m0fnu");
  add("mxfp8", XD_EP_QUANTISE_MXFP8, "float8_e8m0fnu");
  return ways;
}

void bind_words(nb::module_& constants) {
  constants.attr("DEVICE_TYPES") = words({{"cpu", kDLCPU}, {"cuda", kDLCUDA}});
  constants.attr("DTYPES") = dtypes();
  constants.attr("LAYOUTS") =
      words({{"expert_major", XD_EP_EXPERT_MAJOR}, {"rank_major", XD_EP_RANK_MAJOR}});
  constants.attr("OVERFLOWS") =
      words({{"error", XD_EP_OVERFLOW_ERROR}, {"drop", XD_EP_OVERFLOW_DROP}});
  constants.attr("DUPLICATE_IDS") =
      words({{"error", XD_EP_DUPLICATE_IDS_ERROR}, {"collapse", XD_EP_DUPLICATE_IDS_COLLAPSE}});
  constants.attr("ON_ERROR") =
      words({{"status", XD_EP_ON_ERROR_STATUS}, {"fatal", XD_EP_ON_ERROR_FATAL}});
  constants.attr("STAGINGS") = words({{"auto", XD_EP_STAGING_AUTO}, {"none", XD_EP_STAGING_NONE}});
  constants.attr("PEER_LOSSES") =
      words({{"fatal", XD_LL_PEER_LOSS_FATAL}, {"mask", XD_LL_PEER_LOSS_MASK}});
  constants.attr("RECEIVES") =
      words({{"slots", XD_LL_SLOTS}, {"by_expert", XD_LL_BY_EXPERT}, {"by_rank", XD_LL_BY_RANK}});
  constants.attr("PHASES") = words(
      {{"both", XD_LL_PHASE_BOTH}, {"send", XD_LL_PHASE_SEND}, {"receive", XD_LL_PHASE_RECEIVE}});
  constants.attr("EP_PEER_LOSSES") =
      words({{"fatal", XD_EP_PEER_LOSS_FATAL}, {"resume", XD_EP_PEER_LOSS_RESUME}});
  constants.attr("COMM_PEER_LOSSES") =
      words({{"fatal", XD_COMM_PEER_LOSS_FATAL}, {"mask", XD_COMM_PEER_LOSS_MASK}});
  constants.attr("QUANTISE") = quantise_ways();
  constants.attr("WIRES") = words({{"same", XD_EP_WIRE_SAME},
                                   {"float32", XD_EP_WIRE_FLOAT32},
                                   {"fp8", XD_EP_WIRE_FP8_BLOCK128},
                                   {"fp8_block128", XD_EP_WIRE_FP8_BLOCK128},
                                   {"fp8_block128_pow2", XD_EP_WIRE_FP8_BLOCK128_POW2},
                                   {"fp8_block128_e8m0", XD_EP_WIRE_FP8_BLOCK128_E8M0}});
  constants.attr("ACTIVATIONS") = words({{"silu", XD_GATED_SILU},
                                         {"gelu_tanh", XD_GATED_GELU_TANH},
                                         {"relu", XD_GATED_RELU},
                                         {"relu2", XD_GATED_RELU_SQUARED}});
}

void bind_gemm_words(nb::module_& constants) {
  constants.attr("GEMM_OPERATIONS") = words({{"all_gather", XD_GEMM_ALL_GATHER},
                                             {"reduce_scatter", XD_GEMM_REDUCE_SCATTER},
                                             {"all_reduce", XD_GEMM_ALL_REDUCE},
                                             {"bulk", XD_GEMM_BULK},
                                             {"start_all_gather", XD_GEMM_START_ALL_GATHER}});
  constants.attr("GEMM_BITS") =
      words({{"all_gather", XD_GEMM_BIT(XD_GEMM_ALL_GATHER)},
             {"reduce_scatter", XD_GEMM_BIT(XD_GEMM_REDUCE_SCATTER)},
             {"all_reduce", XD_GEMM_BIT(XD_GEMM_ALL_REDUCE)},
             {"bulk", XD_GEMM_BIT(XD_GEMM_BULK)},
             {"start_all_gather", XD_GEMM_BIT(XD_GEMM_START_ALL_GATHER)}});
  constants.attr("GEMM_ALGOS") =
      words({{"auto", XD_GEMM_ALGO_AUTO},
             {"direct", XD_GEMM_ALGO_DIRECT},
             {"split", XD_GEMM_ALGO_SPLIT},
             {"sequential", XD_GEMM_ALGO_SEQUENTIAL},
             {"cublasmp", XD_GEMM_ALGO_CUBLASMP},
             {"cublasmp_split_p2p", XD_GEMM_ALGO_CUBLASMP_SPLIT_P2P},
             {"cublasmp_split_multicast", XD_GEMM_ALGO_CUBLASMP_SPLIT_MULTICAST},
             {"cublasmp_atomic_p2p", XD_GEMM_ALGO_CUBLASMP_ATOMIC_P2P},
             {"cublasmp_atomic_multicast", XD_GEMM_ALGO_CUBLASMP_ATOMIC_MULTICAST},
             {"cublasmp_no_overlap", XD_GEMM_ALGO_CUBLASMP_NO_OVERLAP},
             {"cublasmp_fused", XD_GEMM_ALGO_CUBLASMP_FUSED}});
  constants.attr("GEMM_EPILOGUES") = words({{"none", XD_GEMM_EPILOGUE_NONE},
                                            {"gelu", XD_GEMM_EPILOGUE_GELU},
                                            {"dgelu", XD_GEMM_EPILOGUE_DGELU},
                                            {"relu", XD_GEMM_EPILOGUE_RELU},
                                            {"drelu", XD_GEMM_EPILOGUE_DRELU}});
}

}  // namespace

void bind_constants(nb::module_& module) {
  nb::module_ constants = module.def_submodule("constants", "Numbers and words of the headers.");
  constants.attr("MAX_RANKS") = XD_MAX_RANKS;
  constants.attr("MAX_EXPERTS") = XD_EP_MAX_EXPERTS;
  constants.attr("MAX_TOPK") = XD_EP_MAX_TOPK;
  constants.attr("MAX_TOKENS") = XD_EP_MAX_TOKENS;
  constants.attr("MAX_PARTS") = XD_EP_MAX_PARTS;
  constants.attr("ROW_ALIGNMENT") = XD_EP_ROW_ALIGNMENT;
  constants.attr("LL_MAX_TOKENS") = XD_LL_MAX_TOKENS;
  constants.attr("LL_MAX_RANKS") = XD_LL_MAX_RANKS;
  constants.attr("LL_MAX_IN_FLIGHT") = XD_LL_MAX_IN_FLIGHT;
  constants.attr("PREPARE") = static_cast<int>(XD_EP_PREPARE);
  constants.attr("DISPATCH") = static_cast<int>(XD_EP_DISPATCH);
  constants.attr("COMBINE") = static_cast<int>(XD_EP_COMBINE);
  constants.attr("DISPATCH_BWD") = static_cast<int>(XD_EP_DISPATCH_BWD);
  constants.attr("COMBINE_BWD") = static_cast<int>(XD_EP_COMBINE_BWD);
  constants.attr("LL_DISPATCH") = static_cast<int>(XD_LL_DISPATCH);
  constants.attr("LL_COMBINE") = static_cast<int>(XD_LL_COMBINE);
  constants.attr("LL_RESET") = static_cast<int>(XD_LL_RESET);
  constants.attr("SET_PLACEMENT") = static_cast<int>(XD_EP_SET_PLACEMENT);
  constants.attr("LL_SET_PLACEMENT") = static_cast<int>(XD_LL_SET_PLACEMENT);
  nb::list operations;
  for (const char* name : kOperations) operations.append(name);
  constants.attr("OPERATIONS") = nb::tuple(operations);
  bind_words(constants);
  bind_gemm_words(constants);
  module.def("default_timeout_ms", &xd_default_timeout_ms);
}

}  // namespace xdpy
