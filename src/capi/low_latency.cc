#include <crossdock/low_latency.h>

#include "capi/boundary.h"

using xd::count_tokens;
using xd::operate;
using xd::ep::Group;

namespace {

template <class Args>
bool sends(const Args& args) {
  return args.phase != XD_EP_PHASE_RECEIVE;
}
template <class Args>
bool receives(const Args& args) {
  return args.phase != XD_EP_PHASE_SEND;
}

}  // namespace

xd_status xd_ep_ll_dispatch(xd_ep_group* group, const xd_ep_ll_dispatch_args* args,
                            xd_stream stream) {
  const xd_status status = operate("xd_ep_ll_dispatch", group, XD_EP_LL_DISPATCH,
                                   [&](Group& g) { g.ll_dispatch(args, stream); });
  return count_tokens(status, group, status == XD_SUCCESS && sends(*args) ? args->tokens : nullptr);
}

xd_status xd_ep_ll_combine(xd_ep_group* group, const xd_ep_ll_combine_args* args,
                           xd_stream stream) {
  const xd_status status = operate("xd_ep_ll_combine", group, XD_EP_LL_COMBINE,
                                   [&](Group& g) { g.ll_combine(args, stream); });
  return count_tokens(status, group, status == XD_SUCCESS && receives(*args) ? args->out : nullptr);
}

xd_status xd_ep_ll_mask_set(xd_ep_group* group, int32_t rank, int32_t masked, xd_stream stream) {
  return operate("xd_ep_ll_mask_set", group, xd::kNoOperation,
                 [&](Group& g) { g.ll_mask_set(rank, masked, stream); });
}

xd_status xd_ep_ll_mask_get(xd_ep_group* group, const DLTensor* mask, xd_stream stream) {
  return operate("xd_ep_ll_mask_get", group, xd::kNoOperation,
                 [&](Group& g) { g.ll_mask_get(mask, stream); });
}

xd_status xd_ep_ll_reset(xd_ep_group* group, xd_stream stream) {
  return operate("xd_ep_ll_reset", group, XD_EP_LL_RESET, [&](Group& g) { g.ll_reset(stream); });
}
