// A group's sizes with the list that they may refer to.
#pragma once

#include <crossdock/crossdock.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace xdpy {

// `Config`: xd_ep_config or xd_ll_config.
template <class Config>
class ConfigWithExperts {
 public:
  // `expert_ranks` empty = none. Of a list the config has `num_experts`.
  ConfigWithExperts(const Config& config, std::vector<std::int32_t> expert_ranks)
      : config_(config), expert_ranks_(std::move(expert_ranks)) {}

  // Refers to this object.
  [[nodiscard]] Config get() const {
    Config config = config_;
    config.expert_ranks = expert_ranks_.empty() ? nullptr : expert_ranks_.data();
    return config;
  }

 private:
  Config config_;
  std::vector<std::int32_t> expert_ranks_;
};
using GroupConfig = ConfigWithExperts<xd_ep_config>;
using LlGroupConfig = ConfigWithExperts<xd_ll_config>;

}  // namespace xdpy
