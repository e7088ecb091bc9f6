#include "net/rank/process.h"

#include <gtest/gtest.h>

#include <chrono>

namespace xd::test {
namespace {

constexpr auto kPatience = std::chrono::seconds(30);  // also under sanitizers

ChildProcess::Program program(const NetHosts& hosts, int host, RankProcess::Settings settings) {
  settings["XD_TEST_NET_RANK"] = "1";
  return {.arguments = {}, .settings = std::move(settings), .network = hosts.name(host)};
}

}  // namespace

RankProcess::RankProcess(const NetHosts& hosts, int host, const Settings& settings)
    : child_(program(hosts, host, settings)) {}

RankProcess::~RankProcess() {
  if (child_.pid() < 0) return;
  dismiss();
  const auto status = child_.wait_for_end(kPatience);
  EXPECT_TRUE(status.has_value()) << "a rank process does not end";
  EXPECT_EQ(status.value_or(0), 0) << "of a rank process";
}

std::string RankProcess::answer(int within_ms) {
  return child_.wait_for_line(std::chrono::milliseconds(within_ms));
}

}  // namespace xd::test
