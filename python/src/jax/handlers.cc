#include "handlers.h"

#include "call.h"
#include "experts.h"
#include "low_latency.h"
#include "products.h"

namespace nb = nanobind;

namespace xdjax {
namespace {

ByExpert by_expert(std::string_view buffers, ffi::Span<const std::int64_t> missing) {
  return {.buffers = words(buffers), .missing = {missing.begin(), missing.end()}};
}

template <Platform platform>
auto make_expert_call(std::int64_t group, std::string_view config, std::string_view arguments,
                      std::string_view results, std::int64_t quantise, std::int64_t alignment,
                      std::int64_t wire, std::int64_t parts, std::int64_t num_sms,
                      std::int64_t activation, std::string_view buffers,
                      ffi::Span<const std::int64_t> missing) {
  return make_call<platform, Experts>(group, config, arguments, results,
                                      {.alignment = static_cast<std::int32_t>(alignment),
                                       .quantise = static_cast<xd_ep_quantise>(quantise),
                                       .wire = static_cast<xd_ep_wire>(wire),
                                       .parts = static_cast<std::int32_t>(parts),
                                       .num_sms = static_cast<std::int32_t>(num_sms),
                                       .activation = static_cast<xd_gated_activation>(activation)},
                                      by_expert(buffers, missing));
}

template <Platform platform>
XLA_FFI_Error* expert_instantiate(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::BindInstantiate()
                                   .Attr<std::int64_t>("group")
                                   .Attr<std::string_view>("config")
                                   .Attr<std::string_view>("arguments")
                                   .Attr<std::string_view>("results")
                                   .Attr<std::int64_t>("quantise")
                                   .Attr<std::int64_t>("alignment")
                                   .Attr<std::int64_t>("wire")
                                   .Attr<std::int64_t>("parts")
                                   .Attr<std::int64_t>("num_sms")
                                   .Attr<std::int64_t>("activation")
                                   .Attr<std::string_view>("by_expert")
                                   .Attr<ffi::Span<const std::int64_t>>("missing")
                                   .To(&make_expert_call<platform>)
                                   .release();
  return handler->Call(frame);
}

template <Platform platform>
auto make_ll_call(std::int64_t group, std::string_view config, std::string_view arguments,
                  std::string_view results, std::int64_t quantise, std::int64_t wire,
                  std::int64_t max_tokens, std::int64_t phase, std::int64_t rank,
                  std::int64_t masked, std::string_view buffers,
                  ffi::Span<const std::int64_t> missing) {
  return make_call<platform, LowLatency>(group, config, arguments, results,
                                         {.quantise = static_cast<xd_ep_quantise>(quantise),
                                          .wire = static_cast<xd_ep_wire>(wire),
                                          .max_tokens = static_cast<std::int32_t>(max_tokens),
                                          .phase = static_cast<xd_ll_phase>(phase),
                                          .mask = {static_cast<std::int32_t>(rank), masked != 0}},
                                         by_expert(buffers, missing));
}

template <Platform platform>
XLA_FFI_Error* ll_instantiate(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::BindInstantiate()
                                   .Attr<std::int64_t>("group")
                                   .Attr<std::string_view>("config")
                                   .Attr<std::string_view>("arguments")
                                   .Attr<std::string_view>("results")
                                   .Attr<std::int64_t>("quantise")
                                   .Attr<std::int64_t>("wire")
                                   .Attr<std::int64_t>("max_tokens")
                                   .Attr<std::int64_t>("phase")
                                   .Attr<std::int64_t>("rank")
                                   .Attr<std::int64_t>("masked")
                                   .Attr<std::string_view>("by_expert")
                                   .Attr<ffi::Span<const std::int64_t>>("missing")
                                   .To(&make_ll_call<platform>)
                                   .release();
  return handler->Call(frame);
}

template <Platform platform>
auto make_product_call(std::int64_t context, std::string_view config, std::string_view arguments,
                       std::string_view results, std::int64_t transpose_a, std::int64_t transpose_b,
                       std::int64_t allow_tf32, std::int64_t epilogue, std::int64_t algo,
                       std::int64_t collective, std::int64_t tag,
                       ffi::Span<const std::int64_t> tokens) {
  return make_call<platform, Products>(context, config, arguments, results,
                                       {.transpose_a = transpose_a != 0,
                                        .transpose_b = transpose_b != 0,
                                        .allow_tf32 = allow_tf32 != 0,
                                        .epilogue = static_cast<xd_gemm_epilogue>(epilogue),
                                        .algo = static_cast<xd_gemm_algo>(algo),
                                        .collective = static_cast<xd_gemm_operation>(collective),
                                        .tag = static_cast<std::uint32_t>(tag),
                                        .tokens = {tokens.begin(), tokens.end()}});
}

template <Platform platform>
XLA_FFI_Error* product_instantiate(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::BindInstantiate()
                                   .Attr<std::int64_t>("context")
                                   .Attr<std::string_view>("config")
                                   .Attr<std::string_view>("arguments")
                                   .Attr<std::string_view>("results")
                                   .Attr<std::int64_t>("transpose_a")
                                   .Attr<std::int64_t>("transpose_b")
                                   .Attr<std::int64_t>("allow_tf32")
                                   .Attr<std::int64_t>("epilogue")
                                   .Attr<std::int64_t>("algo")
                                   .Attr<std::int64_t>("collective")
                                   .Attr<std::int64_t>("tag")
                                   .Attr<ffi::Span<const std::int64_t>>("tokens")
                                   .To(&make_product_call<platform>)
                                   .release();
  return handler->Call(frame);
}

template <Platform platform, Experts::Operation operation>
nb::dict expert() {
  return target<platform, Experts, operation>(&expert_instantiate<platform>);
}

template <Platform platform, LowLatency::Operation operation>
nb::dict low_latency() {
  return target<platform, LowLatency, operation>(&ll_instantiate<platform>);
}

template <Platform platform, xd_gemm_operation operation>
nb::dict product() {
  return target<platform, Products, operation>(&product_instantiate<platform>);
}

template <Platform platform>
nb::dict registration() {
  using Operation = Experts::Operation;
  nb::dict targets;
  targets["crossdock_ep_prepare"] = expert<platform, Operation::prepare>();
  targets["crossdock_ep_dispatch"] = expert<platform, Operation::dispatch>();
  targets["crossdock_ep_combine"] = expert<platform, Operation::combine>();
  targets["crossdock_ep_dispatch_bwd"] = expert<platform, Operation::dispatch_bwd>();
  targets["crossdock_ep_combine_bwd"] = expert<platform, Operation::combine_bwd>();
  targets["crossdock_ep_moe_forward"] = expert<platform, Operation::moe_forward>();
  targets["crossdock_ep_moe_backward"] = expert<platform, Operation::moe_backward>();
  targets["crossdock_ll_dispatch"] = low_latency<platform, LowLatency::Operation::dispatch>();
  targets["crossdock_ll_combine"] = low_latency<platform, LowLatency::Operation::combine>();
  targets["crossdock_ll_mask_get"] = low_latency<platform, LowLatency::Operation::mask_get>();
  targets["crossdock_ll_mask_set"] = low_latency<platform, LowLatency::Operation::mask_set>();
  targets["crossdock_ll_reset"] = low_latency<platform, LowLatency::Operation::reset>();
  targets["crossdock_gemm_all_gather"] = product<platform, XD_GEMM_ALL_GATHER>();
  targets["crossdock_gemm_reduce_scatter"] = product<platform, XD_GEMM_REDUCE_SCATTER>();
  targets["crossdock_gemm_all_reduce"] = product<platform, XD_GEMM_ALL_REDUCE>();
  targets["crossdock_gemm_bulk"] = product<platform, XD_GEMM_BULK>();
  nb::dict types;
  types["crossdock_ep_call"] = type<platform, Experts>();
  types["crossdock_ll_call"] = type<platform, LowLatency>();
  types["crossdock_gemm_call"] = type<platform, Products>();
  nb::dict all;
  all["types"] = types;
  all["targets"] = targets;
  return all;
}

}  // namespace

std::uint64_t calls() { return made_calls; }

nb::dict registrations() {
  nb::dict platforms;
  platforms["cpu"] = registration<Platform::cpu>();
  platforms["CUDA"] = registration<Platform::cuda>();
  return platforms;
}

}  // namespace xdjax
