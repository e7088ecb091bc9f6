// The declarations of TransformerEngine's functions and types, as its headers have them, against
// those of the compat headers. Nothing here runs: it compiles or it does not.
#include <transformer_engine/comm_gemm.h>
#include <transformer_engine/comm_window.h>
#include <transformer_engine/ep.h>
#include <transformer_engine/transformer_engine.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace {

template <class Declared, class Function>
constexpr bool is(Function*) {
  return std::is_same_v<Declared, Function>;
}

using Layer = const NVTEEpLayerConfig*;
using Tensor = NVTETensor;
using Window = NVTECommWindow;
using Stream = cudaStream_t;

// ---- transformer_engine/ep.h ----
static_assert(is<void(void*, const NVTEEpGroupConfig*)>(&nvte_ep_initialize));
static_assert(is<void()>(&nvte_ep_shutdown));
static_assert(is<std::size_t(Layer)>(&nvte_ep_handle_mem_size));
static_assert(is<void(Tensor, Tensor, Tensor, Tensor, Layer, Stream)>(&nvte_ep_prepare));
static_assert(is<void(Tensor, Tensor, Tensor, Window, Tensor, Window, Tensor, Window, Tensor,
                      Window, Stream)>(&nvte_ep_dispatch));
static_assert(is<void(Tensor, Tensor, Tensor, Window, Tensor, Window, Tensor, Window, Tensor,
                      Window, Tensor, Tensor, Layer, Stream)>(&nvte_ep_prepare_and_dispatch));
static_assert(is<void(Tensor, Tensor, Window, Tensor, Stream)>(&nvte_ep_combine));
static_assert(is<void(Tensor, Tensor, Window, Tensor, Window, Tensor, Tensor, Stream)>(
    &nvte_ep_dispatch_bwd));
static_assert(is<void(Tensor, Tensor, Window, Tensor, Window, Stream)>(&nvte_ep_combine_bwd));

static_assert(std::is_same_v<NVTETensor, void*>);
static_assert(std::is_same_v<cudaStream_t, struct CUstream_st*>);
// In the order of the struct. Designated initialisers would not compile in another order.
constexpr NVTEEpGroupConfig kGroup{.struct_size = sizeof(NVTEEpGroupConfig),
                                   .ep_size = 1,
                                   .num_experts = 2,
                                   .max_tokens_per_rank = 3,
                                   .max_recv_tokens_per_rank = 4,
                                   .hidden_dim = 5,
                                   .num_comm_sms = 6,
                                   .max_token_dtype = kNVTEBFloat16,
                                   .zero_copy = 7,
                                   .num_topk = 8,
                                   .drop_on_overflow = 9};
static_assert(kGroup.drop_on_overflow == 9);
static_assert(offsetof(NVTEEpGroupConfig, ep_size) == 8);
static_assert(offsetof(NVTEEpGroupConfig, max_token_dtype) == 32);
static_assert(offsetof(NVTEEpGroupConfig, num_topk) == 40);
static_assert(sizeof(NVTEEpGroupConfig) == 48);
constexpr NVTEEpLayerConfig kLayer{.struct_size = sizeof(NVTEEpLayerConfig),
                                   .top_k = 1,
                                   .dispatch_output_per_expert_alignment = 2};
static_assert(kLayer.top_k == 1);
static_assert(offsetof(NVTEEpLayerConfig, dispatch_output_per_expert_alignment) == 16);
static_assert(sizeof(NVTEEpLayerConfig) == 24);
constexpr NVTEEpGroupConfig kGroupInit = NVTE_EP_GROUP_CONFIG_INIT;
constexpr NVTEEpLayerConfig kLayerInit = NVTE_EP_LAYER_CONFIG_INIT;
static_assert(kGroupInit.struct_size == 48 && kGroupInit.drop_on_overflow == 0);
static_assert(kLayerInit.struct_size == 24 && kLayerInit.top_k == 0);

// ---- transformer_engine/comm_gemm.h ----
using Product = void(NVTECommGemmCtx*, std::int64_t m, std::int64_t n, std::int64_t k, Tensor a,
                     Tensor b, Tensor d, Tensor bias, Tensor pre_act_out, bool transa, bool transb,
                     bool grad, bool accumulate, int comm_sm_count, Stream, NVTECommGemmAlgoType);
static_assert(is<Product>(&nvte_all_gather_gemm));
static_assert(is<Product>(&nvte_gemm_reduce_scatter));
static_assert(is<Product>(&nvte_gemm_all_reduce));
static_assert(is<NVTECommGemmCtx*(ncclComm_t, int, int)>(&nvte_comm_gemm_ctx_create));
static_assert(is<void(NVTECommGemmCtx*)>(&nvte_comm_gemm_ctx_destroy));
static_assert(is<std::int64_t(NVTECommGemmCtx*, std::int64_t)>(&nvte_comm_gemm_numroc));
static_assert(std::is_same_v<ncclComm_t, struct ncclComm*>);
static_assert(kNVTECommGemmAlgoDefault == 0 && kNVTECommGemmAlgoSplitP2P == 1 &&
              kNVTECommGemmAlgoSplitMulticast == 2 && kNVTECommGemmAlgoAtomicP2P == 3 &&
              kNVTECommGemmAlgoAtomicMulticast == 4);

// ---- transformer_engine/comm_window.h ----
static_assert(std::is_same_v<decltype(NVTECommWindow::window), struct ncclWindow_vidmem*>);
static_assert(std::is_same_v<decltype(NVTECommWindow::offset), std::uint64_t>);
static_assert(std::is_same_v<decltype(NVTECommWindow::scale_window), struct ncclWindow_vidmem*>);
static_assert(std::is_same_v<decltype(NVTECommWindow::scale_offset), std::uint64_t>);
static_assert(offsetof(NVTECommWindow, scale_window) == 16 && sizeof(NVTECommWindow) == 32);

// ---- transformer_engine/transformer_engine.h ----
static_assert(is<Tensor(NVTEScalingMode)>(&nvte_create_tensor));
static_assert(is<void(NVTEScalingMode, Tensor*, std::size_t)>(&nvte_create_tensors));
static_assert(is<void(Tensor)>(&nvte_destroy_tensor));
static_assert(is<void(Tensor*, std::size_t)>(&nvte_destroy_tensors));
static_assert(is<void(Tensor*, NVTETensorParam, const NVTEBasicTensor*)>(&nvte_set_tensor_param));
static_assert(is<NVTEBasicTensor(Tensor, NVTETensorParam)>(&nvte_get_tensor_param));
static_assert(
    is<void(Tensor, NVTETensorParam, const void*, std::size_t)>(&nvte_set_tensor_param_v2));
static_assert(
    is<void(Tensor, NVTETensorParam, void*, std::size_t, std::size_t*)>(&nvte_get_tensor_param_v2));
static_assert(is<NVTEShape(const std::size_t*, std::size_t)>(&nvte_make_shape));
static_assert(is<NVTEShape(Tensor)>(&nvte_tensor_shape));
static_assert(is<NVTEShape(Tensor)>(&nvte_tensor_columnwise_shape));
static_assert(is<NVTEShape(Tensor)>(&nvte_tensor_scale_inv_shape));
static_assert(is<void*(Tensor)>(&nvte_tensor_data));
static_assert(is<void*(Tensor)>(&nvte_tensor_columnwise_data));
static_assert(is<NVTEDType(Tensor)>(&nvte_tensor_type));
static_assert(is<NVTEScalingMode(Tensor)>(&nvte_tensor_scaling_mode));
static_assert(is<std::size_t(Tensor)>(&nvte_tensor_ndims));
static_assert(is<std::size_t(Tensor, std::size_t)>(&nvte_tensor_size));
static_assert(is<std::size_t(Tensor)>(&nvte_tensor_size_bytes));
static_assert(is<std::size_t(Tensor)>(&nvte_tensor_numel));
static_assert(is<std::size_t(Tensor)>(&nvte_tensor_element_size));
static_assert(is<std::size_t(Tensor)>(&nvte_tensor_element_size_bits));
static_assert(is<float*(Tensor)>(&nvte_tensor_amax));
static_assert(is<float*(Tensor)>(&nvte_tensor_scale));
static_assert(is<float*(Tensor)>(&nvte_tensor_scale_inv));

static_assert(kNVTEByte == 0 && kNVTEInt16 == 1 && kNVTEInt32 == 2 && kNVTEInt64 == 3 &&
              kNVTEFloat32 == 4 && kNVTEFloat16 == 5 && kNVTEBFloat16 == 6 &&
              kNVTEFloat8E4M3 == 7 && kNVTEFloat8E5M2 == 8 && kNVTEFloat8E8M0 == 9 &&
              kNVTEFloat4E2M1 == 10 && kNVTENumTypes == 11);
static_assert(kNVTERowwiseData == 0 && kNVTEColumnwiseData == 1 && kNVTEScale == 2 &&
              kNVTEAmax == 3 && kNVTERowwiseScaleInv == 4 && kNVTEColumnwiseScaleInv == 5 &&
              kNVTEColumnwiseAmax == 6 && kNVTEWithGEMMSwizzledScales == 7);
static_assert(NVTE_DELAYED_TENSOR_SCALING == 0 && NVTE_MXFP8_1D_SCALING == 1 &&
              NVTE_BLOCK_SCALING_1D == 2 && NVTE_BLOCK_SCALING_2D == 3 &&
              NVTE_NVFP4_1D_SCALING == 4 && NVTE_INVALID_SCALING == 100);
static_assert(sizeof(NVTEShape) == 16 * sizeof(std::size_t) && offsetof(NVTEShape, ndim) == 120);
static_assert(sizeof(NVTEBasicTensor) == 144 && offsetof(NVTEBasicTensor, shape) == 16);

}  // namespace
