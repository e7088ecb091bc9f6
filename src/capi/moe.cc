#include <crossdock/moe.h>

#include "capi/boundary.h"
#include "moe/layer.h"
#include "moe/schedule.h"

namespace {

// The passes are no operations of their own, but made of these.
template <class Args>
xd_status run(const char* function, xd_ep_group* group, const Args* args, xd_stream stream,
              void (*pass)(xd::ep::Group&, xd::moe::Passes&, const Args*, xd_stream)) {
  return xd::operate(function, group, xd::kNoOperation,
                     [&](xd::ep::Group& g) { pass(g, group->passes, args, stream); });
}

}  // namespace

xd_status xd_moe_forward(xd_ep_group* group, const xd_moe_forward_args* args, xd_stream stream) {
  return run("xd_moe_forward", group, args, stream, xd::moe::forward);
}

xd_status xd_moe_backward(xd_ep_group* group, const xd_moe_backward_args* args, xd_stream stream) {
  return run("xd_moe_backward", group, args, stream, xd::moe::backward);
}

xd_status xd_moe_sizes(const xd_ep_config* config, int32_t ffn, xd_moe_memory* memory) {
  return xd::guarded("xd_moe_sizes",
                     [&] { xd::write_struct("memory", memory, xd::moe::memory_of(config, ffn)); });
}

xd_status xd_moe_schedule(const xd_ep_config* config, int32_t ffn, int32_t tokens,
                          xd_moe_overlap* overlap) {
  return xd::guarded("xd_moe_schedule", [&] {
    xd::write_struct("overlap", overlap, xd::moe::choose_schedule(config, ffn, tokens));
  });
}
