#define XD_EXPERIMENTAL 1
#include <crossdock/channel.h>

#include <memory>
#include <utility>

#include "capi/boundary.h"
#include "comm/channel.h"

struct xd_channel {
  xd_channel(std::shared_ptr<xd::Comm> comm, const xd::Channel::Config& config)
      : channel(std::move(comm), config) {}

  xd::Channel channel;
};

namespace {

template <class Body>
xd_status on_channel(const char* function, xd_channel* channel, Body&& body) {
  XD_REQUIRE_GIVEN(function, channel);
  return xd::guarded_on(function, channel->channel.comm(), [&] { body(channel->channel); });
}

}  // namespace

xd_status xd_channel_create(xd_comm* comm, int32_t peer, const void* symmetric, size_t bytes,
                            uint32_t counters, xd_channel** channel) {
  XD_REQUIRE_GIVEN("xd_channel_create", comm);
  if (channel != nullptr) *channel = nullptr;
  return xd::guarded_on("xd_channel_create", *comm->comm, [&] {
    comm->comm->errors().check_usable();
    // The peer writes into it: the caller's const says that this call does not.
    auto* const memory = const_cast<std::byte*>(static_cast<const std::byte*>(symmetric));
    const xd::Channel::Config config{
        .peer = peer, .memory = memory, .bytes = bytes, .counters = counters};
    // A failure in here is told to all ranks.
    comm->comm->collective().run(xd::kCreateChannel, [&] {
      XD_REQUIRE(channel != nullptr, "channel = NULL, expected a pointer");
      *channel = new xd_channel(comm->comm, config);
    });
  });
}

xd_status xd_channel_put(xd_channel* channel, size_t to, const void* from, size_t bytes,
                         uint32_t counter) {
  return on_channel("xd_channel_put", channel, [&](xd::Channel& c) {
    c.put(to, static_cast<const std::byte*>(from), bytes, counter);
  });
}

xd_status xd_channel_wait(xd_channel* channel, uint32_t counter, uint64_t count) {
  return on_channel("xd_channel_wait", channel, [&](xd::Channel& c) { c.wait(counter, count); });
}

xd_status xd_channel_test(xd_channel* channel, uint32_t counter, uint64_t count, int32_t* reached) {
  XD_REQUIRE_GIVEN("xd_channel_test", reached);
  *reached = 0;
  return on_channel("xd_channel_test", channel,
                    [&](xd::Channel& c) { *reached = c.test(counter, count) ? 1 : 0; });
}

xd_status xd_channel_flush(xd_channel* channel) {
  return on_channel("xd_channel_flush", channel, [](xd::Channel& c) { c.flush(); });
}

xd_status xd_channel_destroy(xd_channel* channel) {
  if (channel == nullptr) return XD_SUCCESS;
  return xd::guarded("xd_channel_destroy", [&] { delete channel; });
}
