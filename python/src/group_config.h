// A group's sizes with the list that they may refer to.
#pragma once

#include <crossdock/crossdock.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace xdpy {

class GroupConfig {
 public:
  GroupConfig() = default;
  // `expert_ranks` empty = none. Of a list the config has `num_experts`.
  GroupConfig(const xd_ep_config& config, std::vector<std::int32_t> expert_ranks)
      : config_(config), expert_ranks_(std::move(expert_ranks)) {}

  // Refers to this object.
  [[nodiscard]] xd_ep_config get() const {
    xd_ep_config config = config_;
    config.expert_ranks = expert_ranks_.empty() ? nullptr : expert_ranks_.data();
    return config;
  }

 private:
  xd_ep_config config_ XD_EP_CONFIG_INIT;
  std::vector<std::int32_t> expert_ranks_;
};

}  // namespace xdpy
