#include <crossdock/low_latency.h>

#include "capi/boundary.h"

using xd::operate;
using xd::ep::Group;

xd_status xd_ep_ll_dispatch(xd_ep_group* group, const xd_ep_ll_dispatch_args* args,
                            xd_stream stream) {
  return operate("xd_ep_ll_dispatch", group, [&](Group& g) { g.ll_dispatch(args, stream); });
}

xd_status xd_ep_ll_combine(xd_ep_group* group, const xd_ep_ll_combine_args* args,
                           xd_stream stream) {
  return operate("xd_ep_ll_combine", group, [&](Group& g) { g.ll_combine(args, stream); });
}

xd_status xd_ep_ll_mask_set(xd_ep_group* group, int32_t rank, int32_t masked, xd_stream stream) {
  return operate("xd_ep_ll_mask_set", group,
                 [&](Group& g) { g.ll_mask_set(rank, masked, stream); });
}

xd_status xd_ep_ll_mask_get(xd_ep_group* group, const DLTensor* mask, xd_stream stream) {
  return operate("xd_ep_ll_mask_get", group, [&](Group& g) { g.ll_mask_get(mask, stream); });
}

xd_status xd_ep_ll_reset(xd_ep_group* group, xd_stream stream) {
  return operate("xd_ep_ll_reset", group, [&](Group& g) { g.ll_reset(stream); });
}
